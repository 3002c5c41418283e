"""Requests, from the gateway's batches to events of the ledger, and their replies, back to batches.

Each request is passed on once. Cheap ones go to the ledger as they arrive. Expensive ones wait in a :class:`FairQueue`.

Work is expensive if it takes a millisecond or more: checking a layout, listing a thousand pools, sending a layout of
megabytes. It runs on the broker's loop all the same, where it needs no locks and does not compete with another thread
for the interpreter. It runs in short steps, so that cheap requests wait for one step at most. After a step the loop
does its other work, for at least as long as the step took if there is that much, and then the next step. Each turn goes
to the user who has used the least loop time. The sessions of a user take turns, job by job. The jobs of one session run
in the order of their arrival, and are dropped when the session ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Generator, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from time import perf_counter
from weakref import WeakValueDictionary

import msgpack
from msgspec import Struct
from msgspec.structs import replace

from cubroker.protocol import wire
from cubroker.protocol.errors import InternalFailure, Invalid
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
    SetLayout,
)
from cubroker.protocol.wire import NUMBER, SECRET, Digest, complete, digest, session_of
from cubroker.server.event_queue import EventQueue, TurnDue
from cubroker.server.ledger.events import RequestReceived, Respond
from cubroker.server.transport import framing
from cubroker.server.transport.reply_cache import (
    LEASES,
    MAX_BYTES,
    MAX_REQUESTS,
    Admission,
    ReplyAccount,
    SharedLayout,
    parts,
)
from cubroker.server.transport.session import LASTING, SessionConnection, SessionLog

log = logging.getLogger(__name__)

TOLD = frozenset((Describe, ListClients, ListDigests, ListPools, Look))
"""Requests whose replies are long, and are not kept."""

LAID_OUT = (Create, SetLayout)
"""Requests with a layout, which is checked before the ledger receives them."""

EXPENSIVE = TOLD.union(LAID_OUT)
"""Requests that may cost milliseconds, in the ledger or in encoding the reply: users take turns with them."""

LARGE = 64 << 10
"""Bytes of a lease, as it travels, past which it is sent in its user's turn. Most are its layout, which is encoded."""

TOO_LONG = Failed(
    "over_quota",
    f"the answer would exceed {wire.MAX_MESSAGE} bytes, the limit of a message; ask again when fewer pools, versions or"
    f" sessions exist",
)

MAX_REMEMBERED = 32 << 20
"""Bytes of the layouts that are remembered. Most of these belong to versions, which keep the bytes anyway."""

HASH_STEP = 256 << 10  #: Bytes of a layout that are hashed in one step.
HEAD = 64  #: Bytes of a message that are searched for its secret and its id, which have 28 at most.

DENIED = Failed("denied", "no session has this secret: the broker was started again, or the session is over; open one")
FULL = Failed(
    "over_quota",
    f"{MAX_REQUESTS} requests of this session are unanswered or unacknowledged, or {MAX_BYTES >> 20} MiB of requests"
    f" and answers of it or of all its user's sessions; that is the limit; send again when fewer are pending",
)

QUANTUM = 0.001  #: Seconds after which a step is over, if its job has come to a ``yield``.
IDLE_ROUND = 0.0001  #: Seconds that a round of the loop takes with next to nothing to do.

Outcome = RequestReceived | Respond
"""What a job may lead to: a request for the ledger, or a reply that needs no decision."""

Job = Generator[None, None, Outcome | None]
"""Work that may be interrupted wherever it yields."""


