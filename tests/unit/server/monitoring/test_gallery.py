"""Pictures of the page are those of a real broker, with pools and holders."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.brokers import PATIENCE
from tests.unit.server.monitoring.gallery import CHROMIUM


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here; `apt-get install chromium` brings one")
def test_pictures_are_made_of_a_real_broker(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.unit.server.monitoring.gallery", str(tmp_path), "--devices", "2"]
    command += ["--pools", "5", "--colours", "dark", "--widths", "400"]
    made = subprocess.run(command, env=os.environ, capture_output=True, text=True, timeout=PATIENCE)
    assert made.returncode == 0, made.stderr
    pictures = sorted(path.name for path in tmp_path.iterdir())
    assert pictures == sorted(f"2x5-{step}dark-400.png" for step in ("", "search-", "plan-"))
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in tmp_path.iterdir())
