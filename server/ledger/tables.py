"""The ledger's tables: every record by number and by name, and who may do what with the records.

The tables also have the effects of the event that is being handled.

*Access* is decided here and nowhere else. A pool has an owner, a group and a mode, like a file. Reading is attaching,
describing and watching; writing is publishing and retiring. The mode's group bits count for members of the group, and
its other bits for all other users; execute bits mean nothing. The owner may read and write with any mode, so that its
memory can always be released.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass, field
from enum import StrEnum

from cubroker.server.ledger.events import Effect
from cubroker.server.ledger.policy import Limits, Policy
from cubroker.server.ledger.records import (
    Budget,
    DeviceAccount,
    Footprint,
    IpcEvent,
    Lease,
    MulticastGroup,
    Past,
    Pool,
    PoolLock,
    Replica,
    Session,
    Ticket,
    User,
    Version,
    Waiter,
)
from cubroker.server.ledger.states import VERSION, E, S, VersionEvent, VersionState, step

MAX_PAST_NAMES = 65_536  #: Names without versions whose past is remembered; beyond it the oldest are forgotten.
MAX_PAST_LOGS = 512  #: Ended pools, and ended sessions, whose event logs are kept; beyond it the oldest are dropped.
NO_INDEX = -1  #: The index of a device that is not served.

ROOT = 0
READ, WRITE = 4, 2  #: Bits of a mode.


class Kind(StrEnum):
    """Kinds of snapshot entries; the value is part of the journal's key."""

    SESSION = "session"
    WATCH = "watch"
    NAME = "name"
    MEMORY = "memory"
    VERSION = "version"
    STATE = "state"
    LEASE = "lease"
    EVENT = "event"
    LOCK = "lock"


DirtyKey = tuple[Kind, int, str]  #: A snapshot entry to be written: kind, number and name; 0 and empty if it has none.


class Counter:
    """Numbers that rise by one."""

    __slots__ = ("last",)

    def __init__(self) -> None:
        self.last = 0  # the last one given out

    def __next__(self) -> int:
        self.last += 1
        return self.last


