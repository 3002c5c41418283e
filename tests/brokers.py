"""Broker processes for tests, each serving in a temporary directory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TypeVar

from tests import forkserver
from tests.forkserver import SERVER

DEVICES = "host:2@64MiB"
PATIENCE = 120.0
"""Seconds after which a condition that does not come true fails a test."""


def eventually(condition: Callable[[], object], what: str, patience: float = PATIENCE) -> None:
    """Return when ``condition()`` is true; fail if it is not within the patience of a test, in seconds."""
    deadline = time.monotonic() + patience
    while not condition():
        assert time.monotonic() < deadline, f"waited {patience:g} s in vain for {what}"
        time.sleep(0.01)


def measured() -> bool:
    """Whether the coverage of a broker counts that is started now: in tests of the server, and not of its clients.

    Tracing, the trace of its gateway, and two files of results cost as much as the rest of a short broker's life.
    """
    return os.environ.get("PYTEST_CURRENT_TEST", "").startswith("tests/unit/server/")


class BrokerProcess:
    """``python -m cubroker.server``, started and serving.

    Attributes:
        directory: where it serves; also what ``$CUBROKER_DIR`` should be.
        devices: what it was given as ``--devices``.
        drain: seconds that it waits for leases to end when it is stopped.
    """

    drain = "0"

    def __init__(self, directory: Path, devices: str = DEVICES, budget: str | None = None) -> None:
        self.directory = directory
        self.devices = devices
        self._budget = budget
        self._log = directory.with_name(directory.name + ".log")
        self.start()

    @property
    def pid(self) -> int:
        return self.process.pid

    def log(self) -> str:
        """All that it has written to standard error, of every start."""
        return self._log.read_text()

    def start(self) -> None:
        """Start it (again) and return when it serves."""
        with self._log.open("ab") as log:
            written = log.tell()
            self.process = self.spawn(log.fileno())
        eventually(lambda: self._serves(written), "the broker to serve")

    def spawn(self, log: int) -> subprocess.Popen[bytes]:
        """Start the process, with everything that it writes in its log."""
        streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
        return forkserver.start(self.command(), preload=SERVER, measured=measured(), **streams)

    def command(self) -> list[str]:
        command = [sys.executable, "-m", "cubroker.server", str(self.directory), "--devices", self.devices]
        command += ["--drain", self.drain]
        return command + (["--budget", self._budget] if self._budget else [])

    def stop(self) -> int:
        """Send SIGTERM and return its exit status; nothing happens if it has ended before."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(PATIENCE)

    def kill(self) -> None:
        """Send SIGKILL and wait for its end."""
        self.process.kill()
        self.process.wait(PATIENCE)

    def _serves(self, written: int) -> bool:
        said = self._log.read_bytes()[written:]
        assert self.process.poll() is None, f"the broker ended:\n{said.decode()}"
        return b"cubroker: serving on " in said


B = TypeVar("B", bound=BrokerProcess)


def serving(devices: str = DEVICES, budget: str | None = None) -> AbstractContextManager[BrokerProcess]:
    """Start a broker on a fresh directory, and stop it at the end whatever happens."""
    return started(lambda directory: BrokerProcess(directory, devices, budget))


@contextmanager
def started(start: Callable[[Path], B]) -> Iterator[B]:
    """Start a broker of any kind on a fresh directory, stop it at the end, and kill it if it does not end."""
    # Not pytest's tmp_path: the path of a socket has 107 bytes at most.
    with tempfile.TemporaryDirectory(prefix="cubroker-") as folder:
        broker = start(Path(folder) / "run")
        try:
            yield broker
        finally:
            try:
                broker.stop()
            finally:
                broker.kill()


class Patient(BrokerProcess):
    """A broker that waits an hour for leases to end when it is stopped."""

    drain = "3600"


def program(source: str) -> AbstractContextManager[BrokerProcess]:
    """Start a broker process that runs ``source``."""

    class Other(BrokerProcess):
        def command(self) -> list[str]:
            _, _, _, *options = super().command()
            return [sys.executable, "-c", source, *options]

    return started(Other)


UP_TO = """
import sys
from cubroker.server.transport import admission
from cubroker.server.__main__ import main

admission.VERSIONS = admission.VERSIONS[:{}]
sys.exit(main())
"""


def older(newest: int) -> AbstractContextManager[BrokerProcess]:
    """Start a broker that speaks no later version of the protocol than this one."""
    return program(UP_TO.format(newest))
