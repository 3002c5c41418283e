"""``python -m benchmarks --devices cuda --output DIR``: run all benchmarks, one after the other."""

from __future__ import annotations

import sys
from importlib import import_module
from time import perf_counter

from benchmarks.options import parse
from benchmarks.report import Figure, publish

ALL = (
    *("attach", "load", "load_command", "load_files", "publish", "update", "create", "sleep", "switch", "follow"),
    *("fetch", "handover", "digest", "peers", "replicate", "memory", "requests", "restart", "driver_calls"),
)
"""The modules of the benchmarks, in this order."""


def main() -> None:
    """Run all benchmarks and publish their results together."""
    plan = parse("python -m benchmarks")
    results: dict[str, list[Figure]] = {}
    try:
        for name in ALL:
            began = perf_counter()
            results[name] = list(import_module(f"benchmarks.{name}").measure(plan))
            print(f"{name}: {perf_counter() - began:.1f} s", file=sys.stderr)
    finally:
        status = publish(plan, results)  # if a benchmark fails, the results of those before it
    sys.exit(status)


if __name__ == "__main__":
    main()
