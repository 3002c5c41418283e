"""What the ledger remembers: sessions, leases, pools, versions and memory.

Records only; they are linked with each other, and the modules that change them keep both ends of
every link in step (:mod:`cubroker.server.ledger.invariants` says what that means). A record is not spelled out where
an exception names it: with all that it is linked to, along every path, that would never end.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from cubroker.protocol.messages import Digests
from cubroker.server.ledger.chronicle import Story
from cubroker.server.ledger.policy import MODE, NOTHING, Quota, exceeds
from cubroker.server.ledger.states import MEMORY, TEAM, VERSION, Bond, Cause, Report, Stage, State, Turn, step

if TYPE_CHECKING:
    from cubroker.server.ledger.waiters import Listener, Reader, Waiter, Writer

IPC = "ipc"
"""The share kind whose memory legacy handles open; a mapping of it can always be written."""

VMM = "vmm"
"""The share kind whose memory descriptors open, or fabric handles; every lease has the ones or the others."""

MULTICAST = "multicast"
"""The share kind whose replicas are bound together; else it is as ``vmm``."""

BY_DESCRIPTOR = (VMM, MULTICAST)
"""The share kinds whose memory descriptors open."""


SESSION = 2
"""Descriptors of the broker's that a session takes: its connection and its pidfd."""


@dataclass(frozen=True, slots=True)
class Budget:
    """One device, and the bytes of it that the broker may use. ``total`` is what it has.

    An ``ipc`` allocation on it takes so many ``descriptors`` of the broker's: one if the device is emulated, else none.
    ``vmm`` says whether its memory can be shared as that.
    """

    index: int
    uuid: str
    name: str
    total: int
    budget: int
    descriptors: int = 0
    vmm: bool = True

    def descriptors_of(self, share: str) -> int:
        """Return how many descriptors of the broker's one allocation takes, at most, that is shared as ``share``.

        What is handed over takes one more, and so does the multicast object over it, which all its devices share. An
        emulated one holds the memory by a descriptor of its own, and its members' addresses by another.
        """
        handed, bound = share in BY_DESCRIPTOR, share == MULTICAST
        return self.descriptors + handed + bound * (1 + 2 * self.descriptors)


@dataclass(frozen=True, slots=True)
class Limits:
    """What one session may have at once, so that a flood cannot grow the ledger."""

    leases: int = 4096
    unfinished: int = 1024
    watches: int = 1024
    events: int = 1024


@dataclass(slots=True, eq=False, repr=False)
class Account:
    """What is allocated and promised on one device, in bytes, and the line of those who wait for room.

    ``lost`` is the part of ``allocated`` that is nobody's: allocations failed and could not be undone either.
    ``tolerated`` was allocated and promised when the budget changed last, and may be more than that.
    """

    device: Budget
    allocated: int = 0
    promised: int = 0
    lost: int = 0
    tolerated: int = 0
    allocations: dict[int, Allocation] = field(default_factory=dict)
    line: list[Writer] = field(default_factory=list)

    @property
    def most(self) -> int:
        """Bytes that can be allocated and promised at all."""
        return self.device.budget - self.lost

    @property
    def room(self) -> int:
        """Bytes that are neither allocated nor promised."""
        return self.device.budget - self.allocated - self.promised

    def place(self, writer: Writer) -> int:
        """Return where in the line ``writer`` is, or belongs: the line is in order of arrival."""
        return bisect_left(self.line, writer.arrival, key=attrgetter("arrival"))


@dataclass(slots=True, eq=False, repr=False)
class User:
    """What one user has, all sessions together, and the line of creates that wait for room in its quota.

    ``memory`` counts the bytes of its versions until their device has them back, and those that are set
    aside for its creates that wait for room; ``layouts`` the encoded layouts of its versions and waiting creates;
    ``pieces`` the descriptors of its memory, and of what its waiting creates ask for. ``tolerated`` is what it had
    when the quota changed last, and may be more than that.
    """

    uid: int
    quota: Quota
    tolerated: Quota = NOTHING
    sessions: dict[int, Session] = field(default_factory=dict)
    allocations: dict[int, Allocation] = field(default_factory=dict)
    memory: int = 0
    leases: int = 0
    unfinished: int = 0
    watches: int = 0
    events: int = 0
    layouts: int = 0
    pieces: int = 0
    line: list[Writer] = field(default_factory=list)

    @property
    def idle(self) -> bool:
        """Whether it has nothing any more."""
        return not (self.sessions or self.allocations)

    def place(self, writer: Writer) -> int:
        """Return where in the line ``writer`` is, or belongs: the line is in order of arrival."""
        return bisect_left(self.line, writer.arrival, key=attrgetter("arrival"))

    @property
    def descriptors(self) -> int:
        """Descriptors that it takes of the broker's."""
        return SESSION * len(self.sessions) + self.pieces

    @property
    def used(self) -> Quota:
        """All that counts for its quota."""
        return Quota(
            memory=self.memory,
            sessions=len(self.sessions),
            leases=self.leases,
            requests=self.unfinished,
            watches=self.watches,
            events=self.events,
            layouts=self.layouts,
            descriptors=self.descriptors,
            mapped_beyond_leases=0,  # that was taken, not granted: see Footprint
        )

    def affords(self, writer: Writer) -> bool:
        """Whether its quota has room for all that ``writer`` takes, and no earlier one waits for that."""
        return self.place(writer) == 0 and not exceeds(self.memory, writer.total, self.quota.memory)


