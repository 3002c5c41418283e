"""The command as a process: run to its end, or watched line by line; and what it may have left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.brokers import PATIENCE

DEADLINE = PATIENCE
"""Seconds after which a command that has not ended has failed."""

COMMAND = (sys.executable, "-m", "cubroker.cli")


def environment(**changes: str) -> dict[str, str]:
    """Return the environment without a directory of the user's, so that a test meets only its own broker."""
    kept = {key: value for key, value in os.environ.items() if key not in ("CUBROKER_DIR", "COLUMNS")}
    return kept | changes


def run(*arguments: str | Path, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run ``cubroker`` to its end."""
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        env=environment() if env is None else env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )


@contextmanager
def started(*arguments: str | Path, env: Mapping[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
    """Start ``cubroker``, with signals as in a shell's foreground; what still runs at the end is killed."""
    process = subprocess.Popen(
        [*COMMAND, *map(str, arguments)],
        env=environment() if env is None else env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=_as_in_the_foreground,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def _as_in_the_foreground() -> None:
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def holding(marker: str) -> list[int]:
    """Return the processes whose environment holds ``marker``: a command's, and those of all that it started."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                if marker.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:  # it has just ended, or is another user's
                continue
    return found
