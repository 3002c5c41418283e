"""``python -m benchmarks --devices cuda --output DIR``: run all benchmarks, one after the other."""

from __future__ import annotations

from importlib import import_module

from benchmarks.harness import run

ALL = (
    *("attach", "load", "load_command", "load_files", "publish", "update", "create", "sleep", "switch", "follow"),
    *("fetch", "handover", "digest", "peers", "replicate", "memory", "requests", "restart", "driver_calls"),
)
"""The modules of the benchmarks, in this order."""


if __name__ == "__main__":
    run("python -m benchmarks", {name: import_module(f"benchmarks.{name}").measure for name in ALL})