@dataclass(eq=False, repr=False)
class Tables:
    """All records of a ledger. Only the modules of this package change them."""

    #: The devices that the broker serves.
    devices: InitVar[Sequence[Budget]]
    #: The user that the broker runs as.
    uid: int
    #: What one session may have.
    limits: Limits
    #: What users may do and have.
    policy: Policy
    #: Places that the store has; None: there is no store.
    store: int | None = None

    #: The time of the event that is being handled, in seconds since 1970, within the bounds of messages.
    now: float = 0.0
    effects: list[Effect] = field(default_factory=list)

    #: By device UUID.
    accounts: dict[str, DeviceAccount] = field(init=False)
    #: Devices that an earlier broker served and this one does not, while memory on them is held.
    absent: dict[str, DeviceAccount] = field(default_factory=dict)
    #: By uid; a user without anything has no record.
    users: dict[int, User] = field(default_factory=dict)
    sessions: dict[int, Session] = field(default_factory=dict)
    pools: dict[str, Pool] = field(default_factory=dict)
    #: By number.
    tickets: dict[int, Ticket] = field(default_factory=dict)
    leases: dict[int, Lease] = field(default_factory=dict)
    ipc_events: dict[int, IpcEvent] = field(default_factory=dict)
    locks: dict[int, PoolLock] = field(default_factory=dict)
    multicast_groups: dict[int, MulticastGroup] = field(default_factory=dict)
    timers: dict[int, Waiter] = field(default_factory=dict)
    #: The past of names without a pool, oldest first.
    past_names: dict[str, Past] = field(default_factory=dict)
    #: Ended pools and sessions, for their event logs.
    past_pools: OrderedDict[str, Pool] = field(default_factory=OrderedDict)
    past_sessions: OrderedDict[int, Session] = field(default_factory=OrderedDict)

    #: Pools, users and devices where something ended, so that a create that waits there may be served.
    #: Each is looked at once after the event, however often it was added: many requests may end together. All creates
    #: that wait in a pool are looked at then, so a pool is added only if its turn or its record may have become free.
    recheck_pools: dict[Pool, None] = field(default_factory=dict)
    recheck_users: dict[User, None] = field(default_factory=dict)
    recheck_accounts: dict[DeviceAccount, None] = field(default_factory=dict)

    lease_ids: Counter = field(default_factory=Counter)
    event_ids: Counter = field(default_factory=Counter)
    lock_ids: Counter = field(default_factory=Counter)
    #: Numbers of tickets and of multicast groups.
    ticket_ids: Counter = field(default_factory=Counter)
    timer_ids: Counter = field(default_factory=Counter)
    arrivals: Counter = field(default_factory=Counter)
    #: The highest number that a session had.
    last_session: int = 0

    #: Places that sessions and durable memory take in the store, waiting creates included.
    stored: int = 0
    #: Places taken when the snapshot was loaded; they may exceed the store's.
    grandfathered_store: int = 0
    #: Entries changed since they were written last; None: nothing is written.
    dirty_keys: OrderedDict[DirtyKey, None] | None = field(init=False)
    #: False while a restored ledger is being told of lost sessions and memory.
    resumed: bool = True
    #: The parts of the snapshot that contradicted the rest and were dropped or lost, one sentence each.
    findings: list[str] = field(default_factory=list)

    #: Whether durable memory outlives the broker, in a store that does not end with it.
    outlives_broker: bool = field(init=False)
    #: Whether an administrator drains the broker.
    drained: bool = False
    #: Leases whose end the shutdown waits for; None: the broker was not told to end.
    shutdown_leases: dict[int, Lease] | None = None

    #: What processes refer to beyond leases, by uid.
    footprints: dict[int, Footprint] = field(default_factory=dict)
    #: Users and memory of the leases that ended during the scan of processes; None: there is no scan.
    ended_in_scan: list[tuple[int, Replica]] | None = None

    def __post_init__(self, devices: Sequence[Budget]) -> None:
        self.accounts = {device.uuid: DeviceAccount(device) for device in devices}
        assert len(self.accounts) == len(devices), "two devices with one UUID"
        self.dirty_keys = None if self.store is None else OrderedDict()
        self.outlives_broker = self.store is not None

    def lends(self, *, durable: bool) -> bool:
        """Whether new leases are granted, on memory that is ``durable`` or on memory that is not."""
        return not self.drained and (self.shutdown_leases is None or (durable and self.outlives_broker))

    def ends_with_broker(self, version: Version) -> bool:
        """Whether the memory of a version ends with the broker; a lost version has none."""
        return version.state is not VersionState.LOST and not (version.durable and self.outlives_broker)

    def mark_dirty(self, kind: Kind, number: int = 0, name: str = "") -> None:
        """Note that a snapshot entry changed, was added or is gone; the one noted last is written last."""
        if self.dirty_keys is not None:
            key = kind, number, name
            self.dirty_keys[key] = None
            self.dirty_keys.move_to_end(key)  # takes no memory: what was noted before is not lost for want of it

    def note(self, record: Session | Pool, text: str) -> None:
        """Add an event, with the present time, to the log of a session or a pool."""
        record.log.append((self.now, text))

    def advance(self, table: Mapping[S, Mapping[E, S]], state: S, event: E, pool: Pool, what: str) -> S:
        """Return the state that the table has after ``event``, and note it in a pool's log; raises ``Impossible``."""
        after = step(table, state, event, pool.log)
        self.note(pool, f"{what} is {after.value}: {event.value}")
        return after

    def transition_version(self, version: Version, event: VersionEvent) -> None:
        """Take a version one step, and mark its entries dirty."""
        pool, name, number = version.pool, version.pool.name, version.number
        version.state = self.advance(VERSION, version.state, event, pool, f"version {number}")
        self.mark_dirty(Kind.NAME, name=name)
        self.mark_dirty(Kind.STATE, number, name)
        if version.state in (VersionState.DRAFT, VersionState.ENDED):
            self.mark_dirty(Kind.VERSION, number, name)

    def past(self, name: str) -> Past:
        """Return what is remembered of a name, whether or not it has versions."""
        pool = self.pools.get(name)
        return self.past_names.get(name, Past()) if pool is None else pool.past

    def pool(self, name: str) -> Pool:
        """Return the record of a name; adds it if needed."""
        pool = self.pools.get(name)
        if pool is None:
            pool = self.past_pools.pop(name, None) or Pool(name, 0)
            if (past := self.past_names.pop(name, None)) is not None:
                pool.last, pool.loss, pool.previous_owner, pool.group, pool.mode = past
            self.pools[name] = pool
        return pool

    def account(self, uuid: str) -> DeviceAccount:
        """Return the account of a device; one that is not served is ``absent`` and has no budget."""
        account = self.accounts.get(uuid) or self.absent.get(uuid)
        if account is None:
            account = self.absent[uuid] = DeviceAccount(Budget(NO_INDEX, uuid, "", 0, 0))
        return account

    def user(self, uid: int) -> User:
        """Return the record of a user; adds it if needed."""
        user = self.users.get(uid)
        if user is None:
            user = self.users[uid] = User(uid, self.policy.quota_of(uid))
        return user

    def drop_idle_user(self, user: User) -> None:
        """Drop the record of a user who has nothing any more."""
        if user.idle:
            self.users.pop(user.uid, None)

    def recheck_user(self, user: User) -> None:
        """Have the first create in a user's queue looked at after the event."""
        if user.queue:
            self.recheck_users[user] = None

    def drop_session(self, session: Session) -> None:
        """Drop the record of a session that has nothing any more."""
        del self.sessions[session.id], session.user.sessions[session.id]
        self.past_sessions[session.id] = session
        if len(self.past_sessions) > MAX_PAST_LOGS:
            self.past_sessions.popitem(last=False)
        self.drop_idle_user(session.user)

    def drop_pool(self, pool: Pool) -> None:
        """Drop the record of an idle pool; its past stays, since numbers are not given out twice."""
        del self.pools[pool.name]
        self.past_pools[pool.name] = pool
        if len(self.past_pools) > MAX_PAST_LOGS:
            self.past_pools.popitem(last=False)
        if pool.last:
            self.past_names[pool.name] = pool.past
            self.mark_dirty(Kind.NAME, name=pool.name)  # the newest, in the record as well
            if len(self.past_names) > MAX_PAST_NAMES:
                oldest = next(iter(self.past_names))
                del self.past_names[oldest]
                self.mark_dirty(Kind.NAME, name=oldest)


