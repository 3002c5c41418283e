"""How long a worker takes to give the memory of a pool away, and to have it back where it was.

A ``vmm`` pool, in one allocation: ``sleep()`` waits for the device's work, unmaps and ends the lease, ``wake()``
leases and maps again. Torch tensors of it stay as they are.
"""

from __future__ import annotations

from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter

from benchmarks import alone
from benchmarks.plan import Plan
from benchmarks.report import Figure, median
from benchmarks.stage import Child, serving
from cubroker.client import Broker
from cubroker.protocol import Layout

POOL = "weights"
MARK = b"still here"
WARM = 3
"""Rounds before those that count."""


def measure(plan: Plan) -> list[Figure]:
    """Take the figures."""
    with serving(plan.devices) as stage, Broker(stage.directory) as broker:
        with broker.create(POOL, Layout.pack([("x", "U8", (plan.nbytes,))]), share="vmm") as draft:
            draft.context.write(draft["x"].pointer + plan.nbytes - len(MARK), MARK)
            draft.seal()
        with Child(sleep_and_wake, stage.directory, plan.gpu, plan.rounds) as worker:
            times: list[tuple[float, float]] = worker.answer()
    what = f"vmm, one allocation of {plan.nbytes / 1e9:g} GB"
    return [
        median("sleep()", (slept for slept, _ in times), "ms", what),
        median("wake()", (woken for _, woken in times), "ms", what),
    ]


def sleep_and_wake(connection: Connection, directory: Path, gpu: bool, rounds: int) -> None:
    """In a worker: answer with the milliseconds of each sleep and each wake."""
    import torch

    from cubroker.client.torch import state_dict

    if gpu:
        torch.ones(1, device="cuda").sum().item()
    times = []
    with Broker(directory) as broker, broker.attach(POOL) as pool:
        tensor = state_dict(pool)["x"]
        for _ in range(WARM + rounds):
            began = perf_counter()
            pool.sleep()
            slept = perf_counter()
            pool.wake()
            woken = perf_counter()
            times.append(((slept - began) * 1e3, (woken - slept) * 1e3))
            if bytes(tensor[-len(MARK) :].tolist()) != MARK:
                raise RuntimeError("the tensor that slept has lost its bytes")
        del tensor
    connection.send(times[WARM:])


if __name__ == "__main__":
    alone.main(measure)
