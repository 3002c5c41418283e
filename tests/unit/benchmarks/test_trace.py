"""How many modules a reader needs for one attach: the trip that every other change must not make longer."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.brokers import PATIENCE

ROOT = Path(__file__).parents[3]
MODULES, DEPTH = 12, 9


@pytest.mark.parametrize("share", ["ipc", "vmm"])
def test_an_attach_runs_through_few_modules_of_the_broker_and_is_not_deep(share: str) -> None:
    command = [sys.executable, "-m", "benchmarks.trace", "attach", "--share", share]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=True)
    found = re.match(r"broker: \d+ calls, (\d+) modules, depth (\d+),", done.stdout)
    assert found, done.stdout
    modules, depth = map(int, found.groups())
    assert modules <= MODULES, done.stdout
    assert depth <= DEPTH, done.stdout
