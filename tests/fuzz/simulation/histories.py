"""Random histories as plain data, and how they are played.

An action names its objects by numbers that are taken modulo what there is, so any part of a history
is a history again: that is what lets a failing one be shrunk.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import TypeVar

from cubroker.protocol import messages as m
from cubroker.protocol.layout import Layout, Outline
from cubroker.server.ledger import Budget, Limits
from cubroker.server.ledger import events as e
from cubroker.server.ledger.policy import NameReservation, Policy, Quota
from tests.fuzz.simulation.compare import Pair
from tests.fuzz.simulation.model import MIB, digest

Action = tuple[str, tuple[int, ...]]

BROKER = 1000
ADMIN = 1003
UIDS = (BROKER, 1001, 1002, 0, 1001, 1001, 1002, ADMIN, 1004)
DEVICES = (
    Budget(0, "GPU-0", "first", 16 * MIB, 12 * MIB),
    Budget(1, "GPU-1", "second", 16 * MIB, 8 * MIB, 1, vmm=False),
)
LIMITS = (Limits(), Limits(leases=3, requests=3, watches=1, events=1, locks=1))
SCARCE = Quota(
    memory=8 * MIB, sessions=4, leases=5, requests=4, watches=2, events=2, locks=2, layouts=60, descriptors=9
)
RESERVED = {"b": NameReservation(frozenset((1001,)), frozenset((200,)))}
POLICIES = (
    Policy(),
    Policy(quota=Quota(memory=8 * MIB), quotas={1002: Quota(memory=4 * MIB), BROKER: Quota()}),
    Policy(
        keep=2,
        mode=0o640,
        admins=frozenset((ADMIN,)),
        share="ipc",
        trust_root=False,
        reserved=RESERVED,
    ),
    Policy(keep=1, mode=0o660, admins=frozenset((ADMIN,)), quota=SCARCE, quotas={BROKER: Quota(), 1004: Quota(0)}),
)
BUDGETS = ((12, 8), (12, 8), (6, 8), (12, 2), (2, 4), (16, 16))
OBSERVER = 1

# What requests are made of: usual values, and rare ones that are mostly refused.
NAMES = (("a", "a", "b", "b", "c"), ("-bad", "c"))
VERSIONS = ((0, 0, 0, 0, 1, 2), (3, 4))
ANY_DEVICE = ((None, "GPU-0", "GPU-0", "GPU-1"), ("GPU-9",))
DEVICE_SETS = (
    (("GPU-0",), ("GPU-0",), ("GPU-1",), ("GPU-0", "GPU-1")),
    (("GPU-1", "GPU-0"), ("GPU-0", "GPU-0"), ("GPU-9",)),
)
LAYOUTS = (((1,), (2 * MIB,), (3 * MIB, 256), (4 * MIB,), (8 * MIB,)), ((6 * MIB, 6 * MIB), (13 * MIB,), ()))
BASES = (((1,), (1, 1), (1, 1), (256, 1, 2 * MIB)), ((3 * MIB, 1),))
SHARES = (("ipc", "vmm", "multicast", "auto"), ("wish",))
SHARD_SHARES = (("ipc", "vmm", "auto"), ("multicast", "wish"))
OWNERS: tuple[tuple[tuple[int, ...], ...], ...] = (((), (), (), (1001,)), ((1002, 0), (1001, BROKER)))
PEERS: tuple[tuple[tuple[str, ...], ...], ...] = (
    ((), (), (), ("GPU-1",), ("GPU-0",), ("GPU-0", "GPU-1")),
    (("GPU-9",), ("GPU-9", "GPU-0"), ("GPU-1", "GPU-9")),
)
SHARDS = (
    (((2 * MIB, 1), (0, 1)), ((2 * MIB, 4 * MIB), (1, 0)), ((6 * MIB, 6 * MIB), (0, 1)), ((1, 1, 1), (1, 0, 1))),
    (((1, 1), (0, 0)), ((1, 1), (1, 1)), ((1, 1), (0, 2)), ((1, 1), (0,)), ((1,), (0, 1)), ((1, 9 * MIB), (0, 1))),
)
SHARD_SETS = ((("GPU-0", "GPU-1"), ("GPU-1", "GPU-0")), (("GPU-0",), ("GPU-0", "GPU-9"), ("GPU-1", "GPU-1")))
WAITS = ((0.0, 5.0, 7.0), (0.0,))
GROUPS = ((100, (200,)), (100, ()), (200, ()), (300, (100, 200)))
MODES = ((None, None, None, 0o600, 0o640, 0o660, 0o644, 0o666), (0o604, 0o020, 0))
EVENTS = (("a", "a", "b"), ("-bad", "c"))
EVENT_DEVICES = (("GPU-0", "GPU-1"), ("GPU-9",))
OR_ATTACH = (
    (None, None, m.Where("GPU-0"), m.Where("GPU-0", owners=(1001,))),
    (m.Where(None), m.Where("GPU-1"), m.Where("GPU-9"), m.Where("GPU-9", ("GPU-8", "GPU-1"))),
)

WEIGHTS = {
    "join": 4,
    "lost": 2,
    "gone": 3,
    "attach": 32,
    "read_draft": 16,
    "create": 36,
    "shard": 12,
    "base": 6,
    "update": 24,
    "seal": 24,
    "seal_in_place": 4,
    "set_layout": 4,
    "close": 12,
    "send_descriptors": 5,
    "cancel": 3,
    "retire": 14,
    "watch": 4,
    "describe": 2,
    "share_event": 18,
    "open_event": 12,
    "record": 14,
    "listen": 20,
    "drop_event": 3,
    "lock": 10,
    "unlock": 7,
    "list": 2,
    "allocated": 40,
    "failed": 3,
    "freed": 24,
    "bound": 30,
    "unbound": 24,
    "elapsed": 3,
    "again": 1,
    "reconfigure": 2,
    "vanish": 1,
    "drain": 1,
    "end": 1,
    "restart": 3,
}

CHAINING = {
    ("base", "allocated", "allocated", "seal", "attach"): 2,
    ("update", "allocated", "allocated", "seal", "attach", "attach"): 8,
    ("update", "update", "allocated", "allocated", "seal", "seal"): 2,
    ("update", "vanish", "close"): 1,
    ("attach",): 3,
    ("close", "freed"): 3,
    ("retire",): 1,
    ("freed", "freed", "freed"): 3,
}
"""What a history of versions that share memory has beside single actions: each as often as its weight says. Without
them few updates would get as far as a version, and hardly any had one that is an update itself."""

SMALL = 16
STORES = (None, 1000, SMALL)
"""Descriptors that the store has room for."""

NUMBERS = 8
"""Numbers that an action has."""

T = TypeVar("T")
Choices = tuple[tuple[T, ...], tuple[T, ...]]


def generate(seed: int) -> list[Action]:
    """Return the history of a seed: 30 to 200 actions, after the world that it is played in."""
    chance = random.Random(seed)
    weights = [weight * chance.choice((0.3, 1, 1, 2)) for weight in WEIGHTS.values()]
    rules = (int(chance.random() < 0.25), chance.randrange(len(POLICIES)), chance.randrange(len(STORES)))
    world: list[Action] = [("world", rules), ("join", (1, 1)), ("join", (1, 2)), ("join", (2, 0))]
    kinds = chance.choices(list(WEIGHTS), weights, k=chance.randrange(30, 200))
    if chance.random() < 0.4:
        for phrase in chance.choices(list(CHAINING), list(CHAINING.values()), k=len(kinds) // 6):
            place = chance.randrange(len(kinds) + 1)
            kinds[place:place] = phrase
    return world + [(kind, tuple(chance.randrange(1 << 16) for _ in range(NUMBERS))) for kind in kinds]


def choose(choices: Choices[T], number: int) -> T:
    """Return one of the usual choices, or once in 40 times a rare one."""
    usual, rare = choices
    return rare[number // 40 % len(rare)] if number % 40 == 0 else usual[number // 40 % len(usual)]


@cache
def layout(sizes: tuple[int, ...]) -> tuple[Outline, bytes]:
    made = Layout((), sizes)
    return made.outline, made.encode()


def _devices(budgets: int) -> tuple[Budget, ...]:
    mib = zip(DEVICES, BUDGETS[budgets % len(BUDGETS)], strict=True)
    return tuple(replace(device, budget=size * MIB) for device, size in mib)


def _writable(number: int) -> bool:
    return number % 4 != 0


class Play:
    """A pair of ledger and model, and the state of those who use it."""

    def __init__(self, tight: int, policy: int, store: int = 0) -> None:
        self.pair = Pair(DEVICES, BROKER, LIMITS[tight], POLICIES[policy], STORES[store])
        self.sessions = OBSERVER
        self.requests = 0
        self.events: list[object] = []
        self.tell(e.SessionOpened(OBSERVER, 1, BROKER, BROKER, verified=True))

    def tell(self, event: e.LedgerEvent) -> None:
        self.events.append(event)
        self.pair.handle(event)

    def ask(self, session: int, body: m.Request, layout: Outline | None = None) -> None:
        self.requests += 1
        self.tell(e.RequestReceived(session, self.requests, body, layout))

    def observe(self) -> None:
        """Compare everything that can be seen of the two."""
        for body in (m.ListPools(), m.ListClients(), m.ListDevices()):
            self.ask(OBSERVER, body)

    def do(self, action: Action) -> None:
        kind, numbers = action
        ACTIONS[kind](self, *numbers)

    def user(self, number: int) -> int:
        """Return a session, in rare cases one that is over."""
        known = [session.id for session in self.pair.model.sessions if session.id != OBSERVER]
        if number % 29 and known:
            return known[number % len(known)]
        return 0 if number % (self.sessions + 1) == OBSERVER else number % (self.sessions + 1)

    # -- actions -------------------------------------------------------------------------------

    def join(self, uid: int, groups: int, *_: int) -> None:
        user, (gid, others) = UIDS[uid % len(UIDS)], GROUPS[groups % len(GROUPS)]
        verified = bool(groups // len(GROUPS) % 3)
        if self.pair.admits(user, verified=verified):
            self.sessions += 1
            self.tell(e.SessionOpened(self.sessions, 100 + self.sessions, user, gid, frozenset(others), verified))

    def lost(self, session: int, *_: int) -> None:
        self.tell(e.ConnectionLost(self.user(session)))

    def gone(self, session: int, *_: int) -> None:
        self.tell(e.ProcessExited(self.user(session)))

    def attach(self, session: int, name: int, version: int, device: int, wait: int, peers: int, *_: int) -> None:
        wanted, where = choose(VERSIONS, version), choose(ANY_DEVICE, device)
        owners = choose(OWNERS, peers // 7)
        body = m.Attach(choose(NAMES, name), wanted, where, choose(WAITS, wait), choose(PEERS, peers), owners)
        self.ask(self.user(session), body)

    def read_draft(self, session: int, number: int, device: int, wait: int, peers: int, odd: int, *_: int) -> None:
        """Attach to a draft, or to one that is allocating; in rare cases to what is published, or not yet there."""
        versions = self.pair.model.versions
        drafts = [version for version in versions if version.state in ("allocating", "draft")]
        known = versions if odd % 11 == 0 else drafts
        if known:
            version = known[number % len(known)]
            place = version.body.devices[device // 40 % len(version.body.devices)]
            where = choose(ANY_DEVICE, device) if odd % 5 == 0 else None if version.body.plan else place
            head = version.name, version.number + (odd % 13 == 0), where, choose(WAITS, wait), choose(PEERS, peers)
            self.ask(self.user(session), m.Attach(*head, choose(OWNERS, peers // 7), unsealed=True))

    def create(
        self, session: int, name: int, sizes: int, on: int, share: int, wait: int, attach: int, mode: int
    ) -> None:
        made, encoded = layout(choose(LAYOUTS, sizes))
        devices, kind, where = choose(DEVICE_SETS, on), choose(SHARES, share), choose(OR_ATTACH, attach)
        head = choose(NAMES, name), encoded, devices, kind, choose(WAITS, wait), where
        body = m.Create(*head, choose(MODES, mode), None, _writable(share), self._durable(kind, share))
        self.ask(self.user(session), body, made)

    def shard(self, session: int, name: int, plan: int, on: int, share: int, wait: int, attach: int, _: int) -> None:
        """Create a pool whose allocations are spread over devices by a plan."""
        (sizes, places), devices = choose(SHARDS, plan), choose(SHARD_SETS, on)
        made, encoded = layout(sizes)
        kind, where = choose(SHARD_SHARES, share), choose(OR_ATTACH, attach)
        head = choose(NAMES, name), encoded, devices, kind, choose(WAITS, wait), where
        body = m.Create(*head, None, places, _writable(share), self._durable(kind, share))
        self.ask(self.user(session), body, made)

    def base(self, session: int, name: int, sizes: int, on: int, share: int, wait: int, mode: int, _: int) -> None:
        """Create a version with which updates can share memory."""
        made, encoded = layout(choose(BASES, sizes))
        head = choose(NAMES, name), encoded, choose(DEVICE_SETS, on), ("ipc", "vmm", "auto")[share % 3]
        body = m.Create(*head, choose(WAITS, wait), None, choose(MODES, mode))
        self.ask(self.user(session), body, made)

    def update(self, session: int, number: int, keep: int, more: int, wait: int, odd: int, mode: int, _: int) -> None:
        """Create a version that has some of a published one's memory; in rare cases what that cannot be."""
        published = [v for v in self.pair.model.versions if v.state in ("current", "superseded", "retired")]
        fit = [v for v in published if not v.body.writable and v.body.share != "multicast"] or published
        if not fit:
            return
        base, slip = fit[number % len(fit)], odd // 4 if odd % 4 == 0 else 1
        body, sizes, plan = base.body, list[int](), list[int]()
        kept: list[int | None] = []
        for index, size in enumerate(base.layout.allocations):
            what = keep >> 2 * index & 3
            if what or not index:  # the first stays, or another takes its place
                sizes.append(size + (slip % 41 == 0) * 4 * MIB)
                kept.append(None if what == 1 else index + (slip % 43 == 0))
                plan.append(body.plan[index] if body.plan else 0)
        for _ in range((0, 0, 1, 2)[more % 4]):
            sizes.append((256, 2 * MIB, 3 * MIB)[more // 4 % 3])
            kept.append(0 if slip % 37 == 0 else None)
            plan.append(more // 12 % len(body.devices))
        made, encoded = layout(tuple(sizes))
        share = choose((("auto", body.share), SHARES[0]), odd)
        where = m.Where("GPU-0") if slip % 29 == 0 else None
        durable = None if odd % 3 else bool(body.durable) != (slip % 31 == 0)
        devices = body.devices[::-1] if slip % 23 == 0 else body.devices
        wanted = m.Base(base.number + (slip % 19 == 0), tuple(kept) + (None,) * (slip % 17 == 0))
        head = body.name, encoded, devices, share, choose(WAITS, wait), where, choose(MODES, mode)
        sharded = tuple(plan) if body.plan and slip % 13 else None
        asked = m.Create(*head, sharded, slip % 11 == 0, durable, wanted)
        holders = [lease.session.id for lease in self.pair.model.leases if lease.version is base]
        others = [each.id for each in self.pair.model.sessions if each.uid == base.owner and each.id != OBSERVER]
        able = holders or others
        user = able[session % len(able)] if able and session % 5 else self.user(session)
        self.ask(user, asked, made)

    def _durable(self, share: str, number: int) -> bool | None:
        """Whether a create is to be durable, if it says so; in rare cases although it cannot be."""
        if number // 80 % 4 == 0:
            return None
        cannot = share == "ipc" or self.pair.model.store is None
        return number // 4 % 20 == 0 if cannot else number // 4 % 4 != 0

    def _with_lease(
        self, number: int, body: Callable[[int], m.Request], *, draft: bool, layout: Outline | None = None
    ) -> None:
        """Ask with a lease, a draft's writer's or not; in rare cases with one that the session does not hold."""
        leases = [lease for lease in self.pair.model.leases if draft == lease.writes]
        if number % 23 == 0:
            self.ask(self.user(number), body(number % 50), layout)
        elif leases:
            lease = leases[number % len(leases)]
            self.ask(lease.session.id, body(lease.id), layout)

    def seal(self, number: int, digested: int, *_: int) -> None:
        self._with_lease(number, self._digested if digested % 3 else m.Seal, draft=number % 11 != 0)

    def _digested(self, lease: int) -> m.SealDigested:
        """Seal with digests that fit what the lease is on; in rare cases with such as do not."""
        found = [each.version for each in self.pair.model.leases if each.id == lease]
        homes = [home for version in found for home in version.homes]
        rows = [tuple(map(digest, self.pair.model.replica(home).handles)) for home in homes]
        if self.requests % 19 == 0:
            rows = [row[1:] for row in rows]
        return m.SealDigested(lease, m.Digests("cubroker-128-1", tuple(rows)))

    def seal_in_place(self, number: int, digested: int, *_: int) -> None:
        def body(lease: int) -> m.SealInPlace:
            return m.SealInPlace(lease, self._digested(lease).digests if digested % 3 else None)

        self._with_lease(number, body, draft=number % 11 != 0)

    def set_layout(self, number: int, less: int, other: int, *_: int) -> None:
        """Give a draft a layout of allocations that are a little smaller; in rare cases one of any other."""
        drafts = [lease for lease in self.pair.model.leases if lease.writes]
        sizes = choose(LAYOUTS, other)
        if drafts and other % 7:
            known = drafts[number % len(drafts)].version.layout.allocations
            sizes = tuple(max(1, size - less % 3) for size in known)
        made, encoded = layout(sizes)
        self._with_lease(number, lambda lease: m.SetLayout(lease, encoded), draft=number % 11 != 0, layout=made)

    def close(self, number: int, *_: int) -> None:
        self._with_lease(number, m.Close, draft=number % 11 == 0)

    def send_descriptors(self, number: int, draft: int, *_: int) -> None:
        self._with_lease(number, m.SendDescriptors, draft=draft % 3 == 0)

    def cancel(self, number: int, *_: int) -> None:
        requests = self.pair.model.requests
        if requests:
            request = requests[number % len(requests)]
            self.ask(request.session.id, m.Cancel(request.id + (number % 17 == 0)))

    def _version(self, name: int, number: int) -> tuple[str, int]:
        """Return a version that was published and lives; in rare cases any."""
        versions = [version for version in self.pair.model.versions if version.state in ("current", "superseded")]
        if number % 16 == 0 or not versions:
            return choose(NAMES, name), number // 8 % 5
        version = versions[number % len(versions)]
        return version.name, 0 if version.state == "current" and name % 2 else version.number

    def retire(self, session: int, name: int, number: int, *_: int) -> None:
        if self.pair.model.versions or number % 16 == 0:
            user = self.user(session) if session % 3 else OBSERVER
            self.ask(user, m.Retire(*self._version(name, number)))

    def watch(self, session: int, name: int, on: int, *_: int) -> None:
        self.ask(self.user(session), m.Watch(choose(NAMES, name), on % 3 != 0))

    def describe(self, session: int, name: int, number: int, *_: int) -> None:
        kind = m.Describe if number // 16 % 2 else m.ListDigests
        self.ask(self.user(session), kind(*self._version(name, number)))

    def _with_events(self, number: int) -> tuple[int, int]:
        """Return a session and its lease on a published version that is writable; in rare cases any numbers."""
        held = [lease for lease in self.pair.model.leases if lease.version.body.writable]
        fit = [lease for lease in held if lease.version.state != "draft"] if number % 13 else self.pair.model.leases
        if number % 23 == 0 or not fit:
            return self.user(number), 1 + number % 50
        lease = fit[number % len(fit)]
        return lease.session.id, lease.id

    def share_event(self, number: int, name: int, device: int, *_: int) -> None:
        session, lease = self._with_events(number)
        handle = b"%064d" % self.requests
        self.ask(session, m.ShareEvent(lease, choose(EVENTS, name), choose(EVENT_DEVICES, device), handle))

    def open_event(self, number: int, name: int, wait: int, *_: int) -> None:
        session, lease = self._with_events(number)
        self.ask(session, m.OpenEvent(lease, choose(EVENTS, name), choose(WAITS, wait)))

    def _of_maker(self, number: int, body: type[m.Recorded | m.DropEvent]) -> None:
        """Ask as the maker of an event; in rare cases as anybody, for any event."""
        signals = self.pair.model.signals
        if number % 17 == 0:
            self.ask(self.user(number), body(1 + number % 20))
        elif signals:
            signal = signals[number % len(signals)]
            self.ask(signal.lease.session.id, body(signal.id))

    def record(self, number: int, *_: int) -> None:
        self._of_maker(number, m.Recorded)

    def listen(self, number: int, by: int, after: int, wait: int, *_: int) -> None:
        """Wait for an event that there is, by a lease on its version; in rare cases for any, by any."""
        model = self.pair.model
        if number % 17 == 0 or by % 19 == 0:
            session, lease = self._with_events(by)
            self.ask(session, m.AwaitEvent(lease, 1 + number % 20, after % 3, choose(WAITS, wait)))
        elif model.signals:
            signal = model.signals[number % len(model.signals)]
            fit = [lease for lease in model.leases if lease.version is signal.lease.version]
            mine, past = fit[by % len(fit)], max(0, signal.generation + after % 4 - 1)
            self.ask(mine.session.id, m.AwaitEvent(mine.id, signal.id, past, choose(WAITS, wait)))

    def drop_event(self, number: int, *_: int) -> None:
        self._of_maker(number, m.DropEvent)

    def lock(self, session: int, name: int, wait: int, *_: int) -> None:
        self.ask(self.user(session), m.Lock(choose(NAMES, name), choose(WAITS, wait)))

    def unlock(self, number: int, *_: int) -> None:
        """Give a lock back; in rare cases one that the session does not have."""
        locks = self.pair.model.locks
        if number % 17 == 0:
            self.ask(self.user(number), m.Unlock(1 + number % 20))
        elif locks:
            held = locks[number % len(locks)]
            self.ask(held.session.id, m.Unlock(held.id))

    def list(self, session: int, *_: int) -> None:
        self.observe()
        for body in (m.ListPools(), m.ListClients()):
            self.ask(self.user(session), body)

    def again(self, number: int, name: int, *_: int) -> None:
        """Ask with the id of a request that is unfinished."""
        requests = self.pair.model.requests
        if requests:
            request = requests[number % len(requests)]
            self.tell(e.RequestReceived(request.session.id, request.id, m.Attach(choose(NAMES, name), 9, None, 5.0)))

    def allocated(self, number: int, fabric: int, *_: int) -> None:
        """Report an allocation; of ``vmm`` memory some has fabric handles."""
        if self.pair.under_way:
            block = self.pair.under_way.pop(number % len(self.pair.under_way))
            handles = tuple(f"{block.ticket}.{index}".encode() for index in range(len(block.sizes)))
            if {"ipc": False, "vmm": fabric % 3 == 0, "multicast": True}[block.version.body.share]:
                handles = (m.DESCRIPTOR,) * len(block.sizes)
            self.tell(e.Allocated(block.ticket, handles))

    def failed(self, number: int, kept: int, *_: int) -> None:
        """Report an allocation that failed; in rare cases the device did not take back what there was of it."""
        if self.pair.under_way:
            block = self.pair.under_way.pop(number % len(self.pair.under_way))
            code = ("out_of_memory", "device")[number // 8 % 2]
            left = sum(block.sizes[: kept // 5 % len(block.sizes) + 1]) if kept % 5 == 0 else 0
            self.tell(e.AllocationFailed(block.ticket, code, "the device said no", left))

    def freed(self, number: int, kept: int, *_: int) -> None:
        """Report a free: in any order, also before the outcome of its allocation, which then never comes."""
        if self.pair.to_free:
            block, numbers = self.pair.to_free.pop(number % len(self.pair.to_free))
            if block in self.pair.under_way:
                self.pair.under_way.remove(block)
            left = sum(block.sizes[index] for index in numbers[: kept // 5 % len(numbers) + 1]) if kept % 5 == 0 else 0
            self.tell(e.Freed(block.ticket, () if len(numbers) == len(block.sizes) else numbers, left))

    def bound(self, number: int, how: int, *_: int) -> None:
        if self.pair.to_bind:
            group = self.pair.to_bind.pop(number % len(self.pair.to_bind))
            if how % 3:
                sizes = tuple(2 * cell.nbytes for cell in group.version.homes[0].cells if cell)
                self.tell(e.MulticastBound(group.id, "multicast", "it works", sizes, tuple(range(len(sizes)))))
            else:
                self.tell(e.MulticastBound(group.id, "copies", "no slots left"))

    def unbound(self, number: int, *_: int) -> None:
        """Report the end of a group: in any order, also before it was reported to be bound, which then never is."""
        if self.pair.to_unbind:
            group = self.pair.to_unbind.pop(number % len(self.pair.to_unbind))
            if group in self.pair.to_bind:
                self.pair.to_bind.remove(group)
            self.tell(e.MulticastUnbound(group.id))

    def elapsed(self, number: int, *_: int) -> None:
        timed = [request for request in self.pair.model.requests if request.timed]
        if timed:
            self.tell(e.TimerExpired(timed[number % len(timed)].timer))
        elif number % 5 == 0:
            self.tell(e.TimerExpired(number))

    def reconfigure(self, policy: int, tight: int, budgets: int, *_: int) -> None:
        """Change the rules: any of them may become tighter than what is held, or wider."""
        served = [device.uuid for device in self.pair.model.devices]
        granted = {device.uuid: device.budget for device in _devices(budgets) if device.uuid in served}
        self.tell(e.Reconfigured(POLICIES[policy % len(POLICIES)], LIMITS[int(tight % 4 == 0)], granted))

    def vanish(self, number: int, *_: int) -> None:
        """Report memory that cannot be reached, of any version but those that wait for theirs."""
        blocks = [block for block in self.pair.model.blocks if block.state in ("held", "freeing")]
        allocating = [v for v in self.pair.model.versions if v.state == "allocating"]
        waited = [cell.block for version in allocating for cell in self.pair.model.cells_of(version)]
        blocks = [block for block in blocks if block not in waited]
        if blocks:
            self.tell(e.MemoryLost(blocks[number % len(blocks)].ticket, "it was taken away"))

    def drain(self, session: int, on: int, *_: int) -> None:
        """Drain the broker, or mostly take that back, since little happens meanwhile."""
        user = self.user(session) if session % 3 else OBSERVER
        self.ask(user, m.Drain(on % 3 == 0 and not self.pair.model.drained))

    def end(self, number: int, *_: int) -> None:
        """Tell the broker to end, in rare cases: without a store little happens from then on."""
        if number % 3 == 0 and self.pair.model.awaited is None:
            self.tell(e.ShutdownStarted(with_store=number % 2 == 0))

    def restart(self, rules: int, policy: int, budgets: int, ended: int, missing: int, gone: int, *_: int) -> None:
        """Kill the broker and start it again, at times with other rules; processes end, devices and memory go."""
        model = self.pair.model
        if model.store is None:
            return
        same = model.limits, model.policy, model.store
        other = LIMITS[int(rules % 16 == 0)], POLICIES[policy % len(POLICIES)], SMALL
        devices = model.devices if rules % 4 else _devices(budgets)
        there = [device for device in devices if gone % 8 != device.index] or devices
        waiting, chance = list(model.requests), random.Random(ended)
        self.events.append(f"the broker is started again, with {len(there)} devices")
        self.pair.restart(tuple(there), *(other if rules % 4 == 0 else same))
        served = [device.uuid for device in there]
        for session in [session.id for session in model.sessions if session.id != OBSERVER]:
            if chance.random() < 0.2:
                self.tell(chance.choice((e.ProcessExited, e.ConnectionLost))(session))
        for block in list(model.blocks):
            if not block.version.body.durable or missing % 8 == 0 or block.device not in served:
                self.tell(e.MemoryLost(block.ticket, "it went with the broker"))
        self.tell(e.Resumed())
        while missing % 4 and self.pair.to_bind:
            self.bound(0, chance.randrange(3))
        for request in waiting:
            session = model.session(request.session.id)
            if session is not None and session.connected:
                self.tell(e.RequestReceived(session.id, request.id, request.body, request.layout))

    def finish(self) -> None:
        """End every session and report every free; then nothing may be left."""
        for session in [session.id for session in self.pair.model.sessions if session.id != OBSERVER]:
            self.tell(e.ProcessExited(session))
        for version in list(self.pair.model.versions):
            self.ask(OBSERVER, m.Retire(version.name, version.number))
        while self.pair.to_unbind:
            self.unbound(0)
        while self.pair.to_free:
            self.freed(0, 1)
        self.observe()
        model = self.pair.model
        left = (
            model.versions,
            model.blocks,
            model.multicast_groups,
            model.leases,
            model.signals,
            model.locks,
            model.requests,
            self.pair.under_way,
        )
        assert not any(left)


ACTIONS: dict[str, Callable[..., None]] = {kind: getattr(Play, kind) for kind in WEIGHTS}
