"""A target that plays what it reads: requests of three sessions go to a ledger, whose books are checked after each.

An input is a sequence of records: two bytes of length, one that says what happens, and the rest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace

from cubroker.protocol import messages as m
from cubroker.protocol import wire
from cubroker.protocol.layout import Layout
from cubroker.protocol.messages import AUTHENTICATED, VERSIONS
from cubroker.protocol.wire import Keyed, authentication
from cubroker.server.event_queue import BatchReceived, TurnDue
from cubroker.server.ledger import Budget, Ledger, Limits
from cubroker.server.ledger import events as e
from cubroker.server.transport import framing
from cubroker.server.transport.reply_cache import Frame, ReplyCache
from cubroker.server.transport.requests import IncomingRequests

MIB = 1 << 20
DEVICES = (Budget(0, "GPU-a", "first", 16 * MIB, 12 * MIB), Budget(1, "GPU-b", "second", 16 * MIB, 8 * MIB))
LIMITS = Limits(leases=6, requests=4, watches=3)
SECRETS = tuple(bytes([number]) * 16 for number in (1, 2, 3))

FRAME, DEVICE, FAILURE, TIME, LOST, GONE = range(6)


def _speaks(session: int) -> int:
    """The protocol version of a session: the newest, or of an odd one the last whose requests have the secret."""
    return AUTHENTICATED - 1 if session % 2 else VERSIONS[-1]


class Guest:
    """As much of a session as requests need."""

    def __init__(self, number: int, secret: bytes) -> None:
        self.number = number
        self.authentication = authentication(_speaks(number), number, secret)
        self.forged = 0
        self.replies = ReplyCache()
        self.peer = SimpleNamespace(uid=1000 + number // 3, pid=100 + number)


class Loop:
    """As much of an event loop as turns need; its rounds are made by hand."""

    def __init__(self) -> None:
        self.soon: deque[Callable[[], None]] = deque()
        self.call_soon = self.soon.append


class World:
    """The broker's requests and its ledger, without sockets, clock and devices."""

    def __init__(self) -> None:
        self.ledger = Ledger(DEVICES, 0, LIMITS)
        self.loop = Loop()
        self.requests = IncomingRequests(self, self.loop)  # type: ignore[arg-type]
        self.guests: dict[int, Guest] = {}
        self.submitted: deque[e.Allocate | e.Free | e.BindMulticast | e.UnbindMulticast] = deque()
        self.timers: dict[int, float] = {}
        for number, secret in enumerate(SECRETS, 1):
            self.guests[number] = guest = Guest(number, secret)
            self.requests.enter(guest)  # type: ignore[arg-type]
            self.tell(e.SessionOpened(number, 100 + number, 1000 + number // 3, 1000))

    def put(self, event: BatchReceived | TurnDue) -> None:
        """Take a batch or a turn, and send the replies."""
        batch = isinstance(event, BatchReceived)
        for outcome in self.requests.decode(event.requests) if batch else self.requests.turns.step():
            if isinstance(outcome, e.Respond):
                self.requests.respond(self.guests[outcome.session], outcome.request, outcome.body)  # type: ignore[arg-type]
            else:
                self.tell(outcome)
        for replies in self.requests.replies():
            self.take(replies)

    def take(self, frames: Sequence[Frame]) -> None:
        """Every answer can be read by its client."""
        for _, frame in framing.pairs(wire.unpack(framing.encode(frames), list[bytes])):
            guests = [guest.authentication for guest in self.guests.values()]
            plain = any(isinstance(each, Keyed) and each.read(frame) for each in guests)
            assert plain or wire.unpack(frame, m.Answer)

    def tell(self, event: e.LedgerEvent) -> None:
        for effect in self.ledger.handle(event):
            match effect:
                case e.Respond(session, request, body):
                    self.requests.respond(self.guests[session], request, body)  # type: ignore[arg-type]
                case e.Allocate() | e.Free() | e.BindMulticast() | e.UnbindMulticast():
                    self.submitted.append(effect)
                case e.SetTimer(timer, seconds):
                    self.timers[timer] = seconds
                case e.CancelTimer(timer):
                    del self.timers[timer]
                case e.Notify(session, notice):
                    wire.unpack(wire.pack(notice), m.Notice)
                case e.ForgetSession(session):
                    self.requests.leave(self.guests.pop(session))  # type: ignore[arg-type]
        self.ledger.check()

    def happen(self, what: int, rest: bytes) -> None:
        if what == DEVICE and self.submitted:
            self.device(self.submitted.popleft(), failed=False)
        elif what == FAILURE and self.submitted:
            self.device(self.submitted.popleft(), failed=True)
        elif what == TIME and self.timers:
            timer = next(iter(self.timers))
            del self.timers[timer]
            self.tell(e.TimerExpired(timer))
        elif what in (LOST, GONE) and rest:
            number = rest[0] % 4
            self.tell(e.ConnectionLost(number) if what == LOST else e.ProcessExited(number))
        elif what == FRAME:
            self.put(BatchReceived([(rest[:1], rest)]))
        while self.loop.soon:
            self.loop.soon.popleft()()
        for replies in self.requests.replies():
            self.take(replies)

    def device(self, request: e.Allocate | e.Free | e.BindMulticast | e.UnbindMulticast, *, failed: bool) -> None:
        if isinstance(request, e.Free):
            self.tell(e.Freed(request.ticket))
        elif isinstance(request, e.UnbindMulticast):
            self.tell(e.MulticastUnbound(request.group))
        elif isinstance(request, e.BindMulticast):
            made = e.MulticastBound(request.group, "multicast", "it works", request.sizes)
            self.tell(e.MulticastBound(request.group, "copies", "no slots left") if failed else made)
        elif failed:
            self.tell(e.AllocationFailed(request.ticket, "out_of_memory", "no"))
        else:
            self.tell(e.Allocated(request.ticket, tuple(bytes(64) for _ in request.sizes)))

    def finish(self) -> None:
        """With all processes gone and all versions retired, no memory is left on the books."""
        self.tell(e.SessionOpened(9, 109, 0, 0, verified=True))
        for number in list(self.guests):
            self.tell(e.ProcessExited(number))
        self.guests[9] = guest = Guest(9, bytes(16))
        self.requests.enter(guest)  # type: ignore[arg-type]
        tables = self.ledger._tables
        versions = [(pool.name, number) for pool in tables.pools.values() for number in pool.versions]
        for number, (name, version) in enumerate(versions, 1):
            request = envelope(9, bytes(16), number, m.Retire(name, version))
            self.put(BatchReceived([(b"", request)]))
        while self.submitted:
            self.device(self.submitted.popleft(), failed=False)
        assert not any((tables.pools, tables.tickets, tables.timers, self.timers)), "something is left"


def play(data: bytes) -> None:
    """Play an input."""
    world = World()
    try:
        for what, rest in records(data):
            world.happen(what, rest)
        world.finish()
    finally:
        world.requests.turns.close()


def records(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Return what happens; a record that promises more than there is gets what there is."""
    while len(data) > 2:
        length = 3 + int.from_bytes(data[:2], "big")
        yield data[2] % 6, data[3:length]
        data = data[length:]


def record(what: int, rest: bytes = b"") -> bytes:
    return len(rest).to_bytes(2, "big") + bytes([what]) + rest


def envelope(who: int, secret: bytes, number: int, body: m.Request) -> bytes:
    client = authentication(_speaks(who), who, secret)
    return client.request(m.Envelope(client.secret, number, 1, body))


def _story(*happenings: tuple[int, m.Request] | int | bytes) -> bytes:
    """An input: requests of sessions (counted from 1), what the devices and the clock do, or ready records."""
    parts = []
    for number, what in enumerate(happenings, 1):
        match what:
            case int():
                parts.append(record(what))
            case bytes():
                parts.append(what)
            case who, body:
                parts.append(record(FRAME, envelope(who, SECRETS[who - 1], number, body)))
    return b"".join(parts)


SMALL = Layout.pack([("x", "F32", (64,)), ("y", "U8", (5,))]).encode()
LARGE = Layout((), (3 * MIB, 5 * MIB)).encode()


def _create(name: str, layout: bytes = SMALL, wait: float = 0.0, attach: str | None = None) -> m.Create:
    where = None if attach is None else m.Where(attach, ("GPU-b",))
    return m.Create(name, layout, ("GPU-a",), "ipc", wait, where)


def _shard(name: str, wait: float = 0.0) -> m.Create:
    return m.Create(name, LARGE, ("GPU-b", "GPU-a"), "vmm", wait, None, None, (1, 0))


def _read_draft(name: str) -> m.Attach:
    return m.Attach(name, 1, None, 5.0, unsealed=True)


BOTH = m.Create("b", SMALL, ("GPU-b", "GPU-a"), "ipc", 5.0, None)
SEEDS = (
    _story((1, _create("a")), DEVICE, (1, m.Seal(1)), (2, m.Attach("a", 0, None, 0.0)), (2, m.Close(2))),
    _story(
        (1, m.Attach("a", 0, None, 9.0)),
        (2, _create("a")),
        DEVICE,
        (2, m.Seal(1)),
        (1, m.Close(2)),
        (2, m.Retire("a", 1)),
    ),
    _story(
        (1, _create("a", LARGE)),
        DEVICE,
        (2, _create("b", LARGE, 5.0)),
        (3, _create("c", SMALL, 5.0)),
        (1, m.Close(1)),
        DEVICE,
        DEVICE,
    ),
    _story(
        (1, _create("a", LARGE)), (2, _create("b", LARGE, 5.0)), TIME, FAILURE, (2, m.Cancel(2)), (1, m.ListPools())
    ),
    _story(
        (1, BOTH),
        DEVICE,
        DEVICE,
        (1, m.Seal(1)),
        (2, m.Attach("b", 1, "GPU-b", 0.0)),
        (3, m.Attach("b", 1, "GPU-c", 0.0, ("GPU-d", "GPU-a"))),
        (1, BOTH),
        record(GONE, b"\x01"),
        DEVICE,
        DEVICE,
        DEVICE,
    ),
    _story(
        (1, m.Watch("a", True)),
        (2, _create("a", SMALL, 1.0, "GPU-a")),
        (3, _create("a", SMALL, 1.0, "GPU-a")),
        DEVICE,
        (2, m.Seal(1)),
        record(LOST, b"\x01"),
    ),
    _story(
        (1, _shard("a")),
        (2, m.Attach("a", 0, "GPU-a", 5.0, ("GPU-b",))),
        DEVICE,
        DEVICE,
        (1, m.Seal(1)),
        (3, m.Attach("a", 0, None, 0.0)),
        (2, m.Close(2)),
        (1, m.Retire("a", 1)),
        record(GONE, b"\x03"),
        DEVICE,
        DEVICE,
    ),
    _story(
        (1, m.ListClients()),
        (2, m.ListDevices()),
        (3, m.Describe("a", 0)),
        (3, m.ListDigests("a", 0)),
        (1, m.Watch("a", False)),
        record(LOST, b"\x02"),
    ),
    _story(
        (1, _create("a")),
        record(LOST, b"\x01"),
        DEVICE,
        (1, m.Seal(1)),
        (2, _create("a")),
        DEVICE,
        record(LOST, b"\x02"),
        (2, m.Seal(1)),
        (2, m.Close(1)),
    ),
    _story(
        (2, _read_draft("a")),
        (1, _create("a")),
        DEVICE,
        (2, m.Seal(2)),
        record(GONE, b"\x01"),
        (2, m.Close(2)),
        DEVICE,
    ),
)
TOKENS = (
    *SECRETS,
    *map(record, (DEVICE, FAILURE, TIME)),
    *(record(what, bytes([who])) for what in (LOST, GONE) for who in (1, 2, 3)),
    *(record(FRAME, envelope(2, SECRETS[1], 90 + number, _read_draft(name))) for number, name in enumerate("ab")),
    *(
        record(FRAME, envelope(number % 3 + 1, SECRETS[number % 3], 40 + number, body))
        for number, body in enumerate(
            (
                *(m.Attach(name, version, None, 5.0) for name in "ab" for version in (0, 1, 2)),
                *(m.Attach(name, 0, "GPU-c", 5.0, ("GPU-b",)) for name in "ab"),
                *(_create(name, layout, 5.0) for name in "ab" for layout in (SMALL, LARGE)),
                *(_shard(name, 5.0) for name in "ab"),
                *(kind(lease) for lease in (1, 2, 3) for kind in (m.Seal, m.Close)),
                *(m.SealInPlace(lease) for lease in (1, 2, 3)),
                *(m.SetLayout(lease, layout) for lease in (1, 2) for layout in (SMALL, LARGE)),
                *(m.SealDigested(lease, m.Digests("x", ((bytes(16),),))) for lease in (1, 2, 3)),
                *(m.Retire(name, 0) for name in "ab"),
                *(m.Watch(name, True) for name in "ab"),
                *(m.Cancel(number) for number in (1, 2, 3, 43)),
            )
        )
    ),
)
