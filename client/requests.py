"""Requests on their way: numbered, encoded in the caller's thread, and kept until they are answered.

A request is sent again, under its number, when the gateway was replaced and once a second while it
is unanswered: the broker answers it again and does it once. Nothing here touches a socket.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from itertools import islice
from threading import RLock
from time import monotonic
from typing import TypeVar

from cubroker.client.futures import Future
from cubroker.client.processes import Owner, Unsendable
from cubroker.protocol.authentication import Bearer
from cubroker.protocol.bounds import MAX_RECEIVED
from cubroker.protocol.errors import CubrokerError, Unavailable, from_code
from cubroker.protocol.messages import Answer, Envelope, Failed, Reply, Request

log = logging.getLogger(__name__)

R = TypeVar("R", bound=Reply)

RESEND = 1.0
"""Seconds after which an unanswered request is sent again."""

INTRUDER = "a finalizer or a signal handler"
INSTEAD = "ask again when it has returned, or in another thread"

Settle = Callable[[Reply | CubrokerError], None]
"""Takes the answer of a request, or why there will be none. Runs on the connection's thread: it must be quick."""


class Pending:
    """What is to become of a request's answer.

    Attributes:
        number: the request's, once it is under way; 0 before.
    """

    __slots__ = ("body", "number", "sent", "settle")

    body: Request

    def __init__(self, settle: Settle) -> None:
        self.number = 0
        self.settle = settle
        self.sent = 0.0


class Requests(Unsendable):
    """All requests of one session.

    Args:
        authentication: how this session's frames are authenticated.
        owner: refuses calls from any process but the one that opened the session.
        wake: tells the connection's thread that ``outbox`` has something.
    """

    def __init__(self, authentication: Bearer, owner: Owner, wake: Callable[[], None]) -> None:
        self.outbox: deque[bytes] = deque()
        self._authentication = authentication
        self._forged = 0
        self._owner = owner
        self._wake = wake
        self._lock = RLock()
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
        self.post(body, Pending(future.settle))
        return future

    def send(self, body: Request, settle: Settle) -> None:
        """Send a request; ``settle`` is called once, with its reply or an error."""
        self.post(body, Pending(settle))

    def post(self, body: Request, pending: Pending) -> None:
        """Send a request whose ``pending`` the caller keeps, and so knows it to be under way if this is interrupted."""
        self._owner.check()
        self.check_free()
        with self._lock:  # until it is in the outbox: requests leave in the order of their numbers
            closed = self._closed
            if closed is None:
                number = self._next
                data = self._pack(number, body)
                pending.body = body
                pending.sent = monotonic()
                # Nothing is called in these lines, so no signal handler runs between them.
                pending.number = number
                self._next = number + 1
                self._pending[number] = pending
                self.outbox.append(data)
                self._wake()
                return
        pending.settle(closed.anew())

    def check_free(self) -> None:
        """Raise ``Unavailable`` in a finalizer or a signal handler that runs while this thread sends a request.

        Nothing moves meanwhile.
        """
        if self._lock._is_owned():  # type: ignore[attr-defined]  # as Condition asks it
            raise Unavailable(f"called by {INTRUDER} in the middle of a request, which has to be sent first; {INSTEAD}")

    def waiting(self) -> bool:
        """Whether any request is unanswered."""
        return bool(self._pending)

    def read(self, frame: bytes) -> Answer | None:
        """Return the answer in a frame; None if it is not the broker's: then what was asked is asked again.

        Raises:
            Invalid: the broker sent what is no answer.
        """
        answer = self._authentication.read(frame)
        if answer is None:
            self._forged += 1
            if self._forged == 1:
                log.warning(
                    "answers that the broker did not write are dropped, and what was asked is asked again: the gateway"
                    " alters or forges them; have whoever runs the broker end its gateway, which starts another"
                )
        return answer

    def answer(self, answer: Answer) -> Request | None:
        """Settle the request that ``answer`` belongs to, and return it; None if it was answered before."""
        body = answer.body
        with self._lock:
            pending = self._pending.pop(answer.id, None)
            if pending is None:
                return None
            if next(iter(self._pending), answer.id) < answer.id:
                self._received.append(answer.id)
        pending.settle(from_code(body.code, body.message) if isinstance(body, Failed) else body)
        return pending.body

    def resend_all(self) -> None:
        """Put every unanswered request into the outbox, oldest first, and nothing else."""
        now = monotonic()
        with self._lock:
            self.outbox.clear()
            for number, pending in self._pending.items():
                pending.sent = now
                self.outbox.append(self._pack(number, pending.body))

    def resend_overdue(self) -> None:
        """Put the requests into the outbox that were sent a while ago."""
        now = monotonic()
        if now < self._checked + RESEND / 2 or self.outbox:
            return
        self._checked = now
        with self._lock:
            for number, pending in self._pending.items():
                if pending.sent <= now - RESEND:
                    pending.sent = now
                    self.outbox.append(self._pack(number, pending.body))

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

    def _pack(self, number: int, body: Request) -> bytes:
        """Encode a request, with what has come by now: the broker may wait for the room that this makes."""
        oldest, authentication = next(iter(self._pending), number), self._authentication
        if not self._received:
            return authentication.request(Envelope(authentication.secret, number, oldest, body))
        received = tuple(islice(self._received, MAX_RECEIVED))
        data = authentication.request(Envelope(authentication.secret, number, oldest, body, received))
        for _ in received:
            self._received.popleft()
        return data


def expect(reply: Reply, kind: type[R]) -> R:
    """Return ``reply``, which the protocol says is a ``kind``."""
    if not isinstance(reply, kind):
        raise Unavailable(f"the broker answered with {type(reply).__name__} instead of {kind.__name__}")
    return reply
