"""What the ledger is told, and what it wants done: the whole of its interface, as plain data.

Events say what happened, and never what to do about it. Effects are carried out by the shell, in
order; whatever comes of them returns as another event. One of each is made for every request, so they are structs,
which are made faster than dataclasses.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from cubroker.protocol.layout import Outline
from cubroker.protocol.messages import Notice, Reply, Request
from cubroker.server.ledger.entries import Limits
from cubroker.server.ledger.policy import Policy

# -- events ----------------------------------------------------------------------------------------


class Joined(Struct, frozen=True):
    """A process opened a session; the kernel says who it is. ``groups`` are its supplementary ones.

    ``verified`` says that its number is worth something if it is root's or the broker's: see :func:`administers
    <cubroker.server.ledger.permissions.administers>`.
    """

    session: int
    pid: int
    uid: int
    gid: int
    groups: frozenset[int] = frozenset()
    verified: bool = False


class Lost(Struct, frozen=True):
    """A session's connection ended; its process may well be alive."""

    session: int


class Gone(Struct, frozen=True):
    """The kernel says that a session's process has ended, so nothing of it is mapped any more."""

    session: int


class Asked(Struct, frozen=True):
    """A session sent request ``request``, for the first time. ``layout`` is that of a create, as it was checked."""

    session: int
    request: int
    body: Request
    layout: Outline | None = None


class Allocated(Struct, frozen=True):
    """An :class:`Allocate` succeeded: cleared memory, one handle per size.

    ``descriptors``, one per size of ``vmm`` memory, are for the shell alone; they stay open until the ticket is freed.
    """

    ticket: int
    handles: tuple[bytes, ...]
    descriptors: tuple[int, ...] = ()


class NotAllocated(Struct, frozen=True):
    """An :class:`Allocate` failed. What there was of it is freed, but for ``kept`` bytes that the device still has."""

    ticket: int
    code: str
    message: str
    kept: int = 0


class Freed(Struct, frozen=True):
    """A :class:`Free` is done; the device has the bytes again."""

    ticket: int


class Elapsed(Struct, frozen=True):
    """A timer that :class:`SetTimer` asked for has run out."""

    timer: int


class Assembled(Struct, frozen=True):
    """An :class:`Assemble` is done: by ``multicast``, or, since that cannot be had, by ``copies``; ``why`` says why.

    ``sizes`` are those of the multicast objects, one per allocation, none if there are no such objects.
    ``descriptors`` of them are for the shell alone; they stay open until the team is dissolved.
    """

    team: int
    how: str
    why: str
    sizes: tuple[int, ...] = ()
    descriptors: tuple[int, ...] = ()


class Dissolved(Struct, frozen=True):
    """A :class:`Dissolve` is done; nothing is bound to the team's memory any more."""

    team: int


class Reconfigured(Struct, frozen=True):
    """The rules are others from now on; ``budgets`` has the bytes of every device, by UUID."""

    policy: Policy
    limits: Limits
    budgets: Mapping[str, int]


class Vanished(Struct, frozen=True):
    """The memory of a ticket that a restored ledger has cannot be reached any more; ``why`` is a clause for people."""

    ticket: int
    why: str


class Measuring(Struct, frozen=True):
    """What processes refer to begins to be looked at: what :class:`Measured` will say is of moments after this."""


class Process(Struct, frozen=True):
    """What one process of a user has mapped or open of the broker's memory: bytes by ticket, of freed ones as well.

    None: the kernel does not tell.
    """

    pid: int
    uid: int
    memory: Mapping[int, int] | None


class Measured(Struct, frozen=True):
    """What processes refer to, every one that there is anything to tell of."""

    processes: tuple[Process, ...]


class Ending(Struct, frozen=True):
    """The broker was told to end: it lends nothing that would go with it, and waits for :class:`Drained`.

    ``with_store`` says whether what it stored goes, too: else a store leaves that to the next broker.
    """

    with_store: bool = False


class Resumed(Struct, frozen=True):
    """A restored ledger has been told of everything that is missing; the work goes on."""


Event = (
    Joined
    | Lost
    | Gone
    | Asked
    | Allocated
    | NotAllocated
    | Freed
    | Elapsed
    | Assembled
    | Dissolved
    | Reconfigured
    | Vanished
    | Measuring
    | Measured
    | Ending
    | Resumed
)

# -- effects ---------------------------------------------------------------------------------------


class Respond(Struct, frozen=True):
    """Answer request ``request`` of ``session``."""

    session: int
    request: int
    body: Reply


class Notify(Struct, frozen=True):
    """Send a notice on the session socket."""

    session: int
    notice: Notice


class Allocate(Struct, frozen=True):
    """Allocate, clear and export ``sizes`` bytes on device ``device`` (a UUID), known as ``ticket`` from now on.

    ``share`` says how they are to be shared. If they are ``durable``, the store has them before they are reported.
    """

    ticket: int
    device: str
    sizes: tuple[int, ...]
    share: str
    durable: bool = False


class Free(Struct, frozen=True):
    """Free everything that was allocated as ``ticket``; also asked for while that is under way, or once it vanished."""

    ticket: int
    device: str


class HandOver(Struct, frozen=True):
    """Send a session the descriptors of a lease: those of each ``(device, ticket)``, in order, until ``Withdraw``.

    Those of the multicast objects of ``team``, if there is one, come last. It comes before the answer that grants the
    lease, or that says they are sent; or, ``rebound``, after the notice that says what they are. Memory that is not
    ``writable`` is lent for reading: with descriptors that cannot be written, where the driver has such.
    """

    session: int
    lease: int
    allocations: tuple[tuple[str, int], ...]
    team: int = 0
    rebound: bool = False
    writable: bool = False


class Withdraw(Struct, frozen=True):
    """A lease that was handed over has ended: send no more of its descriptors. It comes before they are closed."""

    session: int
    lease: int


class Assemble(Struct, frozen=True):
    """Make a multicast object per size and bind to it that allocation of every member, a ``(device, ticket)``.

    It is known as ``team`` from now on, a number that no ticket has.
    """

    team: int
    sizes: tuple[int, ...]
    members: tuple[tuple[str, int], ...]


class Dissolve(Struct, frozen=True):
    """Undo what was assembled as ``team``; also asked for while that is under way. No member is freed before."""

    team: int


class SetTimer(Struct, frozen=True):
    """Report :class:`Elapsed` in ``seconds``."""

    timer: int
    seconds: float


class DropTimer(Struct, frozen=True):
    """The timer is not needed any more."""

    timer: int


class Forget(Struct, frozen=True):
    """The session is over and holds nothing; the shell may drop what it keeps of it."""

    session: int


class Drained(Struct, frozen=True):
    """The broker ends, and nobody holds what would go with it any more."""


Effect = (
    Respond
    | Notify
    | Allocate
    | Free
    | HandOver
    | Withdraw
    | Assemble
    | Dissolve
    | SetTimer
    | DropTimer
    | Forget
    | Drained
)
