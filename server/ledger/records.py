"""The ledger's records: sessions, leases, pools, versions, memory, and the requests that wait for them.

Records only. They refer to each other, and the modules that change them keep both ends of every reference consistent;
:mod:`cubroker.server.ledger.invariants` states what that means. Records have no repr: it would follow every reference.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from operator import attrgetter
from typing import NamedTuple

from cubroker.protocol.layout import Outline
from cubroker.protocol.messages import BY_DESCRIPTOR, MULTICAST, Attach, AwaitEvent, Create, Digests, Lock, OpenEvent
from cubroker.protocol.status import ProcessInfo
from cubroker.server.ledger.events import AllocationId, FdSource
from cubroker.server.ledger.policy import MODE, NO_LIMITS, NOTHING, Limits, Quota, exceeds
from cubroker.server.ledger.states import GroupState, MemoryState, VersionState

SESSION_FDS = 2  #: Descriptors of the broker that a session takes: its connection and its pidfd.
EVENT_LOG_LINES = 32  #: Events that the log of a pool or a session keeps.

# -- devices and users ---------------------------------------------------------------------------------


def listed(index: int, name: str, uuid: str) -> str:
    """Return index, name and the beginning of the UUID, which names a device to every process of the host."""
    return f"{index} ({name}, {'-'.join(uuid.split('-')[:2])})"


@dataclass(frozen=True, slots=True)
class Budget:
    """One device, and how much of it the broker may use."""

    #: The broker's index of the device; negative for a device that is not served.
    index: int
    uuid: str
    name: str
    #: Bytes that the device has.
    total: int
    #: Bytes that the broker may allocate.
    budget: int
    #: Descriptors that an ``ipc`` allocation takes: one on an emulated device, otherwise none.
    descriptors: int = 0
    #: Whether its memory can be shared as ``vmm``.
    vmm: bool = True

    @property
    def label(self) -> str:
        """The device for messages: ``the broker's device 3 (NVIDIA H200, GPU-8d2f41c6)``. Clients count their own."""
        return f"the broker's device {self.listed}" if self.index >= 0 else f"device {self.uuid}, which is gone"

    @property
    def listed(self) -> str:
        """The device in a list of the broker's: ``3 (NVIDIA H200, GPU-8d2f41c6)``."""
        return listed(self.index, self.name, self.uuid) if self.index >= 0 else f"{self.uuid} (gone)"

    def descriptors_of(self, share: str) -> int:
        """Return the most descriptors that one allocation of a share kind takes.

        An exported allocation takes one, and so does its multicast object, which all devices share. An emulated device
        holds memory by a descriptor of its own, and the addresses of a multicast member by another.
        """
        exported, bound = share in BY_DESCRIPTOR, share == MULTICAST
        return self.descriptors + exported + bound * (1 + 2 * self.descriptors)


@dataclass(slots=True, eq=False, repr=False)
class DeviceAccount:
    """The memory of one device: what is allocated and promised, and the creates that wait for room."""

    device: Budget
    #: Bytes allocated, ``lost`` ones included.
    allocated: int = 0
    #: Bytes being allocated.
    promised: int = 0
    #: Bytes that could not be freed; no version has them, and no user.
    lost: int = 0
    #: Bytes allocated and promised when the budget changed last; they may exceed it.
    grandfathered: int = 0
    #: By number.
    tickets: dict[int, Ticket] = field(default_factory=dict)
    #: Creates that wait for room, in order of arrival.
    queue: list[CreateWaiter] = field(default_factory=list)

    @property
    def capacity(self) -> int:
        """Bytes that can be allocated and promised at all."""
        return self.device.budget - self.lost

    @property
    def available(self) -> int:
        """Bytes neither allocated nor promised."""
        return self.device.budget - self.allocated - self.promised

    def lose(self, nbytes: int) -> None:
        """Count bytes that the device does not take back; they stay counted."""
        self.allocated += nbytes
        self.lost += nbytes

    def position(self, waiter: CreateWaiter) -> int:
        """Return the index at which a create is, or belongs, in the queue."""
        return bisect_left(self.queue, waiter.arrival, key=attrgetter("arrival"))


