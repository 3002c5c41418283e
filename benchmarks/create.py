"""Time to create a draft, in milliseconds, compared with clearing as much memory by itself."""

from __future__ import annotations

from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter

from benchmarks.harness import answer_of, beside_broker, first_context, one_allocation, run_alone, seconds
from benchmarks.options import Plan
from benchmarks.report import Figure, median
from cubroker.client import Broker

ROUNDS = 5


def measure(plan: Plan) -> list[Figure]:
    created: list[float] = beside_broker(plan.devices, create_repeatedly, plan.nbytes)
    cleared: list[float] = answer_of(clear_repeatedly, plan.devices, plan.nbytes)
    return [
        median("create() of one allocation", created, "ms", f"{plan.nbytes / 1e9:g} GB"),
        median("of which clearing, measured by itself", cleared, "ms"),
    ]


def create_repeatedly(connection: Connection, directory: Path, nbytes: int) -> None:
    """In a child: send the milliseconds of each create."""
    layout = one_allocation(nbytes)
    times = []
    with Broker(directory) as broker:
        for _ in range(1 + ROUNDS):
            began = perf_counter()
            draft = broker.create("draft", layout, share="ipc", wait=60.0)
            times.append((perf_counter() - began) * 1e3)
            draft.close()
    connection.send(times[1:])


def clear_repeatedly(connection: Connection, devices: str, nbytes: int) -> None:
    """In a child: send the milliseconds of each clearing of fresh memory."""
    context = first_context(devices)
    times = []
    for _ in range(1 + ROUNDS):
        pointer = context.allocate(nbytes)
        times.append(seconds(partial(context.clear, pointer, nbytes)) * 1e3)
        context.free(pointer)
    connection.send(times[1:])


if __name__ == "__main__":
    run_alone(measure)
