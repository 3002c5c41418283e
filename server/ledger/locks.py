"""Locks of names: one session at a time has the lock of a pool's name, in the order in which they asked.

A lock is advice: it keeps no session from publishing. It is for work that begins before a create can, such as that of a
loader that knows its layout only once it has loaded. A session that may publish a pool may lock its name.

A lock ends in :func:`release`, for every cause: it was given back, or its session ended. As with leases, a session
whose connection ended keeps its locks until its process ends.
"""

from __future__ import annotations

from cubroker.protocol import fields, messages
from cubroker.protocol.errors import CubrokerError, NotFound, TimedOut, Unavailable
from cubroker.server.ledger import error_text, leases
from cubroker.server.ledger.events import RequestReceived
from cubroker.server.ledger.policy import exceeds
from cubroker.server.ledger.records import LockWaiter, Pool, PoolLock, Session
from cubroker.server.ledger.tables import Kind, Tables


def lock(tables: Tables, session: Session, body: messages.Lock, event: RequestReceived) -> messages.Locked | None:
    """Give a session the lock of a name; None if the request waits for it.

    Raises:
        Denied: the session may not publish a pool of that name.
        OverQuota: the session or its user has as many locks, or requests that wait, as it may.
        TimedOut: another request has the lock, and this one may not wait.
        Unavailable: no leases are granted, so that what the lock is for could not be published.
    """
    fields.check_pool_name(body.name)
    if not tables.lends(durable=True):
        raise Unavailable(error_text.not_lending(tables))
    pool = tables.pools.get(body.name)
    _check(tables, session, body.name, pool)
    if pool is None or pool.lock is None:
        return _grant(tables, session, tables.pool(body.name))
    if not body.wait:
        raise TimedOut(error_text.locked(tables, session, pool.lock))
    leases.admit(tables, session, event.request)
    waiter = LockWaiter(session, event.request, pool, body)
    leases.enqueue(tables, waiter)
    leases.arm_timeout(tables, waiter)
    return None


def unlock(tables: Tables, session: Session, body: messages.Unlock) -> messages.Done:
    """Take a lock back from its session; raises ``NotFound``, also for a lock of another session."""
    held = session.locks.get(body.lock)
    if held is None:
        raise NotFound(f"this session has no lock {body.lock}; it was given back already, or was never its own")
    release(tables, held)
    return messages.Done()


def release(tables: Tables, held: PoolLock) -> None:
    """End a lock, and give it to the first request in line that may still have it; the others before it are refused."""
    session, pool = held.session, held.pool
    del tables.locks[held.id], session.locks[held.id]
    session.user.locks -= 1
    pool.lock = None
    tables.mark_dirty(Kind.LOCK, held.id, pool.name)
    tables.note(pool, f"{session.label} gave back the lock of the name")
    while pool.lock is None and pool.lock_waiters:
        waiter = next(iter(pool.lock_waiters))
        leases.stop_waiting(tables, waiter)
        try:
            _check(tables, waiter.session, pool.name, pool)
        except CubrokerError as error:
            leases.answer(tables, waiter, messages.Failed(error.code, error.message))
        else:
            leases.answer(tables, waiter, _grant(tables, waiter.session, pool))
    if pool.idle:
        tables.recheck_pools[pool] = None


def _check(tables: Tables, session: Session, name: str, pool: Pool | None) -> None:
    """Raise ``Denied`` or ``OverQuota`` if a session may not have the lock of a name, or no more locks."""
    leases.check_reserved(tables, session, name)
    if pool is not None:
        leases.check_publishable(tables, session, pool)
    user = session.user
    if len(session.locks) >= tables.limits.locks or exceeds(user.locks, 1, user.quota.locks):
        raise error_text.too_many(session, tables.limits, error_text.LOCKS)


def _grant(tables: Tables, session: Session, pool: Pool) -> messages.Locked:
    held = pool.lock = PoolLock(next(tables.lock_ids), session, pool)
    tables.locks[held.id] = session.locks[held.id] = held
    session.user.locks += 1
    tables.mark_dirty(Kind.LOCK, held.id, pool.name)
    tables.note(pool, f"{session.label} has the lock of the name")
    return messages.Locked(held.id)
