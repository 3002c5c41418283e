"""Publication: how a version enters and leaves service, which sessions are notified, and the locks of names.

The requests are seal, retire, watch and find; lock and unlock of a name.

Digests that a version is sealed with are the writer's claim: the broker does not read the memory that it lends. It
checks only that there is one digest for each piece of memory.
"""

from __future__ import annotations

from cubroker.protocol import errors, fields, messages
from cubroker.protocol.fields import DIGEST_BYTES
from cubroker.protocol.messages import MULTICAST
from cubroker.server.ledger import error_text, leases
from cubroker.server.ledger.events import RequestReceived
from cubroker.server.ledger.policy import exceeds
from cubroker.server.ledger.records import AttachWaiter, CreateWaiter, LockWaiter, Pool, PoolLock, Session, Version
from cubroker.server.ledger.states import VersionEvent, VersionState
from cubroker.server.ledger.tables import Kind, Tables, can_read, visible_past


def seal(tables: Tables, session: Session, body: messages.Seal | messages.SealInPlace) -> messages.Sealed:
    """Publish a draft, end its writer's lease unless it is sealed in place, and serve the requests that wait for it.

    Raises:
        NotFound, Invalid, Unavailable: the session has no such lease, the lease writes no draft, or the draft was lost.
        Unsupported, Invalid: the version cannot have digests, or the digests are not one for each piece of memory; or
            it is to be sealed in place, and a reader's lease would not have the same memory as the writer's.
    """
    draft = leases.own_draft(session, body.lease)
    version = draft.version
    if isinstance(body, messages.SealInPlace):
        _check_stays(version)
    sealed_with = sealed_digests(version, body)
    pool = version.pool
    tables.transition_version(version, VersionEvent.SEALED)
    version.digests, version.published, version.lent = sealed_with, tables.now, False
    previous, pool.current, pool.draft, pool.last = pool.current, version, None, version.number
    if version.mode is not None:
        pool.mode = version.mode
    if isinstance(body, messages.Seal):
        leases.release(tables, draft)
    else:
        tables.note(session, f"lease {draft.id} stays, and {version.label} is published")
    if previous is not None:
        tables.transition_version(previous, VersionEvent.REPLACED)
    leases.announce(tables, pool)  # before memory is freed, whose thread would take the interpreter first
    leases.end_unused(tables, pool)  # one more is superseded, so another may no longer be kept
    _serve(tables, version)
    tables.recheck_pools[pool] = None
    return messages.Sealed(version.number)


def _check_stays(version: Version) -> None:
    """Raise ``Unsupported`` unless a reader's lease on a version would have the same memory as its writer's."""
    if version.share == MULTICAST or (version.plan is None and len(version.replicas) > 1):
        raise errors.Unsupported(
            f"{version.label} cannot be sealed in place: it is shared as {version.share}, and has"
            f" {len(version.replicas)} replicas, and a reader has only one; seal it without in_place, and attach to it"
        )
    if any(each.ticket.version != version.number for each in version.allocations):
        raise errors.Unsupported(
            f"{version.label} cannot be sealed in place: it shares memory with an earlier one, which its writer does"
            f" not have; seal it, and attach to it"
        )


def _serve(tables: Tables, version: Version) -> None:
    """Give leases to the requests that wait for a version just published."""
    pool = version.pool
    waiters: list[AttachWaiter | CreateWaiter] = [
        waiter for waiter in pool.attach_waiters if waiter.body.version in (0, version.number)
    ]
    leases.serve(tables, version, waiters + [waiter for waiter in pool.queue if waiter.body.attach is not None])


