"""The ledger's interface: events in, effects out, as plain data.

An event says what happened, never what to do about it. The broker executes the effects in order; their outcomes come
back as events. Both are structs, since one of each is made for every request and structs are the cheapest to make.

Code that runs for every request compares their types, and those of messages, by ``is`` and ``in``: an ``isinstance``
that is false takes four times as long. Such a comparison has to name subclasses, too: ``SealDigested`` is a ``Seal``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, final

from msgspec import Struct

from cubroker.protocol.layout import Outline
from cubroker.protocol.messages import Notice, Reply, Request
from cubroker.protocol.status import ProcessInfo
from cubroker.server.ledger.policy import Limits, Policy


class AllocationId(NamedTuple):
    """One allocation."""

    ticket: int
    #: Its number in the ticket.
    number: int


class FdSource(NamedTuple):
    """Allocations of one ticket, whose descriptors are sent."""

    #: UUID of the device.
    device: str
    ticket: int
    #: Their numbers, in order; empty: all of the ticket.
    numbers: tuple[int, ...] = ()


# -- events ----------------------------------------------------------------------------------------


class LedgerEvent(Struct, frozen=True):
    """What happened."""


class SessionOpened(LedgerEvent, frozen=True):
    """A process opened a session."""

    session: int
    #: Process id. It comes from the kernel, as the three fields that follow do.
    pid: int
    uid: int
    gid: int
    #: Supplementary groups.
    groups: frozenset[int] = frozenset()
    #: Whether the uid is from the broker's own namespaces: see :func:`cubroker.server.ledger.tables.is_admin`.
    verified: bool = False
    #: What is known of the process beyond its number.
    process: ProcessInfo | None = None


class ConnectionLost(LedgerEvent, frozen=True):
    """A session's connection ended. Its process may still live."""

    session: int


class ProcessExited(LedgerEvent, frozen=True):
    """A session's process ended, so it maps no memory any more."""

    session: int


class RequestReceived(LedgerEvent, frozen=True):
    """A session sent a request for the first time."""

    session: int
    request: int
    body: Request
    #: The validated layout of a request that has one.
    layout: Outline | None = None


class Allocated(LedgerEvent, frozen=True):
    """An :class:`Allocate` succeeded; the memory is zeroed."""

    ticket: int
    #: One handle per size.
    handles: tuple[bytes, ...]
    #: One per size for memory shared by descriptor, open until the ticket is freed. The ledger ignores them.
    descriptors: tuple[int, ...] = ()


class AllocationFailed(LedgerEvent, frozen=True):
    """An :class:`Allocate` failed, and what it had allocated was freed again."""

    ticket: int
    code: str
    message: str
    #: Bytes that could not be freed and remain allocated on the device.
    unfreed: int = 0


class Freed(LedgerEvent, frozen=True):
    """A :class:`Free` is done; the device has the bytes again."""

    ticket: int
    #: As in the :class:`Free`.
    numbers: tuple[int, ...] = ()
    #: Bytes of these allocations that could not be freed and remain allocated on the device.
    unfreed: int = 0


class TimerExpired(LedgerEvent, frozen=True):
    """A timer set by :class:`SetTimer` expired."""

    timer: int


class MulticastBound(LedgerEvent, frozen=True):
    """A :class:`BindMulticast` is done, by multicast objects or, where the device has none, by copies."""

    group: int
    #: ``multicast`` or ``copies``.
    how: str
    #: The reason for ``how``, as a clause.
    why: str
    #: Size of each multicast object, one per allocation; empty without objects.
    sizes: tuple[int, ...] = ()
    #: Descriptors of the objects, open until the group is unbound. The ledger ignores them.
    descriptors: tuple[int, ...] = ()


class MulticastUnbound(LedgerEvent, frozen=True):
    """An :class:`UnbindMulticast` is done; no object is bound to the group's memory any more."""

    group: int


class Reconfigured(LedgerEvent, frozen=True):
    """The configuration was reloaded."""

    policy: Policy
    limits: Limits
    #: Bytes that the broker may use of every device, by UUID.
    budgets: Mapping[str, int]


