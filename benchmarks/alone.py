"""Running one benchmark by itself."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.plan import Plan, parse
from benchmarks.report import Figure, publish


def main(measure: Callable[[Plan], list[Figure]]) -> None:
    """Parse the command line, measure and publish, under the module's name."""
    name = Path(sys.argv[0]).stem
    plan = parse(f"python -m benchmarks.{name}")
    publish(plan, {name: measure(plan)})
