"""Memory that processes refer to beyond the leases of their user: what a quota of leases cannot tell.

A lease ends when its holder says that it has unmapped, and the ledger believes it. So the shell looks from outside, and
tells what every process has mapped or open of memory that the broker allocated, freed or not. What no session of its
user leases is *beyond leases*. Leases of the same user count, whichever process holds them: a process that was forked
has the mappings of its parent. Who unmaps before it closes, and maps after it was granted a lease, has nothing beyond
at any moment; leases that end while the shell looks count as well, since it may have looked before.
"""

from __future__ import annotations

from collections.abc import Mapping

from cubroker.protocol.errors import OverQuota
from cubroker.server.ledger import shortages
from cubroker.server.ledger.books import Books
from cubroker.server.ledger.entries import Footprint, Lease, Session, User
from cubroker.server.ledger.events import Measured


def begin(books: Books) -> None:
    """Remember the leases that end until :func:`measured`."""
    books.ended = set()


def ended(books: Books, lease: Lease) -> None:
    """Note the end of a lease."""
    if books.ended is not None:
        books.ended.update((lease.session.uid, allocation.ticket) for allocation in lease.allocations)


def measured(books: Books, event: Measured) -> None:
    """Note what processes refer to beyond leases; of those that are not told of, nothing is known."""
    leased: dict[tuple[int, int], bool] = dict.fromkeys(books.ended or (), True)

    def is_leased(uid: int, ticket: int) -> bool:
        key = uid, ticket
        if key not in leased:
            leased[key] = _is_leased(books, uid, ticket)
        return leased[key]

    footprints: dict[int, Footprint] = {}
    for process in event.processes:
        memory = process.memory
        if memory is not None:
            memory = {ticket: size for ticket, size in memory.items() if not is_leased(process.uid, ticket)}
        footprints.setdefault(process.uid, Footprint()).processes[process.pid] = memory
    for footprint in footprints.values():
        footprint.count()
    books.footprints, books.ended = footprints, None


def _is_leased(books: Books, uid: int, ticket: int) -> bool:
    allocation = books.allocations.get(ticket)
    if allocation is None:  # it is freed
        return False
    holders = allocation.version.holders.values()
    return any(lease.session.uid == uid and allocation in lease.allocations for lease in holders)


def gone(books: Books, session: Session) -> None:
    """Forget a process that has ended."""
    footprint = books.footprints.get(session.uid)
    if footprint is not None and footprint.processes.pop(session.pid, None):
        footprint.count()


def beyond(books: Books, session: Session) -> int | None:
    """Return the bytes that a session's process refers to beyond leases; None: unknown."""
    footprint = books.footprints.get(session.uid)
    memory = None if footprint is None else footprint.processes.get(session.pid)
    return None if memory is None else sum(memory.values())


def totals(books: Books) -> Mapping[int, int]:
    """Return the bytes beyond leases by user, for all of whom anything is known."""
    return {uid: footprint.nbytes for uid, footprint in books.footprints.items() if footprint.known}


def excesses(books: Books) -> Mapping[int, str]:
    """Return, by user, in words, who has more beyond leases than its quota allows."""
    return {
        uid: shortages.too_much_beyond(uid, footprint, limit)
        for uid, footprint in books.footprints.items()
        if (limit := books.policy.quota_of(uid).mapped_beyond_leases) is not None and footprint.nbytes > limit
    }


def check(books: Books, user: User) -> None:
    """Raise ``OverQuota`` if a user has more beyond leases than its quota allows."""
    limit, footprint = user.quota.mapped_beyond_leases, books.footprints.get(user.uid)
    if limit is not None and footprint is not None and footprint.nbytes > limit:
        raise OverQuota(shortages.too_much_beyond(user.uid, footprint, limit))
