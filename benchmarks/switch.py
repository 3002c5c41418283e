"""Time of a worker's ``switch()``, in milliseconds, for ``vmm`` pools of one and of many allocations.

The worker switches to and fro between two versions, as it would switch from each version to the next. A switch leases
the other version, imports its memory, waits for the device's work, and unmaps and maps each allocation at the same
addresses. No bytes are copied. Torch tensors of the pool stay valid.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.harness import answer_of, run_alone, seconds, serving, warm_up
from benchmarks.options import Plan
from benchmarks.report import Figure, median
from cubroker.client import Broker
from cubroker.protocol import Layout

ALLOCATIONS = (1, 64, 723)
"""The numbers of allocations of the pools; pools beyond the size that was asked for are left out."""

PIECE = 2 << 20
"""Bytes of each allocation: the least that can be mapped. The time hardly depends on the size."""

WARM = 3
"""Rounds that are not counted."""


def measure(plan: Plan) -> list[Figure]:
    figures = []
    for count in (count for count in ALLOCATIONS if count * PIECE <= plan.nbytes):
        with serving(plan.devices) as server, Broker(server.directory) as broker, ExitStack() as leases:
            for version in (1, 2):
                _publish(broker, count, version)
                leases.enter_context(broker.attach("weights"))
            times: list[float] = answer_of(to_and_fro, server.directory, plan.gpu, plan.rounds)
        what = f"vmm, {count} allocations of 2 MiB" if count > 1 else "vmm, one allocation of 2 MiB"
        figures.append(median(f"switch(), {count}", times, "ms", what))
    return figures


def _publish(broker: Broker, count: int, version: int) -> None:
    layout = Layout.pack([(f"x{number}", "U8", (PIECE,)) for number in range(count)], slab=PIECE)
    with broker.create("weights", layout, share="vmm") as draft:
        for tensor in draft.values():
            draft.context.write(tensor.pointer, bytes([version]))
        draft.seal()


def to_and_fro(connection: Connection, directory: Path, gpu: bool, rounds: int) -> None:
    """In a worker: send the milliseconds of each switch."""
    from cubroker.integrations.torch import state_dict

    warm_up(gpu=gpu)
    times = []
    with Broker(directory) as broker, broker.attach("weights", version=1) as pool:
        tensors = list(state_dict(pool).values())
        for turn in range(WARM + rounds):
            version = 2 - turn % 2
            times.append(seconds(partial(pool.switch, version)) * 1e3)
            if any(int(tensor[0]) != version for tensor in tensors):
                raise RuntimeError(f"a tensor does not show version {version}")
        tensors.clear()
        del tensors
    connection.send(times[WARM:])


if __name__ == "__main__":
    run_alone(measure)
