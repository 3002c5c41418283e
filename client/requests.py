"""Requests on their way: numbered, encoded in the caller's thread, and kept until they are answered.

A request is sent again, under its number, when the gateway was replaced and once a second while it
is unanswered: the broker answers it again and does it once. Nothing here touches a socket.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import islice
from threading import Lock
from time import monotonic
from typing import TypeVar

from cubroker.client.futures import Future
from cubroker.client.processes import Owner
from cubroker.protocol import wire
from cubroker.protocol.errors import CubrokerError, OverQuota, Unavailable, from_code
from cubroker.protocol.messages import (
    MAX_RECEIVED,
    Answer,
    Cancel,
    Close,
    DropEvent,
    Envelope,
    Failed,
    Reply,
    Request,
    Seal,
)

R = TypeVar("R", bound=Reply)

RESEND = 1.0
"""Seconds after which an unanswered request is sent again."""

LAST_WORDS = (Cancel, Close, Seal, DropEvent)
"""Requests that must reach the broker, or it would keep what nobody uses."""

Settle = Callable[[Reply | CubrokerError], None]
"""Takes the answer of a request, or why there will be none. Runs on the connection's thread: it must be quick."""


class Pending:
    """What is to become of a request's answer.

    Attributes:
        number: the request's, once it is under way; 0 before.
    """

    __slots__ = ("data", "insist", "number", "sent", "settle")

    def __init__(self, settle: Settle) -> None:
        self.number = 0
        self.data = b""
        self.insist = False
        self.settle = settle
        self.sent = 0.0


class Requests:
    """All requests of one session.

    Args:
        secret: what the broker handed out for this session.
        owner: refuses calls from any process but the one that opened the session.
        wake: tells the connection's thread that ``outbox`` has something.
    """

    def __init__(self, secret: bytes, owner: Owner, wake: Callable[[], None]) -> None:
        self.outbox: deque[bytes] = deque()
        self._secret = secret
        self._owner = owner
        self._wake = wake
        self._lock = Lock()
        self._next = 1
        self._pending: dict[int, Pending] = {}
        self._received: deque[int] = deque()  # answered while an older request waits, and not told yet
        self._closed: CubrokerError | None = None
        self._checked = 0.0

    def submit(self, body: Request) -> Future[Reply]:
        """Send a request without waiting. The future's result is the reply; :class:`Failed` is raised as its error.

        Leases that come this way are the caller's own to open and close; their descriptors are closed.
        """
        future: Future[Reply] = Future()
        self.send(body, future.settle)
        return future

    def send(self, body: Request, settle: Settle) -> None:
        """Send a request; ``settle`` is called once, with its reply or an error."""
        self.post(body, Pending(settle))

    def post(self, body: Request, pending: Pending) -> None:
        """Send a request whose ``pending`` the caller keeps, and so knows it to be under way if this is interrupted."""
        self._owner.check()
        with self._lock:  # until it is in the outbox: requests leave in the order of their numbers
            closed = self._closed
            if closed is None:
                number = self._next
                oldest = next(iter(self._pending), number)
                received = tuple(islice(self._received, MAX_RECEIVED))
                pending.data = wire.pack(Envelope(self._secret, number, oldest, body, received))
                for _ in received:
                    self._received.popleft()
                pending.insist = isinstance(body, LAST_WORDS)
                pending.sent = monotonic()
                # Nothing is called in these lines, so no signal handler runs between them.
                pending.number = number
                self._next = number + 1
                self._pending[number] = pending
                self.outbox.append(pending.data)
                self._wake()
                return
        pending.settle(closed.anew())

    def waiting(self) -> bool:
        """Whether any request is unanswered."""
        return bool(self._pending)

    def answer(self, answer: Answer) -> bool:
        """Settle the request that ``answer`` belongs to; one that was answered before is left alone (False)."""
        body = answer.body
        with self._lock:
            pending = self._pending.get(answer.id)
            if pending is None or (pending.insist and _refused_for_now(body)):
                return False
            del self._pending[answer.id]
            if next(iter(self._pending), answer.id) < answer.id:
                self._received.append(answer.id)
        pending.settle(from_code(body.code, body.message) if isinstance(body, Failed) else body)
        return True

    def resend_all(self) -> None:
        """Put every unanswered request into the outbox, oldest first, and nothing else."""
        now = monotonic()
        with self._lock:
            self.outbox.clear()
            for pending in self._pending.values():
                pending.sent = now
                self.outbox.append(pending.data)

    def resend_overdue(self) -> None:
        """Put the requests into the outbox that were sent a while ago."""
        now = monotonic()
        if now < self._checked + RESEND / 2 or self.outbox:
            return
        self._checked = now
        with self._lock:
            for pending in self._pending.values():
                if pending.sent <= now - RESEND:
                    pending.sent = now
                    self.outbox.append(pending.data)

    def refuse(self, reason: CubrokerError) -> None:
        """Settle every later request with ``reason``; those under way are left as they are."""
        with self._lock:
            self._closed = reason
            self.outbox.clear()

    def close(self, reason: CubrokerError) -> None:
        """Settle every request with ``reason``, and every later one too."""
        self.refuse(reason)
        pending, self._pending = self._pending, {}
        for request in pending.values():
            request.settle(reason.anew())


def _refused_for_now(body: Reply) -> bool:
    """Whether the broker had no room for one more request: it remembers nothing of this one and may get it again."""
    return isinstance(body, Failed) and body.code == OverQuota.code


def expect(reply: Reply, kind: type[R]) -> R:
    """Return ``reply``, which the protocol says is a ``kind``."""
    if not isinstance(reply, kind):
        raise Unavailable(f"the broker answered with {type(reply).__name__} instead of {kind.__name__}")
    return reply
