"""How many modules a reader needs for one attach: the trip that every other change must not make longer."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.brokers import PATIENCE

ROOT = Path(__file__).parents[3]
BOUNDS = {
    "ipc": {"broker": (12, 9), "client": (17, 11)},
    "vmm": {"broker": (12, 9), "client": (19, 14)},
}
"""By share kind and side, the modules, those of protocol/ and driver/ included, and the depth of the stack.

Without descriptors to send the broker has 11 modules; on a busy machine 12, since it looks at the gateway's socket.
"""


@pytest.mark.parametrize("share", BOUNDS)
def test_an_attach_runs_through_few_modules_and_is_not_deep(share: str) -> None:
    command = [sys.executable, "-m", "benchmarks.trace", "attach", "--share", share]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE, check=True)
    found = re.findall(r"^(broker|client): \d+ calls, (\d+) modules, depth (\d+),", done.stdout, re.MULTILINE)
    bounds = BOUNDS[share]
    assert [side for side, *_ in found] == [*bounds], done.stdout
    for side, modules, depth in found:
        assert int(modules) <= bounds[side][0], done.stdout
        assert int(depth) <= bounds[side][1], done.stdout