class MemoryLost(LedgerEvent, frozen=True):
    """The memory of a ticket in a restored ledger cannot be reached any more."""

    ticket: int
    #: The reason, as a clause.
    why: str


class ProcessScanStarted(LedgerEvent, frozen=True):
    """A scan of the memory that processes refer to begins; :class:`ProcessScanFinished` reports states after this."""


class ProcessMemory(Struct, frozen=True):
    """The broker's memory that one process has mapped or open, freed memory included."""

    pid: int
    uid: int
    #: Bytes by allocation; None: unknown.
    memory: Mapping[AllocationId, int] | None


class ProcessScanFinished(LedgerEvent, frozen=True):
    """The scan is done; processes without anything to report are left out."""

    processes: tuple[ProcessMemory, ...]


class ShutdownStarted(LedgerEvent, frozen=True):
    """The broker was told to end: no new lease on memory that ends with it, and a :class:`ShutdownReady` to come."""

    #: Whether the store ends, too. Otherwise the next broker takes over the stored memory.
    with_store: bool = False


class Resumed(LedgerEvent, frozen=True):
    """A restored ledger has been told of all lost sessions and memory, and serves requests from now on."""


# -- effects ---------------------------------------------------------------------------------------


class Effect(Struct, frozen=True):
    """What the broker is to do."""


@final
class Respond(Effect, frozen=True):
    """Answer a request."""

    session: int
    request: int
    body: Reply


class Notify(Effect, frozen=True):
    """Send a notice on the session socket."""

    session: int
    notice: Notice


class Allocate(Effect, frozen=True):
    """Allocate, zero and export memory on one device; the outcome is Allocated or AllocationFailed."""

    #: The number by which the memory is known from now on.
    ticket: int
    #: UUID of the device.
    device: str
    #: Bytes of each allocation.
    sizes: tuple[int, ...]
    #: Share kind: ``ipc``, ``vmm`` or ``multicast``.
    share: str
    #: Whether the store must hold the descriptors before the outcome is reported.
    durable: bool = False


class Free(Effect, frozen=True):
    """Free memory of a ticket, perhaps while its Allocate is still under way, or after the memory was lost."""

    ticket: int
    #: UUID of the device.
    device: str
    #: Which allocations; empty: all that are left.
    numbers: tuple[int, ...] = ()


class SendFds(Effect, frozen=True):
    """Send a session the descriptors of a lease, until :class:`CancelFds`.

    It precedes the answer that grants the lease or confirms the sending; with ``rebound`` it follows the notice.
    """

    session: int
    lease: int
    #: In the order in which the descriptors are sent.
    sources: tuple[FdSource, ...]
    #: Multicast group whose objects' descriptors are sent last; 0: none.
    group: int = 0
    #: Whether these replace the objects of a broker that ended.
    rebound: bool = False
    #: Whether the lease may write. Otherwise read-only descriptors are sent, if the driver can make them.
    writable: bool = False


class CancelFds(Effect, frozen=True):
    """Send no more descriptors of a lease that ended; it precedes the Free that closes them."""

    session: int
    lease: int


class BindMulticast(Effect, frozen=True):
    """Make one multicast object per size and bind to it that allocation of every member."""

    #: The number by which the objects are known from now on; it differs from all tickets.
    group: int
    sizes: tuple[int, ...]
    #: ``(device UUID, ticket)`` of each member.
    members: tuple[tuple[str, int], ...]


class UnbindMulticast(Effect, frozen=True):
    """Release the objects of a group, perhaps while its BindMulticast is under way, before any member is freed."""

    group: int


class SetTimer(Effect, frozen=True):
    """Report :class:`TimerExpired` in ``seconds``."""

    timer: int
    seconds: float


class CancelTimer(Effect, frozen=True):
    """Drop a timer that is not needed any more."""

    timer: int


class ForgetSession(Effect, frozen=True):
    """A session ended and holds nothing; the broker may drop its state."""

    session: int


class ShutdownReady(Effect, frozen=True):
    """No lease is left on memory that ends with the broker; it may end."""
