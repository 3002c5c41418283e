"""A command on a terminal of its own, of a given width, and what it wrote there."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import termios
from collections.abc import Sequence
from pathlib import Path

from tests import forkserver
from tests.forkserver import CLI
from tests.unit.cli.processes import COMMAND, DEADLINE, environment


def run(
    *arguments: str | Path, columns: int = 80, command: Sequence[str] = COMMAND, **variables: str
) -> tuple[int, str]:
    """Run ``cubroker``, or another command, with all streams on a terminal; return its status and what it wrote."""
    ours, theirs = pty.openpty()
    try:
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        env = environment(**{"TERM": "xterm", "NO_COLOR": "", **variables})
        line = [*command, *map(str, arguments)]
        process = forkserver.start(line, preload=CLI, env=env, stdin=theirs, stdout=theirs, stderr=theirs)
    finally:
        os.close(theirs)
    with os.fdopen(ours, "rb", buffering=0) as terminal, process:
        written = bytearray()
        while piece := _read(terminal.fileno()):
            written += piece
        return process.wait(DEADLINE), written.decode().replace("\r\n", "\n")


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # EIO: the last one on the other side has closed it
        return b""