@dataclass(slots=True, eq=False, repr=False)
class User:
    """What one user has, all sessions together, and the creates that wait for room in its quota."""

    uid: int
    quota: Quota
    #: Usage when the quota changed last; it may exceed the quota.
    grandfathered: Quota = NOTHING
    #: By number.
    sessions: dict[int, Session] = field(default_factory=dict)
    #: By number; a ticket stays here until its device has the bytes again.
    tickets: dict[int, Ticket] = field(default_factory=dict)
    #: Bytes of ``tickets``, and those reserved for creates that wait for a device.
    memory: int = 0
    leases: int = 0
    #: Requests that wait.
    unfinished: int = 0
    watches: int = 0
    #: IPC events.
    events: int = 0
    locks: int = 0
    #: Bytes of the encoded layouts of its versions and waiting creates.
    layouts: int = 0
    #: Descriptors of its memory and of what its waiting creates ask for.
    memory_descriptors: int = 0
    #: Parked creates, in order of arrival.
    queue: list[CreateWaiter] = field(default_factory=list)

    @property
    def idle(self) -> bool:
        """Whether the user has nothing any more."""
        return not (self.sessions or self.tickets or self.layouts)  # a version may have only others' memory

    def position(self, waiter: CreateWaiter) -> int:
        """Return the index at which a create is, or belongs, in the queue."""
        return bisect_left(self.queue, waiter.arrival, key=attrgetter("arrival"))

    @property
    def descriptors(self) -> int:
        """Descriptors of the broker that the user takes."""
        return SESSION_FDS * len(self.sessions) + self.memory_descriptors

    @property
    def used(self) -> Quota:
        """Everything that counts against the quota."""
        return Quota(
            memory=self.memory,
            sessions=len(self.sessions),
            leases=self.leases,
            requests=self.unfinished,
            watches=self.watches,
            events=self.events,
            locks=self.locks,
            layouts=self.layouts,
            descriptors=self.descriptors,
            mapped_beyond_leases=0,  # taken, not granted: see Footprint
        )

    def affords(self, waiter: CreateWaiter) -> bool:
        """Whether the quota has room for a create, and no earlier one waits for it."""
        return self.position(waiter) == 0 and not exceeds(self.memory, waiter.total, self.quota.memory)


@dataclass(slots=True, eq=False)
class Footprint:
    """The broker's memory that a user's processes refer to beyond the user's leases."""

    #: By process id, the bytes of each allocation; None: unknown.
    processes: dict[int, Mapping[AllocationId, int] | None] = field(default_factory=dict)
    #: The sum, each allocation counted once.
    nbytes: int = 0

    def count(self) -> None:
        """Compute ``nbytes`` again."""
        sizes: dict[AllocationId, int] = {}
        for memory in self.processes.values():
            for allocation, nbytes in (memory or {}).items():
                sizes[allocation] = max(nbytes, sizes.get(allocation, 0))
        self.nbytes = sum(sizes.values())


# -- event logs ----------------------------------------------------------------------------------------


EventLog = deque[tuple[float, str]]
"""The last events of a pool or a session: their times, in seconds since 1970, and what happened, in words."""

empty_log = partial(deque[tuple[float, str]], maxlen=EVENT_LOG_LINES)


# -- sessions and what they hold -----------------------------------------------------------------------


