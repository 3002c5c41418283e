"""From frames to requests, each passed on once, and from replies back to frames."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import msgpack

from cubroker.protocol import wire
from cubroker.protocol.errors import CubrokerError, InternalFailure, Invalid
from cubroker.protocol.layout import Layout
from cubroker.protocol.messages import (
    LAST_WORDS,
    Answer,
    Cancel,
    Create,
    Envelope,
    Failed,
    Reply,
    Request,
)
from cubroker.server import batches
from cubroker.server.answers import LEASES, MAX_REQUESTS, Frame, Verdict, weight
from cubroker.server.checks import Checks, check
from cubroker.server.ledger.events import Asked
from cubroker.server.scribe import Scribe, lasts
from cubroker.server.sessions import Session

log = logging.getLogger(__name__)

INLINE = 16 << 10
"""Bytes of a layout that is checked at once (about 0.5 ms); larger ones are checked on a thread."""

TOO_LONG = Failed(
    "over_quota", f"the answer has over {wire.MAX_MESSAGE} bytes, the most of a message; ask again when less is in use"
)

HEAD = 64
"""Bytes of a frame that are looked at for its secret and its id, which take 28 at most."""

DENIED = Failed("denied", "no session has this secret: the broker was started again, or the session is over; open one")
FULL = Failed(
    "over_quota", f"{MAX_REQUESTS} requests of this session, or too many bytes, await an answer or its receipt"
)


class Requests:
    """Everything between the gateway and the ledger.

    Args:
        ask: takes each request that arrives for the first time.
        settle: called when requests were taken in and answered; it is to :meth:`flush`.
        send: takes batches of answers for the gateway.
        scribe: writes down what was received and answered, if anything outlives this broker.
    """

    def __init__(
        self,
        ask: Callable[[Asked], None],
        settle: Callable[[], None],
        send: Callable[[Sequence[Frame]], None],
        scribe: Scribe | None = None,
    ) -> None:
        self._ask = ask
        self._settle = settle
        self._send = send
        self._scribe = scribe
        self._sessions: dict[bytes, Session] = {}
        self._outbox: list[list[Frame]] = [[]]  # batches, of which the last is not full
        self._unsent = 0
        self._checks = Checks()
        self._unchecked: dict[Session, int] = {}  # how many requests of a session are being checked
        self._closed = False

    def enter(self, session: Session) -> None:
        """Accept requests of a session."""
        self._sessions[session.secret] = session

    def leave(self, session: Session) -> None:
        """Accept none any more."""
        del self._sessions[session.secret]

    def close(self) -> None:
        """Take no further request, and stop checking layouts."""
        self._closed = True
        self._checks.close()

    def receive(self, batch: Iterable[bytes]) -> None:
        """Take a batch from the gateway, and answer it with one as far as answers are there at once.

        As many as are sent together are sent before the next request is taken: the gateway may be behind then.
        """
        if self._closed:  # the next broker is asked again
            return
        for routing, frame in batches.pairs(batch):
            try:
                self._take(routing, frame)
            # It would end the connection to the gateway, and that again when the same request is sent again.
            except Exception as error:
                log.exception("the broker failed at a request of %d bytes", len(frame))
                message = f"the broker itself failed at this request: {error!r}; its log says more"
                self._reject(routing, frame, InternalFailure(message))
            if self.full:
                self._settle()
        self._settle()

    def respond(self, session: Session, request: int, body: Reply) -> None:
        """Answer a request; the answer is kept for when it is asked again."""
        answer = _frame(Answer(request, body))
        lasting = self._scribe is not None and lasts(body)
        if self._scribe:
            self._scribe.asked(session)
        self._put(session.answers.settle(request, answer, lasting=lasting), answer)

    @property
    def full(self) -> bool:
        """Whether as many answers have gathered as are sent together."""
        return len(self._outbox) > 1

    def flush(self) -> None:
        """Send the answers that have gathered."""
        outbox, self._outbox, self._unsent = self._outbox, [[]], 0
        for batch in filter(None, outbox):
            self._send(batch)

    def _put(self, routing: bytes, answer: Frame) -> None:
        self._outbox[-1] += (routing, answer)
        self._unsent += weight(answer)
        if self._unsent > batches.FULL:
            self._outbox.append([])
            self._unsent = 0

    def _take(self, routing: bytes, frame: bytes) -> None:
        try:
            envelope = wire.unpack(frame, Envelope)
        except Invalid as error:
            return self._reject(routing, frame, error)
        session = self._sessions.get(envelope.secret)
        if session is None:
            return self._put(routing, wire.pack(Answer(envelope.id, DENIED)))
        if self._scribe:
            self._scribe.asked(session)
        body = envelope.body
        verdict = session.answers.admit(
            envelope.id,
            envelope.oldest,
            routing,
            len(frame),
            envelope.received,
            insisted=type(body) in LAST_WORDS,
            about=body.request if type(body) is Cancel else 0,
        )
        if verdict is Verdict.NEW:
            self._begin(session, envelope.id, body)
        elif verdict is Verdict.FULL:
            self._put(routing, wire.pack(Answer(envelope.id, FULL)))
        elif not isinstance(verdict, Verdict):
            self._put(routing, verdict)
        return None

    def _reject(self, routing: bytes, frame: bytes, error: CubrokerError) -> None:
        """Say what is wrong to a session that sent it. A stranger hears nothing, and is no line in the log."""
        secret, request = author(frame)
        if secret in self._sessions and request:
            self._put(routing, wire.pack(Answer(request, Failed(error.code, error.message))))

    def _begin(self, session: Session, request: int, body: Request) -> None:
        layout = body.layout if isinstance(body, Create) else None
        if layout is None:
            # A cancel must not overtake the create that it is meant for.
            if session in self._unchecked and isinstance(body, Cancel):
                return self._check_later(session, request, body, None)
            return self._ask(Asked(session.number, request, body))
        if len(layout) > INLINE:
            return self._check_later(session, request, body, layout)
        return self._pass_on(session, request, body, check(layout))

    def _check_later(self, session: Session, request: int, body: Request, layout: bytes | None) -> None:
        self._unchecked[session] = self._unchecked.get(session, 0) + 1
        self._checks.put(session.peer.uid, layout, partial(self._checked, session, request, body))

    def _checked(self, session: Session, request: int, body: Request, layout: Layout | Failed | None) -> None:
        self._unchecked[session] -= 1
        if not self._unchecked[session]:
            del self._unchecked[session]
        if session.secret in self._sessions:
            self._pass_on(session, request, body, layout)
            self._settle()

    def _pass_on(self, session: Session, request: int, body: Request, layout: Layout | Failed | None) -> None:
        if isinstance(layout, Failed):
            self.respond(session, request, layout)
        else:
            self._ask(Asked(session.number, request, body, layout))


def _frame(answer: Answer) -> Frame:
    """Encode an answer, unless it is a lease, which is no longer than a client reads."""
    if type(answer.body) in LEASES:
        return answer
    data = wire.pack(answer)
    return data if len(data) <= wire.MAX_MESSAGE else wire.pack(Answer(answer.id, TOO_LONG))


def author(frame: bytes) -> tuple[bytes, int]:
    """Return the secret and the id that a frame begins with, whatever follows them; no secret and 0 if it has none."""
    unpacker = msgpack.Unpacker(max_buffer_size=HEAD, max_array_len=0, max_map_len=0)
    unpacker.feed(frame[:HEAD])
    try:
        unpacker.read_array_header()
        secret, request = unpacker.unpack(), unpacker.unpack()
    except (msgpack.UnpackException, ValueError):
        return b"", 0
    # A bool is an int, and an id beyond what an answer can carry is none.
    fits = type(secret) is bytes and type(request) is int and 0 < request < 1 << 63
    return (secret, request) if fits else (b"", 0)
