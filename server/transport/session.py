"""One session: the connection to its client, the watch on its process, and the journal's entries about it.

The next broker continues the sessions with these entries. Keys of the journal:

- ``s/SESSION``: the secret that the session's requests carry; since version 4 of the protocol ``k/SESSION``: the secret
  that authenticates them
- ``r/SESSION``: what its client has received
- ``a/SESSION/REQUEST``: a reply to a request that must not be done again
- ``d/LEASE``: the session of a lease some of whose descriptors may not have been sent yet
- ``n``: how many brokers continued with the journal
- ``l/…``: the ledger's

Any other key is refused. A new meaning gets a new letter, so that a broker of another version reports the unknown key.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import re
import select
import socket
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import msgspec
from msgspec import Struct

from cubroker.protocol import wire
from cubroker.protocol.encoding import encode as _encode
from cubroker.protocol.errors import CorruptJournal
from cubroker.protocol.fields import MAX_DESCRIPTORS, MAX_NOTICE
from cubroker.protocol.messages import (
    AUTHENTICATED,
    Answer,
    Attached,
    Created,
    Descriptors,
    Done,
    EventOpened,
    EventShared,
    Failed,
    Generation,
    Locked,
    Notice,
    PoolChanged,
    PoolLost,
    Rebound,
    Reply,
    Retirement,
    Sealed,
)
from cubroker.protocol.wire import authentication
from cubroker.server.event_queue import EventQueue, FdsDelivered
from cubroker.server.ledger.events import ConnectionLost, ProcessExited
from cubroker.server.ledger.snapshot import PREFIX
from cubroker.server.transport.reply_cache import LEASES, NO_RECEIPTS, Frame, Receipts, ReplyCache
from cubroker.server.transport.unix_sockets import Peer, RejectionLog

if TYPE_CHECKING:
    from cubroker.driver import Driver

log = logging.getLogger(__name__)

SCARCE = (errno.ETOOMANYREFS, errno.ENOMEM, errno.ENOBUFS, errno.EAGAIN, errno.EMFILE, errno.ENFILE)
"""Errors that pass: too many descriptors of the broker are in flight to all clients together, too many are open, or too
little memory is left."""

PAUSE = 0.05  #: Seconds after which a send that failed with such an error is tried again.
TRIES = 40  #: How often the last packet of a connection is tried again.

WELCOME = ".welcome"  #: The key of the answer to a greeting among what waits.

LASTING = frozenset((Attached, Created, Sealed, Done, Retirement, Locked, EventShared, EventOpened, Generation, Failed))
"""Replies to requests that changed something or were refused: a cancelled request must not be done when a copy arrives,
since the cancel would not be repeated. Requests whose replies only report something are done again."""

RESTARTS = b"n"  #: The key of the number of brokers that continued with the journal.

_NUMBER = rb"/(?:0|[1-9][0-9]{0,18})"
_KEY = re.compile(rb"([skrd])(%s)|(a)(%s%s)" % (_NUMBER, _NUMBER, _NUMBER))

T = TypeVar("T")

Changes = list[tuple[bytes, bytes | None]]
_Key = tuple[str, tuple[int, ...]]


def label(session: int) -> str:
    """Return the name under which a session's descriptors are stored."""
    return f"s{session}"