@dataclass(slots=True, eq=False, repr=False)
class Session:
    """One session of a client process."""

    id: int
    pid: int
    user: User
    gid: int
    #: Supplementary groups.
    groups: frozenset[int] = frozenset()
    #: False once its connection ended while it still has leases or locks.
    connected: bool = True
    #: By number.
    leases: dict[int, Lease] = field(default_factory=dict)
    #: Its requests that wait, by request number.
    unfinished: dict[int, Waiter] = field(default_factory=dict)
    #: Pools that it watches, by name.
    watches: dict[str, Pool] = field(default_factory=dict)
    #: Events that it made, by number.
    ipc_events: dict[int, IpcEvent] = field(default_factory=dict)
    #: By number.
    locks: dict[int, PoolLock] = field(default_factory=dict)
    log: EventLog = field(default_factory=empty_log)
    #: Usage when the limits changed last; it may exceed them.
    grandfathered: Limits = NO_LIMITS
    #: Whether its uid and gid are those of the broker's own namespaces; decided once, at the handshake.
    verified: bool = False
    #: What is known of the process beyond its number.
    process: ProcessInfo | None = None

    @property
    def used(self) -> Limits:
        """Everything that counts against the limits."""
        return Limits(len(self.leases), len(self.unfinished), len(self.watches), len(self.ipc_events), len(self.locks))

    @property
    def held(self) -> bool:
        """Whether it has leases or locks, which stay until its process ends."""
        return bool(self.leases or self.locks)

    @property
    def uid(self) -> int:
        """The user of its process."""
        return self.user.uid

    @property
    def label(self) -> str:
        """The session in words."""
        return f"session {self.id} (pid {self.pid}, uid {self.uid})"


@dataclass(slots=True, eq=False, repr=False)
class Lease:
    """The right of one session to map one version, or to fill its own draft."""

    id: int
    session: Session
    version: Version
    #: The memory that it was given.
    replicas: tuple[Replica, ...]
    #: Whether it writes all replicas together, by the version's multicast group.
    bound: bool
    #: Events made by it, by number.
    ipc_events: dict[int, IpcEvent] = field(default_factory=dict)
    #: Whether it got fabric handles and may still ask for descriptors.
    unsent: bool = False
    #: When it began, in seconds since 1970; None: the broker that granted it did not record that.
    since: float | None = None

    @property
    def writes(self) -> bool:
        """Whether it is the writer's lease on a draft; all others read, or are on a sealed ``writable`` version."""
        return self.version.state is VersionState.DRAFT and self.version.writer_lease == self.id


@dataclass(slots=True, eq=False, repr=False)
class IpcEvent:
    """An IPC event of a version."""

    id: int
    name: str
    #: The lease by which it was made, and with which it ends.
    lease: Lease
    #: UUID of the device that it was made on.
    device: str
    handle: bytes
    #: How often it was recorded.
    generation: int = 0
    event_waiters: dict[EventWaiter, None] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The event in words."""
        return f"event {self.name!r} of {self.lease.version.label}"


@dataclass(slots=True, eq=False, repr=False)
class PoolLock:
    """The lock of a pool's name, while a session has it."""

    id: int
    session: Session
    pool: Pool


# -- pools, versions and memory ------------------------------------------------------------------------


class Loss(NamedTuple):
    """The last version of a name whose memory was lost."""

    number: int
    #: The reason, as a clause.
    why: str


class Past(NamedTuple):
    """What the ledger remembers of a name without versions."""

    #: Number of the last version.
    last: int = 0
    loss: Loss | None = None
    #: The last owner; None: there was none, or it is not known.
    previous_owner: int | None = None
    group: int = 0
    mode: int = 0


@dataclass(slots=True, eq=False, repr=False)
class Pool:
    """One name: its versions, and the sessions that wait for it or watch it.

    Not to be confused with :class:`cubroker.client.pool.Pool`.
    """

    name: str
    #: Number of the last version that was published, or that as a draft was lost, or was lent and then given up.
    last: int
    loss: Loss | None = None
    #: User that the name belongs to while any version of it lives.
    owner: int | None = None
    previous_owner: int | None = None
    #: Unix group to which the group bits of ``mode`` apply.
    group: int = 0
    mode: int = MODE
    #: By number, oldest first.
    versions: dict[int, Version] = field(default_factory=dict)
    current: Version | None = None
    #: The version that is being allocated or filled.
    draft: Version | None = None
    #: The create whose turn it is, until its draft is granted.
    writer: CreateWaiter | None = None
    #: Creates that wait for their turn, in order of arrival.
    queue: OrderedDict[CreateWaiter, None] = field(default_factory=OrderedDict)
    attach_waiters: dict[AttachWaiter, None] = field(default_factory=dict)
    watchers: dict[Session, None] = field(default_factory=dict)
    #: None: no session has the lock of the name, and none waits for it.
    lock: PoolLock | None = None
    #: Requests that wait for the lock, in order of arrival.
    lock_waiters: dict[LockWaiter, None] = field(default_factory=dict)
    log: EventLog = field(default_factory=empty_log)

    @property
    def idle(self) -> bool:
        """Whether no version of it lives, and no session waits for it, watches it or has its lock."""
        return not (self.versions or self.writer or self.queue or self.attach_waiters or self.watchers or self.lock)

    @property
    def free(self) -> bool:
        """Whether a create could have the turn."""
        return self.writer is None and self.draft is None

    @property
    def past(self) -> Past:
        """What is remembered of it once it is idle."""
        return Past(self.last, self.loss, self.previous_owner, self.group, self.mode)

    def remember(self, loss: Loss) -> None:
        """Remember how a version was lost, unless a later one was."""
        self.loss = max(self.loss or loss, loss)


