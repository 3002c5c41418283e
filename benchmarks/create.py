"""How long a draft takes to be granted, and how much of it is the clearing of its memory."""

from __future__ import annotations

from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter

from benchmarks import alone
from benchmarks.plan import Plan
from benchmarks.report import Figure, median
from benchmarks.stage import Child, serving
from cubroker import driver
from cubroker.client import Broker
from cubroker.protocol import Layout

ROUNDS = 5


def measure(plan: Plan) -> list[Figure]:
    """Take the figures."""
    with serving(plan.devices) as stage, Child(create_repeatedly, stage.directory, plan.nbytes) as child:
        created: list[float] = child.answer()
    with Child(clear_repeatedly, plan.devices, plan.nbytes) as child:
        cleared: list[float] = child.answer()
    return [
        median("create() of one allocation", created, "ms", f"{plan.nbytes / 1e9:g} GB"),
        median("of which clearing, measured by itself", cleared, "ms"),
    ]


def create_repeatedly(connection: Connection, directory: Path, nbytes: int) -> None:
    """In a child: answer with the milliseconds of each create."""
    layout = Layout.pack([("x", "U8", (nbytes,))])
    times = []
    with Broker(directory) as broker:
        for _ in range(1 + ROUNDS):
            began = perf_counter()
            draft = broker.create("draft", layout, share="ipc", wait=60.0)
            times.append((perf_counter() - began) * 1e3)
            draft.close()
    connection.send(times[1:])


def clear_repeatedly(connection: Connection, devices: str, nbytes: int) -> None:
    """In a child: answer with the milliseconds of each clearing of fresh memory."""
    opened = driver.load(devices)
    context = opened.context(opened.devices[0].index)
    times = []
    for _ in range(1 + ROUNDS):
        pointer = context.allocate(nbytes)
        began = perf_counter()
        context.clear(pointer, nbytes)
        times.append((perf_counter() - began) * 1e3)
        context.free(pointer)
    connection.send(times[1:])


if __name__ == "__main__":
    alone.main(measure)
