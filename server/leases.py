"""How leases begin and end, and what ends with them: the one path on which memory is released.

A lease ends because its holder closed it, sealed its draft, or is gone. Whatever the cause, it ends
in :func:`release`; a version ends in :func:`end`, and nowhere else is memory freed.
"""

from __future__ import annotations

from cubroker.protocol.errors import NotFound, OverQuota
from cubroker.server import wording
from cubroker.server.books import Books
from cubroker.server.records import Lease, Session, Version
from cubroker.server.room import give_up
from cubroker.server.states import Cause, State


def grant(books: Books, session: Session, version: Version) -> Lease:
    """Give ``session`` a lease on ``version``; raises ``OverQuota``."""
    check_quota(books, session)
    lease = Lease(next(books.lease_ids), session, version)
    session.leases[lease.id] = lease
    version.leases += 1
    session.story.append(f"lease {lease.id} on {version.label} began")
    return lease


def check_quota(books: Books, session: Session) -> None:
    """Raise ``OverQuota`` if ``session`` may have no more leases."""
    if len(session.leases) >= books.limits.leases:
        raise OverQuota(f"this session holds {books.limits.leases} leases, the most that one may; close some of them")


def held(session: Session, lease: int) -> Lease:
    """Return a lease of ``session``; raises ``NotFound`` alike for one of another session and for none at all."""
    found = session.leases.get(lease)
    if found is None:
        raise NotFound(wording.no_lease(lease))
    return found


def release(books: Books, lease: Lease) -> None:
    """End a lease, and its version if nothing else keeps that."""
    del lease.session.leases[lease.id]
    version = lease.version
    version.leases -= 1
    lease.session.story.append(f"lease {lease.id} on {version.label} ended")
    if version.state is State.DRAFT:
        end(books, version, Cause.DROPPED)
    else:
        end_if_empty(books, version)


def end_if_empty(books: Books, version: Version) -> None:
    """End a version that is out of service once it has no lease."""
    if version.leases == 0 and version.state in (State.SUPERSEDED, State.RETIRED):
        end(books, version, Cause.EMPTIED)


def end(books: Books, version: Version, cause: Cause) -> None:
    """End a version and have its memory freed, whatever of it there is already."""
    version.move(cause)
    pool = version.pool
    del pool.versions[version.number]
    if pool.draft is version:
        pool.draft = None
    if not pool.versions:
        pool.owner = None
    for allocation in version.replicas.values():
        give_up(books, allocation)
    books.stirred_pools.append(pool)
