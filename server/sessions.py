"""One session: the connection that greeted, the process behind it, its notices and its answers."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import select
import socket
from collections.abc import Callable
from contextlib import ExitStack, suppress

from cubroker.protocol import wire
from cubroker.protocol.authentication import authentication
from cubroker.protocol.bounds import MAX_NOTICE
from cubroker.protocol.messages import Notice, PoolChanged, PoolLost, Rebound
from cubroker.server.answers import Answers
from cubroker.server.denials import Denials
from cubroker.server.ledger.events import Gone, Lost
from cubroker.server.parcels import Parcel
from cubroker.server.peers import Peer

log = logging.getLogger(__name__)

SCARCE = (errno.ETOOMANYREFS, errno.ENOMEM, errno.ENOBUFS, errno.EAGAIN, errno.EMFILE, errno.ENFILE)
"""What the system says while too many descriptors of the broker are on their way to all clients together, too many are
open, or too little memory is left: that passes."""

PAUSE = 0.05
"""Seconds after which what was refused like that is tried again."""


def label(session: int) -> str:
    """Return what the descriptors of a session are called where they outlive the broker."""
    return f"s{session}"


class Session:
    """Watches a client's connection and process, and sends it notices without ever waiting for it.

    Notices that the client does not take are kept, the latest for each pool and of each other kind,
    so a client that does not read costs no more than one notice for each pool that it watches. Descriptors
    that it does not take wait as well, all of them: they are numbers here, and few are on their way at any time.

    Args:
        number: the session.
        connection: the connection, which belongs to the session from now on, as ``peer.pidfd`` does; None if it ended.
        peer: the process.
        report: told when the connection or the process has ended, each at most once.
        denials: takes what the process is refused.
        version: of the protocol, which both sides speak.
        secret: what its requests are authenticated by; by default a new one.
        answers: what it asked before, if it is an earlier broker's.
        welcomed: whether an earlier broker answered its greeting; notices wait until :meth:`welcome` does.
    """

    def __init__(
        self,
        number: int,
        connection: socket.socket | None,
        peer: Peer,
        report: Callable[[Lost | Gone], None],
        denials: Denials,
        version: int,
        secret: bytes | None = None,
        answers: Answers | None = None,
        *,
        welcomed: bool = False,
    ) -> None:
        self.number = number
        self.peer = peer
        self.version = version
        self.secret = secret or os.urandom(16)
        self.authentication = authentication(version, number, self.secret)
        self.forged = 0  # requests in its name that its client did not write
        self.answers = answers or Answers()
        self._loop = asyncio.get_running_loop()
        self._connection = connection
        self._pidfd = peer.pidfd
        self._report = report
        self._denials = denials
        self._welcomed = welcomed
        self._waiting: dict[str, Notice | Parcel] = {}
        # The least that the kernel knows: what is on its way counts as open files, and whoever does not read stops it.
        if connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 0)

    @property
    def descriptors(self) -> list[int]:
        """Its connection's, and that of its process."""
        assert self._connection
        return [self._connection.fileno(), self._pidfd]

    @property
    def pidfd(self) -> int:
        """That of its process; -1 once that has ended."""
        return self._pidfd

    def watch(self) -> None:
        """Begin to look for the end of the connection and of the process."""
        if self._pidfd >= 0:
            self._loop.add_reader(self._pidfd, self._end)
        if self._connection:
            self._loop.add_reader(self._connection, self._read)

    def send(self, data: bytes) -> bool:
        """Send one packet now; False if the client's buffer is full. One that no client reads whole is not sent."""
        if self._connection is None:
            return True
        if len(data) > MAX_NOTICE:
            log.error("session %d is not told %d bytes: a notice has %d at most", self.number, len(data), MAX_NOTICE)
            return True
        try:
            _send(self._connection, data)
        except BlockingIOError:
            self._loop.add_writer(self._connection, self._resume, self._connection)
            return False
        except OSError as error:
            # The end of the connection is reported once, when it is read.
            log.debug("session %d: %s", self.number, error)
        return True

    def welcome(self, answer: bytes) -> None:
        """Answer the greeting. The client takes what comes first for this answer, so no notice goes before it."""
        self.send(answer)
        self._welcomed = True
        self._drain()

    def notify(self, notice: Notice) -> None:
        """Send a notice now, or when the client was welcomed and has read the ones before it."""
        # The names of pools begin with no dot, so the kinds cannot be taken for one.
        match notice:
            case PoolChanged(name):
                self._put(name, notice)
            case PoolLost(name, version):
                self._put(f".lost {name}@{version}", notice)
            case Rebound(lease):
                self._put(f".rebound {lease}", notice)
            case _:
                self._put(f".{type(notice).__name__}", notice)

    def hand_over(self, parcel: Parcel) -> None:
        """Send descriptors now, or when the client has read the notices before them."""
        key = f".lease {parcel.lease}"
        self._put(f".more of {key}" if key in self._waiting else key, parcel)

    def withdraw(self, lease: int) -> None:
        """Send no more descriptors of a lease."""
        key = f".lease {lease}"
        for each in (key, f".more of {key}", f".rebound {lease}"):
            self._waiting.pop(each, None)

    def leave(self) -> None:
        """Forget the connection and the process without ending either: others have them too, and go on with them."""
        if self._connection:
            self._loop.remove_reader(self._connection)
            self._loop.remove_writer(self._connection)
            self._connection.close()
            self._connection = None
        self.close()

    def close(self) -> None:
        """Close the connection and forget the process."""
        self._disconnect()
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1

    def _put(self, key: str, item: Notice | Parcel) -> None:
        blocked = bool(self._waiting)
        self._waiting[key] = item
        if self._welcomed and not blocked:
            self._drain()

    def _drain(self) -> None:
        while self._waiting:
            key, item = next(iter(self._waiting.items()))
            if not (self._deliver(item) if isinstance(item, Parcel) else self.send(wire.pack(item))):
                return
            del self._waiting[key]

    def _deliver(self, parcel: Parcel) -> bool:
        """Send what is left of a parcel; False if not all of it could be sent now."""
        while packet := parcel.packet():
            if not self._send_descriptors(parcel, *packet):
                return False
            parcel.sent()
        return True

    def _send_descriptors(self, parcel: Parcel, data: bytes, descriptors: list[int]) -> bool:
        """Send one packet now; False if the client has not read those before it, or the system is short of something.

        The kernel calls a socket writable when no more than a quarter of its buffer is unread: one such packet.
        """
        if self._connection is None:
            return True
        if not _is_writable(self._connection):
            self._loop.add_writer(self._connection, self._resume, self._connection)
            return False
        with ExitStack() as lending:
            try:
                lent = lending.enter_context(parcel.lend(descriptors))
            except OSError as error:
                return self._cannot_lend(parcel.lease, error)
            try:
                socket.send_fds(self._connection, [data], lent)
            except OSError as error:
                if error.errno in SCARCE:
                    return self._later()
                log.debug("session %d: %s", self.number, error)  # as in send()
        return True

    def _later(self) -> bool:
        self._loop.call_later(PAUSE, self._drain)
        return False

    def _cannot_lend(self, lease: int, error: OSError) -> bool:
        """Try again later if the system is short of something; else give up what the log tells of."""
        if error.errno in SCARCE:
            return self._later()
        log.error(
            "session %d is not sent the memory of lease %d, which this broker cannot open for reading: %s; if a broker"
            " of another user made it, publish it anew",
            self.number,
            lease,
            error,
        )
        return True

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
            with suppress(OSError):  # it has ended
                self._connection.shutdown(socket.SHUT_RDWR)  # a store may have it too
            self._connection.close()
            self._connection = None


def _send(connection: socket.socket, data: bytes) -> None:
    """Send a packet; one for which the least buffer is too small gets another, for itself alone."""
    try:
        connection.send(data)
    except OSError as error:
        if error.errno != errno.EMSGSIZE:
            raise
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, len(data))  # the kernel makes it twice that
        try:
            connection.send(data)
        finally:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 0)


def _is_writable(connection: socket.socket) -> bool:
    poll = select.poll()
    poll.register(connection, select.POLLOUT)
    return bool(poll.poll(0))