@dataclass(slots=True, eq=False, repr=False)
class Version:
    """One version of a pool."""

    pool: Pool
    number: int
    #: The user that made it, to whose quota it counts.
    user: User
    #: Label of the session that fills or filled it.
    writer: str
    #: The pool's mode from its publication on; None: unchanged.
    mode: int | None
    #: Share kind.
    share: str
    #: Index in ``replicas`` of each allocation's device, each of which has one shard; None: every device has all.
    plan: tuple[int, ...] | None
    #: Whether its readers may write it.
    writable: bool
    #: Whether its memory is in the store.
    durable: bool
    #: Encoded, as it travels.
    layout: bytes
    tensors: int
    #: Bytes that the layout describes.
    nbytes: int
    #: Memory by device UUID.
    replicas: dict[str, Replica] = field(default_factory=dict)
    #: Bytes of that, and those of them that older versions have, too.
    memory: int = 0
    shared: int = 0
    state: VersionState = VersionState.ALLOCATING
    #: How it was lost, as a clause.
    why: str = ""
    #: Digests that it was sealed with, in the order of ``replicas``.
    digests: Digests | None = None
    #: When it was published, in seconds since 1970; None: not yet, or the broker of that time did not record it.
    published: float | None = None
    #: Number of the lease that fills or filled it; 0: it is allocating, or the broker of that time did not record it.
    writer_lease: int = 0
    #: Whether readers have or had leases on it, and it was not sealed: its number is not given out again.
    lent: bool = False
    #: Leases on it, by number.
    holders: dict[int, Lease] = field(default_factory=dict)
    #: By name.
    ipc_events: dict[str, IpcEvent] = field(default_factory=dict)
    #: Requests that wait for an event that does not exist yet.
    open_waiters: dict[EventWaiter, None] = field(default_factory=dict)
    #: How its last events ended, by event number.
    ended_reasons: dict[int, str] = field(default_factory=dict)
    #: Binds its replicas; only :mod:`cubroker.server.ledger.memory` looks into it.
    multicast_group: MulticastGroup | None = None
    #: ``name@number``.
    label: str = field(init=False)

    def __post_init__(self) -> None:
        self.label = f"{self.pool.name}@{self.number}"

    @property
    def leases(self) -> int:
        """Number of leases on it."""
        return len(self.holders)

    @property
    def is_multicast(self) -> bool:
        """Whether its replicas are bound together once their memory is there."""
        return self.share == MULTICAST and len(self.replicas) > 1

    @property
    def owner(self) -> int:
        """The uid of the user that made it."""
        return self.user.uid

    @property
    def allocations(self) -> Iterator[Allocation]:
        """All its memory, device by device, each in the order of the layout."""
        return (each for replica in self.replicas.values() for each in replica.allocations if each is not None)


@dataclass(slots=True, eq=False, repr=False)
class Replica:
    """The memory of one version on one device: its own, and what it shares with other versions.

    Not to be confused with :class:`cubroker.client.pool.Replica`.
    """

    account: DeviceAccount
    #: One per allocation of the version's layout; None for those on other devices.
    allocations: tuple[Allocation | None, ...]
    #: One per allocation of the layout once all are there; ``b""`` for those on other devices.
    handles: tuple[bytes, ...] = ()
    #: Where the descriptors of the allocations come from, in order.
    fd_sources: tuple[FdSource, ...] = ()


