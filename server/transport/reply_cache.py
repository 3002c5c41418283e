"""The requests of one session and their replies: a request that is sent again is answered again, not done again.

Pure. A request is *pending* from its first arrival until its reply. The reply is *kept* until the client acknowledges
it: by its number (``received``), or with all replies before a number (``oldest``). From then on only the number is
remembered, as part of a span, since a copy of the request may still be on its way. Of a reply that only reports
something, such as a list, only the length is kept, and a copy of the request is done again. If replies outlive the
broker, :meth:`ReplyCache.changes` has what is to be written down.

All of this is bounded. For each session, the number of requests is bounded, and the bytes as they travel, so that a
client which acknowledges nothing is not sent replies without end. For each user, the memory is bounded over all of the
user's sessions, so that more sessions do not get more memory. A layout counts once for its user, however many requests
and replies have it: a thousand workers that attach to one model, or publish the same one, cost its layout once. The end
of a session releases all that it costs.

Past a bound further requests are refused, and so are their copies, however late: their numbers are remembered, as spans
too, until the client has the refusals. A request that gives something back is not refused but ignored, and is done when
it is sent again and there is room. A cancel that arrives before the request that it cancels is ignored, too.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Generator, Iterable, Mapping
from enum import Enum

from msgspec import Struct

from cubroker.protocol import layout as layouts
from cubroker.protocol.errors import InternalFailure, Invalid
from cubroker.protocol.layout import Outline
from cubroker.protocol.messages import DESCRIPTOR, Answer, Attached, Created, Failed

MAX_BYTES = 64 << 20  #: Bytes that the requests and answers of one user may cost: a few of the largest messages.

SHARE = 16 << 10
"""Bytes of those that each session may always use, so that one session of a user does not stop the others."""

OVERHEAD = 512  #: Bytes that a request or an answer counts in addition to its own, for the objects about it.
MAX_REQUESTS = 4096  #: Requests of one session that are pending or whose answers are kept.

MAX_REFUSED = 64
"""Runs of refused requests of one session, which are written down with each change of the session. Past that the
requests between the runs are refused as well."""

Frame = bytes | Answer
"""An answer: encoded; or a lease as an object, encoded each time it is sent. All leases on a version share its layout,
which can take megabytes, and any number of requests may wait for the version."""

LEASES = (Attached, Created)


class SharedLayout:
    """An encoded layout, and the outcome of its check.

    Attributes:
        data: the layout as it travels.
        holders: how many requests and answers of the user have it.
    """

    __slots__ = ("_outcome", "data", "holders")

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.holders = 0
        self._outcome: Outline | Failed | None = None

    def check(self) -> Generator[None, None, Outline | Failed]:
        """Check the layout in short steps, or return the earlier outcome."""
        if self._outcome is None:
            try:
                self._outcome = yield from layouts.outline(self.data)
            except Invalid as error:
                self._outcome = Failed(error.code, error.message)
            except MemoryError:  # not kept as the outcome: a later check may find memory
                reason = f"the broker has no memory to check a layout of {len(self.data)} bytes; make it smaller"
                return Failed(InternalFailure.code, reason)
        return self._outcome


class ReplyAccount:
    """What one user's requests and answers cost.

    Attributes:
        nbytes: what they cost together, in bytes. Those of layouts are counted here, all others by the caches.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._layouts: dict[bytes, SharedLayout] = {}

    def has_room(self, nbytes: int, layout: bytes) -> bool:
        """Whether ``nbytes`` more may be kept, and a layout, which may be empty."""
        new = 0 if layout in self._layouts else len(layout)
        return self.nbytes + nbytes + new <= MAX_BYTES

    def hold(self, layout: bytes) -> None:
        """Count one more holder of a layout."""
        shared = self._layouts.get(layout)
        if shared is None:
            shared = self._layouts[layout] = SharedLayout(layout)
            self.nbytes += len(layout)
        shared.holders += 1

    def release(self, layout: bytes) -> None:
        """Undo :meth:`hold`."""
        shared = self._layouts[layout]
        shared.holders -= 1
        if not shared.holders:
            del self._layouts[layout]
            self.nbytes -= len(layout)

    def shared(self, layout: bytes) -> SharedLayout:
        """Return the one copy of a layout that has a holder; one that has none, or is empty, is not shared."""
        return self._layouts.get(layout) or SharedLayout(layout)


class CachedReply(Struct, frozen=True, gc=False):
    """An answer that its client may not have received."""

    #: The answer; None if a copy of the request is done again.
    frame: Frame | None
    #: Bytes that count for its user, without the layout.
    cost: int
    #: The layout, which other answers may share; empty if it has none.
    layout: bytes
    #: Bytes on the request socket.
    travelling: int


def parts(answer: Answer) -> tuple[int, bytes]:
    """Return about how many bytes a lease has as it travels, without its layout; and the layout, which may be empty."""
    body = answer.body
    assert isinstance(body, LEASES)
    replicas = body.replicas
    layout = body.layout if type(body) is Attached else b""
    # Each allocation has a handle of 64 bytes on one device, or a placeholder for a descriptor on each device.
    return len(replicas[0].handles) * (64 + (2 + len(DESCRIPTOR)) * len(replicas)), layout


