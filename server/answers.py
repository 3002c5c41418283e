"""What one session asked and was answered: a request that is sent again is answered again, not done again.

Pure. A request is *pending* from its first arrival until its answer, which is *kept* until the
client says that it has it: by its number (``received``), or with all before one (``oldest``).
From then on only the number is remembered, as part of a span, since a copy may still be on its way.
Of an answer that only tells something, such as a list, no more than its length is kept: whoever asks again is told
again.
Where answers outlive the broker, :meth:`Answers.changes` tells what is to be written down of them.
All of it is bounded: for each session in number, and in bytes as they travel, so that a client which acknowledges
nothing is not sent answers without end; for each user in the bytes that it costs (:mod:`cubroker.server.accounts`).
Past a bound further requests are refused, and so are their copies, however late. Of those only the highest number
is remembered: what came before it and is not known was lost, or refused as well. What a client insists on, since it
gives something back, is not refused but ignored, and so done when it is sent again and there is room; so is a cancel
that comes before what it is meant for.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from enum import Enum

from msgspec import Struct

from cubroker.protocol.messages import DESCRIPTOR, Answer, Attached, Created
from cubroker.server.accounts import MAX_BYTES, OVERHEAD, SHARE, Account

MAX_REQUESTS = 4096
"""Requests of one session that are pending or whose answers are kept."""

Frame = bytes | Answer
"""An answer: encoded, or a lease as it is, to be encoded whenever it is sent. All leases on a version share its layout,
which can take megabytes, and any number of requests may wait for it."""

LEASES = (Attached, Created)


class KeptAnswer(Struct, frozen=True, gc=False):
    """An answer that its client may not have.

    Attributes:
        frame: the answer; None of one that can be worked out anew.
        cost: bytes that it counts for its user, but for its layout.
        layout: what it has in common with others, or nothing.
        travelling: bytes of it as it travels.
    """

    frame: Frame | None
    cost: int
    layout: bytes
    travelling: int


def weight(answer: Frame) -> int:
    """Return the bytes of an answer as it travels, or about so many."""
    if isinstance(answer, bytes):
        return len(answer)
    own, layout = parts(answer)
    return own + len(layout)


def parts(answer: Frame) -> tuple[int, bytes]:
    """Return about how many bytes an answer has of its own, and the layout that it shares with others, or nothing."""
    if isinstance(answer, bytes):
        return len(answer), b""
    body = answer.body
    assert isinstance(body, LEASES)
    replicas = body.replicas
    layout = body.layout if isinstance(body, Attached) else b""
    # Each allocation has a handle of 64 bytes on one device, or what stands for a descriptor on each.
    return len(replicas[0].handles) * (64 + (2 + len(DESCRIPTOR)) * len(replicas)), layout


class Verdict(Enum):
    """What to do with a request that arrived."""

    NEW = "do it"
    PENDING = "it is being done; its answer goes to where it was asked from last"
    STALE = "the client said that it has the answer: ignore it"
    FULL = "refuse it, for good"
    LATER = "ignore it until it is sent again"


class Spans:
    """A set of numbers that mostly follow each other, as the edges of its runs.

    Attributes:
        edges: the first number of a run and the one after its last, the first of the next run, …: they rise.
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


