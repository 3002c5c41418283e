"""Rate from one replica to the next, in GB/s, compared with a plain copy; seconds of loads to one and all devices.

Plain copies and copies between a draft's replicas alternate in one process. So do loads to one device, to all devices,
and spread over all devices. The file is in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks import model_weights
from benchmarks.harness import SHARES, beside_broker, one_allocation, run_alone, seconds
from benchmarks.load import retire
from benchmarks.options import Plan, neighbours
from benchmarks.report import Figure, median, rate, ratio
from cubroker.client import Broker, Draft
from cubroker.client.loading.loader import load
from cubroker.driver import Context, Driver

POOL = "weights"
ROUNDS = 7
MARK = b"passed on"


def measure(plan: Plan) -> list[Figure]:
    """Measure; no figures without two devices that reach each other."""
    if (pair := neighbours(plan)) is None:
        return []
    figures: list[Figure] = []
    for share in SHARES:
        figures += _replication(plan, pair, share)
    tensors = model_weights.tensors(plan.nbytes)
    with model_weights.in_memory(tensors) as path:
        for share in SHARES:
            figures += _loads(plan, path, share, tensors)
    return figures


def _replication(plan: Plan, pair: tuple[str, str], share: str) -> list[Figure]:
    plain, ours = beside_broker(plan.devices, copy_by_turns, pair, share, plan.nbytes)
    what = f"{plan.nbytes / 1e9:g} GB"
    return [
        rate(f"{share}: plain copy to a second device", plan.nbytes, plain, what),
        rate(f"{share}: from a draft's first replica to its second", plan.nbytes, ours, what),
        ratio(f"{share}: replica ÷ plain copy", plain, ours, "of each pair of rounds"),
    ]


def copy_by_turns(connection: Connection, directory: Path, pair: tuple[str, str], share: str, nbytes: int) -> None:
    """In a child: send the seconds of each plain copy and of each copy from replica to replica."""
    with Broker(directory) as broker:
        contexts = {device.uuid: broker.driver.context(device.index) for device in broker.driver.devices}
        first, second = (contexts[uuid] for uuid in pair)
        with (
            direct(broker.driver, second, first),
            plain_copy(first, second, nbytes) as plain,
            broker.create(POOL, one_allocation(nbytes), devices=pair, share=share) as draft,
        ):
            times = [(seconds(plain), pass_on(draft)) for _ in range(1 + ROUNDS)][1:]
            connection.send(tuple(zip(*times, strict=True)))


@contextmanager
def direct(driver: Driver, context: Context, peer: Context) -> Iterator[None]:
    """Give a device direct access to another one within a ``with`` block."""
    driver.peers.enable(context, peer.device.index)
    try:
        yield
    finally:
        driver.peers.disable(context, peer.device.index)


@contextmanager
def plain_copy(first: Context, second: Context, nbytes: int) -> Iterator[Callable[[], None]]:
    """Yield a function that copies between two allocations of this process."""
    source, target = first.allocate(nbytes), second.allocate(nbytes)
    with second.stream() as stream:

        def copy() -> None:
            stream.copy(target, source, nbytes)
            stream.synchronize()

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
        for view, source in zip(second.allocation_views, second.upstream, strict=True):
            stream.copy(view.pointer, source, view.nbytes)
        stream.synchronize()
        took = perf_counter() - began
    if second.context.read(second["x"].pointer + end, len(MARK)) != MARK:
        raise RuntimeError("the second replica has not got the bytes of the first")
    return took


def _loads(plan: Plan, path: Path, share: str, tensors: model_weights.Tensors) -> list[Figure]:
    devices, single, spread, sharded = beside_broker(plan.devices, load_by_turns, path, share, tensors)
    what, pairs = "all of it, to the published version", "of each pair of rounds"
    return [
        median(f"{share}: whole load to one device", single, "s", what),
        median(f"{share}: whole load to {devices} devices", spread, "s", what),
        median(f"{share}: whole load, sharded over {devices} devices by plan", sharded, "s", what),
        ratio(f"{share}: load to {devices} devices ÷ to one", spread, single, pairs, "less"),
        ratio(
            f"{share}: rate of a load that is sharded over {devices} devices ÷ to one", single, sharded, pairs, "more"
        ),
    ]


def load_by_turns(
    connection: Connection, directory: Path, path: Path, share: str, tensors: model_weights.Tensors
) -> None:
    """In a child: send the number of devices, and the seconds of each load to the first, to all, and spread over all.

    If the load is spread over all, each device has a run of layers, like a stage of a pipeline.
    """
    with Broker(directory) as broker:
        devices = [device.uuid for device in broker.driver.devices]
        stages = zip(model_weights.parts(tensors, len(devices)), devices, strict=True)
        plan = {name: device for part, device in stages for name, _, _ in part}
        ways: list[dict[str, Any]] = [{"devices": devices[:1]}, {"devices": devices}, {"plan": plan}]
        times: list[list[float]] = [[] for _ in ways]
        for number in range(1 + ROUNDS):
            for way, taken in zip(ways, times, strict=True):
                taken.append(load(broker, POOL, path, share=share, **way).seconds)
                if number == 0:
                    for device in way.get("devices", [None]):
                        model_weights.check(broker, POOL, path, device)
                retire(broker, POOL)
        connection.send((len(devices), *(taken[1:] for taken in times)))


if __name__ == "__main__":
    run_alone(measure)
