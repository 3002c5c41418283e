"""Broker processes with a store that a test can look into and take from; it speaks for systemd, or `cubroker keep`."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from socket import AF_UNIX, SCM_RIGHTS, SOCK_DGRAM, SOL_SOCKET, socket
from threading import Event, Thread

from cubroker.protocol.errors import CorruptJournal
from cubroker.server.store import sd_notify
from cubroker.server.store.sd_notify import close_all
from cubroker.server.store.store import Journal, newest_slot
from tests import forkserver
from tests.brokers import DEVICES, BrokerProcess, measured, started
from tests.forkserver import SERVER

ATTEMPTS = 10
"""At reading a journal that is written meanwhile."""

ROOM = 1000
"""Descriptors that the store says it has room for."""

LAUNCH = """
import fcntl, os, sys
count = int(sys.argv[1])
stored = [int(each) for each in sys.argv[2:2 + count]]
for number, descriptor in enumerate([fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, 3 + count) for each in stored], start=3):
    os.dup2(descriptor, number)
for each in stored:
    if each >= 3 + count:
        os.close(each)
os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS=str(count))
os.execv(sys.argv[2 + count], sys.argv[2 + count:])
"""


def launch(
    command: Sequence[str], numbers: Sequence[int], log: int, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start a broker as a service manager does that has descriptors for it: at the numbers from 3 on, and counted."""
    streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
    if command[0] == sys.executable and len(numbers) < forkserver.MOST - 10 and forkserver.like_ours():
        counted = {"LISTEN_PID": forkserver.SELF, "LISTEN_FDS": str(len(numbers))}
        placed = dict(enumerate(numbers, start=3))
        env = {**os.environ, **counted, **environment}
        options = {"preload": SERVER, "measured": measured(), "descriptors": placed, "env": env}
        return forkserver.Forked(command[1:], **options, **streams)
    before = [sys.executable, "-c", LAUNCH, str(len(numbers)), *map(str, numbers)]
    return subprocess.Popen([*before, *command], pass_fds=numbers, env={**os.environ, **environment}, **streams)


def fill(path: Path) -> None:
    """Leave no room in the queue of a socket that nobody reads, which may hold more than one sender may send."""
    sent = True
    while sent:
        sent = False
        with socket(AF_UNIX, SOCK_DGRAM) as end, suppress(BlockingIOError):
            end.setblocking(False)
            end.connect(str(path))
            while True:
                end.send(b"NOISE=1")
                sent = True


