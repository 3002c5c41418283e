"""``python -m benchmarks --devices cuda --output DIR``: run all benchmarks, one after the other."""

from __future__ import annotations

import sys
from time import perf_counter

from benchmarks import (
    attach,
    create,
    digest,
    driver_calls,
    fetch,
    follow,
    handover,
    load,
    load_command,
    load_files,
    memory,
    peers,
    replicate,
    requests,
    restart,
    sleep,
    switch,
    update,
)
from benchmarks import publish as publishing
from benchmarks.options import parse
from benchmarks.report import Figure, publish

ALL = {
    "attach": attach.measure,
    "load": load.measure,
    "load_command": load_command.measure,
    "load_files": load_files.measure,
    "publish": publishing.measure,
    "update": update.measure,
    "create": create.measure,
    "sleep": sleep.measure,
    "switch": switch.measure,
    "follow": follow.measure,
    "fetch": fetch.measure,
    "handover": handover.measure,
    "digest": digest.measure,
    "peers": peers.measure,
    "replicate": replicate.measure,
    "memory": memory.measure,
    "requests": requests.measure,
    "restart": restart.measure,
    "driver_calls": driver_calls.measure,
}


def main() -> None:
    """Run all benchmarks and publish their results together."""
    plan = parse("python -m benchmarks")
    results: dict[str, list[Figure]] = {}
    try:
        for name, measure in ALL.items():
            began = perf_counter()
            results[name] = list(measure(plan))
            print(f"{name}: {perf_counter() - began:.1f} s", file=sys.stderr)
    finally:
        status = publish(plan, results)  # if a benchmark fails, the results of those before it
    sys.exit(status)


if __name__ == "__main__":
    main()
