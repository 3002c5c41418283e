"""The systemd units."""

from __future__ import annotations

import shutil
import subprocess
import sys
from configparser import ConfigParser
from pathlib import Path

import pytest

UNIT = Path(__file__).parents[2] / "deploy/systemd/cubroker.service"


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="needs systemd-analyze")
@pytest.mark.parametrize("manager", ["--system", "--user"])
def test_systemd_finds_nothing_wrong_with_the_unit(
    manager: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    result = subprocess.run(
        ["systemd-analyze", manager, "--recursive-errors=no", "verify", UNIT],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_the_command_in_the_unit_is_one_that_cubroker_knows() -> None:
    unit = ConfigParser(interpolation=None, strict=False)
    unit.read(UNIT)
    env, program, command, *options = unit["Service"]["execstart"].split()
    assert (env, program, command) == ("/usr/bin/env", "cubroker", "serve")
    known = subprocess.check_output([sys.executable, "-m", "cubroker.cli", command, "--help"], text=True)
    assert [option for option in options if option.startswith("--") and option not in known] == []