@dataclass(slots=True, eq=False, repr=False)
class Ticket:
    """The allocations that one draft was given on one device."""

    id: int
    account: DeviceAccount
    pool: Pool
    #: Number of the version whose draft it was.
    version: int
    #: The user to whose quota it counts, also when other versions have its allocations later.
    user: User
    #: Share kind.
    share: str
    #: Whether the store has it.
    durable: bool
    #: Bytes of each allocation, rounded to the granularity.
    sizes: tuple[int, ...]
    #: The allocations that the device has not freed yet, by number.
    allocations: dict[int, Allocation] = field(init=False)
    #: The sum of their bytes.
    nbytes: int = field(init=False)
    state: MemoryState = MemoryState.PROMISED
    #: One per size, once the ticket is allocated.
    handles: tuple[bytes, ...] = ()

    def __post_init__(self) -> None:
        self.allocations = {number: Allocation(self, number) for number in range(len(self.sizes))}
        self.nbytes = sum(self.sizes)

    @property
    def label(self) -> str:
        """The version whose draft it was, as ``name@number``."""
        return f"{self.pool.name}@{self.version}"

    @property
    def descriptors_each(self) -> int:
        """Descriptors of the broker that each allocation takes."""
        return self.account.device.descriptors_of(self.share)

    @property
    def descriptors(self) -> int:
        """Descriptors of the broker that it takes."""
        return len(self.allocations) * self.descriptors_each

    @property
    def stored(self) -> int:
        """Places of the store that it takes."""
        return len(self.allocations) if self.durable else 0

    @property
    def used(self) -> bool:
        """Whether a version has some of it."""
        return any(allocation.oldest for allocation in self.allocations.values())

    @property
    def versions(self) -> tuple[Version, ...]:
        """The versions that have some of it, oldest first."""
        known, given = self.pool.versions, set[int]().union(*(each.given for each in self.allocations.values()))
        return tuple(known[number] for number in sorted(given) if number in known)


@dataclass(slots=True, eq=False, repr=False)
class Allocation:
    """One piece of device memory, and the versions that have it; it is freed when none has it any more.

    Thousands of versions may share it. So the numbers of versions that ended may stay in its list until they are half
    of it: the end of a version takes the same time on average, however many there are.
    """

    ticket: Ticket
    #: Its number in the ticket.
    number: int
    #: The numbers of the versions that were given it, oldest first; some may have ended, but not all.
    given: list[int] = field(init=False, default_factory=list)
    #: How many of those at the beginning have ended, and how many of all.
    _first: int = field(init=False, default=0)
    _ended: int = field(init=False, default=0)

    @property
    def nbytes(self) -> int:
        """Bytes, rounded to the granularity."""
        return self.ticket.sizes[self.number]

    @property
    def id(self) -> AllocationId:
        """Its identifier among all allocations."""
        return AllocationId(self.ticket.id, self.number)

    @property
    def oldest(self) -> Version | None:
        """The oldest version that has it; None if none has it any more."""
        given = self.given
        return self.ticket.pool.versions.get(given[self._first]) if self._first < len(given) else None

    @property
    def sharers(self) -> int:
        """The number of versions that have it."""
        return len(self.given) - self._ended

    @property
    def versions(self) -> tuple[Version, ...]:
        """The versions that have it, oldest first; costs time in proportion to them."""
        known = self.ticket.pool.versions
        return tuple(known[number] for number in self.given if number in known)

    def give(self, version: Version) -> None:
        """Note that the newest version of its pool has it, too."""
        self.given.append(version.number)

    def note_end(self) -> Version | None:
        """Note that one of its versions has ended, and is not among its pool's any more.

        If that was the oldest one, return the version that is the oldest now.
        """
        known, given, first = self.ticket.pool.versions, self.given, self._first
        self._ended += 1
        while given and given[-1] not in known:  # at once: the next draft may get the number of one that was given up
            given.pop()
            self._ended -= 1
        while first < len(given) and given[first] not in known:
            first += 1
        heir = known[given[first]] if self._first < first < len(given) else None
        self._first = first
        if 2 * self._ended >= len(given):
            self.given = [number for number in given if number in known]
            self._first = self._ended = 0
        return heir