class Admission(Enum):
    """What to do with a request that arrived."""

    NEW = "do it"
    PENDING = "it is being done; its answer goes to where it was asked from last"
    STALE = "the client said that it has the answer: ignore it"
    FULL = "refuse it, for good"
    LATER = "ignore it until it is sent again"


class Spans:
    """A set of mostly consecutive numbers, stored as the edges of its runs.

    Attributes:
        edges: for each run, in ascending order, its first number and the number after its last.
    """

    def __init__(self, edges: Iterable[int] = ()) -> None:
        self.edges = list(edges)

    def __contains__(self, number: int) -> bool:
        return bisect_right(self.edges, number) % 2 == 1

    def __len__(self) -> int:
        return len(self.edges) // 2

    def add(self, number: int) -> None:
        """Add a number that is not in it."""
        edges = self.edges
        place = bisect_right(edges, number)
        start = place - 1 if place and edges[place - 1] == number else place
        end = place + 1 if place < len(edges) and edges[place] == number + 1 else place
        edges[start:end] = [number] * (start == place) + [number + 1] * (end == place)

    def drop_runs_before(self, number: int) -> None:
        """Forget the runs that end before ``number``."""
        place = bisect_right(self.edges, number)
        del self.edges[: place - place % 2]

    def close_gaps(self) -> None:
        """Add all numbers between the lowest and the highest."""
        del self.edges[1:-1]


