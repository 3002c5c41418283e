"""Rates of publishing a model's tensors, in GB/s, compared with a plain copy of the same bytes on the same device.

The tensors are torch's, on the first device: on a GPU where the devices are, else in host memory. Publications and
plain copies take turns in one process. One more round publishes the pool itself again.
"""

from __future__ import annotations

from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks import weights
from benchmarks.harness import SHARES, beside_broker, run_alone, seconds
from benchmarks.options import Plan
from benchmarks.replicate import plain_copy
from benchmarks.report import Figure, median
from cubroker.client import Broker

POOL = "policy"
ROUNDS = 5


def measure(plan: Plan) -> list[Figure]:
    """Measure."""
    tensors = weights.tensors(plan.nbytes)
    nbytes = weights.total(tensors)
    figures: list[Figure] = []
    for share in SHARES:
        times = beside_broker(plan.devices, publish_by_turns, tensors, share)
        plain, tensors_published, pool_published = ([nbytes / each / 1e9 for each in row] for row in times)
        what = f"{len(tensors)} tensors, {nbytes / 1e9:.2f} GB"
        figures += [
            median(f"{share}: plain copy on the device", plain, "GB/s", what),
            median(f"{share}: publish() of torch tensors", tensors_published, "GB/s", what),
            median(f"{share}: publish() of a pool", pool_published, "GB/s", what),
        ]
        for name, rates in (("torch tensors", tensors_published), ("a pool", pool_published)):
            ratios = [ours / bound for ours, bound in zip(rates, plain, strict=True)]
            figures.append(median(f"{share}: publish() of {name} ÷ plain copy", ratios, "", "of each pair of rounds"))
    return figures


def publish_by_turns(connection: Connection, directory: Path, tensors: weights.Tensors, share: str) -> None:
    """In a child: send the seconds of plain copies, of publishing torch's tensors, and of publishing a pool."""
    import torch

    with Broker(directory) as broker:
        context = broker.driver.context(broker.driver.devices[0].index)
        where = "cpu" if context.host else f"cuda:{context.device.index}"
        arrays = {name: torch.ones(shape, dtype=torch.bfloat16, device=where) for name, _, shape in tensors}
        publish = partial(broker.publish, POOL, share=share, wait=60.0, devices=(context.device.index,))
        times = []
        with plain_copy(context, context, weights.total(tensors)) as plain:
            for _ in range(1 + ROUNDS):
                copied, published = seconds(plain), seconds(partial(publish, arrays))
                with broker.attach(POOL) as pool:
                    times.append((copied, published, seconds(partial(publish, pool))))
        connection.send(tuple(zip(*times[1:], strict=True)))


if __name__ == "__main__":
    run_alone(measure)
