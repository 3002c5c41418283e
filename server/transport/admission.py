"""Opens and closes sessions: a client's greeting on the session socket, its admission, its welcome, and its end.

:class:`Listener` accepts connections, and passes on the clients that send a valid greeting in time. :class:`Sessions`
admits each of them in steps: the ledger allows its user another session; the loop watches its process and connection;
the store (if there is one) stores its descriptors; the ledger and the journal record the session. Only then does the
broker tell the client that its session is open. If a step fails, the broker undoes the earlier ones and tells the
client the reason.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import logging
import os
import socket
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from cubroker.protocol import wire
from cubroker.protocol.errors import (
    CubrokerError,
    InternalFailure,
    Invalid,
    OverQuota,
    TimedOut,
    Unavailable,
    Unsupported,
    explain,
    reason,
)
from cubroker.protocol.messages import VERSIONS, Draining, Hello, Notice, Pong, Refused, Welcome
from cubroker.server.event_queue import ClientGreeted, EventQueue
from cubroker.server.ledger import Ledger
from cubroker.server.ledger.events import ForgetSession, ProcessExited, SessionOpened
from cubroker.server.store.store import StoreReplied
from cubroker.server.transport.requests import IncomingRequests
from cubroker.server.transport.session import LoggedSession, SessionConnection, SessionLog, label, send_last
from cubroker.server.transport.unix_sockets import (
    CREDENTIALS,
    Peer,
    RejectionLog,
    identify,
    read_process_by_pidfd,
    verify,
)

if TYPE_CHECKING:
    from cubroker.driver import Driver
    from cubroker.server.store.store import Store

log = logging.getLogger(__name__)

MAX_HELLO = 4096  #: Bytes of a greeting.
PATIENCE = 10.0  #: Seconds that a peer may take to greet.

MAX_PENDING = 256
"""Most connections without a greeting. A client that greets immediately is served, however many others do not."""

PAUSE = 1.0  #: Seconds without accepting after a call failed, in most cases because no descriptors were left.

EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


class Listener:
    """Accepts connections, and puts those that have greeted into the queue.

    Args:
        listener: the listening session socket.
        queue: gets ``ClientGreeted``.
        patience: seconds that a peer may take to greet.
    """

    def __init__(self, listener: socket.socket, queue: EventQueue, patience: float = PATIENCE) -> None:
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._queue = queue
        self._patience = patience
        self._rejections = RejectionLog()
        self._pending: dict[socket.socket, tuple[Peer, asyncio.TimerHandle]] = {}
        self._resume: asyncio.TimerHandle | None = None
        self._paused = False

    def open(self) -> None:
        """Begin to accept connections."""
        self._resume = None
        try:
            self._loop.add_reader(self._listener, self._accept)
        except OSError as error:
            self._pause(error)

    def close(self) -> None:
        """Stop accepting, and refuse the connections that have not greeted yet."""
        if self._resume:
            self._resume.cancel()
        self._loop.remove_reader(self._listener)
        for connection in list(self._pending):
            self._refuse(connection, Unavailable("the broker is shutting down"))

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return None
        except OSError as error:
            return self._pause(error)
        connection.setblocking(False)
        try:
            peer = identify(connection)
        except ProcessLookupError:
            return connection.close()  # the process is gone, and there is nothing to release
        except CubrokerError as error:
            return send_last(connection, _refusal(error))
        except OSError as error:
            failed = Unavailable(f"the broker cannot identify the process that connects: {explain(error)}")
            send_last(connection, _refusal(failed))
            return self._pause(error) if error.errno in EXHAUSTED else None
        self._paused = False
        late = TimedOut(f"no greeting came within {self._patience:g} seconds")
        timer = self._loop.call_later(self._patience, self._refuse, connection, late)
        self._pending[connection] = (peer, timer)
        try:
            self._loop.add_reader(connection, self._greet, connection)
        except OSError as error:
            return self._refuse(
                connection, Unavailable(f"the broker cannot listen to this connection: {explain(error)}")
            )
        if len(self._pending) > MAX_PENDING:
            self._make_room()
        return None

    def _pause(self, error: OSError) -> None:
        """Leave connections in the backlog for a while: retrying immediately would keep the loop busy."""
        if not self._paused:
            log.error("no new sessions for now: %s", explain(error))
        self._paused = True
        self._loop.remove_reader(self._listener)
        self._resume = self._loop.call_later(PAUSE, self.open)

    def _make_room(self) -> None:
        """Refuse the oldest pending connection of the user with the most, so that no user can keep others out."""
        users = Counter(peer.uid for peer, _ in self._pending.values())
        ((uid, count),) = users.most_common(1)
        oldest = next(connection for connection, (peer, _) in self._pending.items() if peer.uid == uid)
        reason = (
            f"user {uid} has {count} of the {MAX_PENDING} connections that may be open without a greeting; send the"
            f" greeting immediately after connecting"
        )
        self._refuse(oldest, OverQuota(reason))

    def _greet(self, connection: socket.socket) -> None:
        try:
            data, named = _receive(connection)
        except BlockingIOError:
            return None
        except ConnectionError:
            data, named = b"", None
        if not data:
            os.close(self._take(connection).pidfd)
            return connection.close()
        try:
            hello, version = _read(data)
        except CubrokerError as error:
            return self._refuse(connection, error)
        peer = self._take(connection)
        peer = replace(peer, verified=not hello.ping and verify(peer, named))
        self._queue.put(ClientGreeted(connection, peer, version, hello.ping))
        return None

    def _refuse(self, connection: socket.socket, error: CubrokerError) -> None:
        peer = self._take(connection)
        os.close(peer.pidfd)
        self._rejections.log(peer.pid, peer.uid, error.message, code=error.code)
        send_last(connection, _refusal(error))

    def _take(self, connection: socket.socket) -> Peer:
        """Await no greeting any more, and return the process, whose pidfd is the caller's."""
        peer, timer = self._pending.pop(connection)
        timer.cancel()
        self._loop.remove_reader(connection)
        return peer