class Receipts(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a client has acknowledged, and what it was refused permanently."""

    #: The client has all replies before this number.
    oldest: int
    #: Edges of :class:`Spans`; 0 if there are none, as earlier builds write and read it. Those wrote only the highest
    #: refused number, and also refused all unknown numbers before it.
    refused: tuple[int, ...] | int
    #: Edges of :class:`Spans`: other replies that the client has.
    received: tuple[int, ...]

    def refused_edges(self) -> tuple[int, ...]:
        """Return ``refused`` in the form in which it is written now."""
        if isinstance(self.refused, tuple):
            return self.refused
        return (self.oldest, self.refused + 1) if self.oldest <= self.refused > 0 else ()


NO_RECEIPTS = Receipts(0, 0, ())


class ReplyCache:
    """The requests of one session that its client may send again.

    Args:
        receipts: the receipts of the session, if an earlier broker opened it.
        kept: the answers that an earlier broker kept, in order of their numbers; None for those that are not to be
            kept any more.
    """

    def __init__(self, receipts: Receipts | None = None, kept: Mapping[int, Frame | None] | None = None) -> None:
        receipts, kept = receipts or NO_RECEIPTS, kept or {}
        #: The account that the requests and answers are counted on.
        self.account = ReplyAccount()
        self._nbytes = 0  # what this session has on the account, without layouts
        self._travelling = 0  # bytes of requests without an answer and of answers without a receipt
        self._pending: dict[int, tuple[bytes, int, bytes]] = {}  # routing id, bytes and layout of the request
        self._kept: dict[int, CachedReply] = {}
        self._received = Spans(receipts.received)
        self._oldest = receipts.oldest
        self._refused = Spans(receipts.refused_edges())
        for number, frame in kept.items():
            if frame is not None:
                self._keep_answer(number, frame)
        self._lasting: set[int] = set(self._kept)
        #: Lasting answers that are not written down yet, and None for those that are not kept any more.
        self.changes: dict[int, Frame | None] = dict.fromkeys(kept.keys() - self._kept.keys())

    @property
    def receipts(self) -> Receipts:
        """What the client has acknowledged, and what it was refused."""
        return Receipts(self._oldest, tuple(self._refused.edges) or 0, tuple(self._received.edges))

    @property
    def lasting(self) -> frozenset[int]:
        """The requests whose answers are written down."""
        return frozenset(self._lasting)

    def written(self) -> None:
        """Forget the changes, after all of them were encoded."""
        self.changes = {}

    @property
    def crowded(self) -> bool:
        """Whether unanswered requests and unacknowledged answers have too many bytes for another report now."""
        return self._travelling > MAX_BYTES

    def move(self, account: ReplyAccount) -> None:
        """Count everything on another account from now on: that of the session's user."""
        self.account.nbytes -= self._nbytes
        account.nbytes += self._nbytes
        pending, kept = self._pending.values(), self._kept.values()
        for layout in filter(None, [*(layout for _, _, layout in pending), *(answer.layout for answer in kept)]):
            self.account.release(layout)
            account.hold(layout)
        self.account = account

    def abandon(self) -> None:
        """Forget all requests that are pending: their client receives no answer any more."""
        for number in tuple(self._pending):
            self._answered(number)

    def close(self) -> None:
        """Forget everything."""
        self.abandon()
        for answer in self._kept.values():
            if answer.layout:
                self.account.release(answer.layout)
        self._kept.clear()
        self.account.nbytes -= self._nbytes
        self._nbytes = 0

    def admit(
        self,
        number: int,
        oldest: int,
        routing: bytes,
        nbytes: int,
        received: Iterable[int] = (),
        *,
        must_deliver: bool = False,
        about: int = 0,
        layout: bytes = b"",
    ) -> Admission | Frame:
        """Record request ``number``, ``nbytes`` long without its ``layout``; return the kept answer, if any.

        ``must_deliver``: the client repeats the request until it is answered, and accepts no refusal. ``about``: the
        earlier request that it cancels. If that was lost in an earlier broker's gateway, it is still to come.
        """
        for other in received:
            if other in self._kept:
                self._forget(other)
                self._received.add(other)
        if oldest > self._oldest:
            self._acknowledge(oldest)
        if (kept := self._kept.get(number)) is not None:
            if kept.frame is not None:
                return kept.frame
            self._forget(number)  # the request is done again
        if number in self._pending:
            self._pending[number] = (routing, *self._pending[number][1:])
            return Admission.PENDING
        edges = self._received.edges  # nearly always there are none, and no refused ones either
        if number < self._oldest or (edges and number in self._received):
            return Admission.STALE
        if self._refused.edges and number in self._refused and not must_deliver:
            return Admission.FULL
        known = len(self._pending) + len(self._kept) + len(edges) // 2
        cost, travelling = nbytes + OVERHEAD, self._travelling + nbytes + len(layout)
        room = self._nbytes + cost + len(layout) <= SHARE or self.account.has_room(cost, layout)
        if known >= MAX_REQUESTS or (known and travelling > MAX_BYTES) or not room:
            if must_deliver:
                return Admission.LATER
            self._refuse(number)
            return Admission.FULL
        if 0 < about < number and self._is_to_come(about):
            return Admission.LATER
        self._pending[number] = (routing, cost, layout)
        self._nbytes += cost
        self.account.nbytes += cost
        self._travelling = travelling
        if layout:
            self.account.hold(layout)
        return Admission.NEW

    def settle(self, number: int, answer: Frame, *, lasting: bool = False) -> bytes:
        """Keep the answer of a pending request and return the routing id to send it to.

        ``lasting``: the answer is to be written down, since the request must not be done again after a restart either.
        """
        routing = self._answered(number)
        if number >= self._oldest:  # else the client gave the request up
            self._keep_answer(number, answer)
            if lasting:
                self._lasting.add(number)
                self.changes[number] = answer
        return routing

    def tell(self, number: int, nbytes: int) -> bytes:
        """Forget a pending request whose answer, ``nbytes`` long, is not kept; return the routing id to send it to."""
        routing = self._answered(number)
        if number >= self._oldest:
            self._keep(number, CachedReply(None, OVERHEAD, b"", nbytes))
        return routing

    def is_pending(self, number: int) -> bool:
        """Whether the request is still to be answered."""
        return number in self._pending

    def _refuse(self, number: int) -> None:
        self._refused.add(number)
        if len(self._refused) > MAX_REFUSED:  # a request between them that is neither pending nor kept was lost
            self._refused.close_gaps()

    def _is_to_come(self, number: int) -> bool:
        """Whether a request has not arrived and would be done if it did: its client has no answer or refusal of it."""
        there = number in self._pending or number in self._kept or number in self._received
        return not there and number >= self._oldest and number not in self._refused

    def _acknowledge(self, oldest: int) -> None:
        """Drop kept answers, up to the first that is not before ``oldest``; requests are answered about in order."""
        self._oldest = oldest
        for spans in (self._received, self._refused):
            if spans.edges:  # nearly always there are none
                spans.drop_runs_before(oldest)
        kept = self._kept
        while kept and (number := next(iter(kept))) < oldest:
            self._forget(number)

    def _forget(self, number: int) -> None:
        answer = self._kept.pop(number)
        self._nbytes -= answer.cost
        self.account.nbytes -= answer.cost
        self._travelling -= answer.travelling
        if answer.layout:
            self.account.release(answer.layout)
        if number in self._lasting:
            self._lasting.remove(number)
            self.changes[number] = None

    def _keep_answer(self, number: int, answer: Frame) -> None:
        own, layout = (len(answer), b"") if isinstance(answer, bytes) else parts(answer)
        self._keep(number, CachedReply(answer, own + OVERHEAD, layout, own + len(layout)))
        if layout:
            self.account.hold(layout)

    def _keep(self, number: int, reply: CachedReply) -> None:
        """Keep a reply, and count it without its layout."""
        self._kept[number] = reply
        self._nbytes += reply.cost
        self.account.nbytes += reply.cost
        self._travelling += reply.travelling

    def _answered(self, number: int) -> bytes:
        """Forget a pending request, and return the routing id that its answer goes to."""
        routing, cost, layout = self._pending.pop(number)
        self._nbytes -= cost
        self.account.nbytes -= cost
        self._travelling -= cost - OVERHEAD + len(layout)
        if layout:
            self.account.release(layout)
        return routing
