"""Ctrl-C at any moment of a command: in its imports, in its work and at its end, there is never a traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.brokers import BrokerProcess
from tests.unit.cli.processes import COMMAND, DEADLINE, environment

HOOK = """
import os, signal, sys

class Count:
    # Counts the imports of the command, from the first that the entry makes, and has Ctrl-C typed at one of them.
    seen = 0
    def find_spec(self, name, path, target=None):
        if self.seen or name == "cubroker.cli.main":
            self.seen += 1
            if self.seen == int(os.environ["INTERRUPTED_AT"]):
                os.kill(os.getpid(), signal.SIGINT)

count = Count()
sys.meta_path.insert(0, count)
if os.environ["INTERRUPTED_AT"] == "0":
    import atexit
    atexit.register(lambda: print(count.seen, file=sys.stderr))
"""
"""The module sitecustomize, which an interpreter imports before all others."""

QUIET = (-signal.SIGINT, 130)
"""The process ended by the signal, or a command that was told of it has ended in order: a shell shows 130 for both."""


@pytest.fixture
def hook(tmp_path: Path) -> dict[str, str]:
    """The environment in which :data:`HOOK` is at work."""
    (tmp_path / "sitecustomize.py").write_text(HOOK)
    kept = {name: value for name, value in environment().items() if not name.startswith("COVERAGE")}
    return kept | {"PYTHONPATH": f"{tmp_path}:{kept.get('PYTHONPATH', '')}"}


def interrupted(env: dict[str, str], at: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments],
        env=env | {"INTERRUPTED_AT": str(at)},
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL) and None,
    )


@pytest.mark.slow
def test_an_interrupt_at_any_import_ends_a_command_without_a_traceback(
    broker: BrokerProcess, hook: dict[str, str]
) -> None:
    command = ("ls", "--directory", str(broker.directory))
    whole = interrupted(hook, 0, *command)
    assert whole.returncode == 0
    imports = int(whole.stderr.splitlines()[-1])
    assert imports > 100
    points = 5
    for number in (1, 2, *(imports * point // points for point in range(1, points)), imports):
        done = interrupted(hook, number, *command)
        assert done.returncode in QUIET, (number, done.stderr)
        assert "Traceback" not in done.stderr, (number, done.stderr)
        assert done.stderr.strip() in ("", "Aborted!"), (number, done.stderr)


def test_an_interrupt_that_is_ignored_stays_ignored(hook: dict[str, str]) -> None:
    """As under nohup, and in the background of a shell without job control."""
    done = subprocess.run(
        [*COMMAND, "--version"],
        env=hook | {"INTERRUPTED_AT": "40"},
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN) and None,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("cubroker, version ")


def test_the_console_script_begins_where_the_module_does() -> None:
    script = Path(sys.executable).with_name("cubroker").read_text()
    assert "from cubroker.cli.__main__ import main" in script
    assert os.access(Path(sys.executable).with_name("cubroker"), os.X_OK)