class IncomingRequests:
    """Decodes requests, each of them passed on once, and encodes their replies.

    Args:
        queue: gets :class:`~cubroker.server.event_queue.TurnDue` when ``turns.step()`` should be called.
        loop: the event loop of ``queue``.
        log: collects entries for the journal; None if there is no journal.

    Attributes:
        turns: the expensive requests; paused while the gateway is behind with the replies.
    """

    def __init__(self, queue: EventQueue, loop: asyncio.AbstractEventLoop, log: SessionLog | None = None) -> None:
        self._log = log
        self._sessions: dict[bytes, SessionConnection] = {}  # by the number or secret that their requests begin with
        self._layouts = RecentLayouts()
        self._batches: list[list[framing.Part]] = [[]]  # of replies; the last one is not full
        self._unsent = 0  # bytes in the last batch
        #: Whether a whole batch of replies has gathered.
        self.full = False
        #: By user; an account stays as long as there is a reference to it.
        self._accounts: WeakValueDictionary[int, ReplyAccount] = WeakValueDictionary()
        self.turns = FairQueue(queue, loop)

    def enter(self, session: SessionConnection) -> None:
        """Accept the requests of a session."""
        session.replies.move(self._accounts.setdefault(session.peer.uid, ReplyAccount()))
        self._sessions[session.authentication.name] = session

    def hang_up(self, session: SessionConnection) -> None:
        """Drop the pending requests of a session whose connection has ended: it receives no replies."""
        self.turns.drop(session.peer.uid, session)
        session.replies.abandon()

    def leave(self, session: SessionConnection) -> None:
        """Accept no more requests of a session, and drop all that is kept for it."""
        del self._sessions[session.authentication.name]
        self.turns.drop(session.peer.uid, session)
        session.replies.close()

    def decode(self, requests: Iterable[tuple[bytes, bytes]]) -> Iterator[RequestReceived]:
        """Yield the requests of a batch that arrive for the first time and are cheap.

        An expensive request waits for its user's turn. A request that was answered before is answered again, and an
        invalid one is refused.
        """
        for routing, frame in requests:
            try:
                request = self._accept(routing, frame)
            # It would end the connection to the gateway, and again whenever the client repeats the request.
            except Exception as error:
                log.exception("the broker failed at a request of %d bytes", len(frame))
                self._reject(routing, frame, own_failure(error))
                continue
            if request is not None:
                yield request

    def respond(self, session: SessionConnection, request: int, body: Reply) -> None:
        """Encode the reply to a pending request; keep it for copies of the request, unless it can be made again.

        A lease is encoded when it is sent. A reply that is longer than a client accepts is replaced by a refusal.
        """
        answer, replies = Answer(request, body), session.replies
        if self._log:
            self._log.asked(session)
        if type(body) in LEASES:
            routing = replies.settle(request, answer, lasting=self._log is not None)
            return self._deliver(session, request, routing, answer)
        reply = session.authentication.reply(answer, self._layouts.digest)
        if (nbytes := len(reply)) > wire.MAX_MESSAGE:
            reply = session.authentication.reply(Answer(request, TOO_LONG))
            nbytes = len(reply)
        if type(body) in LASTING:
            routing = replies.settle(request, reply, lasting=self._log is not None)
        else:
            routing = replies.tell(request, nbytes)
        return self._put(routing, reply, nbytes)

    def replies(self) -> Iterator[list[framing.Part]]:
        """Return the batches of replies that have gathered, and forget them."""
        batches, self._batches, self._unsent, self.full = self._batches, [[]], 0, False
        return filter(None, batches)

    def _accept(self, routing: bytes, frame: bytes) -> RequestReceived | None:
        """Return the request in a frame if it arrives for the first time and need not wait for a turn."""
        opened = self._opened(frame)
        if opened is None:
            return None
        session, data, beside = opened
        try:
            envelope = wire.unpack(data, Envelope)
            body: Request | None = envelope.body
            if beside:
                body = complete(envelope.body, beside, getattr(frame, "digest", b"") or digest(beside))
        except Invalid as error:
            self._reject(routing, frame, Failed(error.code, error.message))
            return None
        session = session or self._bearer(envelope.secret)
        if session is None:
            denial = wire.pack(Answer(envelope.id, DENIED))
            self._put(routing, denial, len(denial))
            return None
        if body is None:
            _suspect(session)
            return None
        if self._log:
            self._log.asked(session)
        kind = type(body)
        layout: bytes = body.layout if kind in LAID_OUT else b""  # type: ignore[union-attr]
        about = body.request if type(body) is Cancel else 0
        admission = session.replies.admit(
            envelope.id,
            envelope.oldest,
            routing,
            len(frame) - len(layout),
            envelope.received,
            must_deliver=kind in LAST_WORDS,
            about=about,
            layout=layout,
        )
        if admission is Admission.NEW:
            # A cancel must not overtake the request that it is meant for.
            if kind not in EXPENSIVE and not (about and self.turns.has(session.peer.uid, session, about)):
                return RequestReceived(session.number, envelope.id, body)
            self.turns.put(session.peer.uid, session, envelope.id, self._work(session, envelope.id, body))
        elif admission is Admission.FULL:
            self._refuse(session, envelope.id, routing, FULL)
        elif isinstance(admission, bytes):
            self._put(routing, admission, len(admission))
        elif isinstance(admission, Answer):
            self._deliver(session, envelope.id, routing, admission)
        return None

    def _opened(self, frame: bytes) -> tuple[SessionConnection | None, bytes, bytes] | None:
        """Return the session that a frame names by number, and the frame's message and layout.

        The session is None if the message names it by a secret. The result is None if the session did not write the
        frame or is over; the sender then gets no reply.
        """
        session = self._sessions.get(frame[:NUMBER])
        if session is None:
            return None if session_of(frame) else (None, frame, b"")
        opened = session.authentication.opened(frame)
        if opened is None:
            _suspect(session)
            return None
        data, beside = opened
        return session, data, beside

    def _bearer(self, secret: bytes) -> SessionConnection | None:
        """Return the session, of protocol version 1 to 3, that has a secret.

        Requests of later versions name their session by number, which is shorter than a secret and proves nothing.
        """
        return self._sessions.get(secret) if len(secret) == SECRET else None

    def _reject(self, routing: bytes, frame: bytes, refusal: Failed) -> None:
        """Tell a session what is wrong with its request. An unknown sender gets no reply and no line in the log."""
        opened = self._opened(frame)
        if opened is None:
            return
        session, data, _ = opened
        secret, request = head(data)
        session = session or self._bearer(secret)
        if session and request:
            self._refuse(session, request, routing, refusal)

    def _refuse(self, session: SessionConnection, request: int, routing: bytes, refusal: Failed) -> None:
        """Send a refusal, and keep nothing of it."""
        frame = session.authentication.reply(Answer(request, refusal))
        self._put(routing, frame, len(frame))

    def _work(self, session: SessionConnection, request: int, body: Request) -> Job:
        """Prepare an expensive request for the ledger: check its layout, if it has one."""
        outline: Outline | Failed | None = None
        try:
            if isinstance(body, LAID_OUT):
                layout = session.replies.account.shared(body.layout)
                body = replace(body, layout=layout.data)
                outline = yield from self._layouts.check(layout)
        # The request would stay unanswered otherwise.
        except Exception as error:
            log.exception("the broker failed at a %s", type(body).__name__)
            outline = own_failure(error)
        if isinstance(outline, Failed):
            return Respond(session.number, request, outline)
        if type(body) in TOLD and session.replies.crowded:  # as if it had arrived after the replies that wait now
            return Respond(session.number, request, FULL)
        return RequestReceived(session.number, request, body, outline)

    def _deliver(self, session: SessionConnection, request: int, routing: bytes, reply: Answer) -> None:
        """Send a lease now; but a large one in its user's turn, since it costs next to nothing while it waits."""
        own, layout = parts(reply)
        if (nbytes := own + len(layout)) > LARGE:
            self.turns.put(session.peer.uid, session, request, self._delivery(session, routing, reply, nbytes))
        else:
            self._put(routing, session.authentication.reply(reply, self._layouts.digest), nbytes)

    def _delivery(self, session: SessionConnection, routing: bytes, reply: Answer, nbytes: int) -> Job:
        """Send a lease, encoded only when its batch is: many leases that wait may have the same layout."""
        if layout := session.authentication.bulk(reply.body):
            yield from self._layouts.steps(layout)
        self._put(routing, partial(session.authentication.reply, reply, self._layouts.digest), nbytes)
        return None

    def _put(self, routing: bytes, frame: framing.Part, nbytes: int) -> None:
        self._batches[-1] += (routing, frame)
        self._unsent += nbytes
        if self._unsent > framing.FULL:
            self._batches.append([])
            self._unsent, self.full = 0, True


