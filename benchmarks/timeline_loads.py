"""Several loads in one process, for :mod:`benchmarks.timeline`: ``DIRECTORY FILE SHARE LOADS SPANS``."""

from __future__ import annotations

import sys
from time import perf_counter, sleep

from benchmarks import spans
from benchmarks.load import POOL, retire
from cubroker.client import Broker
from cubroker.client.loading.loader import load


def main() -> None:
    """Load, and note where the last load begins and ends."""
    directory, path, share, loads, _ = sys.argv[1:]
    with Broker(directory) as broker:
        for _ in range(int(loads)):
            sleep(0.2)
            began = perf_counter()
            load(broker, POOL, path, share=share)
            ended = perf_counter()
            retire(broker, POOL)
    spans.spans += [("main", "begin", began, began), ("main", "end", ended, ended)]


if __name__ == "__main__":
    main()
