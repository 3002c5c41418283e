"""Time of a worker's ``sleep()`` and ``wake()``, in milliseconds, for a ``vmm`` pool of one allocation.

``sleep()`` waits for the device's work, unmaps the memory and ends the lease. ``wake()`` leases the pool and maps its
memory again, at the same addresses. Torch tensors of the pool stay valid.
"""

from __future__ import annotations

from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.harness import answer_of, one_allocation, run_alone, seconds, serving, warm_up
from benchmarks.options import Plan
from benchmarks.report import Figure, median
from cubroker.client import Broker

POOL = "weights"
MARK = b"still here"
WARM = 3
"""Rounds that are not counted."""


def measure(plan: Plan) -> list[Figure]:
    with serving(plan.devices) as server, Broker(server.directory) as broker:
        with broker.create(POOL, one_allocation(plan.nbytes), share="vmm") as draft:
            draft.context.write(draft["x"].pointer + plan.nbytes - len(MARK), MARK)
            draft.seal()
        times: list[tuple[float, float]] = answer_of(sleep_and_wake, server.directory, plan.gpu, plan.rounds)
    what = f"vmm, one allocation of {plan.nbytes / 1e9:g} GB"
    return [
        median("sleep()", (slept for slept, _ in times), "ms", what),
        median("wake()", (woken for _, woken in times), "ms", what),
    ]


def sleep_and_wake(connection: Connection, directory: Path, gpu: bool, rounds: int) -> None:
    """In a worker: send the milliseconds of each sleep and each wake."""
    from cubroker.integrations.torch import state_dict

    warm_up(gpu=gpu)
    times = []
    with Broker(directory) as broker, broker.attach(POOL) as pool:
        tensor = state_dict(pool)["x"]
        for _ in range(WARM + rounds):
            times.append((seconds(pool.sleep) * 1e3, seconds(pool.wake) * 1e3))
            if bytes(tensor[-len(MARK) :].tolist()) != MARK:
                raise RuntimeError("the tensor that slept has lost its bytes")
        del tensor
    connection.send(times[WARM:])


if __name__ == "__main__":
    run_alone(measure)
