"""Rate of reading and copying, by size of chunks and parts and number of buffers: ``python -m benchmarks.staging``.

It shows which values of the constants of ``client/loading`` suit a machine: ``copy.CHUNK``, ``copy.RING_DEPTH`` and
``threads.AIO_PART``. All ways are measured alternately, in one process, into one draft. The module is no part
of ``python -m benchmarks``.
"""

from __future__ import annotations

from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks import model_weights
from benchmarks.harness import beside_broker, run_alone, seconds
from benchmarks.load import POOL, pinned_copy
from benchmarks.options import Plan
from benchmarks.report import Figure, rate
from cubroker.client import Broker
from cubroker.client.loading import copy, threads
from cubroker.client.loading.checkpoint import Checkpoint
from cubroker.client.loading.read_plan import target_of
from cubroker.protocol import Layout

ROUNDS = 4
MIB = 1 << 20

WAYS = (
    *((16 * MIB, part, depth) for part in (MIB // 2, MIB, 2 * MIB) for depth in (2, 3, 4)),
    *((8 * MIB, part, depth) for part in (MIB // 2, MIB) for depth in (4, 6)),
    *((32 * MIB, part, 3) for part in (MIB, 2 * MIB)),
)
"""Bytes of a chunk, bytes of a part, and the number of buffers."""

Way = tuple[int, int, int]


def measure(plan: Plan) -> list[Figure]:
    tensors = model_weights.tensors(plan.nbytes)
    size = model_weights.total(tensors)
    with model_weights.in_memory(tensors) as path:
        pinned, times = beside_broker(plan.devices, take_turns, plan.devices, path, size)
    return [
        rate("pinned host buffer to device", size, pinned),
        *(
            rate(
                f"{depth} x {chunk >> 20} MiB, in parts of {part >> 10} KiB: reading and copying",
                size,
                taken,
                f"ready after {1e3 * min(ready):.3g} ms at best",
            )
            for (chunk, part, depth), (taken, ready) in times.items()
        ),
    ]


def take_turns(connection: Connection, directory: Path, devices: str, path: Path, size: int) -> None:
    """In a child: send the seconds of pinned copies, and of each way its seconds of copying and of making ready."""
    pinned: list[float] = []
    times: dict[Way, tuple[list[float], list[float]]] = {way: ([], []) for way in WAYS}
    with Broker(directory) as broker, Checkpoint.open(path) as checkpoint, pinned_copy(devices, size) as bound:
        layout = Layout.pack((entry.name, entry.dtype, entry.shape) for entry in checkpoint.entries)
        with broker.create(POOL, layout, share="ipc") as draft:
            for number in range(1 + ROUNDS):
                pinned.append(seconds(bound))
                for way, (taken, ready) in times.items():
                    copy.CHUNK, threads.AIO_PART, copy.RING_DEPTH = way
                    first = draft.replicas[0].context
                    stored = zip(checkpoint.entries, layout.tensors, strict=True)
                    with copy.FileCopy("cubroker-load", lambda context=first: context) as copying:
                        copying.plan(checkpoint.files, stored, layout.allocations)
                        whole: list[float] = []
                        took = seconds(lambda c=copying, w=whole: w.append(c.into([target_of(draft.replicas[0])])))
                    if number:
                        taken.append(whole[0])
                        ready.append(took - whole[0])
    connection.send((pinned[1:], times))


if __name__ == "__main__":
    run_alone(measure)
