"""The ledger's tests are scripts: ``story >> event``, then ``story << effect`` for every effect, in order.

An effect that was not asserted fails the next event, and the end of the script. Ids of leases,
tickets and timers count from 1, each in order of appearance.
"""

from __future__ import annotations

from collections import deque
from typing import TypeVar

from cubroker.protocol import messages as m
from cubroker.protocol.layout import Layout
from cubroker.server.ledger import Budget, Ledger, Limits
from cubroker.server.ledger import events as e
from cubroker.server.ledger.policy import Policy

MIB = 1 << 20
BROKER, ALICE, BOB = 1000, 1001, 1002
GPU0 = Budget(0, "GPU-0", "first", 16 * MIB, 10 * MIB)
GPU1 = Budget(1, "GPU-1", "second", 16 * MIB, 6 * MIB)

FIRST, SECOND = "the broker's device 0 (first, GPU-0)", "the broker's device 1 (second, GPU-1)"
"""What refusals call them."""

R = TypeVar("R", bound=m.Reply)


class Story:
    """A ledger, its invariants checked after every event, and the effects that nobody asserted yet."""

    def __init__(
        self,
        *devices: Budget,
        limits: Limits | None = None,
        policy: Policy | None = None,
        store: int | None = None,
    ) -> None:
        self.devices = devices or (GPU0, GPU1)
        self.ledger = Ledger(self.devices, BROKER, limits, policy, store)
        self.effects: deque[e.Effect] = deque()

    def __rshift__(self, event: e.LedgerEvent) -> Story:
        self.end()
        self.effects.extend(self.ledger.handle(event))
        self.ledger.check()
        return self

    def __lshift__(self, effect: e.Effect) -> Story:
        assert self.effects, f"nothing was done, instead of {effect}"
        assert self.effects.popleft() == effect
        return self

    def end(self) -> None:
        assert not self.effects, f"not in the script: {[*self.effects]}"

    def joins(
        self,
        *sessions: int,
        uid: int = ALICE,
        gid: int = 100,
        groups: tuple[int, ...] = (),
        verified: bool = True,
    ) -> None:
        for session in sessions:
            self >> e.SessionOpened(session, 100 + session, uid, gid, frozenset(groups), verified)

    def restarts(self, *lost: int, policy: Policy | None = None, store: int = 100) -> None:
        """Restore the ledger from its snapshot with these tickets lost, and resume; the effects are not asserted."""
        self.end()
        items = self.ledger.snapshot().items()
        self.ledger = Ledger.restore(self.devices, BROKER, Limits(), policy or Policy(), items, store)
        self.ledger.check()
        self.quietly(*(e.MemoryLost(ticket, "it went with the broker") for ticket in lost), e.Resumed())

    def quietly(self, *events: e.LedgerEvent) -> list[e.Effect]:
        """Tell the beginning of a story whose effects are asserted elsewhere; return those of the last event."""
        self.end()
        effects: list[e.Effect] = []
        for event in events:
            effects = self.ledger.handle(event)
            self.ledger.check()
        return effects

    def tells(self, session: int, body: m.Request, kind: type[R]) -> R:
        """Ask what is answered at once, and changes nothing, as request 800; return the answer."""
        self >> asks(session, 800, body)
        effect = self.effects.popleft()
        assert isinstance(effect, e.Respond)
        assert isinstance(effect.body, kind)
        return effect.body

    def log(self, session: int, subject: str | int) -> list[str]:
        """Return what a session hears of a pool, by name, or of a session, by number."""
        pool, number = (subject, 0) if isinstance(subject, str) else (None, subject)
        return [line.text for line in self.tells(session, m.Tell(pool, number), m.Story).lines]

    def publishes(
        self,
        session: int,
        name: str,
        *,
        nbytes: int = MIB,
        devices: tuple[str, ...] = ("GPU-0",),
        mode: int | None = None,
    ) -> int:
        """Have a session create, fill and seal a version; return its number. Uses its requests 900 to 902."""
        effects = self.quietly(creates(session, 900, name, nbytes, devices=devices, mode=mode))
        for effect in effects:
            assert isinstance(effect, e.Allocate)
            last = self.quietly(e.Allocated(effect.ticket, (handle(effect.ticket),)))
        assert isinstance(last[0], e.Respond)
        assert isinstance(last[0].body, m.Created)
        self.quietly(e.RequestReceived(session, 901, m.Seal(last[0].body.lease)))
        return last[0].body.version


class Refusal:
    """Equal to every ``Failed`` of its code whose message has all its words."""

    def __init__(self, code: str, *words: str) -> None:
        self.code, self.words = code, words

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, m.Failed):
            return NotImplemented
        return other.code == self.code and all(word in other.message for word in self.words)

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return f"Refusal({self.code!r}, {self.words})"


def layout(*sizes: int) -> Layout:
    return Layout((), sizes)


def handle(ticket: int) -> bytes:
    return b"handle %d" % ticket


def asks(session: int, request: int, body: m.Request) -> e.RequestReceived:
    return e.RequestReceived(session, request, body)


def creates(
    session: int,
    request: int,
    name: str,
    *sizes: int,
    devices: tuple[str, ...] = ("GPU-0",),
    share: str = "ipc",
    wait: float = 0.0,
    attach: str | m.Where | None = None,
    mode: int | None = None,
    plan: tuple[int, ...] | None = None,
    writable: bool = False,
    durable: bool | None = False,
    base: m.Base | None = None,
) -> e.RequestReceived:
    made = layout(*sizes)
    where = m.Where(attach) if isinstance(attach, str) else attach
    body = m.Create(name, made.encode(), devices, share, wait, where, mode, plan, writable, durable, base)
    return e.RequestReceived(session, request, body, made.outline)


def attaches(
    session: int,
    request: int,
    name: str,
    version: int = 0,
    *,
    device: str | None = None,
    wait: float = 0.0,
    peers: tuple[str, ...] = (),
) -> e.RequestReceived:
    return e.RequestReceived(session, request, m.Attach(name, version, device, wait, peers))


def answer(session: int, request: int, body: m.Reply) -> e.Respond:
    return e.Respond(session, request, body)


def done(session: int, request: int) -> e.Respond:
    return e.Respond(session, request, m.Done())


def refused(session: int, request: int, code: str, *words: str) -> e.Respond:
    return e.Respond(session, request, Refusal(code, *words))  # type: ignore[arg-type]


def attached(
    session: int,
    request: int,
    lease: int,
    name: str,
    version: int,
    *,
    ticket: int,
    device: str = "GPU-0",
    nbytes: int = MIB,
) -> e.Respond:
    replicas = (m.ReplicaHandles(device, (handle(ticket),)),)
    body = m.Attached(lease, name, version, "ipc", layout(nbytes).encode(), replicas)
    return e.Respond(session, request, body)


def created(session: int, request: int, lease: int, name: str, version: int, **tickets: int) -> e.Respond:
    """Expect a draft; ``tickets`` are those of its devices, ``GPU_0=1``."""
    replicas = tuple(
        m.ReplicaHandles(device.replace("_", "-"), (handle(ticket),)) for device, ticket in tickets.items()
    )
    return e.Respond(session, request, m.Created(lease, name, version, "ipc", replicas))


def changed(session: int, name: str, version: int) -> e.Notify:
    return e.Notify(session, m.PoolChanged(name, version))