class FdTransfer:
    """All descriptors of one lease, in packets of at most ``MAX_DESCRIPTORS``.

    It holds ticket numbers and looks a descriptor up when it is sent, so it keeps nothing open.

    Args:
        lease: whose descriptors they are.
        sources: the tickets and multicast groups whose descriptors are sent, in order, each with the numbers of the
            descriptors; an empty sequence means all.
        descriptors: the descriptors of every ticket and group, by number.
        rebound: whether they belong to the lease's ``Rebound``, and not to the reply that granted it.
        readers: the driver that lends read-only descriptors to send in place of these; None if the client may write.
    """

    def __init__(
        self,
        lease: int,
        sources: Iterable[tuple[int, Sequence[int]]],
        descriptors: Mapping[int, Mapping[int, int]],
        *,
        rebound: bool = False,
        readers: Driver | None = None,
    ) -> None:
        self.lease = lease
        self.rebound = rebound
        self._readers = readers
        self._descriptors = descriptors
        self._first = 0
        self._places = [(ticket, place) for ticket, numbers in sources for place in numbers or descriptors[ticket]]

    def packet(self) -> tuple[bytes, list[int]] | None:
        """Return the next notice and its descriptors, None after the last; :meth:`sent` advances to the next."""
        places = self._places[self._first : self._first + MAX_DESCRIPTORS]
        if not places:
            return None
        notice = Descriptors(self.lease, len(places), self._first, self.rebound)
        return wire.pack(notice), [self._descriptors[ticket][place] for ticket, place in places]

    def lend(self, descriptors: Sequence[int]) -> AbstractContextManager[Sequence[int]]:
        """Return what to send in place of a packet's descriptors, in a ``with`` block; it may raise ``OSError``."""
        return self._readers.for_reading(descriptors) if self._readers else nullcontext(descriptors)

    def sent(self) -> None:
        """Advance to the next packet, in one step: if memory runs out in it, this packet is sent again."""
        self._first += MAX_DESCRIPTORS


