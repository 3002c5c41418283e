"""What the shell around a restored ledger has to take up again: sessions, memory, and what was lent."""

from __future__ import annotations

from typing import NamedTuple

from cubroker.protocol.messages import Attached, Created
from cubroker.server.ledger import attaching, leases
from cubroker.server.ledger.books import Books
from cubroker.server.ledger.entries import BY_DESCRIPTOR
from cubroker.server.ledger.events import HandOver, Joined
from cubroker.server.ledger.states import Stage, State


class Held(NamedTuple):
    """Memory that the version ``label`` has on one device, how many leases are on that, and its team (0: none).

    ``served`` says whether the broker has that device.
    """

    label: str
    ticket: int
    device: str
    sizes: tuple[int, ...]
    share: str
    durable: bool
    leases: int
    team: int
    served: bool


class Lent(NamedTuple):
    """A lease: the answer that grants it, and what has its descriptors sent, if it has any."""

    answer: Attached | Created
    hand_over: HandOver | None


def sessions(books: Books) -> tuple[Joined, ...]:
    """Return all sessions, as they joined."""
    known = books.sessions.values()
    return tuple(Joined(each.id, each.pid, each.uid, each.gid, each.groups, each.verified) for each in known)


def memory(books: Books) -> tuple[Held, ...]:
    """Return all memory that versions have."""
    return tuple(
        Held(
            each.version.label,
            each.ticket,
            each.account.device.uuid,
            each.sizes,
            each.version.share,
            each.version.durable,
            each.version.leases,
            each.version.team.id if each.version.team else 0,
            each.account.device.uuid in books.accounts,
        )
        for each in books.allocations.values()
        if each.stage is Stage.HELD
    )


def lent(books: Books, session: int, lease: int) -> Lent | None:
    """Return the answer that grants a lease, as it would be given now; None if the session holds no such lease."""
    known = books.leases.get(lease)
    if known is None or known.session.id != session:
        return None
    answer = attaching.created(known) if known.version.state is State.DRAFT else attaching.attached(known)
    there = known.version.state is not State.LOST
    given = there and known.version.share in BY_DESCRIPTOR and not known.unsent
    return Lent(answer, leases.hand_over(known) if given else None)