class FdStore:
    """Keeps what is sent to ``path``, by name, until it is told to forget it. Whoever sends is believed.

    Attributes:
        stored: the descriptors of each name.
        said: all fields but those of descriptors, as they came.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.stored: dict[str, list[int]] = {}
        self.said: list[tuple[str, str]] = []
        self._listens, self._deaf = Event(), Event()
        self._listen()

    @property
    def open(self) -> bool:
        """Whether it takes messages."""
        return self._thread.is_alive()

    def close(self) -> None:
        """Forget everything, and take no more; does nothing the second time."""
        if self.open:
            self._leave()
            for name in list(self.stored):
                self.forget(name)

    @contextmanager
    def away(self) -> Iterator[None]:
        """For the length of a block nobody is there, and then somebody who knows everything is there again."""
        self._leave()
        self.path.unlink()
        yield
        self._listen()

    @contextmanager
    def deaf(self) -> Iterator[None]:
        """For the length of a block it reads nothing, and no message has room."""
        self._listens.clear()
        with socket(AF_UNIX, SOCK_DGRAM) as end:
            end.sendto(b"DEAF=1", str(self.path))
        self._deaf.wait()
        fill(self.path)
        try:
            yield
        finally:
            self._deaf.clear()
            self._listens.set()

    def settle(self) -> None:
        """Return when all was acted upon that was sent before: messages come in order."""
        ours, theirs = os.pipe()
        with socket(AF_UNIX, SOCK_DGRAM) as end:
            rights = [(SOL_SOCKET, SCM_RIGHTS, struct.pack("i", theirs))]
            end.sendmsg([b"BARRIER=1"], rights, 0, str(self.path))  # send_fds() forgets the address
        os.close(theirs)
        os.read(ours, 1)
        os.close(ours)

    def journal(self) -> dict[bytes, bytes]:
        """Return what is in the stored journal; its broker may live, and write at the same time."""
        (descriptor,) = self.stored["ledger"]
        for _ in range(ATTEMPTS):
            try:
                journal = Journal(descriptor, newest_slot(descriptor))
                journal._load()
                return dict(journal.items())
            except CorruptJournal as error:
                failure = error
        raise failure

    def forget(self, name: str) -> None:
        """Close what has a name."""
        close_all(self.stored.pop(name, ()))

    def _listen(self) -> None:
        self._channel = sd_notify.listen(str(self.path))
        self._channel.setblocking(True)
        self._thread = Thread(target=self._serve)
        self._thread.start()

    def _leave(self) -> None:
        with socket(AF_UNIX, SOCK_DGRAM) as end:
            end.sendto(b"END=1", str(self.path))
        self._thread.join()
        self._channel.close()

    def _serve(self) -> None:
        while message := sd_notify.receive(self._channel):
            fields = sd_notify.parse(message)
            if "END" in fields:
                return
            if "BARRIER" in fields:
                close_all(message.descriptors)
            elif "DEAF" in fields:
                self._deaf.set()
                self._listens.wait()
            elif "NOISE" not in fields:
                self._heed(fields, message.descriptors)

    def _heed(self, fields: dict[str, str], descriptors: list[int]) -> None:
        name = fields.pop("FDNAME", "")
        if fields.pop("FDSTOREREMOVE", None):
            self.forget(name)
        elif fields.pop("FDSTORE", None):
            fields.pop("FDPOLL", None)
            self.stored.setdefault(name, []).extend(descriptors)
        self.said += fields.items()


class StoredBroker(BrokerProcess):
    """A broker process whose descriptors a :class:`FdStore` keeps. Whatever is told to restart finds them.

    Attributes:
        room: descriptors that the store says it takes.
    """

    def __init__(self, directory: Path, devices: str = DEVICES, budget: str | None = None, room: int = ROOM) -> None:
        self.fdstore = FdStore(directory.with_name("notify"))
        self.room = room
        try:
            super().__init__(directory, devices, budget)
        except BaseException:
            self.fdstore.close()
            raise

    def kill(self) -> None:
        """Send SIGKILL, wait for its end, and for the store to act upon what it sent."""
        super().kill()
        if self.fdstore.open:
            self.settled()

    def stop(self) -> int:
        """Send SIGTERM, wait for its end, and for the store to act upon what it sent; return its exit status."""
        status = super().stop()
        if self.fdstore.open:
            self.settled()
        return status

    def start(self) -> None:
        """Start it (again), with all that was stored, and return when it serves and the store has what it made."""
        if self.fdstore.open:
            self.settled()
        super().start()
        if self.fdstore.open:
            self.settled()

    def restart(self) -> None:
        """Kill it, and start the next one."""
        self.kill()
        self.start()

    def settled(self) -> None:
        """Return when the store has acted upon all that was sent to it."""
        self.fdstore.settle()

    def spawn(self, log: int) -> subprocess.Popen[bytes]:
        """Start the process, with what is stored."""
        stored = [(name, each) for name, descriptors in self.fdstore.stored.items() for each in descriptors]
        numbers = [descriptor for _, descriptor in stored]
        names = ":".join(name for name, _ in stored)
        environ = {"NOTIFY_SOCKET": str(self.fdstore.path), "FDSTORE": str(self.room), "LISTEN_FDNAMES": names}
        return launch(self.command(), numbers, log, environ)


@contextmanager
def storing(devices: str = DEVICES, budget: str | None = None, room: int = ROOM) -> Iterator[StoredBroker]:
    """Start a broker with a store on a fresh directory; at the end it is stopped, and everything forgotten."""
    with started(lambda directory: StoredBroker(directory, devices, budget, room)) as broker:
        try:
            yield broker
        finally:
            try:
                broker.stop()
            finally:
                broker.fdstore.close()