class SessionConnection:
    """Watches a client's connection and process, and sends it notices without ever waiting for it.

    Notices that the client does not read are queued, only the latest for each pool and of each other kind. So a client
    that does not read costs at most one notice for each pool that it watches. Descriptors that it does not receive are
    all queued: they are numbers here, and few are in flight at any time.

    Args:
        number: the session.
        connection: the connection, None if it ended; the session owns it from now on, and ``peer.pidfd``.
        peer: the process.
        queue: gets ``ConnectionLost``, ``ProcessExited`` and ``FdsDelivered``, each of the first two at most once.
        rejections: logs refusals of the process.
        version: the agreed version of the protocol.
        secret: authenticates its requests; by default a new one.
        replies: the replies that an earlier broker kept.
        welcomed: whether an earlier broker answered the greeting; if not, notices wait until :meth:`welcome` does.
    """

    def __init__(
        self,
        number: int,
        connection: socket.socket | None,
        peer: Peer,
        queue: EventQueue,
        rejections: RejectionLog,
        version: int,
        secret: bytes | None = None,
        replies: ReplyCache | None = None,
        *,
        welcomed: bool = False,
    ) -> None:
        self.number = number
        self.peer = peer
        self.version = version
        self.secret = secret or os.urandom(16)
        self.authentication = authentication(version, number, self.secret)
        self.forged = 0  # requests in its name that its client did not write
        self.replies = replies or ReplyCache()
        self.welcomed = welcomed
        self.pidfd = peer.pidfd  # -1 once the process has exited
        self._loop = asyncio.get_running_loop()
        self._connection = connection
        self._queue = queue
        self._rejections = rejections
        self._waiting: dict[str, bytes | Notice | FdTransfer] = {}
        # The kernel's minimum: descriptors in flight count as open files, until the client reads them.
        if connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 0)

    @property
    def descriptors(self) -> list[int]:
        """The descriptor of its connection, and the pidfd of its process."""
        assert self._connection
        return [self._connection.fileno(), self.pidfd]

    def watch(self) -> None:
        """Begin to watch for the end of the connection and of the process; raises ``OSError``."""
        if self.pidfd >= 0:
            self._loop.add_reader(self.pidfd, self._exited)
        if self._connection:
            self._loop.add_reader(self._connection, self._read)

    def send(self, data: bytes) -> bool:
        """Send one packet now; False if the client's buffer is full, or the system is short of something.

        A packet too long for clients is dropped.
        """
        if self._connection is None:
            return True
        if len(data) > MAX_NOTICE:
            log.error("session %d: dropped a message of %d bytes; the limit is %d", self.number, len(data), MAX_NOTICE)
            return True
        try:
            _send(self._connection, data)
        except BlockingIOError:
            self._loop.add_writer(self._connection, self._resume, self._connection)
            return False
        except OSError as error:
            if error.errno in SCARCE:
                self._loop.call_later(PAUSE, self._drain)
                return False
            # The end of the connection is reported once, when it is read.
            log.debug("session %d: %s", self.number, error)
        return True

    def welcome(self, answer: bytes) -> bool:
        """Answer the greeting, now or later; return whether the answer was sent.

        The client takes the first packet for this answer, so no notice is sent before it.
        """
        self._waiting = {WELCOME: answer, **self._waiting}
        self.welcomed = True
        self._drain()
        return WELCOME not in self._waiting

    def refuse(self, answer: bytes) -> None:
        """Answer the greeting with a refusal, and end the connection after it; :meth:`close` follows."""
        connection, self._connection = self._connection, None
        if connection:
            self._loop.remove_reader(connection)
            send_last(connection, answer)

    def notify(self, item: Notice | FdTransfer) -> None:
        """Send a notice or descriptors now, or when the client was welcomed and has read the earlier ones."""
        # No name of a pool begins with a dot, so the other keys cannot be taken for one.
        match item:
            case FdTransfer():
                key = f".lease {item.lease}"
                key = f".more of {key}" if key in self._waiting else key
            case PoolChanged(name):
                key = name
            case PoolLost(name, version):
                key = f".lost {name}@{version}"
            case Rebound(lease):
                key = f".rebound {lease}"
            case _:
                key = f".{type(item).__name__}"
        blocked = bool(self._waiting)
        self._waiting[key] = item
        if self.welcomed and not blocked:
            self._drain()

    def cancel_fds(self, lease: int) -> None:
        """Send no more descriptors of a lease."""
        key = f".lease {lease}"
        for each in (key, f".more of {key}", f".rebound {lease}"):
            self._waiting.pop(each, None)

    def close(self, *, stored: bool = False) -> None:
        """End the connection, and forget the process; a ``stored`` connection stays open for the next broker."""
        self._disconnect(stored=stored)
        if self.pidfd >= 0:
            self._loop.remove_reader(self.pidfd)
            os.close(self.pidfd)
            self.pidfd = -1

    def _drain(self) -> None:
        """Send the notices and descriptors that wait, up to the first that cannot be sent now."""
        try:
            while self._waiting:
                key, item = next(iter(self._waiting.items()))
                if not isinstance(item, FdTransfer):
                    if not self.send(item if isinstance(item, bytes) else wire.pack(item)):
                        return
                else:
                    while packet := item.packet():
                        if not self._send_descriptors(item, *packet):
                            return
                        item.sent()
                del self._waiting[key]
                if isinstance(item, FdTransfer) and not item.rebound:
                    self._queue.put(FdsDelivered(item.lease))
        except MemoryError:  # later items wait behind this one, and would wait for ever
            self._loop.call_later(PAUSE, self._drain)

    def _send_descriptors(self, transfer: FdTransfer, data: bytes, descriptors: list[int]) -> bool:
        """Send one packet now; False if the client has not read earlier packets, or at an error that passes."""
        if self._connection is None:
            return True
        # The kernel reports it as writable while at most a quarter of its buffer is unread: one packet of descriptors.
        poll = select.poll()
        poll.register(self._connection, select.POLLOUT)
        if not poll.poll(0):
            self._loop.add_writer(self._connection, self._resume, self._connection)
            return False
        lent = False
        try:
            with transfer.lend(descriptors) as sent:
                lent = True
                socket.send_fds(self._connection, [data], sent)
        except OSError as error:
            if error.errno in SCARCE:
                self._loop.call_later(PAUSE, self._drain)
                return False
            if lent:
                log.debug("session %d: %s", self.number, error)  # as in send()
            else:
                log.error(
                    "session %d is not sent the memory of lease %d, which this broker cannot open for reading: %s; if a"
                    " broker that ran as another user created the memory, publish the pool again",
                    self.number,
                    transfer.lease,
                    error,
                )
        return True

    def _resume(self, connection: socket.socket) -> None:
        self._loop.remove_writer(connection)
        self._drain()

    def _read(self) -> None:
        """Handle the end of the connection. A client sends nothing after its greeting, so any data ends it too."""
        assert self._connection
        try:
            # recv and not recvmsg: the kernel then drops descriptors that were sent with the data.
            said = self._connection.recv(1)
        except BlockingIOError:
            return
        except OSError:
            said = b""
        if said:
            why = f"session {self.number} was disconnected: it sent data on the session socket"
            self._rejections.log(self.peer.pid, self.peer.uid, why, session=self.number)
        self._disconnect()
        self._queue.put(ConnectionLost(self.number))

    def _exited(self) -> None:
        self.close()
        self._queue.put(ProcessExited(self.number))

    def _disconnect(self, *, stored: bool = False) -> None:
        self._waiting.clear()
        if self._connection:
            self._loop.remove_reader(self._connection)
            self._loop.remove_writer(self._connection)
            if not stored:
                _shut_down(self._connection)
            self._connection.close()
            self._connection = None


