"""Requests that wait, as the ledger remembers them: for a version, for an event, or for their turn, room and memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from cubroker.protocol.messages import Attach, AwaitEvent, Create, OpenEvent
from cubroker.server.ledger.entries import Account, Lease, Pool, Session, Signal


@dataclass(slots=True, eq=False, repr=False)
class Reader:
    """An attach that waits for its version to be published.

    A ``blind`` one waits for a version that has been, of a pool of which its session may not know that.
    """

    arrival: int
    session: Session
    request: int
    pool: Pool
    body: Attach
    blind: bool = False
    timer: int = 0
    since: float = 0.0

    @property
    def awaits(self) -> str:
        """What it waits for."""
        return f"version {self.body.version}" if self.body.version else "a current version"


@dataclass(slots=True, eq=False, repr=False)
class Listener:
    """A request that waits, by ``lease``, for ``name`` to be shared, or for ``signal`` to pass a generation."""

    session: Session
    request: int
    lease: Lease
    body: OpenEvent | AwaitEvent
    name: str
    signal: Signal | None = None
    after: int = 0
    timer: int = 0
    since: float = 0.0

    @property
    def awaits(self) -> str:
        """What it waits for."""
        return f"event {self.name!r}" + (f" past generation {self.after}" if self.signal else "")

    @property
    def pool(self) -> Pool:
        """Whose event it is."""
        return self.lease.version.pool

    @property
    def line(self) -> dict[Listener, None]:
        """Those who wait for the same, in order of arrival."""
        return self.lease.version.openers if self.signal is None else self.signal.listeners


class Phase(Enum):
    """What a create waits for."""

    TURN = "its turn as the writer"
    ROOM = "room"
    MEMORY = "its memory"


@dataclass(slots=True, eq=False, repr=False)
class Writer:
    """A create that waits for its turn, for room, or for its memory; ``arrival`` counts requests that waited.

    ``sizes`` are those of its allocations on each device, as they are allocated, and ``nbytes`` their sums: what it
    takes there. ``content`` is the sum of the sizes of its layout as they were asked for. ``aside`` says that it is
    in its user's line, since it could have had its turn but for its user's quota.
    """

    arrival: int
    session: Session
    request: int
    pool: Pool
    body: Create
    sizes: dict[Account, tuple[int, ...]]
    nbytes: dict[Account, int]
    tensors: int
    content: int
    phase: Phase = Phase.TURN
    aside: bool = False
    timer: int = 0
    since: float = 0.0

    @property
    def awaits(self) -> str:
        """What it waits for."""
        return "room in its user's quota" if self.aside else self.phase.value

    @property
    def accounts(self) -> Iterable[Account]:
        """Its devices, in the order in which it names them."""
        return self.sizes

    @property
    def total(self) -> int:
        """Bytes that it takes of its user's quota: those of all its devices."""
        return sum(self.nbytes.values())

    @property
    def descriptors(self) -> int:
        """Descriptors that its memory takes of the broker's."""
        share = self.body.share
        return sum(len(sizes) * account.device.descriptors_of(share) for account, sizes in self.sizes.items())

    @property
    def durable(self) -> bool:
        """Whether its memory is to outlive the broker, as was decided when it came."""
        return self.body.durable is True

    @property
    def stored(self) -> int:
        """Places that its memory takes of the store."""
        return sum(map(len, self.sizes.values())) if self.durable else 0


Waiter = Reader | Writer | Listener
