"""A version's way into service and out of it: seal, retire, and who is told."""

from __future__ import annotations

from cubroker.protocol import names
from cubroker.protocol.errors import CubrokerError, Denied, Invalid, NotFound, OverQuota, Retired, Unavailable
from cubroker.protocol.messages import (
    Done,
    Failed,
    Find,
    Found,
    PoolChanged,
    Reply,
    Retire,
    Retirement,
    Seal,
    Sealed,
    Watch,
)
from cubroker.server.ledger import digests, shortages, waiting, wording
from cubroker.server.ledger.attaching import check_readable, lease, missing
from cubroker.server.ledger.books import Books, Kind
from cubroker.server.ledger.entries import Pool, Session, Version
from cubroker.server.ledger.events import Notify
from cubroker.server.ledger.leases import end_if_empty, end_surplus, held, release
from cubroker.server.ledger.permissions import heard, may_hear, may_write
from cubroker.server.ledger.policy import exceeds
from cubroker.server.ledger.states import Cause, State
from cubroker.server.ledger.waiters import Reader, Writer


def seal(books: Books, session: Session, body: Seal) -> Sealed:
    """Publish a draft, end its writer's lease, and serve everybody who waits for it.

    Raises:
        NotFound, Invalid, Unavailable: the session has no such lease, or it is on no draft, or on one that was lost.
        Unsupported, Invalid: digests come with it, and the version has none, or others.
    """
    draft = held(session, body.lease)
    version = draft.version
    if version.state is State.LOST:
        raise Unavailable(wording.lost_draft(version))
    if version.state is not State.DRAFT:
        raise Invalid(f"lease {body.lease} is on {version.label}, which is published; only a draft can be sealed")
    sealed_with = digests.taken(version, body)
    pool = version.pool
    books.move(version, Cause.SEALED)
    version.digests = sealed_with
    previous, pool.current, pool.draft, pool.last = pool.current, version, None, version.number
    if version.mode is not None:
        pool.mode = version.mode
    release(books, draft)
    if previous is not None:
        books.move(previous, Cause.REPLACED)
    end_surplus(books, pool)  # the one that is no longer kept ends as well
    announce(books, pool)
    _serve(books, version)
    books.stirred_pools[pool] = None
    return Sealed(version.number)


def _serve(books: Books, version: Version) -> None:
    """Give leases to those who wait for a version that was just published, in order of arrival."""
    pool = version.pool
    waiters: list[Reader | Writer] = [reader for reader in pool.readers if reader.body.version in (0, version.number)]
    waiters += [writer for writer in pool.line if writer.body.attach is not None]
    for waiter in sorted(waiters, key=lambda waiter: waiter.arrival):
        waiting.leave(books, waiter)
        waiting.answer(books, waiter, _lease(books, waiter, version))


def _lease(books: Books, waiter: Reader | Writer, version: Version) -> Reply:
    try:
        where = waiter.body.attach if isinstance(waiter, Writer) else waiter.body
        assert where is not None
        return lease(books, waiter.session, version, where)
    except CubrokerError as error:
        return Failed(error.code, error.message)


def retire(books: Books, session: Session, body: Retire) -> Retirement:
    """Take a version out of service; it ends with its last lease. Again: say how many it still waits for."""
    known = books.pools.get(body.name)
    if known is not None and not may_write(books, session, known):
        raise Denied(wording.not_writable(books, session, known))
    version = find(books, session, body.name, body.version)
    pool = version.pool
    if version is pool.draft:
        raise Invalid(wording.still_draft(books, session, version))
    leases = version.leases
    if version.state not in (State.RETIRED, State.LOST):
        pool.story.append(f"{session.label} retires version {version.number}")
        _retire(books, version)
    return Retirement(version.number, leases)


def _retire(books: Books, version: Version) -> None:
    pool = version.pool
    books.move(version, Cause.RETIRED)
    end_if_empty(books, version)
    if pool.current is version:
        pool.current = None
        announce(books, pool)


def find(books: Books, session: Session, name: str, number: int) -> Version:
    """Return a live version, whatever its state (0: the current one); raises ``NotFound`` or ``Retired``."""
    names.check(name)
    pool = books.pools.get(name)
    if pool is not None:
        version = pool.versions.get(number) if number else pool.current
        if version is not None:
            return version
    past = heard(books, session, name)
    if 0 < number <= past.last:
        raise Retired(wording.retired(name, number, pool.current.number if pool and pool.current else 0, past.loss))
    raise NotFound(missing(books, session, pool, name, number))


def watch(books: Books, session: Session, body: Watch) -> Done:
    """Begin or end telling a session what becomes of a name."""
    names.check(body.name)
    if not body.on:
        unwatch(books, session, body.name)
        return Done()
    if (known := books.pools.get(body.name)) is not None:
        check_readable(books, session, known)
    if body.name not in session.watches:
        _begin_watch(books, session, body.name)
    books.effects.append(_notice(session, books.pools[body.name]))
    return Done()


def find_current(books: Books, session: Session, body: Find) -> Found:
    """Return the current version of a pool, if that is one of the owners' that are asked for, or the asker's.

    Raises:
        Denied: ``session`` may not read the pool, which one of these owners has, or any owner that is asked for.
    """
    names.check(body.name)
    pool = books.pools.get(body.name)
    if pool is None or (body.owners and pool.owner not in (session.uid, *body.owners)):
        return Found(0)
    check_readable(books, session, pool)
    return Found(pool.current.number if pool.current is not None else 0)


def _begin_watch(books: Books, session: Session, name: str) -> None:
    user = session.user
    if len(session.watches) >= books.limits.watches:
        raise OverQuota(f"this session watches {books.limits.watches} pools, the most that one may; end some of them")
    if exceeds(user.watches, 1, user.quota.watches):
        raise OverQuota(shortages.too_many_watches(user))
    pool = session.watches[name] = books.pool(name)
    pool.watchers[session] = None
    user.watches += 1
    books.mark(Kind.WATCH, session.id, name)


def unwatch(books: Books, session: Session, name: str) -> None:
    """End a watch, if there is one."""
    pool = session.watches.pop(name, None)
    if pool is not None:
        del pool.watchers[session]
        session.user.watches -= 1
        books.mark(Kind.WATCH, session.id, name)
        books.stirred_pools[pool] = None


def announce(books: Books, pool: Pool) -> None:
    """Tell everybody who watches a pool, and may hear of it, which version is current."""
    unowned = pool.owner is pool.heir is None  # so there is nothing but the name
    for session in pool.watchers:
        if unowned or may_hear(books, session, pool):
            books.effects.append(_notice(session, pool))


def _notice(session: Session, pool: Pool) -> Notify:
    return Notify(session.id, PoolChanged(pool.name, 0 if pool.current is None else pool.current.number))