def own_failure(error: Exception) -> Failed:
    """Return the answer to a request at which the broker itself failed."""
    return Failed(InternalFailure.code, f"the broker itself failed at this request: {error!r}; its log says more")


def _suspect(session: SessionConnection) -> None:
    """Count a request in a session's name that its client did not write."""
    session.forged += 1
    if session.forged == 1:
        log.warning(
            "dropping forged requests in the name of session %d (pid %d): a peer sends them, or an attacker controls"
            " the gateway",
            session.number,
            session.peer.pid,
        )


def head(data: bytes) -> tuple[bytes, int]:
    """Return the secret and the id at the start of a message, and decode no more; ``(b"", 0)`` if it has none."""
    unpacker = msgpack.Unpacker(max_buffer_size=HEAD, max_array_len=0, max_map_len=0)
    unpacker.feed(data[:HEAD])
    try:
        unpacker.read_array_header()
        secret, request = unpacker.unpack(), unpacker.unpack()
    except (msgpack.UnpackException, ValueError):
        return b"", 0
    # A bool is an int, hence type(); and an id that is too large for an answer is invalid.
    fits = type(secret) is bytes and type(request) is int and 0 < request < 1 << 63
    return (secret, request) if fits else (b"", 0)


# -- layouts -------------------------------------------------------------------------------------------


