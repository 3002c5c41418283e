"""How fast bytes get from device to device, beside a plain copy; and what a load onto several devices takes.

Plain copies and copies from one replica of a draft to the next take turns in one process, and so do loads onto one
device and onto all of them. The file is in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter, sleep

from benchmarks import alone, weights
from benchmarks.plan import Plan, neighbours
from benchmarks.report import Figure, median
from benchmarks.stage import SHARES, Child, room_for, serving
from cubroker.client import Broker, Draft
from cubroker.client.loader import load
from cubroker.client.verify import verify
from cubroker.driver import Context, Driver
from cubroker.protocol import Layout

POOL = "weights"
ROUNDS = 7
MARK = b"passed on"

Copy = Callable[[], float]
"""Copies everything once and returns the seconds."""


def measure(plan: Plan) -> list[Figure]:
    """Take the figures; none without two devices that reach each other."""
    if (pair := neighbours(plan)) is None:
        return []
    figures: list[Figure] = []
    for share in SHARES:
        figures += _replication(plan, pair, share)
    tensors = weights.tensors(plan.nbytes)
    with room_for(weights.total(tensors)) as folder:
        path = folder / "model.safetensors"
        weights.write_file(path, tensors)
        for share in SHARES:
            figures += _loads(plan, path, share)
    return figures


def _replication(plan: Plan, pair: tuple[str, str], share: str) -> list[Figure]:
    with serving(plan.devices) as stage, Child(copy_by_turns, stage.directory, pair, share, plan.nbytes) as child:
        plain, ours = child.answer()
    rates = [[plan.nbytes / seconds / 1e9 for seconds in times] for times in (plain, ours)]
    ratios = [b / a for a, b in zip(*rates, strict=True)]
    what = f"{plan.nbytes / 1e9:g} GB"
    return [
        median(f"{share}: plain copy to a second device", rates[0], "GB/s", what),
        median(f"{share}: from a draft's first replica to its second", rates[1], "GB/s", what),
        median(f"{share}: replica ÷ plain copy", ratios, "", "of each pair of rounds"),
    ]


def copy_by_turns(connection: Connection, directory: Path, pair: tuple[str, str], share: str, nbytes: int) -> None:
    """In a child: answer with the seconds of each plain copy and of each copy from replica to replica."""
    with Broker(directory) as broker:
        contexts = {device.uuid: broker.driver.context(device.index) for device in broker.driver.devices}
        first, second = (contexts[uuid] for uuid in pair)
        layout = Layout.pack([("x", "U8", (nbytes,))])
        with (
            direct(broker.driver, second, first),
            plain_copy(first, second, nbytes) as plain,
            broker.create(POOL, layout, devices=pair, share=share) as draft,
        ):
            times = [(plain(), pass_on(draft)) for _ in range(1 + ROUNDS)][1:]
            connection.send(tuple(zip(*times, strict=True)))


@contextmanager
def direct(driver: Driver, context: Context, peer: Context) -> Iterator[None]:
    """Give a device direct access to another one meanwhile."""
    driver.peers.enable(context, peer.device.index)
    try:
        yield
    finally:
        driver.peers.disable(context, peer.device.index)


@contextmanager
def plain_copy(first: Context, second: Context, nbytes: int) -> Iterator[Copy]:
    """Yield a copy between two allocations of this process's own."""
    source, target = first.allocate(nbytes), second.allocate(nbytes)
    with second.stream() as stream:

        def copy() -> float:
            began = perf_counter()
            stream.copy(target, source, nbytes)
            stream.synchronize()
            return perf_counter() - began

        yield copy
    second.free(target)
    first.free(source)


def pass_on(draft: Draft) -> float:
    """Copy a draft's first replica to its second, as a load does; return the seconds."""
    first, second = draft.replicas
    end = first["x"].nbytes - len(MARK)
    first.context.write(first["x"].pointer + end, MARK)
    second.context.clear(second["x"].pointer + end, len(MARK))
    if second.upstream is None:
        raise RuntimeError("the second device does not reach the first one's replica")
    with second.context.stream() as stream:
        began = perf_counter()
        for slab, source in zip(second.slabs, second.upstream, strict=True):
            stream.copy(slab.pointer, source, slab.nbytes)
        stream.synchronize()
        seconds = perf_counter() - began
    if second.context.read(second["x"].pointer + end, len(MARK)) != MARK:
        raise RuntimeError("the second replica has not got the bytes of the first")
    return seconds


def _loads(plan: Plan, path: Path, share: str) -> list[Figure]:
    with serving(plan.devices) as stage, Child(load_by_turns, stage.directory, path, share) as child:
        devices, single, spread = child.answer()
    pairs = list(zip(single, spread, strict=True))
    return [
        median(f"{share}: whole load to one device", single, "s", "all of it, to the published version"),
        median(f"{share}: whole load to {devices} devices", spread, "s", "all of it, to the published version"),
        median(f"{share}: load to {devices} devices ÷ to one", (b / a for a, b in pairs), "", "of each pair of rounds"),
    ]


def load_by_turns(connection: Connection, directory: Path, path: Path, share: str) -> None:
    """In a child: answer with the number of devices, and the seconds of each load onto the first and onto all."""
    with Broker(directory) as broker:
        devices = [device.uuid for device in broker.driver.devices]
        times: list[list[float]] = [[], []]
        for number in range(1 + ROUNDS):
            for chosen, seconds in zip((devices[:1], devices), times, strict=True):
                seconds.append(load(broker, POOL, path, devices=chosen, share=share).seconds)
                if number == 0:
                    _check(broker, path, chosen)
                broker.retire(POOL)
                while broker.pools():  # its memory goes before the next load's clock starts
                    sleep(0.001)
        connection.send((len(devices), times[0][1:], times[1][1:]))


def _check(broker: Broker, path: Path, devices: list[str]) -> None:
    for device in devices:
        if differences := verify(broker, POOL, path, device=device).differences:
            raise RuntimeError(f"the pool on {device} differs from the file: {differences[:3]}")


if __name__ == "__main__":
    alone.main(measure)