# -- access --------------------------------------------------------------------------------------------


def is_privileged(tables: Tables, session: Session) -> bool:
    """Whether a session's user administers the broker."""
    return is_admin(tables, session.uid, verified=session.verified)


def is_admin(tables: Tables, uid: int, *, verified: bool) -> bool:
    """Whether a user may do everything.

    Listed administrators may, by their uid alone. Root and the broker's own user may only if the process is
    ``verified``, since containers choose these uids for themselves.
    """
    if uid in tables.policy.admins:
        return True
    return verified and (uid == tables.uid or (uid == ROOT and tables.policy.trust_root))


def can_read(tables: Tables, session: Session, pool: Pool) -> bool:
    """Whether a session may attach to, describe and watch a pool; every session may if the pool has no version."""
    return _allows(session, pool, READ) or can_administer(tables, session, pool)


def can_read_draft(tables: Tables, session: Session, draft: Version) -> bool:
    """Whether a session may attach to a draft: it can read the pool now, and still can once the draft is published."""
    pool = draft.pool
    published = Past(group=pool.group, mode=pool.mode if draft.mode is None else draft.mode)
    return can_administer(tables, session, pool) or (_allows(session, pool, READ) and _allows(session, published, READ))


def can_publish(tables: Tables, session: Session, pool: Pool) -> bool:
    """Whether a session may publish and retire versions of a pool; every session may if the pool has no version."""
    return _allows(session, pool, WRITE) or can_administer(tables, session, pool)


def reserved_prefix(tables: Tables, session: Session, name: str) -> str | None:
    """Return the prefix that reserves a name for others; None if the session may publish it.

    The longest matching prefix counts.
    """
    prefix = max((each for each in tables.policy.reserved if name.startswith(each)), key=len, default=None)
    if prefix is None or is_privileged(tables, session):
        return None
    allowed = tables.policy.reserved[prefix]
    member = session.uid in allowed.users or not allowed.groups.isdisjoint((session.gid, *session.groups))
    return None if member else prefix


def can_administer(tables: Tables, session: Session, pool: Pool) -> bool:
    """Whether a session may change the mode of a pool: its owner, or an administrator."""
    return pool.owner in (None, session.uid) or is_privileged(tables, session)


def can_read_history(tables: Tables, session: Session, pool: Pool | Past) -> bool:
    """Whether a session may read a pool's history: it can read the pool, or could while a version of it lived.

    If the last owner is not known, only administrators may.
    """
    if isinstance(pool, Pool) and pool.owner is not None:
        return can_read(tables, session, pool)
    known = pool.previous_owner is not None and (pool.previous_owner == session.uid or _allows(session, pool, READ))
    return known or is_privileged(tables, session)


def can_see_session(tables: Tables, session: Session, other: Session) -> bool:
    """Whether a session may see another one and its requests: they have the same user, or the first is privileged."""
    return other.uid == session.uid or is_privileged(tables, session)


def visible_past(tables: Tables, session: Session, name: str) -> Past:
    """Return the past of a name, or an empty past if the session may not read the history of its pool."""
    pool = tables.pools.get(name)
    past = tables.past(name)
    return past if can_read_history(tables, session, past if pool is None else pool) else Past()


def _allows(session: Session, pool: Pool | Past, bit: int) -> bool:
    """Whether a pool's mode has a bit for a session of another user."""
    member = pool.group == session.gid or pool.group in session.groups
    return bool(pool.mode >> (3 if member else 0) & bit)