@dataclass(slots=True, eq=False, repr=False)
class MulticastGroup:
    """The replicas of a multicast version, bound together."""

    id: int
    version: Version
    state: GroupState = GroupState.BINDING
    #: ``multicast`` or ``copies``; empty until it is known.
    how: str = ""
    #: The reason for ``how``, as a clause.
    why: str = ""
    #: Size of each multicast object; empty without objects.
    sizes: tuple[int, ...] = ()


# -- requests that wait --------------------------------------------------------------------------------


@dataclass(slots=True, eq=False, repr=False)
class _Waiter:
    """A request that waits; its ``body`` is the request."""

    session: Session
    request: int
    pool: Pool
    #: Its timer; 0: none is set.
    timer: int = field(default=0, kw_only=True)
    #: When it began to wait, in seconds since 1970.
    since: float = field(default=0.0, kw_only=True)


@dataclass(slots=True, eq=False, repr=False)
class AttachWaiter(_Waiter):
    """An attach that waits for its version to be published."""

    body: Attach
    #: Its rank among all requests that waited.
    arrival: int
    #: Whether its version will never be published, which its session must not know: it may not read the history.
    blind: bool


@dataclass(slots=True, eq=False, repr=False)
class EventWaiter(_Waiter):
    """A request that waits for an event to be made, or to pass a generation."""

    #: The lease by which it waits.
    lease: Lease
    body: OpenEvent | AwaitEvent
    #: Name of the event.
    name: str
    #: None: it waits for the event to be made.
    ipc_event: IpcEvent | None = None
    #: The generation that must be exceeded.
    after: int = 0

    @property
    def queue(self) -> dict[EventWaiter, None]:
        """The queue in which it waits, in order of arrival: that of its event, or that for events yet to be made."""
        return self.lease.version.open_waiters if self.ipc_event is None else self.ipc_event.event_waiters


@dataclass(slots=True, eq=False, repr=False)
class LockWaiter(_Waiter):
    """A request that waits for the lock of a name."""

    body: Lock


class Phase(Enum):
    """What a create waits for."""

    TURN = "its turn as the writer"
    ROOM = "room"
    MEMORY = "its memory"


@dataclass(slots=True, eq=False, repr=False)
class CreateWaiter(_Waiter):
    """A create that waits for its turn, for room on its devices, or for its memory."""

    #: The request, with share kind and durability decided.
    body: Create
    #: Its rank among all requests that waited.
    arrival: int
    #: Sizes of its new allocations on each device, rounded to the granularity.
    sizes: dict[DeviceAccount, tuple[int, ...]]
    #: Their sums: the bytes that it takes of each device.
    nbytes: dict[DeviceAccount, int]
    outline: Outline
    #: The version with which the new one is to share memory.
    base: Version | None = None
    phase: Phase = Phase.TURN
    #: Whether it is in its user's queue: it could have the turn, but its user's quota has no room.
    parked: bool = False

    @property
    def accounts(self) -> Iterable[DeviceAccount]:
        """Its devices, in the order of the request."""
        return self.sizes

    @property
    def total(self) -> int:
        """Bytes that it takes of its user's quota, all devices together."""
        return sum(self.nbytes.values())

    @property
    def descriptors(self) -> int:
        """Descriptors of the broker that its memory takes."""
        share = self.body.share
        return sum(len(sizes) * account.device.descriptors_of(share) for account, sizes in self.sizes.items())

    @property
    def durable(self) -> bool:
        """Whether its memory outlives the broker."""
        return self.body.durable is True

    @property
    def stored(self) -> int:
        """Places of the store that its memory takes."""
        return sum(map(len, self.sizes.values())) if self.durable else 0


Waiter = AttachWaiter | CreateWaiter | EventWaiter | LockWaiter
