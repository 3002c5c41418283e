"""The ledger's books: everything that it remembers, by id and by name, and what it wants done next."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from itertools import count
from typing import TypeVar

from cubroker.server.events import Effect
from cubroker.server.policy import Policy
from cubroker.server.records import (
    Account,
    Allocation,
    Budget,
    Clock,
    Limits,
    Pool,
    Session,
    Signal,
    Story,
    Team,
    User,
    Waiter,
)

K = TypeVar("K")
V = TypeVar("V")

MAX_NUMBERS = 65_536
"""Names without a pool whose last version number is remembered; beyond it the oldest are forgotten."""

MAX_PAST = 512
"""Pools, and sessions, whose story is remembered although they have ended; beyond it the oldest are forgotten."""


class Books:
    """All records, and the effects of the event that is being handled.

    ``stirred_pools`` and ``stirred_accounts`` are those where something ended, so that somebody who
    waits there may be served: :func:`cubroker.server.drafts.settle` looks at each of them.
    """

    def __init__(self, devices: Sequence[Budget], uid: int, limits: Limits, policy: Policy) -> None:
        self.uid = uid
        self.limits = limits
        self.policy = policy
        self.clock = Clock()
        self.accounts = {device.uuid: Account(device) for device in devices}
        assert len(self.accounts) == len(devices), "two devices with one UUID"
        self.users: dict[int, User] = {}
        self.sessions: dict[int, Session] = {}
        self.pools: dict[str, Pool] = {}
        self.allocations: dict[int, Allocation] = {}
        self.signals: dict[int, Signal] = {}
        self.teams: dict[int, Team] = {}
        self.timers: dict[int, Waiter] = {}
        self.numbers: dict[str, int] = {}
        self.past_pools: OrderedDict[str, Pool] = OrderedDict()
        self.past_sessions: OrderedDict[int, Session] = OrderedDict()
        self.stirred_pools: deque[Pool] = deque()
        self.stirred_accounts: dict[Account, None] = {}
        self.effects: list[Effect] = []
        self.lease_ids = count(1)
        self.signal_ids = count(1)
        self.tickets = count(1)
        self.timer_ids = count(1)
        self.arrivals = count(1)

    def last(self, name: str) -> int:
        """Return the number of the last version of ``name`` that was published, 0 if none was."""
        pool = self.pools.get(name)
        return self.numbers.get(name, 0) if pool is None else pool.last

    def pool(self, name: str) -> Pool:
        """Return the record of ``name``, a new one if it has none."""
        pool = self.pools.get(name)
        if pool is None:
            pool = self.past_pools.pop(name, None) or Pool(name, 0, story=Story(self.clock))
            pool.last = self.numbers.pop(name, 0)
            self.pools[name] = pool
        return pool

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
        """Drop the record of a pool that is idle, except for its last number: numbers are not given out twice."""
        del self.pools[pool.name]
        _keep(self.past_pools, pool.name, pool)
        if pool.last:
            self.numbers[pool.name] = pool.last
            if len(self.numbers) > MAX_NUMBERS:
                del self.numbers[next(iter(self.numbers))]


def _keep(past: OrderedDict[K, V], key: K, record: V) -> None:
    past[key] = record
    if len(past) > MAX_PAST:
        past.popitem(last=False)
