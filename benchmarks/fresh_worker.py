"""A fresh worker, as a program: it has torch and a context, then imports cubroker, connects, attaches and makes views.

``python -m benchmarks.fresh_worker DIRECTORY POOL DEVICES`` prints a line of JSON with the milliseconds of each step.
It imports nothing of cubroker before the clock runs, and therefore none of the other benchmarks.
"""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from time import perf_counter


def main() -> None:
    directory, pool, devices = sys.argv[1:]
    import torch

    if devices.startswith("cuda"):
        torch.ones(1, device="cuda").sum().item()
    times = [perf_counter()]
    from cubroker import Broker
    from cubroker.integrations.torch import state_dict

    times.append(perf_counter())
    with Broker(directory) as broker:
        times.append(perf_counter())
        attached = broker.attach(pool)
        times.append(perf_counter())
        tensors = state_dict(attached)
        times.append(perf_counter())
        print(json.dumps([(after - before) * 1e3 for before, after in pairwise(times)]))
        tensors.clear()
        attached.close()


if __name__ == "__main__":
    main()