@dataclass(slots=True, eq=False)
class Footprint:
    """What a user's processes refer to beyond its leases: by process id, bytes by ticket, or None if that is unknown.

    ``nbytes`` counts each piece of memory once.
    """

    processes: dict[int, Mapping[int, int] | None] = field(default_factory=dict)
    nbytes: int = 0

    def count(self) -> None:
        """Count anew."""
        sizes: dict[int, int] = {}
        for memory in self.processes.values():
            for ticket, nbytes in (memory or {}).items():
                sizes[ticket] = max(nbytes, sizes.get(ticket, 0))
        self.nbytes = sum(sizes.values())

    @property
    def known(self) -> bool:
        """Whether anything is known."""
        return any(memory is not None for memory in self.processes.values())


@dataclass(slots=True, eq=False, repr=False)
class Session:
    """One client process. ``connected`` is False while it lives without a connection and still holds leases.

    ``tolerated`` is what it had when the limits changed last, and may be more than these. ``verified`` is the verdict
    of :class:`cubroker.server.peers.Peer`, which it keeps for good.
    """

    id: int
    pid: int
    user: User
    gid: int
    groups: frozenset[int] = frozenset()
    connected: bool = True
    leases: dict[int, Lease] = field(default_factory=dict)
    unfinished: dict[int, Waiter] = field(default_factory=dict)
    watches: dict[str, Pool] = field(default_factory=dict)
    signals: dict[int, Signal] = field(default_factory=dict)
    story: Story = field(default_factory=Story)
    tolerated: Limits = Limits(0, 0, 0, 0)
    verified: bool = False

    @property
    def used(self) -> Limits:
        """All that counts for its limits."""
        return Limits(len(self.leases), len(self.unfinished), len(self.watches), len(self.signals))

    @property
    def uid(self) -> int:
        """The user that its process runs as."""
        return self.user.uid

    @property
    def label(self) -> str:
        """The session in words."""
        return f"session {self.id} (pid {self.pid}, uid {self.uid})"


@dataclass(slots=True, eq=False, repr=False)
class Lease:
    """One session's reference to one version, the events that it made there, and its requests that wait for events.

    ``allocations`` is the memory that it was given, and ``bound`` says that it is to write all replicas at once:
    through the objects of the version's team, or by copies. ``unsent`` says that it may still ask for the descriptors
    of that memory: it got fabric handles.
    """

    id: int
    session: Session
    version: Version
    allocations: tuple[Allocation, ...]
    bound: bool
    signals: dict[int, Signal] = field(default_factory=dict)
    listeners: dict[Listener, None] = field(default_factory=dict)
    unsent: bool = False

    @property
    def writable(self) -> bool:
        """Whether its holder may write the memory: that of a draft, or of a version whose readers may."""
        return self.version.writable or self.version.state is State.DRAFT


