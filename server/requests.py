"""From frames to requests, each passed on once, and from replies back to frames."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import msgpack
from msgspec.structs import replace

from cubroker.protocol import wire
from cubroker.protocol.authentication import NUMBER, SECRET, complete, digest, session_of
from cubroker.protocol.errors import CubrokerError, InternalFailure, Invalid
from cubroker.protocol.layout import Outline
from cubroker.protocol.messages import (
    LAST_WORDS,
    Answer,
    Cancel,
    Create,
    Describe,
    Envelope,
    Failed,
    ListClients,
    ListDigests,
    ListPools,
    Look,
    Reply,
    Request,
)
from cubroker.server import batches
from cubroker.server.accounts import MAX_BYTES, Accounts
from cubroker.server.answers import LEASES, MAX_REQUESTS, Frame, Verdict, weight
from cubroker.server.layout_hashes import LayoutHashes
from cubroker.server.ledger.events import Asked
from cubroker.server.scribe import Scribe, lasts
from cubroker.server.sessions import Session
from cubroker.server.turns import Job, Turns

log = logging.getLogger(__name__)

TOLD = frozenset((Describe, ListClients, ListDigests, ListPools, Look))
"""Requests whose answers are long, and are not kept."""

DEAR = TOLD | {Create}
"""Requests that may cost milliseconds, of the ledger or of what encodes the answer: users take turns with them."""

LARGE = 64 << 10
"""Bytes of a lease, as it travels, that is sent in its user's turn: most is its layout, which is encoded by then."""

TOO_LONG = Failed(
    "over_quota", f"the answer has over {wire.MAX_MESSAGE} bytes, the most of a message; ask again when less is in use"
)

HEAD = 64
"""Bytes of a message that are looked at for its secret and its id, which take 28 at most."""

DENIED = Failed("denied", "no session has this secret: the broker was started again, or the session is over; open one")
FULL = Failed(
    "over_quota",
    f"{MAX_REQUESTS} requests of this session, or {MAX_BYTES >> 20} MiB of requests and answers of it or of all its"
    f" user's sessions, await an answer or its receipt, the most there may be; ask again when fewer are under way",
)


