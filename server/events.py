"""What the ledger is told, and what it wants done: the whole of its interface, as plain data.

Events say what happened, and never what to do about it. Effects are carried out by the shell, in
order; whatever comes of them returns as another event.
"""

from __future__ import annotations

from dataclasses import dataclass

from cubroker.protocol.layout import Layout
from cubroker.protocol.messages import Notice, Reply, Request

# -- events ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Joined:
    """A process opened a session; the kernel says who it is. ``groups`` are its supplementary ones."""

    session: int
    pid: int
    uid: int
    gid: int
    groups: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Lost:
    """A session's connection ended; its process may well be alive."""

    session: int


@dataclass(frozen=True, slots=True)
class Gone:
    """The kernel says that a session's process has ended, so nothing of it is mapped any more."""

    session: int


@dataclass(frozen=True, slots=True)
class Asked:
    """A session sent request ``request``, for the first time. ``layout`` is that of a create, decoded and checked."""

    session: int
    request: int
    body: Request
    layout: Layout | None = None


@dataclass(frozen=True, slots=True)
class Allocated:
    """An :class:`Allocate` succeeded: cleared memory, one handle per size.

    ``descriptors``, one per size of ``vmm`` memory, are for the shell alone; they stay open until the ticket is freed.
    """

    ticket: int
    handles: tuple[bytes, ...]
    descriptors: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class NotAllocated:
    """An :class:`Allocate` failed. What there was of it is freed, but for ``kept`` bytes that the device still has."""

    ticket: int
    code: str
    message: str
    kept: int = 0


@dataclass(frozen=True, slots=True)
class Freed:
    """A :class:`Free` is done; the device has the bytes again."""

    ticket: int


@dataclass(frozen=True, slots=True)
class Elapsed:
    """A timer that :class:`SetTimer` asked for has run out."""

    timer: int


Event = Joined | Lost | Gone | Asked | Allocated | NotAllocated | Freed | Elapsed

# -- effects ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Respond:
    """Answer request ``request`` of ``session``."""

    session: int
    request: int
    body: Reply


@dataclass(frozen=True, slots=True)
class Notify:
    """Send a notice on the session socket."""

    session: int
    notice: Notice


@dataclass(frozen=True, slots=True)
class Allocate:
    """Allocate, clear and export ``sizes`` bytes on device ``device`` (a UUID), known as ``ticket`` from now on.

    ``share`` says how they are to be shared.
    """

    ticket: int
    device: str
    sizes: tuple[int, ...]
    share: str


@dataclass(frozen=True, slots=True)
class Free:
    """Free everything that was allocated as ``ticket``; also asked for while that is still under way."""

    ticket: int
    device: str


@dataclass(frozen=True, slots=True)
class HandOver:
    """Send a session the descriptors of a lease: those of each ``(device, ticket)``, in order, until ``Withdraw``.

    It comes before the answer that grants the lease.
    """

    session: int
    lease: int
    allocations: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Withdraw:
    """A lease that was handed over has ended: send no more of its descriptors. It comes before they are closed."""

    session: int
    lease: int


@dataclass(frozen=True, slots=True)
class SetTimer:
    """Report :class:`Elapsed` in ``seconds``."""

    timer: int
    seconds: float


@dataclass(frozen=True, slots=True)
class DropTimer:
    """The timer is not needed any more."""

    timer: int


@dataclass(frozen=True, slots=True)
class Forget:
    """The session is over and holds nothing; the shell may drop what it keeps of it."""

    session: int


Effect = Respond | Notify | Allocate | Free | HandOver | Withdraw | SetTimer | DropTimer | Forget
