"""Time of a worker's first access to a pool on another device, in milliseconds, compared with its own device.

Each time a fresh process, whose context is up, calls ``attach()``, and then makes a first copy within the worker's
device, or from the other one. Either call may set up the direct access between devices, so compare their sum.
"""

from __future__ import annotations

from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter

from benchmarks.harness import SHARES, answer_of, one_allocation, run_alone, serving
from benchmarks.options import Plan, neighbours
from benchmarks.report import Figure, median
from cubroker.client import Broker

POOL = "weights"
PIECE = 4096


def measure(plan: Plan) -> list[Figure]:
    """Measure; no figures without two devices that reach each other."""
    if (pair := neighbours(plan)) is None:
        return []
    near, far = pair
    what = f"one allocation of {plan.nbytes / 1e9:g} GB"
    figures = []
    for share in SHARES:
        with serving(plan.devices) as server, Broker(server.directory) as broker:
            for place, device in (("its own device", near), ("another device", far)):
                with broker.create(POOL, one_allocation(plan.nbytes), devices=(device,), share=share) as draft:
                    draft.context.write(draft["x"].pointer, device.encode())
                    draft.seal()
                times = [answer_of(attach_first, server.directory, near, device) for _ in range(plan.few)]
                figures += [
                    median(f"{share}, on {place}: first attach() and first copy", map(sum, times), "ms", what),
                    median(f"{share}, on {place}: of which attach()", (attached for attached, _ in times), "ms"),
                ]
    return figures


def attach_first(connection: Connection, directory: Path, near: str, expected: str) -> None:
    """In a worker: send the milliseconds of the attach and of the copy; check the copied bytes."""
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
    run_alone(measure)