def answer_ping(ping: ClientGreeted, obstacle: str) -> None:
    """Tell a client that the broker serves, or the ``obstacle`` that prevents it now, and close the connection."""
    send_last(ping.connection, wire.pack(Pong(ping.version, obstacle)))
    os.close(ping.peer.pidfd)


def _receive(connection: socket.socket) -> tuple[bytes, int | None]:
    """Return a greeting, and the process that its credentials name: in general its sender, as :func:`verify` explains.

    The credentials come first and fill the buffer for ancillary data, so the kernel drops any descriptors and the
    broker never holds them.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    data, along, _, _ = connection.recvmsg(MAX_HELLO + 1, socket.CMSG_LEN(CREDENTIALS.size))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 0)
    for level, kind, value in along:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS) and len(value) == CREDENTIALS.size:
            pid, _, _ = CREDENTIALS.unpack(value)
            return data, pid
    return data, None


def _read(data: bytes) -> tuple[Hello, int]:
    """Decode a greeting; return it, and the newest protocol version that client and broker have in common."""
    if len(data) > MAX_HELLO:
        raise Invalid(f"a greeting has at most {MAX_HELLO} bytes")
    hello = wire.unpack(data, Hello)
    common = set(hello.versions) & set(VERSIONS)
    if not common:
        raise Unsupported(
            f"this broker speaks protocol versions {VERSIONS}, and the client none of them; upgrade the older"
        )
    return hello, max(common)


def _refusal(error: CubrokerError) -> bytes:
    return wire.pack(Refused(error.code, error.message))


class Sessions:
    """Admits sessions, welcomes them, and forgets them.

    Args:
        queue: receives the events of sessions.
        ledger: decides who may open a session.
        requests: decodes the requests of sessions.
        driver: its ``spec`` is in every welcome, and clients build their driver from that.
        store: keeps the descriptors of sessions; None if there is no store.
        log: records sessions for the next broker; None if there is no store.

    Attributes:
        by_number: the sessions, by number.
        unwelcomed: the sessions whose clients have not been told that they are open, by their name in the store.
    """

    def __init__(
        self,
        queue: EventQueue,
        ledger: Ledger,
        requests: IncomingRequests,
        driver: Driver,
        store: Store | None,
        log: SessionLog | None,
    ) -> None:
        self.by_number: dict[int, SessionConnection] = {}
        self.unwelcomed: dict[str, SessionConnection] = {}
        self._rejections = RejectionLog()
        self._queue = queue
        self._ledger = ledger
        self._requests = requests
        self._driver = driver
        self._store = store
        self._log = log
        self._numbers = itertools.count(ledger.last_session + 1)
        self._unstored: set[str] = set()

    def open(self, greeted: ClientGreeted, *, journal_full: bool) -> SessionOpened | CubrokerError:
        """Begin to admit a client; return the event for the ledger, or the error that turned the client away."""
        number, peer = next(self._numbers), greeted.peer
        session = SessionConnection(number, greeted.connection, peer, self._queue, self._rejections, greeted.version)
        refusal = self._ledger.admission_error(peer.uid, verified=peer.verified)
        refusal = refusal or self._obstacle(session, journal_full=journal_full)
        if refusal is not None:
            self._turn_away(session, refusal)
            session.close()
            return refusal
        self._enter(session)
        if self._log:
            self._log.opened(session, welcomed=False)
        self.unwelcomed[label(number)] = session
        return SessionOpened(
            number, peer.pid, peer.uid, peer.gid, peer.groups, peer.verified, read_process_by_pidfd(peer.pidfd)
        )

    def adopt(self, number: int, connection: socket.socket | None, peer: Peer, logged: LoggedSession) -> None:
        """Take over a session of an earlier broker, whose ``connection`` or process may be gone."""
        replies = logged.reply_cache(partial(self._ledger.granted, number))
        own = logged.version, logged.secret, replies
        session = SessionConnection(
            number, connection, peer, self._queue, self._rejections, *own, welcomed=logged.welcomed
        )
        session.watch()
        self._enter(session)
        if self._log and logged.no_secret:
            self._log.opened(session, welcomed=True)
        if not logged.welcomed:
            self.unwelcomed[label(number)] = session
            if connection and peer.pidfd >= 0 and self._store and self._store.notifier.manager.has_above:
                self._keep_again(session)

    def _keep_again(self, session: SessionConnection) -> None:
        """Store an adopted session that the keeper alone may have: its client holds nothing before it is welcomed."""
        try:
            self._keep(session)
        except (OSError, Unavailable) as error:
            name = label(session.number)
            self._unstored.add(name)
            refusal = error if isinstance(error, Unavailable) else Unavailable(explain(error))
            self._queue.put(StoreReplied(name, refusal))

    def stored(self, reply: StoreReplied) -> ProcessExited | None:
        """Process a reply of the store; if it refused a session, return the event that ends it in the ledger."""
        self._unstored.discard(reply.name)
        session = self.unwelcomed.get(reply.name)
        if reply.error is None or session is None:  # it is stored, or has ended since
            return None
        return self.reject(session, not_stored(reply.error))

    def reject(self, session: SessionConnection, error: CubrokerError) -> ProcessExited:
        """Turn away a client whose session the ledger may have; return the event that ends it there."""
        self.unwelcomed.pop(label(session.number), None)
        self._turn_away(session, error)
        return ProcessExited(session.number)

    def not_opened(self, number: int, error: Exception) -> list[ForgetSession]:
        """Turn away a client whose session the ledger failed to open, and undo the earlier steps."""
        reason = f"the broker itself failed at opening this session: {error!r}; its log says more"
        exited = self.reject(self.by_number[number], InternalFailure(reason))
        if self._ledger.holder(number) is None:
            return [ForgetSession(number)]
        self._queue.put(exited)
        return []

    def welcome_stored(self) -> None:
        """Welcome the clients whose sessions are in the store; the caller has written the journal."""
        for name, session in list(self.unwelcomed.items()):
            if name not in self._unstored:
                del self.unwelcomed[name]
                self.welcome(session)

    def welcome(self, session: SessionConnection) -> None:
        """Tell a client that its session is open."""
        welcome = Welcome(session.version, session.number, session.secret, self._driver.spec, os.geteuid())
        sent = session.welcome(wire.pack(wire.for_version(welcome, session.version)))
        if sent and self._log:  # else the next broker answers again, which has no effect on one that was answered
            self._log.opened(session, welcomed=True)
        if why := self._ledger.drain_reason:
            session.notify(Draining(why))

    def end(self, number: int) -> None:
        """Accept no more requests of a session, and remove it from the journal; :meth:`forget` follows."""
        session = self.by_number[number]
        self.unwelcomed.pop(label(number), None)
        self._requests.leave(session)
        if self._log:
            self._log.closed(session)

    def forget(self, number: int) -> None:
        """Close a session that has ended, here and in the store."""
        self.by_number.pop(number).close()
        self._unstored.discard(label(number))
        if self._store:
            self._store.notifier.remove(label(number))

    def notify_all(self, notice: Notice) -> None:
        """Send every session a notice."""
        for session in self.by_number.values():
            session.notify(notice)

    def _obstacle(self, session: SessionConnection, *, journal_full: bool) -> CubrokerError | None:
        """Watch and store a session; return None, or why its end would not be noticed or a restart would lose it."""
        if journal_full:  # the store may be full, too: it still has sessions that ended
            return Unavailable("the broker's host has no memory left for the journal; try again later")
        try:
            session.watch()
            self._keep(session)
        except OSError as error:  # there is no memory, or this user may watch no more (fs.epoll.max_user_watches)
            return Unavailable(f"the broker cannot watch process {session.peer.pid}: {reason(error)}; try again later")
        except Unavailable as error:
            return not_stored(error)
        return None

    def _keep(self, session: SessionConnection) -> None:
        """Store a session, now or when there is room.

        Raises as :meth:`~cubroker.server.store.store.AsyncNotifier.store`.
        """
        name = label(session.number)
        if self._store and not self._store.notifier.store(name, session.descriptors, self._queue):
            self._unstored.add(name)

    def _enter(self, session: SessionConnection) -> None:
        self.by_number[session.number] = session
        self._requests.enter(session)

    def _turn_away(self, session: SessionConnection, error: CubrokerError) -> None:
        self._rejections.log(session.peer.pid, session.peer.uid, error.message, code=error.code)
        session.refuse(_refusal(error))


def not_stored(error: Unavailable) -> Unavailable:
    """Return the error for a session that the store refused."""
    return Unavailable(
        f"this session would not outlive the broker: {error.message}; try again later, or ask the broker's"
        f" operator to check its store (systemd or cubroker keep)"
    )