def retire(tables: Tables, session: Session, body: messages.Retire) -> messages.Retirement:
    """Take a version out of service; it ends with its last lease. A repeated request reports the remaining leases."""
    known = tables.pools.get(body.name)
    if known is not None:
        leases.check_publishable(tables, session, known)
    version = find(tables, session, body.name, body.version)
    pool = version.pool
    if version is pool.draft:
        writer = version.writer if can_read(tables, session, pool) else "another session"
        raise errors.Invalid(
            f"{version.label} is a draft of {writer}; it ends when that session closes it, or when the session ends"
        )
    left = version.leases
    if version.state not in (VersionState.RETIRED, VersionState.LOST):
        tables.note(pool, f"{session.label} retires version {version.number}")
        tables.transition_version(version, VersionEvent.RETIRED)
        ended = leases.end_if_unused(tables, version)
        if pool.current is version:
            pool.current, ended = None, True
        if ended:
            leases.announce(tables, pool)
    return messages.Retirement(version.number, left)


def find(tables: Tables, session: Session, name: str, number: int) -> Version:
    """Return a live version in any state (0: the current one); raises ``NotFound`` or ``Retired``."""
    fields.check_pool_name(name)
    pool = tables.pools.get(name)
    if pool is not None:
        version = pool.versions.get(number) if number else pool.current
        if version is not None:
            return version
    past = visible_past(tables, session, name)
    if 0 < number <= past.last:
        raise errors.Retired(error_text.retired(name, number, pool, past.loss))
    raise errors.NotFound(error_text.missing(tables, session, name, number) + error_text.held(tables, session, name))


def watch(tables: Tables, session: Session, body: messages.Watch) -> messages.Done:
    """Begin or end a watch, which notifies a session of every change of a name's current version."""
    fields.check_pool_name(body.name)
    if not body.on:
        unwatch(tables, session, body.name)
        return messages.Done()
    if (known := tables.pools.get(body.name)) is not None:
        leases.check_readable(tables, session, known)
    if body.name not in session.watches:
        user = session.user
        if len(session.watches) >= tables.limits.watches or exceeds(user.watches, 1, user.quota.watches):
            raise error_text.too_many(session, tables.limits, error_text.WATCHES)
        pool = session.watches[body.name] = tables.pool(body.name)
        pool.watchers[session] = None
        user.watches += 1
        tables.mark_dirty(Kind.WATCH, session.id, body.name)
    tables.effects.append(leases.notice(session, tables.pools[body.name]))
    return messages.Done()


def find_current(tables: Tables, session: Session, body: messages.Find) -> messages.Found:
    """Return the number of the current version of a pool, 0 if there is none.

    If the request names owners, a pool of any other user except that of ``session`` counts as none.

    Raises:
        Denied: ``session`` may not read the pool.
    """
    fields.check_pool_name(body.name)
    pool = tables.pools.get(body.name)
    if pool is None or (body.owners and pool.owner not in (session.uid, *body.owners)):
        return messages.Found(0)
    leases.check_readable(tables, session, pool)
    return messages.Found(pool.current.number if pool.current is not None else 0)


def unwatch(tables: Tables, session: Session, name: str) -> None:
    """End a watch, if there is one."""
    pool = session.watches.pop(name, None)
    if pool is not None:
        del pool.watchers[session]
        session.user.watches -= 1
        tables.mark_dirty(Kind.WATCH, session.id, name)
        if pool.idle:
            tables.recheck_pools[pool] = None


# -- digests of what a version held when it was sealed -------------------------------------------------


def sealed_digests(version: Version, body: messages.Seal | messages.SealInPlace) -> messages.Digests | None:
    """Return the digests with which a draft is to be sealed, None if the request has none.

    Raises:
        Unsupported: readers of the version may write it.
        Invalid: the digests are not one for each piece of memory.
    """
    digests = body.digests if isinstance(body, messages.SealDigested | messages.SealInPlace) else None
    if digests is None:
        return None
    if version.writable:
        raise errors.Unsupported(
            f"{version.label} is writable by its readers, so a digest would not tell what it holds; seal it without a"
            f" digest"
        )
    if not digests_fit(version, digests):
        raise errors.Invalid(
            f"{version.label} cannot be sealed with these digests; send one of {DIGEST_BYTES} bytes for each allocation"
            f" of each of its {len(version.replicas)} replicas"
        )
    return digests


