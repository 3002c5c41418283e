"""How long a worker takes to reach a pool on another device for the first time, beside one on its own.

A fresh process each time, its context up: ``attach()``, then a first copy within the worker's device, or from the
other one. Direct access between two devices is set up by one of the two, so that the sum is what counts.
"""

from __future__ import annotations

from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter

from benchmarks import alone
from benchmarks.plan import Plan, neighbours
from benchmarks.report import Figure, median
from benchmarks.stage import SHARES, Child, serving
from cubroker.client import Broker
from cubroker.protocol import Layout

POOL = "weights"
ROUNDS = 5
PIECE = 4096

_Times = tuple[float, float]


def measure(plan: Plan) -> list[Figure]:
    """Take the figures; none without two devices that reach each other."""
    if (pair := neighbours(plan)) is None:
        return []
    near, far = pair
    what = f"one allocation of {plan.nbytes / 1e9:g} GB"
    figures = []
    layout = Layout.pack([("x", "U8", (plan.nbytes,))])
    for share in SHARES:
        with serving(plan.devices) as stage, Broker(stage.directory) as broker:
            for place, device in (("its own device", near), ("another device", far)):
                with broker.create(POOL, layout, devices=(device,), share=share) as draft:
                    draft.context.write(draft["x"].pointer, device.encode())
                    draft.seal()
                times = [_first(stage.directory, near, device) for _ in range(ROUNDS)]
                figures += [
                    median(f"{share}, on {place}: first attach() and first copy", map(sum, times), "ms", what),
                    median(f"{share}, on {place}: of which attach()", (attached for attached, _ in times), "ms"),
                ]
    return figures


def _first(directory: Path, near: str, expected: str) -> _Times:
    with Child(attach_first, directory, near, expected) as worker:
        times: _Times = worker.answer()
        return times


def attach_first(connection: Connection, directory: Path, near: str, expected: str) -> None:
    """In a worker: answer with the milliseconds of the attach and of the copy; check what was copied."""
    with Broker(directory) as broker:
        (ordinal,) = (device.index for device in broker.driver.devices if device.uuid == near)
        context = broker.driver.context(ordinal)
        mine = context.allocate(PIECE)
        with context.stream() as stream:
            began = perf_counter()
            pool = broker.attach(POOL, device=near, peer=True)
            attached = perf_counter()
            stream.copy(mine, pool["x"].pointer, PIECE)
            stream.synchronize()
            copied = perf_counter()
        if context.read(mine, len(expected)) != expected.encode():
            raise RuntimeError("the worker does not see what the writer wrote")
        context.free(mine)
        pool.close()
    connection.send(((attached - began) * 1e3, (copied - attached) * 1e3))


if __name__ == "__main__":
    alone.main(measure)