@dataclass(slots=True, eq=False, repr=False)
class Signal:
    """An event of a version, which ``lease``'s session made and has recorded ``generation`` times."""

    id: int
    name: str
    lease: Lease
    device: str
    handle: bytes
    generation: int = 0
    listeners: dict[Listener, None] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The event in words."""
        return f"event {self.name!r} of {self.lease.version.label}"


class Loss(NamedTuple):
    """The last version of a name that was lost, and how: a clause for people."""

    number: int
    why: str


class Past(NamedTuple):
    """What is remembered of a name: the number of its last version, its last loss, and who may know of them.

    ``heir`` is the last owner, None if there was none or nobody knows; ``group`` and ``mode`` were the pool's.
    """

    last: int = 0
    loss: Loss | None = None
    heir: int | None = None
    group: int = 0
    mode: int = 0


@dataclass(slots=True, eq=False, repr=False)
class Pool:
    """One name: its live versions, and everybody who waits for or watches it.

    ``last`` is the number of the last version published, or lost as a draft; ``loss`` is the last that was lost.
    ``owner`` is the uid that the name belongs to while any version of it lives, and ``heir`` the one to whom it
    belonged before; ``group`` and ``mode`` say what others may do. ``draft`` is the version being allocated or filled,
    ``writer`` the request whose turn it is until its draft is filled, ``line`` those whose turn comes later.
    """

    name: str
    last: int
    loss: Loss | None = None
    owner: int | None = None
    heir: int | None = None
    group: int = 0
    mode: int = MODE
    versions: dict[int, Version] = field(default_factory=dict)
    current: Version | None = None
    draft: Version | None = None
    writer: Writer | None = None
    line: OrderedDict[Writer, None] = field(default_factory=OrderedDict)
    readers: dict[Reader, None] = field(default_factory=dict)
    watchers: dict[Session, None] = field(default_factory=dict)
    story: Story = field(default_factory=Story)

    @property
    def idle(self) -> bool:
        """Whether nothing of it lives and nobody waits for or watches it."""
        return not (self.versions or self.writer or self.line or self.readers or self.watchers)

    @property
    def free(self) -> bool:
        """Whether somebody could have the turn as its writer."""
        return self.writer is None and self.draft is None

    @property
    def past(self) -> Past:
        """What is remembered of it when it is forgotten."""
        return Past(self.last, self.loss, self.heir, self.group, self.mode)

    def remember(self, loss: Loss) -> None:
        """Remember how a version was lost, unless a later one was."""
        self.loss = max(self.loss or loss, loss)


@dataclass(slots=True, eq=False, repr=False)
class Version:
    """One version of a pool, made by ``user``; ``writer`` says which session fills or filled it.

    ``layout`` is as it travels; ``nbytes`` is what it describes; ``replicas`` is keyed by device UUID. With a ``plan``,
    which has the index in ``replicas`` of each allocation's device, each of them has a part, a *shard*; else all of it.
    ``mode`` is what the pool's becomes with its publication, if it is given. ``signals`` are its events, by name;
    ``openers`` wait for one with a name that there is not yet; ``epitaphs`` say how the last events ended.
    ``team`` binds the replicas of a multicast version on several devices, once their memory is there. ``holders`` are
    the leases on it, by id. A ``durable`` one has its memory in the store; ``why`` says how it was lost. ``digests``
    are those that it was sealed with, of ``replicas`` in their order. ``label`` is ``name@number``.
    """

    pool: Pool
    number: int
    user: User
    writer: str
    mode: int | None
    share: str
    plan: tuple[int, ...] | None
    writable: bool
    durable: bool
    layout: bytes
    tensors: int
    nbytes: int
    replicas: dict[str, Allocation] = field(default_factory=dict)
    state: State = State.ALLOCATING
    why: str = ""
    digests: Digests | None = None
    holders: dict[int, Lease] = field(default_factory=dict)
    signals: dict[str, Signal] = field(default_factory=dict)
    openers: dict[Listener, None] = field(default_factory=dict)
    epitaphs: dict[int, str] = field(default_factory=dict)
    team: Team | None = None
    label: str = field(init=False)

    def __post_init__(self) -> None:
        self.label = f"{self.pool.name}@{self.number}"

    @property
    def leases(self) -> int:
        """How many leases there are on it."""
        return len(self.holders)

    @property
    def several(self) -> bool:
        """Whether its replicas are bound together, once their memory is there."""
        return self.share == MULTICAST and len(self.replicas) > 1

    @property
    def protected(self) -> bool:
        """Whether the device refuses what its readers write."""
        return self.share in BY_DESCRIPTOR and not self.writable

    @property
    def owner(self) -> int:
        """The uid of whoever made it."""
        return self.user.uid

    def move(self, cause: Cause) -> None:
        """Take the step that the table has for ``cause``, or raise ``Impossible``."""
        self.state = step(VERSION, self.state, cause, self.pool.story)
        self.pool.story.append(f"version {self.number} is {self.state.value}: {cause.value}")


@dataclass(slots=True, eq=False, repr=False)
class Allocation:
    """The memory of one version on one device.

    ``handles`` has one per allocation of the version's layout once this is allocated, ``b""`` for those elsewhere.
    """

    ticket: int
    account: Account
    version: Version
    sizes: tuple[int, ...]
    nbytes: int
    stage: Stage = Stage.PROMISED
    handles: tuple[bytes, ...] = ()

    @property
    def descriptors(self) -> int:
        """Descriptors that it takes of the broker's."""
        return len(self.sizes) * self.account.device.descriptors_of(self.version.share)

    @property
    def stored(self) -> int:
        """Places that it takes of the store."""
        return len(self.sizes) if self.version.durable else 0

    def move(self, report: Report) -> None:
        """Take the step that the table has for ``report``, or raise ``Impossible``."""
        self.stage = step(MEMORY, self.stage, report, self.version.pool.story)
        self.version.pool.story.append(f"memory {self.ticket} is {self.stage.value}: {report.value}")


@dataclass(slots=True, eq=False, repr=False)
class Team:
    """The replicas of a multicast version, bound together: ``how``, and ``why`` so, once that is known.

    ``sizes`` are those of the multicast objects, if there are any.
    """

    id: int
    version: Version
    bond: Bond = Bond.ASSEMBLING
    how: str = ""
    why: str = ""
    sizes: tuple[int, ...] = ()

    def move(self, turn: Turn) -> None:
        """Take the step that the table has for ``turn``, or raise ``Impossible``."""
        self.bond = step(TEAM, self.bond, turn, self.version.pool.story)
        self.version.pool.story.append(f"team {self.id} is {self.bond.value}: {turn.value}")