class Receipts(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What a client has said that it has, and the highest number that it was refused for good."""

    oldest: int
    refused: int
    received: tuple[int, ...]


NO_RECEIPTS = Receipts(0, 0, ())


class Answers:
    """The requests of one session that its client may send again.

    Args:
        receipts: those of the session, if it is an earlier broker's.
        kept: the answers that are kept of it, in order of their numbers; None for those that are not to be kept any
            more.
    """

    def __init__(self, receipts: Receipts | None = None, kept: Mapping[int, Frame | None] | None = None) -> None:
        receipts, kept = receipts or NO_RECEIPTS, kept or {}
        self._account = Account()
        self._nbytes = 0  # what is on the account, layouts apart
        self._travelling = 0  # bytes of requests without an answer and of answers without a receipt
        self._pending: dict[int, tuple[bytes, int, bytes]] = {}  # routing id, bytes and layout of the request
        self._kept: dict[int, KeptAnswer] = {}
        self._received = Spans(receipts.received)
        self._oldest = receipts.oldest
        self._refused = receipts.refused
        for number, frame in kept.items():
            if frame is not None:
                self._keep(number, _kept(frame))
        self._lasting: set[int] = set(self._kept)
        self._changes: dict[int, Frame | None] = dict.fromkeys(kept.keys() - self._kept.keys())

    @property
    def receipts(self) -> Receipts:
        """What the client has said that it has."""
        return Receipts(self._oldest, self._refused, tuple(self._received.edges))

    @property
    def lasting(self) -> frozenset[int]:
        """The requests whose answers are written down."""
        return frozenset(self._lasting)

    def changes(self) -> dict[int, Frame | None]:
        """Return the lasting answers that came since the last call, and None for those that are not kept any more."""
        changes, self._changes = self._changes, {}
        return changes

    @property
    def account(self) -> Account:
        """What the requests and answers count on."""
        return self._account

    @property
    def crowded(self) -> bool:
        """Whether more bytes have no answer or receipt than there may be: nothing more should be told for now."""
        return self._travelling > MAX_BYTES

    def move(self, account: Account) -> None:
        """Count everything on another account from now on: that of the session's user."""
        for nbytes, layout in (
            *((cost, layout) for _, cost, layout in self._pending.values()),
            *((answer.cost, answer.layout) for answer in self._kept.values()),
        ):
            self._account.remove(nbytes, layout)
            account.add(nbytes, layout)
        self._account = account

    def abandon(self) -> None:
        """Forget all requests that are pending: their client hears no answer any more."""
        for number in tuple(self._pending):
            self._answered(number)

    def close(self) -> None:
        """Forget everything."""
        self.abandon()
        for answer in self._kept.values():
            self._account.remove(answer.cost, answer.layout)
        self._kept.clear()

    def admit(
        self,
        number: int,
        oldest: int,
        routing: bytes,
        nbytes: int,
        received: Iterable[int] = (),
        *,
        insisted: bool = False,
        about: int = 0,
        layout: bytes = b"",
    ) -> Verdict | Frame:
        """Take note of request ``number``, ``nbytes`` long without its ``layout``; return the kept answer, if any.

        ``insisted``: its client sends it until it is answered, and takes no refusal. ``about``: an earlier request
        that it cancels. Where that was lost on the way, to an earlier broker's gateway, it is still to come.
        """
        for other in received:
            self._drop(other)
        if oldest > self._oldest:
            self._acknowledge(oldest)
        if (kept := self._kept.get(number)) is not None:
            if kept.frame is not None:
                return kept.frame
            self._forget(number)
        if number in self._pending:
            self._pending[number] = (routing, *self._pending[number][1:])
            return Verdict.PENDING
        edges = self._received.edges  # nearly always there are none
        if number < self._oldest or (edges and number in self._received):
            return Verdict.STALE
        if number <= self._refused and not insisted:
            return Verdict.FULL
        known = len(self._pending) + len(self._kept) + len(edges) // 2
        cost, travelling = nbytes + OVERHEAD, self._travelling + nbytes + len(layout)
        if known >= MAX_REQUESTS or (known and travelling > MAX_BYTES) or not self._has_room(cost, layout):
            if insisted:
                return Verdict.LATER
            self._refused = number
            return Verdict.FULL
        if 0 < about < number and self._is_to_come(about):
            return Verdict.LATER
        self._pending[number] = (routing, cost, layout)
        self._nbytes += cost
        self._travelling = travelling
        self._account.add(cost, layout)
        return Verdict.NEW

    def settle(self, number: int, answer: Frame, *, lasting: bool = False) -> bytes:
        """Keep the answer of a pending request and return the routing id to send it to.

        ``lasting``: it is to be written down, since the request must not be done again after a restart either.
        """
        routing = self._answered(number)
        if number >= self._oldest:  # else the client gave it up
            self._keep(number, _kept(answer))
            if lasting:
                self._lasting.add(number)
                self._changes[number] = answer
        return routing

    def tell(self, number: int, nbytes: int) -> bytes:
        """Forget a pending request whose answer, ``nbytes`` long, is not kept; return the routing id to send it to."""
        routing = self._answered(number)
        if number >= self._oldest:
            self._keep(number, KeptAnswer(None, OVERHEAD, b"", nbytes))
        return routing

    def is_pending(self, number: int) -> bool:
        """Whether the request is still to be answered."""
        return number in self._pending

    def _is_to_come(self, number: int) -> bool:
        """Whether a request would be done if it came: it did not, and its client has no answer or refusal of it."""
        there = number in self._pending or number in self._kept or number in self._received
        return not there and number >= self._oldest and number > self._refused

    def _drop(self, number: int) -> None:
        """Drop an answer that the client has, and remember that it has it."""
        if number in self._kept:
            self._forget(number)
            self._received.add(number)

    def _acknowledge(self, oldest: int) -> None:
        """Drop kept answers before ``oldest``, up to the first that stays; requests are answered about in order."""
        self._oldest = oldest
        if self._received.edges:
            self._received.drop_runs_before(oldest)
        kept = self._kept
        while kept and (number := next(iter(kept))) < oldest:
            self._forget(number)

    def _forget(self, number: int) -> None:
        answer = self._kept.pop(number)
        self._nbytes -= answer.cost
        self._travelling -= answer.travelling
        self._account.remove(answer.cost, answer.layout)
        if number in self._lasting:
            self._lasting.remove(number)
            self._changes[number] = None

    def _keep(self, number: int, answer: KeptAnswer) -> None:
        self._kept[number] = answer
        self._nbytes += answer.cost
        self._travelling += answer.travelling
        self._account.add(answer.cost, answer.layout)

    def _answered(self, number: int) -> bytes:
        """Forget a pending request, and return the routing id that its answer goes to."""
        routing, cost, layout = self._pending.pop(number)
        self._nbytes -= cost
        self._travelling -= cost - OVERHEAD + len(layout)
        self._account.remove(cost, layout)
        return routing

    def _has_room(self, cost: int, layout: bytes) -> bool:
        return self._nbytes + cost + len(layout) <= SHARE or self._account.has_room(cost, layout)


def _kept(answer: Frame) -> KeptAnswer:
    own, layout = parts(answer)
    return KeptAnswer(answer, own + OVERHEAD, layout, own + len(layout))
