"""What the model remembers, and what it expects of one event."""

from __future__ import annotations

from dataclasses import dataclass, field

from cubroker.protocol import messages as m
from cubroker.protocol.layout import Outline


@dataclass(eq=False)
class Session:
    id: int
    pid: int
    uid: int
    groups: tuple[int, ...] = ()
    verified: bool = False
    connected: bool = True


@dataclass(eq=False)
class Version:
    name: str
    number: int
    owner: int
    body: m.Create
    layout: Outline
    state: str = "allocating"
    why: str = ""
    digests: m.Digests | None = None
    published: float | None = None
    #: the lease that it is filled by, or was; and whether it was lent to others before it was sealed
    writer: Lease | None = None
    lent: bool = False
    homes: list[Home] = field(default_factory=list)


@dataclass(eq=False)
class Home:
    """What a version has on one device: of each allocation of its layout a cell, or nothing."""

    version: Version
    device: str
    cells: list[Cell | None]


@dataclass(eq=False)
class Block:
    """Memory made for a version on a device: wanted, held, unwanted (on its way, to be freed) or freeing."""

    version: Version
    device: str
    sizes: tuple[int, ...]
    state: str = "wanted"
    ticket: int = 0
    #: those that the device does not have back
    cells: list[Cell] = field(init=False)

    def __post_init__(self) -> None:
        self.cells = [Cell(self, index, size) for index, size in enumerate(self.sizes)]

    @property
    def nbytes(self) -> int:
        return sum(cell.nbytes for cell in self.cells)


@dataclass(eq=False)
class Cell:
    """One allocation of a block."""

    block: Block
    index: int
    nbytes: int
    handle: bytes = b""
    freeing: bool = False


@dataclass(eq=False)
class MulticastGroup:
    """The replicas of a version, bound together, or by copies, or not yet; it stays until it is unbound."""

    version: Version
    how: str = ""
    why: str = ""
    sizes: tuple[int, ...] = ()
    id: int = 0


@dataclass(eq=False)
class Lease:
    """``unsent`` is memory that it got by fabric handles, of which it may ask for descriptors.

    It may be ``bound`` to write all replicas at once; ``home`` is the first of those that it got.
    """

    session: Session
    version: Version
    home: Home
    bound: bool = False
    id: int = 0
    unsent: list[Home] = field(default_factory=list)

    @property
    def writes(self) -> bool:
        return self.version.state == "draft" and self.version.writer is self


@dataclass(eq=False)
class Signal:
    """An event of a version."""

    lease: Lease
    body: m.ShareEvent
    id: int = 0
    generation: int = 0


@dataclass(eq=False)
class Lock:
    """The lock of a name, while a session has it."""

    session: Session
    name: str
    id: int = 0


@dataclass(eq=False)
class Request:
    """A request that is not answered; ``waits`` for publication, turn, room, memory, event, generation or lock.

    ``lease`` and ``signal`` are what it waits with for events. ``aside`` says that it could have had its turn but for
    its user's quota.
    """

    session: Session
    id: int
    body: m.Attach | m.Create | m.OpenEvent | m.AwaitEvent | m.Lock
    waits: str
    layout: Outline | None = None
    version: Version | None = None
    timed: bool = False
    lease: Lease | None = None
    signal: Signal | None = None
    aside: bool = False
    timer: int = 0


@dataclass
class Expected:
    """What one event should have for effects. A code stands for a refusal with any text."""

    answers: dict[tuple[int, int], m.Reply | str] = field(default_factory=dict)
    leases: dict[tuple[int, int], Lease] = field(default_factory=dict)
    signals: dict[tuple[int, int], Signal] = field(default_factory=dict)
    locks: dict[tuple[int, int], Lock] = field(default_factory=dict)
    notices: list[tuple[int, m.Notice]] = field(default_factory=list)
    blocks: list[Block] = field(default_factory=list)
    frees: list[tuple[Block, tuple[int, ...]]] = field(default_factory=list)
    handed: list[tuple[Lease, list[Home], MulticastGroup | None]] = field(default_factory=list)
    bound: list[MulticastGroup] = field(default_factory=list)
    unbound: list[MulticastGroup] = field(default_factory=list)
    withdrawn: list[tuple[int, int]] = field(default_factory=list)
    timer: Request | None = None
    dropped: list[int] = field(default_factory=list)
    forgotten: list[int] = field(default_factory=list)
    drained: bool = False


class Refusal(Exception):
    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code
