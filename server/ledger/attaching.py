"""Attach: a lease on a published version, at once or once it is published."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from cubroker.protocol import names
from cubroker.protocol.errors import Denied, Invalid, NotFound, Retired
from cubroker.protocol.messages import Attach, Attached, Created, Replica, Where
from cubroker.server.ledger import draining, teams, waiting, wording
from cubroker.server.ledger.books import Books
from cubroker.server.ledger.entries import Allocation, Lease, Pool, Session, Version
from cubroker.server.ledger.leases import grant
from cubroker.server.ledger.permissions import heard, may_read
from cubroker.server.ledger.states import State
from cubroker.server.ledger.waiters import Reader


def attach(books: Books, session: Session, request: int, body: Attach) -> Attached | None:
    """Lease a published version, or have the request wait for it; raises what stands in the way."""
    draining.check(books, durable=True)
    pool = books.pools.get(body.name)
    version = None if pool is None else _published(pool, body.version)
    if version is not None:
        return lease(books, session, version, body)
    if pool is not None:
        check_readable(books, session, pool)
        check_owner(session, pool, body)
    _check_missing(books, session, pool, body)
    waiting.admit(books, session, request)
    blind = 0 < body.version <= books.past(body.name).last
    reader = Reader(next(books.arrivals), session, request, books.pool(body.name), body, blind)
    waiting.begin(books, reader)
    waiting.limit(books, reader)
    return None


def _published(pool: Pool, number: int) -> Version | None:
    if number == 0:
        return pool.current
    version = pool.versions.get(number)
    return version if version is not None and version.state in (State.CURRENT, State.SUPERSEDED) else None


def check_readable(books: Books, session: Session, pool: Pool) -> None:
    """Raise ``Denied`` if ``session`` may not attach to, describe and watch a pool."""
    if not may_read(books, session, pool):
        raise Denied(wording.not_readable(session.uid, pool))


def check_owner(session: Session, pool: Pool, where: Attach | Where) -> None:
    """Raise ``Denied`` if ``where`` asks for certain owners, and a pool has another one, who is not the asker."""
    if where.owners and pool.owner not in (None, session.uid, *where.owners):
        raise Denied(wording.not_owned(pool, where.owners))


def _check_missing(books: Books, session: Session, pool: Pool | None, body: Attach) -> None:
    """Raise unless the missing version can come and the request may wait for it."""
    names.check(body.name)
    past = heard(books, session, body.name)
    if 0 < body.version <= past.last:
        current = 0 if pool is None or pool.current is None else pool.current.number
        raise Retired(wording.retired(body.name, body.version, current, past.loss))
    check_somewhere(books, body)
    if not body.wait:
        raise NotFound(missing(books, session, pool, body.name, body.version))


def check_somewhere(books: Books, where: Attach | Where) -> None:
    """Raise ``NotFound`` if a device is wanted that is not the broker's, and reaches none that is."""
    if where.device is not None and books.accounts.keys().isdisjoint((where.device, *where.peers)):
        raise NotFound(wording.no_device(where.device, books.accounts))


def missing(books: Books, session: Session, pool: Pool | None, name: str, number: int) -> str:
    """Say why there is no such version (0: no current one), and what else there is that ``session`` may see."""
    if pool is None or not pool.versions:
        looked_at = islice(books.pools.values(), wording.NEAR_POOLS)
        visible = (other for other in looked_at if may_read(books, session, other))
        return wording.no_pool(name, visible, heard(books, session, name))
    return wording.unpublished(books, session, pool, number)


def lease(books: Books, session: Session, version: Version, where: Attach | Where) -> Attached:
    """Give a session a lease on a published version, with the handles of one device, or of all its shards.

    Raises:
        Denied: the session may not read the pool, or it is not one of the owners that were asked for.
        Invalid, NotFound: the device has to be named, or has none of it.
        OverQuota: the session or its user has enough leases.
        Unavailable: there are no new ones.
    """
    check_readable(books, session, version.pool)
    check_owner(session, version.pool, where)
    draining.check(books, durable=version.durable)
    allocations, bound = _choose(version, where.device, where.peers), teams.binds(version, where.device)
    if bound:
        allocations = teams.reached(version, allocations[0])
    return attached(grant(books, session, version, allocations, bound=bound))


def attached(lease: Lease) -> Attached:
    """Return the answer that says what was leased of a published version."""
    version = lease.version
    return Attached(
        lease=lease.id,
        name=version.pool.name,
        version=version.number,
        share=version.share,
        layout=version.layout,
        replicas=tuple(map(replica, lease.allocations)),
        writable=version.writable,
        team=teams.message(version, objects=lease.bound),
    )


def created(lease: Lease) -> Created:
    """Return the answer that says what was leased of a draft."""
    version = lease.version
    replicas, team = tuple(map(replica, lease.allocations)), teams.message(version, objects=True)
    return Created(lease.id, version.pool.name, version.number, version.share, replicas, team)


def _choose(version: Version, device: str | None, peers: Sequence[str]) -> tuple[Allocation, ...]:
    """Return what is leased to who asks for ``device`` and reaches ``peers``; raises ``Invalid`` or ``NotFound``."""
    if device is None:
        if version.plan is None and len(version.replicas) > 1:
            raise Invalid(wording.which_device(version))
        return tuple(version.replicas.values())
    # A shard elsewhere is no replacement for one here, which would hold other tensors.
    wanted = (device, *peers) if version.plan is None else (device,)
    for uuid in wanted:
        if uuid in version.replicas:
            return (version.replicas[uuid],)
    raise NotFound(wording.not_here(version, device, peers))


def replica(allocation: Allocation) -> Replica:
    """Return the memory of a version on one device, as it travels."""
    return Replica(allocation.account.device.uuid, allocation.handles)