def digests_fit(version: Version, digests: messages.Digests) -> bool:
    """Say whether there is one digest for each piece of memory of a version, and no other."""
    wanted = [[DIGEST_BYTES * bool(handle) for handle in there.handles] for there in version.replicas.values()]
    return wanted == [list(map(len, replica)) for replica in digests.replicas]


# -- locks of names ------------------------------------------------------------------------------------

# One session at a time has the lock of a pool's name; sessions get it in the order of their requests. A lock is
# advisory: it keeps no session from publishing. It is for work that begins before the create, such as that of a loader
# that knows its layout only once it has loaded. A session that may publish a pool may lock its name.
#
# A lock ends in :func:`release_lock`, for every cause: it was given back, or its session ended. As with leases, a
# session whose connection ended keeps its locks until its process ends.


def lock(tables: Tables, session: Session, body: messages.Lock, event: RequestReceived) -> messages.Locked | None:
    """Give a session the lock of a name; None if the request waits for it.

    Raises:
        Denied: the session may not publish a pool of that name.
        OverQuota: the session or its user has as many locks, or requests that wait, as it may.
        TimedOut: another session has the lock, and the request may not wait.
        Unavailable: no leases are granted, so nothing could be published under the lock.
    """
    fields.check_pool_name(body.name, "a lock")
    if not tables.lends(durable=True):
        raise errors.Unavailable(error_text.not_lending(tables))
    pool = tables.pools.get(body.name)
    _check_lockable(tables, session, body.name, pool)
    if pool is None or pool.lock is None:
        return _grant_lock(tables, session, tables.pool(body.name))
    if not body.wait:
        raise errors.TimedOut(error_text.locked(tables, session, pool.lock))
    leases.admit(tables, session, event.request)
    leases.wait(tables, LockWaiter(session, event.request, pool, body))
    return None


def unlock(tables: Tables, session: Session, body: messages.Unlock) -> messages.Done:
    """Release a lock of a session; raises ``NotFound``, also for a lock of another session."""
    held = session.locks.get(body.lock)
    if held is None:
        raise errors.NotFound(f"this session has no lock {body.lock}; it was given back already, or was never its own")
    release_lock(tables, held)
    return messages.Done()


def release_lock(tables: Tables, held: PoolLock) -> None:
    """End a lock, and give it to the first request in line that may still have it; requests before that are refused."""
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
            _check_lockable(tables, waiter.session, pool.name, pool)
        except errors.CubrokerError as error:
            leases.answer(tables, waiter, messages.Failed(error.code, error.message))
        else:
            leases.answer(tables, waiter, _grant_lock(tables, waiter.session, pool))
    if pool.idle:
        tables.recheck_pools[pool] = None


def _check_lockable(tables: Tables, session: Session, name: str, pool: Pool | None) -> None:
    """Raise ``Denied`` or ``OverQuota`` if a session may not have the lock of a name, or may not have more locks."""
    leases.check_reserved(tables, session, name)
    if pool is not None:
        leases.check_publishable(tables, session, pool)
    user = session.user
    if len(session.locks) >= tables.limits.locks or exceeds(user.locks, 1, user.quota.locks):
        raise error_text.too_many(session, tables.limits, error_text.LOCKS)


def _grant_lock(tables: Tables, session: Session, pool: Pool) -> messages.Locked:
    held = pool.lock = PoolLock(next(tables.lock_ids), session, pool)
    tables.locks[held.id] = session.locks[held.id] = held
    session.user.locks += 1
    tables.mark_dirty(Kind.LOCK, held.id, pool.name)
    tables.note(pool, f"{session.label} has the lock of the name")
    return messages.Locked(held.id)
