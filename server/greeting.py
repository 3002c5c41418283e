"""The door: accepts connections on ``session.sock`` and lets in who greets properly and in time."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from cubroker.protocol import wire
from cubroker.protocol.errors import CubrokerError, Invalid, OverQuota, TimedOut, Unavailable, Unsupported
from cubroker.protocol.messages import VERSIONS, Hello, Pong, Refused
from cubroker.protocol.system_errors import explain
from cubroker.server.denials import Denials
from cubroker.server.peers import CREDENTIALS, Peer, identify, verify

log = logging.getLogger(__name__)

MAX_HELLO = 4096
"""Bytes of a greeting."""

PATIENCE = 10.0
"""Seconds that a peer may take to greet."""

MAX_GUESTS = 256
"""Connections that may stand in the door. Who greets at once is served, however many others do not."""

PAUSE = 1.0
"""Seconds without accepting after the system refused, mostly because no descriptors were left."""

EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)

Admit = Callable[[socket.socket, Peer, int], None]
"""Takes over a connection, its peer's pidfd, and the protocol version that both sides speak."""


class Door:
    """Accepts connections, hands over those that have greeted, and answers those that only ask how the broker fares.

    Args:
        listener: the listening session socket.
        admit: takes over who has greeted.
        obstacle: returns why nobody new is served at the moment, or an empty text.
        patience: seconds that a peer may take to greet.
    """

    def __init__(
        self,
        listener: socket.socket,
        admit: Admit,
        obstacle: Callable[[], str],
        patience: float = PATIENCE,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._admit = admit
        self._obstacle = obstacle
        self._patience = patience
        self._denials = Denials()
        self._guests: dict[socket.socket, tuple[Peer, asyncio.TimerHandle]] = {}
        self._resume: asyncio.TimerHandle | None = None
        self._paused = False

    def open(self) -> None:
        """Begin to accept."""
        self._resume = None
        try:
            self._loop.add_reader(self._listener, self._accept)
        except OSError as error:
            self._pause(error)

    def close(self) -> None:
        """Accept no more, and turn away who has not greeted yet."""
        if self._resume:
            self._resume.cancel()
        self._loop.remove_reader(self._listener)
        for connection in list(self._guests):
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
            return connection.close()  # it holds nothing, so there is nothing to release
        except CubrokerError as error:
            _send(connection, error)
            return connection.close()
        except OSError as error:
            _send(connection, Unavailable(f"the broker cannot identify the process that connects: {explain(error)}"))
            connection.close()
            return self._pause(error) if error.errno in EXHAUSTED else None
        self._paused = False
        timer = self._loop.call_later(self._patience, self._give_up, connection)
        self._guests[connection] = (peer, timer)
        try:
            self._loop.add_reader(connection, self._greet, connection)
        except OSError as error:
            return self._refuse(
                connection, Unavailable(f"the broker cannot listen to this connection: {explain(error)}")
            )
        if len(self._guests) > MAX_GUESTS:
            self._make_room()
        return None

    def _pause(self, error: OSError) -> None:
        """Leave connections in the backlog for a while: trying again at once would take all the time there is."""
        if not self._paused:
            log.error("no new sessions for now: %s", explain(error))
        self._paused = True
        self._loop.remove_reader(self._listener)
        self._resume = self._loop.call_later(PAUSE, self.open)

    def _make_room(self) -> None:
        """Turn away the oldest guest of the user who has most of them, so that nobody can fill the door."""
        users = Counter(peer.uid for peer, _ in self._guests.values())
        ((uid, count),) = users.most_common(1)
        oldest = next(connection for connection, (peer, _) in self._guests.items() if peer.uid == uid)
        reason = (
            f"user {uid} has {count} connections of {MAX_GUESTS} that may stand here without a greeting; greet at once"
        )
        self._refuse(oldest, OverQuota(reason))

    def _give_up(self, connection: socket.socket) -> None:
        self._refuse(connection, TimedOut(f"no greeting came within {self._patience:g} seconds"))

    def _greet(self, connection: socket.socket) -> None:
        try:
            data, named = _receive(connection)
        except BlockingIOError:
            return None
        except ConnectionError:
            data, named = b"", None
        if not data:
            return self._dismiss(connection)
        try:
            hello = _read(data)
            version = _agree(hello)
        except CubrokerError as error:
            return self._refuse(connection, error)
        if hello.ping:
            return self._answer(connection, version)
        peer, timer = self._guests.pop(connection)
        timer.cancel()
        self._loop.remove_reader(connection)
        self._admit(connection, replace(peer, verified=verify(peer, named)), version)
        return None

    def _answer(self, connection: socket.socket, version: int) -> None:
        with suppress(OSError):  # nobody waits for it any more
            connection.send(wire.pack(Pong(version, self._obstacle())))
        self._dismiss(connection)

    def _refuse(self, connection: socket.socket, error: CubrokerError) -> None:
        peer, _ = self._guests[connection]
        self._denials.log(peer, error.message)
        _send(connection, error)
        self._dismiss(connection)

    def _dismiss(self, connection: socket.socket) -> None:
        peer, timer = self._guests.pop(connection)
        timer.cancel()
        self._loop.remove_reader(connection)
        os.close(peer.pidfd)
        connection.close()


def _receive(connection: socket.socket) -> tuple[bytes, int | None]:
    """Return a greeting, and the process that it names: in general its sender, as :func:`verify` explains.

    The credentials come first and fill the room for what comes along: the kernel drops any descriptors, so that none is
    ever held.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    data, along, _, _ = connection.recvmsg(MAX_HELLO + 1, socket.CMSG_LEN(CREDENTIALS.size))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 0)
    for level, kind, value in along:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS) and len(value) == CREDENTIALS.size:
            pid, _, _ = CREDENTIALS.unpack(value)
            return data, pid
    return data, None


def _read(data: bytes) -> Hello:
    if len(data) > MAX_HELLO:
        raise Invalid(f"a greeting has at most {MAX_HELLO} bytes")
    return wire.unpack(data, Hello)


def _agree(hello: Hello) -> int:
    """Return the newest protocol version of a greeting that is known here."""
    common = set(hello.versions) & set(VERSIONS)
    if not common:
        raise Unsupported(
            f"this broker speaks protocol versions {VERSIONS}, and none of the client's; upgrade the older"
        )
    return max(common)


def _send(connection: socket.socket, error: CubrokerError) -> None:
    try:
        connection.send(wire.pack(Refused(error.code, error.message)))
        # A greeting that is unread when the connection closes would be an error, which comes before the refusal.
        connection.recv(1)
    except OSError as failure:
        log.debug("a refusal was not delivered, or nothing came: %s", failure)
