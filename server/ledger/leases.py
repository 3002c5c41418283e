"""How leases begin and end, and what ends with them: the one path on which memory is released.

A lease ends because its holder closed it, sealed its draft, or is gone. Whatever the cause, it ends
in :func:`release`, after its events if it can have any (:mod:`cubroker.server.ledger.signals`); a version ends in
:func:`end`, and nowhere else is memory freed.

The policy may keep the newest superseded versions of each pool: as many as it says stay although they
have no lease, until a newer one takes their place or somebody retires them.
"""

from __future__ import annotations

from collections.abc import Sequence

from cubroker.protocol.errors import Invalid, NotFound, OverQuota, Unavailable
from cubroker.protocol.messages import DESCRIPTOR, Done
from cubroker.server.ledger import mapped, shortages, teams, wording
from cubroker.server.ledger.books import Books, Kind
from cubroker.server.ledger.entries import BY_DESCRIPTOR, Allocation, Lease, Pool, Session, Version
from cubroker.server.ledger.events import Drained, HandOver, Withdraw
from cubroker.server.ledger.policy import exceeds
from cubroker.server.ledger.room import give_up
from cubroker.server.ledger.states import Cause, State

FABRIC = "fabric handle"

OUT_OF_SERVICE = (State.SUPERSEDED, State.RETIRED, State.LOST)
"""The states of versions that end with their last lease."""


def opened_by(version: Version) -> str:
    """Return what opens a version: ``handle``, ``descriptor`` or ``FABRIC``; nothing until all its memory is there."""
    if version.state is State.ALLOCATING:
        return ""
    if version.share not in BY_DESCRIPTOR:
        return "handle"
    by_descriptor = any(DESCRIPTOR in allocation.handles for allocation in version.replicas.values())
    return "descriptor" if by_descriptor else FABRIC


def grant(
    books: Books, session: Session, version: Version, allocations: Sequence[Allocation], *, bound: bool = False
) -> Lease:
    """Give ``session`` a lease on ``version``, and the descriptors of ``allocations``.

    Those of the objects of the version's team as well, if it is ``bound`` to write all replicas at once. Where fabric
    handles open the memory, descriptors are sent only if it asks for them.

    Raises:
        OverQuota: it, or its user, has enough leases, or too much memory beyond them.
    """
    check_quota(books, session)
    lease = Lease(next(books.lease_ids), session, version, tuple(allocations), bound)
    books.leases[lease.id] = session.leases[lease.id] = version.holders[lease.id] = lease
    session.user.leases += 1
    books.mark(Kind.LEASE, lease.id)
    session.story.append(f"lease {lease.id} on {version.label} began")
    if version.share in BY_DESCRIPTOR:
        lease.unsent = opened_by(version) == FABRIC
        if not lease.unsent:
            books.effects.append(hand_over(lease))
    return lease


def hand_over(lease: Lease) -> HandOver:
    """Return what hands all over that a lease by descriptors has been given."""
    tickets = tuple((allocation.account.device.uuid, allocation.ticket) for allocation in lease.allocations)
    team = lease.version.team if lease.bound else None
    objects = team.id if team is not None and team.sizes else 0
    return HandOver(lease.session.id, lease.id, tickets, objects, writable=lease.writable)


def send_descriptors(books: Books, lease: Lease) -> Done:
    """Send the descriptors of a lease whose holder cannot open its fabric handles.

    Each lease has them once, so nobody can have any number of them on their way.

    Raises:
        Invalid: it had them.
        Unavailable: they went with the memory.
    """
    if not lease.unsent:
        raise Invalid(f"lease {lease.id} on {lease.version.label} has no descriptors that were not sent")
    if lease.version.state is State.LOST:
        raise Unavailable(wording.lost(lease.version))
    books.effects.append(hand_over(lease))
    lease.unsent = False
    books.mark(Kind.LEASE, lease.id)
    return Done()


def check_quota(books: Books, session: Session) -> None:
    """Raise ``OverQuota`` if ``session`` or its user may have no more leases."""
    if len(session.leases) >= books.limits.leases:
        raise OverQuota(f"this session holds {books.limits.leases} leases, the most that one may; close some of them")
    user = session.user
    if exceeds(user.leases, 1, user.quota.leases):
        raise OverQuota(shortages.too_many_leases(user))
    mapped.check(books, user)


def held(session: Session, lease: int) -> Lease:
    """Return a lease of ``session``; raises ``NotFound`` alike for one of another session and for none at all."""
    found = session.leases.get(lease)
    if found is None:
        raise NotFound(wording.no_lease(lease))
    return found


def release(books: Books, lease: Lease) -> None:
    """End a lease, of which no event is left, and its version if nothing else keeps that."""
    assert not lease.signals
    assert not lease.listeners
    version = lease.version
    del books.leases[lease.id], lease.session.leases[lease.id], version.holders[lease.id]
    lease.session.user.leases -= 1
    mapped.ended(books, lease)
    books.mark(Kind.LEASE, lease.id)
    lease.session.story.append(f"lease {lease.id} on {version.label} ended")
    if books.awaited is not None and books.awaited.pop(lease.id, None) is not None and not books.awaited:
        books.effects.append(Drained())
    if version.share in BY_DESCRIPTOR:
        books.effects.append(Withdraw(lease.session.id, lease.id))
    if version.state is State.DRAFT:
        end(books, version, Cause.DROPPED)
    else:
        end_if_empty(books, version)


def end_if_empty(books: Books, version: Version) -> None:
    """End a version that is out of service once it has no lease, unless it is kept."""
    if not version.holders and version.state in OUT_OF_SERVICE and not is_kept(books, version):
        end(books, version, Cause.EMPTIED)


def end_surplus(books: Books, pool: Pool) -> None:
    """End the superseded versions of a pool that nobody holds, but for those that the policy keeps."""
    old = superseded(pool)
    for version in old[: max(0, len(old) - books.policy.keep)]:
        if not version.holders:
            end(books, version, Cause.EMPTIED)


def is_kept(books: Books, version: Version) -> bool:
    """Say whether a version is among the newest superseded ones of its pool that the policy keeps."""
    keep = books.policy.keep
    return keep > 0 and version in superseded(version.pool)[-keep:]


def superseded(pool: Pool) -> list[Version]:
    """Return the superseded versions of a pool, the oldest first."""
    return [version for version in pool.versions.values() if version.state is State.SUPERSEDED]


def end(books: Books, version: Version, cause: Cause) -> None:
    """End a version and have its memory freed, whatever of it there is already."""
    books.move(version, cause)
    pool = version.pool
    version.user.layouts -= len(version.layout)
    del pool.versions[version.number]
    if pool.draft is version:
        pool.draft = None
    if not pool.versions:
        pool.owner, pool.heir = None, pool.owner
    teams.give_up(books, version)
    for allocation in version.replicas.values():
        give_up(books, allocation)
    books.stirred_pools[pool] = None