def send_last(connection: socket.socket, answer: bytes, tries: int = TRIES) -> None:
    """Send a packet and end the connection: now, or once the system is not short of something any more."""
    try:
        _send(connection, answer)
    except OSError as error:
        if error.errno in SCARCE and tries:  # not for ever: each such connection takes a descriptor of the broker
            asyncio.get_running_loop().call_later(PAUSE, send_last, connection, answer, tries - 1)
            return
        log.debug("a client is not told why its connection ends: %s", error)
    with suppress(OSError):  # there is no greeting, or it was read
        connection.recv(1)  # were it unread at the close, the client would get an error before it could read the answer
    _shut_down(connection)
    connection.close()


def _shut_down(connection: socket.socket) -> None:
    """End a connection that a store may hold, too."""
    with suppress(OSError):  # it has ended
        connection.shutdown(socket.SHUT_RDWR)


def _send(connection: socket.socket, data: bytes) -> None:
    """Send a packet; if the minimal buffer is too small for it, enlarge the buffer for this packet alone."""
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


# -- the journal's entries -----------------------------------------------------------------------------


class _Session(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    secret: bytes
    #: The protocol version.
    version: int
    #: Whether the welcome was sent.
    welcomed: bool


class _Reply(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    #: The encoded reply; empty if it grants a lease.
    frame: bytes
    #: The lease that it grants, or 0; the ledger has the rest of such a reply.
    lease: int = 0


class SessionLog:
    """Gathers what the next commit writes in addition to the ledger's changes.

    Args:
        items: the content of the journal, if this broker continues an earlier one's.

    Attributes:
        restarts: how many earlier brokers had their sessions and memory taken over, one after the other.

    Raises:
        CorruptJournal: no broker can have written it.
    """

    def __init__(self, items: Mapping[bytes, bytes] | None = None) -> None:
        self.restarts = 0
        self._changes: dict[bytes, bytes | None] = {}
        self._asked: dict[SessionConnection, None] = {}
        if items is not None:
            self.restarts = 1 + (_decode(items[RESTARTS], int) if RESTARTS in items else 0)
            self._changes[RESTARTS] = _encode(self.restarts)

    def opened(self, session: SessionConnection, *, welcomed: bool) -> None:
        """Record a session; ``welcomed``: its client was told that it is open."""
        self._changes[_session_key(session)] = _encode(_Session(session.secret, session.version, welcomed))

    def asked(self, session: SessionConnection) -> None:
        """Note that a session's receipts or replies may have changed."""
        self._asked[session] = None

    def closed(self, session: SessionConnection) -> None:
        """Remove the entries of a session."""
        self._asked.pop(session, None)
        number = session.number
        for key in (
            _session_key(session),
            _key("r", number),
            *(_key("a", number, each) for each in (*session.replies.lasting, *session.replies.changes)),
        ):
            self._changes[key] = None

    def forget(self, keys: Iterable[bytes]) -> None:
        """Remove keys that belong to no session."""
        self._changes |= dict.fromkeys(keys)

    def undelivered(self, session: int, lease: int) -> None:
        """Note that the descriptors of a lease are yet to be sent."""
        self._changes[_key("d", lease)] = _encode(session)

    def delivered(self, lease: int) -> None:
        """Note that all descriptors of a lease were sent, or are not to be sent any more."""
        self._changes[_key("d", lease)] = None

    def changes(self) -> Changes:
        """Return the changes since the last call."""
        for session in self._asked:
            self._write(session)
        self._asked.clear()
        changes = list(self._changes.items())
        self._changes = {}
        return changes

    def _write(self, session: SessionConnection) -> None:
        number, changes = session.number, self._changes  # keys are formatted here and not by _key: this runs often
        changes[b"r/%d" % number] = _encode(session.replies.receipts)
        for request, reply in session.replies.changes.items():
            changes[b"a/%d/%d" % (number, request)] = None if reply is None else _encode(_entry(reply))
        session.replies.written()  # not before: there may be no memory for a value


def _entry(reply: Frame) -> tuple[bytes, int]:
    """Return a tuple with the encoding of a :class:`_Reply`, but made in less time."""
    if isinstance(reply, bytes):
        return reply, 0
    assert isinstance(reply.body, LEASES)
    return b"", reply.body.lease


@dataclass(slots=True)
class LoggedSession:
    """A session that an earlier broker wrote down."""

    #: Empty if the journal has none.
    secret: bytes = b""
    #: The protocol version.
    version: int = 0
    #: Whether the welcome was sent.
    welcomed: bool = True
    #: What its client has received.
    receipts: Receipts = NO_RECEIPTS
    #: Replies by request.
    replies: dict[int, _Reply] = field(default_factory=dict)
    #: Leases whose descriptors the client may not have.
    undelivered_fds: list[int] = field(default_factory=list)

    @property
    def no_secret(self) -> bool:
        """Whether the journal has no secret for the session, so that it cannot send requests any more."""
        return not self.secret

    def reply_cache(self, grant: Callable[[int], Reply | None]) -> ReplyCache:
        """Return its replies; ``grant`` returns the one that grants a lease, None if there is no such lease now."""
        kept = {request: _frame(request, reply, grant) for request, reply in sorted(self.replies.items())}
        return ReplyCache(self.receipts, kept)


def _frame(request: int, reply: _Reply, grant: Callable[[int], Reply | None]) -> Frame | None:
    if not reply.lease:
        return reply.frame
    body = grant(reply.lease)
    return None if body is None else Answer(request, body)


def recall(items: Mapping[bytes, bytes], known: Collection[int]) -> tuple[dict[int, LoggedSession], list[bytes]]:
    """Return what a journal has of the ``known`` sessions, those of the ledger, and the keys that belong to no session.

    If the journal has no secret of a session, the session is :attr:`~LoggedSession.no_secret`, and its other keys are
    ignored. They belong to no session, and neither do keys of a session that the ledger does not know.

    Raises:
        CorruptJournal: no broker can have written it.
    """
    entries = {_numbers(key): data for key, data in items.items() if key != RESTARTS and not key.startswith(PREFIX)}
    sessions: dict[int, LoggedSession] = {}
    owners: dict[_Key, int] = {}
    for key, data in entries.items():
        owners[key] = number = _decode(data, int) if key[0] == "d" else key[1][0]
        _remember(sessions.setdefault(number, LoggedSession()), key, data)
    whole = {number: sessions[number] for number in known if number in sessions and not sessions[number].no_secret}
    stray = [_key(kind, *numbers) for (kind, numbers), owner in owners.items() if owner not in whole]
    return {number: whole.get(number, LoggedSession()) for number in known}, stray


def _remember(session: LoggedSession, key: _Key, data: bytes) -> None:
    match key:
        case "s" | "k", _:
            opened = _decode(data, _Session)
            session.secret, session.version, session.welcomed = opened.secret, opened.version, opened.welcomed
        case "r", _:
            session.receipts = _decode(data, Receipts)
        case "a", (_, request):
            session.replies[request] = _decode(data, _Reply)
        case _, numbers:
            session.undelivered_fds.append(numbers[0])


def _session_key(session: SessionConnection) -> bytes:
    return _key("k" if session.version >= AUTHENTICATED else "s", session.number)


def _key(kind: str, *numbers: int) -> bytes:
    return "/".join((kind, *map(str, numbers))).encode()


def _numbers(key: bytes) -> _Key:
    """Return the kind of a key, and the numbers in it."""
    parts = _KEY.fullmatch(key)
    if parts is None:
        raise CorruptJournal(
            f"the journal has {key.decode('ascii', 'replace')}, and this build does not know what that is"
        )
    kind, numbers = filter(None, parts.groups())
    return kind.decode(), tuple(map(int, numbers[1:].split(b"/")))


def _decode(data: bytes, kind: type[T]) -> T:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.DecodeError as error:
        raise CorruptJournal(f"the journal has an invalid {kind.__name__}: {error}") from None
