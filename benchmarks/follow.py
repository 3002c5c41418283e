"""Time from a writer's ``seal()`` to the new version in a process that follows the pool, in milliseconds.

The writer seals the next version when the follower has reported that it uses the one before. The follower is only woken
by a watch of the pool; or it attaches to each version, or switches its pool to each version, and checks the bytes after
it has read the clock. Both processes read the same clock.
"""

from __future__ import annotations

from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter

from benchmarks import model_weights
from benchmarks.harness import Child, run_alone, serving, warm_up
from benchmarks.options import Plan
from benchmarks.report import Figure, median, percentile
from cubroker.client import Broker
from cubroker.protocol import Layout

POOL = "policy"
MARKED = "model.norm.weight"
"""The tensor that contains the number of the version."""

WARM = 5
"""Versions that are not counted."""

WOKEN = "a watcher's wake-up"
IN_PLACE = f"{WOKEN}, sealed in place"
SMALL = ", one small tensor"
"""A pool that takes next to no time to unmap: what is left is the time of the messages."""

WAYS = (
    (WOKEN, "ipc"),
    (WOKEN, "vmm"),
    (IN_PLACE, "vmm"),
    ("attached", "ipc"),
    ("attached", "vmm"),
    ("switched", "vmm"),
)
"""How the follower gets a version, and the share kind: an ``ipc`` pool cannot be switched.

A draft that is sealed in place stays mapped in its writer; otherwise the writer unmaps it first.
"""


def measure(plan: Plan) -> list[Figure]:
    tensors = model_weights.tensors(plan.nbytes)
    whole = Layout.pack(tensors)
    one = Layout.pack(tensor for tensor in tensors if tensor[0] == MARKED)
    figures = []
    for way, share, layout, of in [*((*each, whole, "") for each in WAYS), (WOKEN, "ipc", one, SMALL)]:
        times = _versions(plan, layout, way, share)
        what = f"tensors: {len(layout.tensors)}, {layout.nbytes / 1e6:.3g} MB"
        figures += [
            median(f"{share}: seal() to {way}{of}", times, "ms", what),
            percentile(f"{share}: seal() to {way}{of}, p99", 0.99, times, "ms", what),
        ]
    return figures


def _versions(plan: Plan, layout: Layout, way: str, share: str) -> list[float]:
    """Return the milliseconds of each version."""
    times = []
    with serving(plan.devices) as server, Broker(server.directory) as broker:
        _seal(broker, layout, share, 1)
        rounds = WARM + 2 * plan.rounds
        with Child(wake if way in (WOKEN, IN_PLACE) else follow, server.directory, plan.gpu, way, rounds) as follower:
            follower.answer()
            for number in range(2, 2 + rounds):
                began = _seal(broker, layout, share, number, in_place=way == IN_PLACE)
                version, taken = follower.answer()
                if version != number:
                    raise RuntimeError(f"version {number} was published, and the follower has version {version}")
                times.append((taken - began) * 1e3)
    return times[WARM:]


def _seal(broker: Broker, layout: Layout, share: str, number: int, *, in_place: bool = False) -> float:
    """Publish a version that is marked with its number; return when its seal began."""
    with broker.create(POOL, layout, share=share, wait=60.0) as draft:
        draft[MARKED].copy_from_bytes(number.to_bytes(8, "little").ljust(draft[MARKED].nbytes, b"\0"))
        began = perf_counter()
        draft.seal(in_place=in_place)
    return began


def wake(connection: Connection, directory: Path, _gpu: bool, _way: str, rounds: int) -> None:
    """In a worker that watches the pool: send each version and when the worker was woken for it."""
    with Broker(directory) as broker, broker.watch(POOL) as watch:
        next(watch)  # the version that is there
        connection.send("there")
        for _ in range(rounds):
            version = next(watch)
            connection.send((version, perf_counter()))


def follow(connection: Connection, directory: Path, gpu: bool, way: str, rounds: int) -> None:
    """In a worker: send each version and when it could be used."""
    warm_up(gpu=gpu)
    with Broker(directory) as broker:
        pool = broker.attach(POOL)
        connection.send("there")
        first = pool.version
        versions = pool.follow(switch=True) if way == "switched" else broker.follow(POOL)
        while rounds:
            version = next(versions)
            if version == first:  # `Broker.follow` returns this one, too
                continue
            before = pool
            if way == "attached":
                pool = broker.attach(POOL, version=version)
            taken = perf_counter()
            if int.from_bytes(pool[MARKED].tobytes()[:8], "little") != version:
                raise RuntimeError(f"the worker does not see the bytes of version {version}")
            if before is not pool:
                before.close()
            connection.send((version, taken))
            rounds -= 1
        versions.close()


if __name__ == "__main__":
    run_alone(measure)
