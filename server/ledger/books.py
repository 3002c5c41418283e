"""The ledger's books: everything that it remembers, by id and by name, and what it wants done next."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from enum import StrEnum
from typing import TypeVar

from cubroker.server.ledger.chronicle import Clock, Story
from cubroker.server.ledger.entries import (
    Account,
    Allocation,
    Budget,
    Footprint,
    Lease,
    Limits,
    Past,
    Pool,
    Session,
    Signal,
    Team,
    User,
    Version,
)
from cubroker.server.ledger.events import Effect
from cubroker.server.ledger.policy import Policy
from cubroker.server.ledger.states import Cause, State
from cubroker.server.ledger.waiters import Waiter

K = TypeVar("K")
V = TypeVar("V")

MAX_NUMBERS = 65_536
"""Names without a pool of which it is remembered what was; beyond it the oldest are forgotten."""

NOWHERE = -1
"""The index of a device that is not served."""

MAX_PAST = 512
"""Pools, and sessions, whose story is remembered although they have ended; beyond it the oldest are forgotten."""


class Kind(StrEnum):
    """What is recorded, as :mod:`cubroker.server.ledger.record` says."""

    SESSION = "session"
    WATCH = "watch"
    NAME = "name"
    VERSION = "version"
    STATE = "state"
    LEASE = "lease"
    EVENT = "event"


Mark = tuple[Kind, int, str]
"""Something that has to be recorded anew: its kind, its number, and its name; 0 and empty if it has none."""


class Serial:
    """Numbers that rise by one; ``last`` is the last one that was given out."""

    __slots__ = ("last",)

    def __init__(self) -> None:
        self.last = 0

    def __next__(self) -> int:
        self.last += 1
        return self.last


class Books:
    """All records, and the effects of the event that is being handled.

    ``stirred_pools``, ``stirred_users`` and ``stirred_accounts`` are those where something ended, so that somebody who
    waits there may be served: :func:`cubroker.server.ledger.drafts.settle` looks at each of them, once however often
    it was stirred, since any number of requests may end together.

    ``store`` says how many descriptors the store has room for, None that there is none; ``stored`` counts those of
    sessions and of durable memory, also of creates that wait for it. ``marks`` are what changed since it was
    recorded last; None: nobody records it. A restored ledger is not ``resumed`` until it was told what is missing;
    ``findings`` say what of its record contradicted the rest, and was given up.
    ``absent`` are devices that an earlier broker served and this one does not, as long as memory on them is held.

    ``outlived`` says whether anything outlives the broker: durable memory does, in a store that does not end with it.

    Nobody gets a lease while the broker is ``drained`` by hand. ``awaited`` are the leases whose end it waits for
    before it ends; None: it was not told to.

    ``footprints`` say what processes refer to beyond leases, by user; ``ended`` has user and ticket of the leases that
    ended since that was begun to be looked at; None: it is not being looked at.
    """

    def __init__(
        self, devices: Sequence[Budget], uid: int, limits: Limits, policy: Policy, store: int | None = None
    ) -> None:
        self.uid = uid
        self.limits = limits
        self.policy = policy
        self.clock = Clock()
        self.accounts = {device.uuid: Account(device) for device in devices}
        assert len(self.accounts) == len(devices), "two devices with one UUID"
        self.absent: dict[str, Account] = {}
        self.users: dict[int, User] = {}
        self.sessions: dict[int, Session] = {}
        self.pools: dict[str, Pool] = {}
        self.allocations: dict[int, Allocation] = {}
        self.leases: dict[int, Lease] = {}
        self.signals: dict[int, Signal] = {}
        self.teams: dict[int, Team] = {}
        self.timers: dict[int, Waiter] = {}
        self.numbers: dict[str, Past] = {}
        self.past_pools: OrderedDict[str, Pool] = OrderedDict()
        self.past_sessions: OrderedDict[int, Session] = OrderedDict()
        self.stirred_pools: dict[Pool, None] = {}
        self.stirred_users: dict[User, None] = {}
        self.stirred_accounts: dict[Account, None] = {}
        self.effects: list[Effect] = []
        self.lease_ids = Serial()
        self.signal_ids = Serial()
        self.tickets = Serial()
        self.timer_ids = Serial()
        self.arrivals = Serial()
        self.last_session = 0
        self.store = store
        self.stored = 0
        self.tolerated_store = 0
        self.marks: dict[Mark, None] | None = None if store is None else {}
        self.resumed = True
        self.findings: list[str] = []
        self.outlived = store is not None
        self.drained = False
        self.awaited: dict[int, Lease] | None = None
        self.footprints: dict[int, Footprint] = {}
        self.ended: set[tuple[int, int]] | None = None

    def mark(self, kind: Kind, number: int = 0, name: str = "") -> None:
        """Note that something has to be recorded anew, if anything is recorded at all."""
        if self.marks is not None:
            self.marks[kind, number, name] = None

    def move(self, version: Version, cause: Cause) -> None:
        """Take a version one step, and note what that changes of the record."""
        version.move(cause)
        name, number = version.pool.name, version.number
        self.mark(Kind.NAME, name=name)
        self.mark(Kind.STATE, number, name)
        if version.state in (State.DRAFT, State.ENDED):
            self.mark(Kind.VERSION, number, name)

    def past(self, name: str) -> Past:
        """Return what is remembered of ``name``, whether or not anything of it lives."""
        pool = self.pools.get(name)
        return self.numbers.get(name, Past()) if pool is None else pool.past

    def pool(self, name: str) -> Pool:
        """Return the record of ``name``, a new one if it has none."""
        pool = self.pools.get(name)
        if pool is None:
            pool = self.past_pools.pop(name, None) or Pool(name, 0, story=Story(self.clock))
            if (past := self.numbers.pop(name, None)) is not None:
                pool.last, pool.loss, pool.heir, pool.group, pool.mode = past
            self.pools[name] = pool
        return pool

    def account(self, uuid: str) -> Account:
        """Return the account of a device; one that is not served is ``absent``, and has room for nothing."""
        account = self.accounts.get(uuid) or self.absent.get(uuid)
        if account is None:
            account = self.absent[uuid] = Account(Budget(NOWHERE, uuid, "", 0, 0))
        return account

    def user(self, uid: int) -> User:
        """Return the record of a user, a new one if there is none."""
        user = self.users.get(uid)
        if user is None:
            user = self.users[uid] = User(uid, self.policy.quota_of(uid))
        return user

    def part(self, user: User) -> None:
        """Drop the record of a user who has nothing any more."""
        if user.idle:
            self.users.pop(user.uid, None)

    def leave(self, session: Session) -> None:
        """Drop the record of a session that has nothing any more."""
        del self.sessions[session.id], session.user.sessions[session.id]
        _keep(self.past_sessions, session.id, session)
        self.part(session.user)

    def forget(self, pool: Pool) -> None:
        """Drop the record of a pool that is idle, except for its past: numbers are not given out twice."""
        del self.pools[pool.name]
        _keep(self.past_pools, pool.name, pool)
        if pool.last:
            self.numbers[pool.name] = pool.past
            if len(self.numbers) > MAX_NUMBERS:
                oldest = next(iter(self.numbers))
                del self.numbers[oldest]
                self.mark(Kind.NAME, name=oldest)


def _keep(past: OrderedDict[K, V], key: K, record: V) -> None:
    past[key] = record
    if len(past) > MAX_PAST:
        past.popitem(last=False)
