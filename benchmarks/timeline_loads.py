"""Several loads in one process, for :mod:`benchmarks.timeline`: ``DIRECTORY FILE SHARE LOADS OVER SPANS``."""

from __future__ import annotations

import sys
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

from benchmarks import model_weights, spans
from benchmarks.load import POOL, retire
from cubroker.client import Broker
from cubroker.client.devices import context
from cubroker.client.loading.checkpoint import Checkpoint
from cubroker.client.loading.loader import load


def main() -> None:
    """Load, and record when the last load begins and ends."""
    directory, path, share, loads, over, _ = sys.argv[1:]
    with Broker(directory) as broker:
        where = destination(broker, Path(path), over)
        for device in broker.driver.devices:
            context(broker.driver, device)
        for _ in range(int(loads)):
            sleep(0.2)
            began = perf_counter()
            load(broker, POOL, path, share=share, **where)
            ended = perf_counter()
            retire(broker, POOL)
    spans.spans += [("main", "begin", began, began), ("main", "end", ended, ended)]


def destination(broker: Broker, path: Path, over: str) -> dict[str, Any]:
    """Return the devices of a load: the first one, all with a copy on each, or all with some of the layers each."""
    devices = [device.uuid for device in broker.driver.devices]
    if over == "sharded":
        with Checkpoint.open(path) as checkpoint:
            stages = model_weights.parts([(e.name, e.dtype, e.shape) for e in checkpoint.entries], len(devices))
        return {"plan": {name: home for part, home in zip(stages, devices, strict=True) for name, _, _ in part}}
    return {"devices": devices if over == "all" else devices[:1]}


if __name__ == "__main__":
    main()
