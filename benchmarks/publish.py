"""Publishing a model's tensors: rates in GB/s compared with a plain copy on the same device, and the time of the call.

The tensors are torch's, on the first device: on a GPU if the devices are GPUs, else in host memory. In one process,
plain copies alternate with copies of the tensors one by one without a publication, and then publications of the tensors
with publications of the pool itself. Each publication begins when the memory of the version before the last is free, as
between two steps of a training. A model of 5.5 GB is measured too, if the size that was asked for is larger.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from time import sleep

from benchmarks import model_weights
from benchmarks.harness import SHARES, beside_broker, run_alone, seconds
from benchmarks.options import Plan
from benchmarks.report import Figure, median, rate, ratio
from cubroker.client import Broker
from cubroker.driver import Context
from cubroker.protocol import Layout

POOL = "policy"
ROUNDS = 10
WARM = 2

SMALLER = 5_500_000_000
"""Bytes of the model for which there is a target time."""

SPARE = 4 << 20
"""Bytes that the memory of a version may have beyond its layout."""


def measure(plan: Plan) -> list[Figure]:
    figures: list[Figure] = []
    sizes = [plan.nbytes, *([SMALLER] if plan.nbytes > SMALLER else [])]
    for share in SHARES:
        for nbytes in sizes:
            figures += _published(plan, share, nbytes, brief=nbytes != plan.nbytes)
    return figures


def _published(plan: Plan, share: str, about: int, *, brief: bool) -> list[Figure]:
    tensors = model_weights.tensors(about)
    nbytes = model_weights.total(tensors)
    what = f"{len(tensors)} tensors, {nbytes / 1e9:.2f} GB"
    times = beside_broker(plan.devices, publish_by_turns, tensors, share)
    calls = [[each * 1e3 for each in row] for row in times[2:]]
    size = f" of {nbytes / 1e9:.1f} GB" if brief else ""
    figures = [
        median(f"{share}: publish() of torch tensors{size}: the call", calls[0], "ms", what),
        median(f"{share}: publish() of a pool{size}: the call", calls[1], "ms", what),
    ]
    if brief:
        return figures
    names = "plain copy on the device", "copying the tensors", "publish() of torch tensors", "publish() of a pool"
    figures += [rate(f"{share}: {name}", nbytes, row, what) for name, row in zip(names, times, strict=True)]
    return figures + [
        ratio(f"{share}: {name} ÷ plain copy", times[0], row, "of each pair of rounds")
        for name, row in zip(names[1:], times[1:], strict=True)
    ]


def publish_by_turns(connection: Connection, directory: Path, tensors: model_weights.Tensors, share: str) -> None:
    """In a child: send the seconds of plain copies, of the tensors' copies, and of both ways to publish them."""
    import torch

    with Broker(directory) as broker:
        context = broker.driver.context(broker.driver.devices[0].index)
        where = "cpu" if context.host else f"cuda:{context.device.index}"
        arrays = {name: torch.ones(shape, dtype=torch.bfloat16, device=where) for name, _, shape in tensors}
        publish = partial(broker.publish, POOL, share=share, wait=60.0, devices=(context.device.index,))
        with copies(context, Layout.pack(tensors)) as (plain, apart):
            copying = [(seconds(plain), seconds(apart)) for _ in range(WARM + ROUNDS)]
        times = []
        for copied in copying:
            settle(broker)
            published = seconds(partial(publish, arrays))
            settle(broker)
            with broker.attach(POOL) as pool:
                times.append((*copied, published, seconds(partial(publish, pool))))
        connection.send(tuple(zip(*times[WARM:], strict=True)))


@contextmanager
def copies(context: Context, layout: Layout) -> Iterator[tuple[Callable[[], None], Callable[[], None]]]:
    """Yield two functions: one copies all bytes between two allocations, one the tensors, in another order."""
    (nbytes,) = layout.allocations
    target, source = context.allocate(nbytes), context.allocate(nbytes)
    mixed = random.Random(1).sample(layout.tensors, len(layout.tensors))
    segments, place = [], source
    for spec in mixed:
        segments.append((target + spec.offset, place, spec.nbytes))
        place += -(-spec.nbytes // 256) * 256
    with context.stream() as stream:

        def plain() -> None:
            stream.copy(target, source, nbytes)
            stream.synchronize()

        def apart() -> None:
            context.copy_batch(stream, segments)
            stream.synchronize()

        yield plain, apart
    context.free(target)
    context.free(source)


def settle(broker: Broker) -> None:
    """Wait until the memory of all versions except the last is free."""
    while (
        sum(device.allocated for device in broker.devices()) > sum(pool.nbytes for pool in broker.pools()[-1:]) + SPARE
    ):
        sleep(0.001)


if __name__ == "__main__":
    run_alone(measure)
