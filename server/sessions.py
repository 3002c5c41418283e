"""One session: the connection that greeted, the process behind it, its notices and its answers."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Callable

from cubroker.protocol import wire
from cubroker.protocol.messages import Notice, PoolChanged
from cubroker.server.answers import Answers
from cubroker.server.denials import Denials
from cubroker.server.events import Gone, Lost
from cubroker.server.peers import Peer

log = logging.getLogger(__name__)


class Session:
    """Watches a client's connection and process, and sends it notices without ever waiting for it.

    Notices that the client does not take are kept, the latest for each pool and of each other kind,
    so a client that does not read costs no more than one notice for each pool that it watches.

    Args:
        number: the session.
        connection: the connection, which belongs to the session from now on, as ``peer.pidfd`` does.
        peer: the process.
        report: told when the connection or the process has ended, each at most once.
        denials: takes what the process is refused.
    """

    def __init__(
        self,
        number: int,
        connection: socket.socket,
        peer: Peer,
        report: Callable[[Lost | Gone], None],
        denials: Denials,
    ) -> None:
        self.number = number
        self.peer = peer
        self.secret = os.urandom(16)
        self.answers = Answers()
        self._loop = asyncio.get_running_loop()
        self._connection: socket.socket | None = connection
        self._pidfd = peer.pidfd
        self._report = report
        self._denials = denials
        self._waiting: dict[str, Notice] = {}

    def watch(self) -> None:
        """Begin to look for the end of the connection and of the process."""
        self._loop.add_reader(self._pidfd, self._end)
        if self._connection:
            self._loop.add_reader(self._connection, self._read)

    def send(self, data: bytes) -> bool:
        """Send one packet now; False if the client's buffer is full."""
        if self._connection is None:
            return True
        try:
            self._connection.send(data)
        except BlockingIOError:
            self._loop.add_writer(self._connection, self._resume, self._connection)
            return False
        except OSError as error:
            # The end of the connection is reported once, when it is read.
            log.debug("session %d: %s", self.number, error)
        return True

    def notify(self, notice: Notice) -> None:
        """Send a notice now, or when the client has read the ones before it."""
        blocked = bool(self._waiting)
        # The names of pools begin with no dot, so the kinds cannot be taken for one.
        self._waiting[notice.name if isinstance(notice, PoolChanged) else f".{type(notice).__name__}"] = notice
        if not blocked:
            self._drain()

    def close(self) -> None:
        """Close the connection and forget the process."""
        self._disconnect()
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1

    def _drain(self) -> None:
        while self._waiting:
            key = next(iter(self._waiting))
            if not self.send(wire.pack(self._waiting[key])):
                return
            del self._waiting[key]

    def _resume(self, connection: socket.socket) -> None:
        self._loop.remove_writer(connection)
        self._drain()

    def _read(self) -> None:
        """A client says nothing after its greeting, so whatever can be read is the end."""
        assert self._connection
        try:
            # recv and not recvmsg: the kernel drops the descriptors that came along.
            said = self._connection.recv(1)
        except BlockingIOError:
            return
        except OSError:
            said = b""
        if said:
            self._denials.log(self.peer, f"session {self.number} is cut off: it sent something on the session socket")
        self._disconnect()
        self._report(Lost(self.number))

    def _end(self) -> None:
        self.close()
        self._report(Gone(self.number))

    def _disconnect(self) -> None:
        self._waiting.clear()
        if self._connection:
            self._loop.remove_reader(self._connection)
            self._loop.remove_writer(self._connection)
            self._connection.close()
            self._connection = None