class Requests:
    """Everything between the gateway and the ledger.

    Args:
        ask: takes each request that arrives for the first time.
        settle: called when requests were taken in and answered; it is to :meth:`flush`.
        send: takes a batch of answers for the gateway, an empty one perhaps, and returns whether that is behind.
        soon: has the loop call a function in its next round.
        scribe: writes down what was received and answered, if anything outlives this broker.
    """

    def __init__(
        self,
        ask: Callable[[Asked], None],
        settle: Callable[[], None],
        send: Callable[[Sequence[batches.Part]], bool | None],
        soon: Callable[[Callable[[], None]], object],
        scribe: Scribe | None = None,
    ) -> None:
        self._ask = ask
        self._settle = settle
        self._send = send
        self._scribe = scribe
        self._sessions: dict[bytes, Session] = {}  # by what their requests begin with
        self._layout_hashes = LayoutHashes()
        self._outbox: list[list[batches.Part]] = [[]]  # batches, of which the last is not full
        self._unsent = 0
        self._accounts = Accounts()
        self._turns = Turns(soon, settle)
        self._closed = False

    def enter(self, session: Session) -> None:
        """Accept requests of a session."""
        session.answers.move(self._accounts.of(session.peer.uid))
        self._sessions[session.authentication.name] = session

    def hang_up(self, session: Session) -> None:
        """Drop what a session has asked and was not answered: its connection has ended, and it hears no answer."""
        self._turns.drop(session.peer.uid, session)
        session.answers.abandon()

    def leave(self, session: Session) -> None:
        """Accept none any more, and drop all that there is of the session's."""
        del self._sessions[session.authentication.name]
        self._turns.drop(session.peer.uid, session)
        session.answers.close()

    def close(self) -> None:
        """Take no further request, and do nothing more of what waits for its turn."""
        self._closed = True
        self._turns.close()

    def receive(self, batch: Iterable[bytes]) -> None:
        """Take a batch from the gateway, and answer it with one as far as answers are there at once.

        As many as are sent together are sent before the next request is taken: the gateway may be behind then.
        """
        if self._closed:  # the next broker is asked again
            return
        if not self._send(()):  # it was behind perhaps
            self._turns.resume()
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
        """Answer a request; the answer is kept for when it is asked again, unless it can be worked out anew."""
        answer = self._frame(session, Answer(request, body))
        if self._scribe:
            self._scribe.asked(session)
        if lasts(body):
            routing = session.answers.settle(request, answer, lasting=self._scribe is not None)
        else:
            routing = session.answers.tell(request, weight(answer))
        self._deliver(session, request, routing, answer)

    @property
    def full(self) -> bool:
        """Whether as many answers have gathered as are sent together."""
        return len(self._outbox) > 1

    def flush(self) -> None:
        """Send the answers that have gathered; no dear work is done while the gateway is behind with them."""
        outbox, self._outbox, self._unsent = self._outbox, [[]], 0
        for batch in filter(None, outbox):
            if self._send(batch):
                self._turns.pause()

    def _deliver(self, session: Session, request: int, routing: bytes, answer: Frame) -> None:
        """Send an answer; a large lease, which costs next to nothing while it waits, in its user's turn."""
        if isinstance(answer, bytes):
            self._put(routing, answer, len(answer))
        elif (nbytes := weight(answer)) > LARGE:
            self._turns.put(session.peer.uid, session, request, self._delivery(session, routing, answer, nbytes))
        else:
            self._put(routing, session.authentication.reply(answer, self._layout_hashes.of), nbytes)

    def _delivery(self, session: Session, routing: bytes, answer: Answer, nbytes: int) -> Job:
        """Send a lease that is encoded with its batch: many may wait that have the same layout."""
        if layout := session.authentication.bulk(answer.body):
            yield from self._layout_hashes.steps(layout)
        self._put(routing, partial(session.authentication.reply, answer, self._layout_hashes.of), nbytes)

    def _frame(self, session: Session, answer: Answer) -> Frame:
        """Encode an answer, unless it is a lease, which is no longer than a client reads."""
        if type(answer.body) in LEASES:
            return answer
        data = session.authentication.reply(answer, self._layout_hashes.of)
        return data if len(data) <= wire.MAX_MESSAGE else session.authentication.reply(Answer(answer.id, TOO_LONG))

    def _refuse(self, session: Session, request: int, routing: bytes, refusal: Failed) -> None:
        """Say that a request is not done; nothing is kept of that."""
        frame = session.authentication.reply(Answer(request, refusal))
        self._put(routing, frame, len(frame))

    def _put(self, routing: bytes, frame: batches.Part, nbytes: int) -> None:
        self._outbox[-1] += (routing, frame)
        self._unsent += nbytes
        if self._unsent > batches.FULL:
            self._outbox.append([])
            self._unsent = 0

    def _take(self, routing: bytes, frame: bytes) -> None:
        opened = self._opened(frame)
        if opened is None:
            return None
        session, (data, beside) = opened
        try:
            envelope = wire.unpack(data, Envelope)
            body: Request | None = envelope.body
            if beside:
                body = complete(envelope.body, beside, getattr(frame, "digest", b"") or digest(beside))
        except Invalid as error:
            return self._reject(routing, frame, error)
        session = session or self._bearer(envelope.secret)
        if session is None:
            denial = wire.pack(Answer(envelope.id, DENIED))
            return self._put(routing, denial, len(denial))
        if body is None:
            return _suspect(session)
        if self._scribe:
            self._scribe.asked(session)
        layout = body.layout if isinstance(body, Create) else b""
        verdict = session.answers.admit(
            envelope.id,
            envelope.oldest,
            routing,
            len(frame) - len(layout),
            envelope.received,
            insisted=type(body) in LAST_WORDS,
            about=body.request if type(body) is Cancel else 0,
            layout=layout,
        )
        if verdict is Verdict.NEW:
            self._begin(session, envelope.id, body)
        elif verdict is Verdict.FULL:
            self._refuse(session, envelope.id, routing, FULL)
        elif not isinstance(verdict, Verdict):
            self._deliver(session, envelope.id, routing, verdict)
        return None

    def _reject(self, routing: bytes, frame: bytes, error: CubrokerError) -> None:
        """Say what is wrong to a session that sent it. A stranger hears nothing, and is no line in the log."""
        opened = self._opened(frame)
        if opened is None:
            return
        session, (data, _) = opened
        secret, request = head(data)
        session = session or self._bearer(secret)
        if session and request:
            self._refuse(session, request, routing, Failed(error.code, error.message))

    def _bearer(self, secret: bytes) -> Session | None:
        """Return the session of version 1 to 3 that has a secret.

        Later ones are known by their number, which is no secret and shorter: it proves nothing.
        """
        return self._sessions.get(secret) if len(secret) == SECRET else None

    def _opened(self, frame: bytes) -> tuple[Session | None, tuple[bytes, bytes]] | None:
        """Return whose request a frame is, unless its secret says that, its message, and the layout beside it.

        None: it is in the name of a session that did not write it, or is over, and nobody is told.
        """
        session = self._sessions.get(frame[:NUMBER])
        if session is None:
            return None if session_of(frame) else (None, (frame, b""))
        opened = session.authentication.opened(frame)
        if opened is None:
            _suspect(session)
            return None
        return session, opened

    def _begin(self, session: Session, request: int, body: Request) -> None:
        uid = session.peer.uid
        # A cancel must not overtake the request that it is meant for.
        if type(body) in DEAR or (isinstance(body, Cancel) and self._turns.has(uid, session, body.request)):
            self._turns.put(uid, session, request, self._work(session, request, body))
        else:
            self._ask(Asked(session.number, request, body))

    def _work(self, session: Session, request: int, body: Request) -> Job:
        """Bring a request to the ledger in its user's turn, a create when its layout was checked."""
        outline: Outline | Failed | None = None
        try:
            if isinstance(body, Create):
                layout = session.answers.account.shared(body.layout)
                body = replace(body, layout=layout.data)
                outline = yield from layout.check()
            if isinstance(outline, Failed):
                self.respond(session, request, outline)
            elif type(body) in TOLD and session.answers.crowded:  # as it would have been refused after the others
                self.respond(session, request, FULL)
            else:
                self._ask(Asked(session.number, request, body, outline))
        # Nobody would hear of it otherwise: the request would stay unanswered.
        except Exception as error:
            log.exception("the broker failed at a %s", type(body).__name__)
            message = f"the broker itself failed at this request: {error!r}; its log says more"
            if session.answers.is_pending(request):
                self.respond(session, request, Failed(InternalFailure.code, message))


def _suspect(session: Session) -> None:
    """Count a request in a session's name that its client did not write."""
    session.forged += 1
    if session.forged == 1:
        log.warning(
            "requests in the name of session %d (pid %d) that it did not write are dropped: a peer forges them, or one"
            " has taken the gateway over",
            session.number,
            session.peer.pid,
        )


def head(data: bytes) -> tuple[bytes, int]:
    """Return the secret and the id that a message begins with, whatever follows; no secret and 0 if it has none."""
    unpacker = msgpack.Unpacker(max_buffer_size=HEAD, max_array_len=0, max_map_len=0)
    unpacker.feed(data[:HEAD])
    try:
        unpacker.read_array_header()
        secret, request = unpacker.unpack(), unpacker.unpack()
    except (msgpack.UnpackException, ValueError):
        return b"", 0
    # A bool is an int, and an id beyond what an answer can carry is none.
    fits = type(secret) is bytes and type(request) is int and 0 < request < 1 << 63
    return (secret, request) if fits else (b"", 0)
