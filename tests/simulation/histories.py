"""Random histories as plain data, and how they are played.

An action names its objects by numbers that are taken modulo what there is, so any part of a history
is a history again: that is what lets a failing one be shrunk.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache

from cubroker.protocol import messages as m
from cubroker.protocol.layout import Layout
from cubroker.server import events as e
from cubroker.server.ledger import Budget, Limits
from tests.simulation.compare import Pair
from tests.simulation.model import MIB

Action = tuple[str, tuple[int, ...]]

BROKER = 1000
UIDS = (BROKER, 1001, 1002, 0, 1001)
NAMES = ("a", "b", "c", "a", "b", "-bad")
DEVICES = (Budget(0, "GPU-0", "first", 16 * MIB, 12 * MIB), Budget(1, "GPU-1", "second", 16 * MIB, 8 * MIB))
UUIDS = ("GPU-0", "GPU-1", None, "GPU-9")
SETS = (("GPU-0",), ("GPU-1",), ("GPU-0", "GPU-1"), ("GPU-1", "GPU-0"), ("GPU-0", "GPU-0"), ("GPU-9",))
SIZES = ((1,), (2 * MIB,), (3 * MIB, 256), (4 * MIB,), (8 * MIB,), (6 * MIB, 6 * MIB), (13 * MIB,), ())
SHARES = ("ipc", "ipc", "ipc", "ipc", "ipc", "ipc", "vmm", "multicast", "wish")
LIMITS = (Limits(), Limits(leases=3, unfinished=3, watches=1))
OBSERVER = 1

WEIGHTS = {
    "join": 4,
    "lost": 2,
    "gone": 3,
    "attach": 22,
    "create": 22,
    "seal": 14,
    "close": 14,
    "cancel": 3,
    "retire": 6,
    "watch": 4,
    "describe": 2,
    "list": 4,
    "allocated": 26,
    "failed": 3,
    "freed": 16,
    "elapsed": 4,
    "again": 1,
}


def generate(seed: int) -> list[Action]:
    """Return the history of a seed: 20 to 120 actions, after the world that it is played in."""
    chance = random.Random(seed)
    weights = [weight * chance.choice((0.3, 1, 1, 2)) for weight in WEIGHTS.values()]
    world: list[Action] = [("world", (int(chance.random() < 0.25),)), ("join", (1,)), ("join", (2,)), ("join", (0,))]
    kinds = chance.choices(list(WEIGHTS), weights, k=chance.randrange(20, 120))
    return world + [(kind, tuple(chance.randrange(1 << 16) for _ in range(7))) for kind in kinds]


@cache
def layout(choice: int) -> tuple[Layout, bytes]:
    made = Layout((), SIZES[choice])
    return made, made.encode()


class Play:
    """A pair of ledger and model, and the state of those who use it."""

    def __init__(self, tight: int) -> None:
        self.pair = Pair(DEVICES, BROKER, LIMITS[tight])
        self.sessions = OBSERVER
        self.requests = 0
        self.events: list[e.Event] = []
        self.tell(e.Joined(OBSERVER, 1, BROKER, BROKER))

    def tell(self, event: e.Event) -> None:
        self.events.append(event)
        self.pair.handle(event)

    def ask(self, session: int, body: m.Request, layout: Layout | None = None) -> None:
        self.requests += 1
        self.tell(e.Asked(session, self.requests, body, layout))

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

    def join(self, uid: int, *_: int) -> None:
        self.sessions += 1
        self.tell(e.Joined(self.sessions, 100 + self.sessions, UIDS[uid % len(UIDS)], 100))

    def lost(self, session: int, *_: int) -> None:
        self.tell(e.Lost(self.user(session)))

    def gone(self, session: int, *_: int) -> None:
        self.tell(e.Gone(self.user(session)))

    def attach(self, session: int, name: int, version: int, device: int, wait: int, *_: int) -> None:
        number = (0, 0, 0, version // 7 % 5)[version % 4]
        uuid = UUIDS[(0, 2, 1, 2, 0, 3)[device % 6]]
        self.ask(self.user(session), m.Attach(NAMES[name % len(NAMES)], number, uuid, (0.0, 5.0, 7.0)[wait % 3]))

    def create(self, session: int, name: int, sizes: int, on: int, share: int, wait: int, attach: int) -> None:
        made, encoded = layout((0, 1, 1, 2, 3, 3, 4, 5, sizes // 16 % 8)[sizes % 9])
        devices = SETS[(0, 0, 1, 2, 2, 3, on // 8 % 6)[on % 7]]
        body = m.Create(
            NAMES[name % len(NAMES)],
            encoded,
            devices,
            SHARES[0 if share % 8 else share // 8 % len(SHARES)],
            (0.0, 5.0, 7.0)[wait % 3],
            (None, None, None, "GPU-0", "GPU-1", "GPU-9")[attach % 6],
        )
        self.ask(self.user(session), body, made)

    def _lease(self, number: int, draft: bool) -> tuple[int, int]:
        """Return a session and a lease of it, in rare cases of another one."""
        leases = [lease for lease in self.pair.model.leases if not draft or lease.version.state == "draft"]
        if number % 23 == 0 or not leases:
            return self.user(number), number % 50
        lease = leases[number % len(leases)]
        return lease.session.id, lease.id

    def seal(self, number: int, *_: int) -> None:
        session, lease = self._lease(number, draft=number % 11 != 0)
        self.ask(session, m.Seal(lease))

    def close(self, number: int, *_: int) -> None:
        session, lease = self._lease(number, draft=number % 11 == 0)
        self.ask(session, m.Close(lease))

    def cancel(self, number: int, *_: int) -> None:
        requests = self.pair.model.requests
        if requests:
            request = requests[number % len(requests)]
            self.ask(request.session.id, m.Cancel(request.id + (number % 17 == 0)))

    def retire(self, session: int, name: int, version: int, *_: int) -> None:
        number = (0, version // 5 % 5)[version % 2]
        self.ask(self.user(session), m.Retire(NAMES[name % len(NAMES)], number))

    def watch(self, session: int, name: int, on: int, *_: int) -> None:
        self.ask(self.user(session), m.Watch(NAMES[name % len(NAMES)], on % 3 != 0))

    def describe(self, session: int, name: int, version: int, *_: int) -> None:
        self.ask(self.user(session), m.Describe(NAMES[name % len(NAMES)], version % 4))

    def list(self, *_: int) -> None:
        self.observe()

    def again(self, number: int, name: int, *_: int) -> None:
        """Ask with the id of a request that is unfinished."""
        requests = self.pair.model.requests
        if requests:
            request = requests[number % len(requests)]
            self.tell(e.Asked(request.session.id, request.id, m.Attach(NAMES[name % 3], 9, None, 5.0)))

    def allocated(self, number: int, *_: int) -> None:
        if self.pair.under_way:
            block = self.pair.under_way.pop(number % len(self.pair.under_way))
            handles = tuple(f"{block.ticket}.{index}".encode() for index in range(len(block.sizes)))
            self.tell(e.Allocated(block.ticket, handles))

    def failed(self, number: int, *_: int) -> None:
        if self.pair.under_way:
            block = self.pair.under_way.pop(number % len(self.pair.under_way))
            code = ("out_of_memory", "device")[number // 8 % 2]
            self.tell(e.NotAllocated(block.ticket, code, "the device said no"))

    def freed(self, number: int, *_: int) -> None:
        """Report a free: in any order, also before the outcome of its allocation, which then never comes."""
        if self.pair.to_free:
            block = self.pair.to_free.pop(number % len(self.pair.to_free))
            if block in self.pair.under_way:
                self.pair.under_way.remove(block)
            self.tell(e.Freed(block.ticket))

    def elapsed(self, number: int, *_: int) -> None:
        timed = [request for request in self.pair.model.requests if request.timed]
        if timed:
            self.tell(e.Elapsed(timed[number % len(timed)].timer))
        elif number % 5 == 0:
            self.tell(e.Elapsed(number))

    def finish(self) -> None:
        """End every session and report every free; then nothing may be left."""
        for session in [session.id for session in self.pair.model.sessions if session.id != OBSERVER]:
            self.tell(e.Gone(session))
        for name in ("a", "b", "c"):
            self.ask(OBSERVER, m.Retire(name, 0))
        while self.pair.to_free:
            self.freed(0)
        self.observe()
        model = self.pair.model
        left = (model.versions, model.blocks, model.leases, model.requests, self.pair.under_way)
        assert not any(left)


ACTIONS: dict[str, Callable[..., None]] = {kind: getattr(Play, kind) for kind in WEIGHTS}
