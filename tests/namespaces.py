"""Brokers and clients in namespaces of their own, as containers have them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests import forkserver
from tests.brokers import DEVICES, PATIENCE, BrokerProcess, started

GUEST = """
import json, sys
from cubroker.client import Broker
from cubroker.protocol.errors import CubrokerError
try:
    with Broker(sys.argv[1]) as broker, broker.attach(sys.argv[2]) as pool:
        print(json.dumps(pool["x"].tobytes()[0]), flush=True)
        sys.stdin.read()
except CubrokerError as error:
    print(json.dumps([error.code, error.message]))
"""
"""Attaches to a pool, says its first byte or what it was refused, and stays until it is told to end."""


def children(pid: int) -> list[int]:
    """The child processes of a process's first thread."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def unshare(*options: str) -> list[str]:
    """Return what, before a command, runs it in namespaces of its own; skip the test where that is not allowed."""
    command = ["unshare", *options]
    try:
        probe = subprocess.run([*command, "true"], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("needs unshare, of util-linux")
    if probe.returncode:
        pytest.skip(f"no namespaces may be made here: {probe.stderr.strip()}")
    return command


class Contained(BrokerProcess):
    """A broker process in namespaces of its own, which ``before`` makes: a command that runs it as its child."""

    def __init__(self, directory: Path, before: Sequence[str], devices: str = DEVICES) -> None:
        self._before = before
        super().__init__(directory, devices)

    def command(self) -> list[str]:
        return [*self._before, *super().command()]

    def stop(self) -> int:
        if self.process.poll() is None:
            for child in children(self.pid):
                os.kill(child, signal.SIGTERM)
        return self.process.wait(PATIENCE)


def contained(*options: str, devices: str = DEVICES) -> AbstractContextManager[Contained]:
    """Start a broker in namespaces of its own, and stop it at the end."""
    before = unshare("--fork", "--kill-child", *options)
    return started(lambda directory: Contained(directory, before, devices))


class Guest:
    """A client in namespaces of its own.

    Attributes:
        process: the outermost process of it.
        said: the first byte of the pool, or the code and the message of a refusal.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        assert process.stdout
        said = process.stdout.readline()
        assert said, f"the client ended with {process.wait()}"
        self.said: Any = json.loads(said)

    def kill(self) -> None:
        """Send SIGKILL to it and what it started, and wait for its end."""
        self.process.kill()
        self.process.wait()


@contextmanager
def visiting(directory: Path, pool: str, before: Sequence[str] = ()) -> Iterator[Guest]:
    """Attach to a pool in another process, which ``before`` runs in namespaces of its own."""
    command = [*before, sys.executable, "-c", GUEST, str(directory), pool]
    with forkserver.start(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Guest(process)
        finally:
            process.kill()
