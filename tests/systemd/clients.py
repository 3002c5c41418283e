"""Processes inside a lab that use its broker, as a test has them."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from typing import Any, Self

from tests.brokers import PATIENCE
from tests.systemd.lab import Lab


class Client:
    """A process of ``tests.systemd.worker``; it ends with its standard input, at the end of a ``with`` block.

    Attributes:
        said: what it said first: its process id inside the lab, or what came of what it does.
    """

    def __init__(self, lab: Lab, role: str, *arguments: str | int) -> None:
        # This interpreter's packages, not those that are installed in the lab.
        path = f"PYTHONPATH={os.environ.get('PYTHONPATH', '')}"
        command = lab.command("env", path, sys.executable, "-m", "tests.systemd.worker", role, *map(str, arguments))
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def __enter__(self) -> Self:
        self.said = self.hear()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        with self._process as process:
            process.wait(PATIENCE)

    def tell(self) -> None:
        """Have it answer, or stop."""
        assert self._process.stdin
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()

    def hear(self) -> Any:
        """Return what it says next; fails if it has ended."""
        assert self._process.stdout
        assert select.select([self._process.stdout], [], [], PATIENCE)[0], f"it has said nothing for {PATIENCE:g} s"
        line = self._process.stdout.readline()
        assert line, f"it ended with {self._process.wait()}"
        return json.loads(line)

    def ask(self) -> Any:
        """Have it answer, and return what it says."""
        self.tell()
        return self.hear()