class RecentLayouts:
    """A cache of the checks and digests of layouts; the layout that was added first is dropped first.

    A model is published again and again, and checking 723 tensors takes a millisecond. Every reply with a layout of
    more than a few kilobytes is authenticated by the layout's digest. All leases on a version have the same layout,
    perhaps of megabytes, and computing a digest takes a millisecond per megabyte.
    """

    def __init__(self) -> None:
        self._known: dict[bytes, _Known] = {}
        self._nbytes = 0

    def check(self, layout: SharedLayout) -> Generator[None, None, Outline | Failed]:
        """Check a layout in short steps, unless an earlier check found it valid."""
        known = self._known.get(layout.data)
        if known and known.outline:
            return known.outline
        outcome = yield from layout.check()
        if isinstance(outcome, Outline):
            self._remember(layout.data).outline = outcome
        return outcome

    def digest(self, layout: bytes) -> bytes:
        """Return a layout's digest, computed without a pause if it is not known."""
        deque(self.steps(layout), maxlen=0)
        return self._known[layout].digest

    def steps(self, layout: bytes) -> Generator[None, None, None]:
        """Compute a layout's digest in short steps, unless it is known."""
        known = self._known.get(layout)
        if known and known.digest:
            return
        digest, view = Digest(), memoryview(layout)
        for start in range(0, len(layout), HASH_STEP):
            digest.add(view[start : start + HASH_STEP])
            yield
        self._remember(layout).digest = digest.done()

    def _remember(self, layout: bytes) -> _Known:
        """Return the entry of a layout, added if it is new; drop the oldest others past :data:`MAX_REMEMBERED`."""
        if layout not in self._known:
            self._known[layout] = _Known()
            self._nbytes += len(layout)
        while self._nbytes > MAX_REMEMBERED and len(self._known) > 1:
            oldest = next(iter(self._known))
            del self._known[oldest]
            self._nbytes -= len(oldest)
        return self._known[layout]


class _Known(Struct):
    """What was computed from a layout."""

    #: Empty if it is not computed yet.
    digest: bytes = b""
    #: None if the layout was not checked, or is invalid.
    outline: Outline | None = None


# -- turns ---------------------------------------------------------------------------------------------


