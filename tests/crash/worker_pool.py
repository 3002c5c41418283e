"""Worker processes by the hundred, each with a line to the test that wants it.

They are forked from one process, the worker_pool, which has imported everything and has no thread, so that one costs
milliseconds: numpy and the host driver, which a client imports with its first device, would cost as much as the rest of
its life several times. No worker outlives the test: the worker_pool ends when its own line closes, and the kernel kills
its children with it. All signals go through pidfds, so none can reach another process.
"""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Self

from tests.brokers import PATIENCE
from tests.forkserver import CLIENT, ONE_THREAD, end_with_parent, unmeasured

ROOT = Path(__file__).parents[2]
WORD = 1 << 16
"""Bytes of the longest word on a line."""


class Channel:
    """A worker's end of the line to the test."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def fileno(self) -> int:
        return self._connection.fileno()

    def say(self, word: str) -> None:
        self._connection.send(word.encode())

    def hear(self) -> str:
        """Wait for a word; the process ends if the test is gone."""
        word = self._connection.recv(WORD)
        if not word:
            os._exit(1)
        return word.decode()


class Worker:
    """A process of the worker_pool, as the test has it; killed at the end of a ``with`` block."""

    def __init__(self, pid: int, connection: socket.socket) -> None:
        self.pid = pid
        self._line = connection
        self.pidfd = os.pidfd_open(pid)  # it is there still: it does nothing before it is told to
        self.tell("go")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fileno(self) -> int:
        """The test's end of the line, for select."""
        return self._line.fileno()

    def tell(self, word: str, descriptors: Sequence[int] = ()) -> None:
        socket.send_fds(self._line, [word.encode()], descriptors)

    def hear(self) -> str:
        """Return the next word of the worker; fails if it has ended or failed."""
        assert select.select([self._line], [], [], PATIENCE)[0], f"worker {self.pid} has said nothing for {PATIENCE} s"
        try:
            word = self._line.recv(WORD).decode()
        except ConnectionResetError:
            word = ""
        assert word, f"worker {self.pid} has ended"
        assert not word.startswith("failed"), word
        return word

    def expect(self, word: str) -> None:
        """Wait for this very word."""
        heard = self.hear()
        assert heard == word, f"worker {self.pid} said {heard!r} instead of {word!r}"

    def signal(self, number: signal.Signals) -> None:
        signal.pidfd_send_signal(self.pidfd, number)

    def kill(self) -> float:
        """Send SIGKILL, wait for the end, and return the moment just before."""
        moment = time.monotonic()
        if not self.ended():
            self.signal(signal.SIGKILL)
        self.wait()
        return moment

    def ended(self) -> bool:
        """Whether all of it has ended, by the kernel's word."""
        return bool(select.select([self.pidfd], [], [], 0)[0])

    def wait(self) -> None:
        """Wait for its end."""
        assert select.select([self.pidfd], [], [], PATIENCE)[0], f"worker {self.pid} has not ended"

    def close(self) -> None:
        if self.pidfd >= 0:
            try:
                self.kill()
            finally:
                os.close(self.pidfd)
                self.pidfd = -1
                self._line.close()


class WorkerPool:
    """The process that forks workers, as the test has it; a context manager.

    Args:
        modules: what it imports in advance, beside a client.
    """

    def __init__(self, *modules: str) -> None:
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-m", "tests.crash.worker_pool", *CLIENT, *modules]
            # Coverage is not measured there: whoever is killed has none to report, and it makes forks slow.
            environment = unmeasured() | ONE_THREAD
            self._process = subprocess.Popen(command, cwd=ROOT, stdin=theirs.fileno(), env=environment)
        self._line.settimeout(PATIENCE)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._line.close()
        try:
            self._process.wait(PATIENCE)
        finally:
            self._process.kill()
            self._process.wait()

    def worker(self, function: str, *args: str | int | float) -> Worker:
        """Start a worker that runs ``module:function`` with its line and ``args``."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            socket.send_fds(self._line, [json.dumps([function, *args]).encode()], [theirs.fileno()])
            pid = int(self._line.recv(WORD))
        return Worker(pid, ours)


# -- in the worker_pool --------------------------------------------------------------------------------


def main(modules: list[str]) -> None:
    """Fork a worker for every message on standard input, until that ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel forgets children that have ended
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is for the test, which closes the line
    for module in modules:
        import_module(module)
    gc.collect()
    gc.freeze()
    line = socket.socket(fileno=0)
    while True:
        message, descriptors, _, _ = socket.recv_fds(line, WORD, 1)
        if not message:
            return
        with socket.socket(fileno=descriptors[0]) as connection:
            connection.set_inheritable(False)
            pid = os.fork()
            if pid == 0:
                null = os.open(os.devnull, os.O_RDWR)
                os.dup2(null, line.detach())
                os.close(null)
                _live(connection, *json.loads(message))
        line.send(str(pid).encode())


def _live(connection: socket.socket, function: str, *args: str | int | float) -> None:
    """A worker's whole life."""
    end_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    line = Channel(connection)
    line.hear()
    status = 1
    try:
        module, name = function.split(":")
        getattr(import_module(module), name)(line, *args)
        status = 0
    except BaseException:
        line.say(f"failed: {traceback.format_exc()[-60_000:]}")
        raise
    finally:
        os._exit(status)


if __name__ == "__main__":
    main(sys.argv[1:])
