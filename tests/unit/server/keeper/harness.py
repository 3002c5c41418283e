"""``cubroker keep`` as a process, and what it keeps, run after run, in the hands of the test."""

from __future__ import annotations

import base64
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests import forkserver
from tests.brokers import PATIENCE, eventually
from tests.unit.cli.processes import COMMAND, environment

LINE = 1 << 18

KEEPER = ("cubroker.cli.main", "cubroker.cli.keep")
"""What the fork server of keepers has imported; it imports no broker."""

KEEP = (*COMMAND, "keep", "--watchdog", "0")
"""What the pupils are kept with: they give no signs of life, but where a test has them watched."""


class Pupil:
    """One run of the kept process.

    Attributes:
        hello: what it found at its start.
        pid: its number here, whatever it has in a pid namespace of its own.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.hello: dict[str, Any] = json.loads(self._hear())
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        self.pid = int.from_bytes(credentials[:4], sys.byteorder)

    @property
    def inherited(self) -> dict[str, int]:
        """How many descriptors of each name it was started with."""
        return {name: len(numbers) for name, numbers in self.hello["inherited"].items()}

    def store(self, name: str, *descriptors: int, poll: bool = False) -> None:
        self._order({"store": name, "poll": poll}, descriptors)

    def give(self, name: str) -> list[int]:
        """Return duplicates of what it was started with under a name; the caller closes them."""
        self._connection.send(json.dumps({"give": name}).encode())
        _, descriptors, _, _ = socket.recv_fds(self._connection, LINE, 253)
        return descriptors

    def say(self, kind: str, *arguments: object) -> object:
        """Say one of ``sd_notify``'s messages to its manager; returns what it was refused with, or None."""
        return self._order({"say": kind, "with": arguments})

    def raw(self, data: bytes, *descriptors: int) -> None:
        """Send a datagram as it is."""
        self._order({"raw": base64.b64encode(data).decode()}, descriptors)

    def last(self, data: bytes) -> None:
        """Send a datagram that may be its last."""
        self._connection.send(json.dumps({"raw": base64.b64encode(data).decode()}).encode())

    def barrier(self) -> None:
        """Return when its keeper has acted upon all that it said before."""
        ours, theirs = os.pipe()
        self.raw(b"BARRIER=1", theirs)
        os.close(theirs)
        assert select.select([ours], [], [], PATIENCE)[0]
        os.close(ours)

    def leave(self, *arguments: str, orphan: bool = False) -> str:
        """Have it start a process, in a session of its own if ``orphan``; returns that one's first line."""
        return str(self._order({"leave": arguments, "orphan": orphan})).strip()

    def expect(self, number: signal.Signals) -> None:
        """Have it exit with 100 and the number of the signal when that comes."""
        self._order({"expect": number})

    def ignore(self, number: signal.Signals) -> None:
        """Have it do nothing when the signal comes."""
        self._order({"ignore": number})

    def stop(self) -> None:
        """Stop it, as SIGSTOP does, and return when it is."""
        os.kill(self.pid, signal.SIGSTOP)
        eventually(lambda: Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T", "the stop")

    def hang(self) -> None:
        """Have it say that it is ready, and stop."""
        self._connection.send(json.dumps({"hang": True}).encode())

    def exit(self, status: int) -> None:
        self._connection.send(json.dumps({"exit": status}).encode())

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def ended(self) -> None:
        """Wait until it has ended."""
        while self._connection.recv(1):  # what it still had to answer
            pass

    def close(self) -> None:
        self._connection.close()

    def _order(self, order: object, descriptors: Sequence[int] = ()) -> object:
        socket.send_fds(self._connection, [json.dumps(order).encode()], descriptors)
        return json.loads(self._hear())

    def _hear(self) -> bytes:
        heard = self._connection.recv(LINE)
        assert heard, "the kept process ended"
        return heard


def pupil(directory: Path) -> list[str]:
    """Return the command of a kept process that calls at the test in a directory; its coverage is not measured."""
    unmeasured = ["env", *(f"--unset={name}" for name in os.environ if name.startswith("COVERAGE_"))]
    return [*unmeasured, sys.executable, "-m", "tests.unit.server.keeper.kept_process", str(directory / "test")]


def listening(inherited: Mapping[str, int]) -> dict[str, str]:
    """Return the variables by which a forked process finds descriptors, if there are any."""
    if not inherited:
        return {}
    names = ":".join(inherited)
    return {"LISTEN_PID": forkserver.SELF, "LISTEN_FDS": str(len(inherited)), "LISTEN_FDNAMES": names}


class Keep:
    """A keeper, started; at the end it is told to end, and has to.

    Args:
        variables: of its environment, as its own service manager sets them.
        inherited: descriptors that it is started with, by name; for a keeper of the command line alone.
    """

    def __init__(
        self,
        directory: Path,
        *options: str,
        program: Sequence[str] = KEEP,
        before: Sequence[str] = (),
        command: Sequence[str | Path] = (),
        stderr: int = subprocess.PIPE,
        variables: Mapping[str, str] | None = None,
        inherited: Mapping[str, int] | None = None,
    ) -> None:
        self._pupils: list[Pupil] = []
        self._written = b""
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(str(directory / "test"))
        self.listener.listen()
        self.command = pupil(directory)
        with forkserver.heeded(signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
            start = partial(forkserver.start, preload=KEEPER) if program[:3] == COMMAND else subprocess.Popen
            if inherited:
                start = partial(start, descriptors=dict(enumerate(inherited.values(), start=3)))
            self.process = start(
                [*before, *program, *options, "--", *map(str, command or self.command)],
                env=environment(TMPDIR=str(directory), **(variables or {}), **listening(inherited or {})),
                stdin=subprocess.DEVNULL,
                stderr=stderr,
            )
        self._pidfd = os.pidfd_open(self.process.pid)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.process.terminate()
        try:
            self.process.wait(PATIENCE if error is None else 1)
        finally:
            self.process.kill()
            self.process.wait()
            self._close(error)

    def _close(self, error: BaseException | None) -> None:
        if self.process.stderr:
            if error:
                self.read()
                error.add_note(self._written.decode())
            self.process.stderr.close()
        for pupil in self._pupils:  # which ends those that outlive the keeper
            pupil.close()
        self.listener.close()
        os.close(self._pidfd)

    def next(self, *, ready: bool = True) -> Pupil:
        """Return the next run of the kept process once it has started, and said that it is ready if it is to."""
        ready_now, _, _ = select.select([self.listener, self._pidfd], [], [], PATIENCE)
        assert self.listener in ready_now, "the keeper ended, or starts nothing"
        connection, _ = self.listener.accept()
        connection.settimeout(PATIENCE)
        pupil = Pupil(connection)
        self._pupils.append(pupil)
        if ready:
            assert pupil.say("ready", "") is None
        return pupil

    def again(self, pupil: Pupil) -> Pupil:
        """Kill a run and return the next."""
        pupil.kill()
        return self.next()

    def says(self, pattern: str) -> str:
        """Wait until a line on its standard error matches, and return all that it wrote up to now."""
        deadline = time.monotonic() + PATIENCE
        while not re.search(pattern, self._written.decode()):
            assert time.monotonic() < deadline, f"{pattern!r} is not in {self._written.decode()}"
            assert self.read(), f"it ended without {pattern!r}: {self._written.decode()}"
        return self._written.decode()

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """Send it a signal and return its exit status."""
        self.process.send_signal(number)
        return self.status()

    def status(self) -> int:
        """Wait for its end and return its exit status."""
        while self.read():
            pass
        return self.process.wait(PATIENCE)

    def said(self) -> str:
        return self._written.decode()

    def read(self) -> bytes:
        """Wait for more on its standard error, and return that; nothing at its end."""
        assert self.process.stderr
        number = self.process.stderr.fileno()
        ready, _, _ = select.select([number], [], [], PATIENCE)
        more = os.read(number, LINE) if ready else b""
        self._written += more
        return more


@contextmanager
def memory(content: bytes) -> Iterator[int]:
    """A memory file for a while."""
    descriptor = os.memfd_create("test")
    try:
        os.write(descriptor, content)
        yield descriptor
    finally:
        os.close(descriptor)


def contents(descriptors: Sequence[int]) -> list[bytes]:
    """What memory files contain; closes them."""
    found = []
    for descriptor in descriptors:
        found.append(os.pread(descriptor, LINE, 0))
        os.close(descriptor)
    return found