class FairQueue:
    """The expensive jobs of all users, and whose turn it is.

    Args:
        queue: gets :class:`~cubroker.server.event_queue.TurnDue` whenever the next :meth:`step` should be made.
        loop: the event loop of ``queue``.

    Attributes:
        paused: whether steps are suspended.
    """

    def __init__(self, queue: EventQueue, loop: asyncio.AbstractEventLoop) -> None:
        self._queue = queue
        self._loop = loop
        self._users: dict[int, _User] = {}
        self._now = 0.0  # the loop time that the user of the last step had used before it
        self._armed = False
        self.paused = False
        self._round = 0.0  # when the last round of the loop began, or the step in it ended
        self._due = 0.0  # when the loop's other work has had as long as the last step

    def put(self, uid: int, owner: Hashable, number: int, job: Job) -> None:
        """Add a job for request ``number`` of a session; it begins immediately if this round of the loop had no step.

        A request has one job at a time: a second one is dropped.
        """
        if self.has(uid, owner, number):
            return
        user = self._users.get(uid)
        if user is None:
            user = self._users[uid] = _User(self._now)
        user.lines.setdefault(owner, {})[number] = job
        if not self._armed and not self.paused:
            self._arm()
            self._queue.put(TurnDue())

    def has(self, uid: int, owner: Hashable, number: int) -> bool:
        """Whether a job of the request waits or was interrupted."""
        user = self._users.get(uid)
        if user is None:
            return False
        current = user.current
        if number in user.lines.get(owner, ()):
            return True
        return current is not None and (current.owner, current.number) == (owner, number)

    def step(self) -> Iterator[Outcome]:
        """Make the next step; if a job ends in it, yield the job's outcome.

        The time that the caller spends on the outcome, until it resumes this iterator, counts for the job's user.
        """
        if not self._users or self.paused:
            return
        if not self._armed:
            self._arm()
        uid, user = min(self._users.items(), key=lambda item: item[1].spent)
        self._now, began = user.spent, perf_counter()
        try:
            if (outcome := user.step(began + QUANTUM)) is not None:
                yield outcome
        finally:
            self._round = ended = perf_counter()
            self._due = ended + ended - began
            user.spent += ended - began
            if user.idle and self._users.get(uid) is user:
                del self._users[uid]

    def drop(self, uid: int, owner: Hashable) -> None:
        """Drop the jobs of a session."""
        user = self._users.get(uid)
        if user is None:
            return
        user.lines.pop(owner, None)
        if user.current and user.current.owner == owner:
            user.current = None
        if user.idle:
            del self._users[uid]

    def pause(self) -> None:
        """Make no step until :meth:`resume`."""
        self.paused = True

    def resume(self) -> None:
        """Make steps again."""
        self.paused = False
        if self._users and not self._armed:
            self._arm()

    def close(self) -> None:
        """Drop all jobs."""
        self._users.clear()

    def _arm(self) -> None:
        self._armed = True
        self._loop.call_soon(self._look)

    def _look(self) -> None:
        """Schedule the next step after an idle round, or once other work has had as long as the last step."""
        began, self._round = self._round, perf_counter()
        if self._round - began > IDLE_ROUND and self._round < self._due:
            self._loop.call_soon(self._look)
        else:
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._armed = False
        if self._users and not self.paused:
            self._queue.put(TurnDue())


@dataclass(slots=True, eq=False)
class _User:
    """The jobs of one user."""

    #: Seconds of the loop's time that the user has used.
    spent: float
    #: The jobs that wait, by session, the next session first, and by request.
    lines: dict[Hashable, dict[int, Job]] = field(default_factory=dict)
    #: The job under way. A user has one at most, and so the memory of one unfinished job.
    current: _Current | None = None

    @property
    def idle(self) -> bool:
        return self.current is None and not self.lines

    def step(self, until: float) -> Outcome | None:
        """Run the current job to its end, or past ``until``; return what it led to."""
        current = self.current = self.current or self._next()
        try:
            while True:
                next(current.job)
                if perf_counter() >= until or self.current is not current:  # or its session ended in this step
                    return None
        except StopIteration as end:
            self.current = None
            outcome: Outcome | None = end.value
            return outcome
        except BaseException:
            self.current = None
            raise

    def _next(self) -> _Current:
        owner = next(iter(self.lines))
        line = self.lines.pop(owner)
        number = next(iter(line))
        job = line.pop(number)
        if line:
            self.lines[owner] = line
        return _Current(owner, number, job)


@dataclass(slots=True)
class _Current:
    """The job that a user's turns are spent on until it is done."""

    owner: Hashable
    number: int
    job: Job
