"""Updates that share memory: publishing 1 % of a model's tensors compared with all, in time and in device memory.

The tensors are those of :mod:`benchmarks.publish`, in one allocation. Whole publications, and updates of the same few
tensors with the version before as their base, alternate in one process. The first update of a round moves the changed
tensors apart, and the measured ones replace them. There are three kinds of update: the changed tensors and an attached
base, the changed tensors and the base's number, and all tensors, of which the update finds the unchanged ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import model_weights
from benchmarks.harness import SHARES, beside_broker, run_alone, seconds
from benchmarks.options import Plan
from benchmarks.publish import POOL, settle
from benchmarks.report import Figure, median, ratio
from cubroker.client import Broker

if TYPE_CHECKING:
    import torch

ROUNDS = 10
WARM = 2
PART = 0.01
"""The largest fraction of the bytes that change."""

KINDS = "the changed tensors, base attached", "the changed tensors, base by number", "all tensors, base attached"


def measure(plan: Plan) -> list[Figure]:
    figures: list[Figure] = []
    tensors = model_weights.tensors(plan.nbytes)
    nbytes = model_weights.total(tensors)
    for share in SHARES:
        part, taken, times = beside_broker(plan.devices, update_by_turns, tensors, share)
        what = f"{part / nbytes:.2%} of {len(tensors)} tensors, {nbytes / 1e9:.2f} GB"
        whole = times[0]
        call = [each * 1e3 for each in whole]
        figures.append(median(f"{share}: publish() of all tensors, without a base: the call", call, "ms", what))
        for kind, row in zip(KINDS, times[1:], strict=True):
            figures.append(median(f"{share}: update, {kind}: the call", [each * 1e3 for each in row], "ms", what))
            figures.append(ratio(f"{share}: update, {kind} ÷ publish() of all: time", row, whole, what))
        figures.append(median(f"{share}: update ÷ publish() of all: device memory", [taken / nbytes], "", what))
    return figures


def update_by_turns(connection: Connection, directory: Path, tensors: model_weights.Tensors, share: str) -> None:
    """In a child: send the bytes that change, the device memory that an update needs, and the seconds of each way."""
    import torch

    with Broker(directory) as broker:
        context = broker.driver.context(broker.driver.devices[0].index)
        where = "cpu" if context.host else f"cuda:{context.device.index}"
        arrays = {name: torch.ones(shape, dtype=torch.bfloat16, device=where) for name, _, shape in tensors}
        changed = _few(arrays, PART * model_weights.total(tensors))
        publish = partial(broker.publish, POOL, share=share, wait=60.0)

        def step() -> None:
            for array in changed.values():
                array.add_(1)
            if not context.host:
                torch.cuda.synchronize()

        times: list[tuple[float, ...]] = []
        taken = 0
        for _ in range(WARM + ROUNDS):
            settle(broker)
            whole = seconds(partial(publish, arrays, devices=(context.device.index,)))
            row = [whole]
            step()
            publish(changed, base=POOL)  # this moves the changed tensors apart
            ways = [(changed, True), (changed, False), (arrays, True)]
            for given, attached in ways:
                settle(broker)
                step()
                with broker.attach(POOL) as pool:
                    base = pool if attached else pool.version
                    row.append(seconds(partial(publish, given, base=base)))
                    new = max(broker.pools(), key=lambda info: info.version)
                    taken = new.memory - new.shared
            times.append(tuple(row))
            broker.retire(POOL)
        part = sum(array.numel() * array.element_size() for array in changed.values())
        connection.send((part, taken, tuple(zip(*times[WARM:], strict=True))))


def _few(arrays: Mapping[str, torch.Tensor], most: float) -> dict[str, torch.Tensor]:
    """Return projections of the first layers, up to ``most`` bytes, but at least one."""
    found: dict[str, torch.Tensor] = {}
    for name, array in arrays.items():
        if "v_proj" in name or "k_proj" in name:
            most -= array.numel() * array.element_size()
            if most < 0 and found:
                break
            found[name] = array
    return found


if __name__ == "__main__":
    run_alone(measure)
