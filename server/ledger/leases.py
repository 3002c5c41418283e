"""Leases: how they are asked for, waited for, granted and ended; and how every request waits.

A draft has one lease that writes it (:attr:`.records.Lease.writes`), and leases of readers who asked for it unsealed.
The seal ends the writer's lease, or turns it into a reader's. If the writer's lease ends in another way, the draft is
given up.

A lease ends because its holder closed it, sealed its draft, or exited. For every cause it ends in :func:`release`,
after its events (:mod:`cubroker.server.ledger.ipc_events`). A version ends in :func:`end_version`, the one path on
which memory is released. The policy may keep the newest superseded versions of each pool without leases, until a newer
one takes their place or a user retires them.

An attach waits for a publication; a create waits for its turn, for room, and for its memory; other requests wait for
IPC events and for locks. All of them stop in :func:`stop_waiting`, for every cause: served, refused, timed out,
cancelled, or their session ended. A request that waits is answered exactly once, unless its session ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cubroker.protocol import errors, fields, messages
from cubroker.protocol.messages import BY_DESCRIPTOR, DESCRIPTOR, IPC, MULTICAST, VMM
from cubroker.server.ledger import error_text, events, memory
from cubroker.server.ledger.memory import release_quota
from cubroker.server.ledger.policy import exceeds
from cubroker.server.ledger.records import (
    AttachWaiter,
    CreateWaiter,
    EventWaiter,
    Lease,
    LockWaiter,
    Phase,
    Pool,
    Replica,
    Session,
    Version,
    Waiter,
)
from cubroker.server.ledger.states import VersionEvent, VersionState
from cubroker.server.ledger.tables import (
    Kind,
    Tables,
    can_publish,
    can_read,
    can_read_draft,
    can_read_history,
    is_privileged,
    reserved_prefix,
    visible_past,
)

FABRIC = "fabric handle"

PUBLISHED = (VersionState.CURRENT, VersionState.SUPERSEDED)
"""The states of versions that can be attached to; so can a draft, by a request with its number and ``unsealed``."""

OUT_OF_SERVICE = (VersionState.SUPERSEDED, VersionState.RETIRED, VersionState.LOST)  #: They end with their last lease.

# -- asking for a lease ----------------------------------------------------------------------------------


def attach(
    tables: Tables, session: Session, body: messages.Attach, event: events.RequestReceived
) -> messages.Attached | None:
    """Lease a published version, or a draft if requested; None if the request waits. Raises like :func:`lend`."""
    if not tables.lends(durable=True):
        raise errors.Unavailable(error_text.not_lending(tables))
    pool = tables.pools.get(body.name)
    if pool is not None:
        version = pool.versions.get(body.version) if body.version else pool.current
        if version is not None and (version.state in PUBLISHED or reads_draft(body, version)):
            return lend(tables, session, version, body)
        check_readable(tables, session, pool)
        _check_owner(session, pool, body)
    _check_expected(tables, session, pool, body)
    admit(tables, session, event.request)
    blind = 0 < body.version <= tables.past(body.name).last
    pool = tables.pool(body.name)
    wait(tables, AttachWaiter(session, event.request, pool, body, next(tables.arrivals), blind))
    return None


def reads_draft(body: messages.Attach, version: Version) -> bool:
    """Whether a request is for a draft that has its memory."""
    return body.unsealed and body.version == version.number and version.state is VersionState.DRAFT


def check_readable(tables: Tables, session: Session, pool: Pool) -> None:
    """Raise ``Denied`` if a session may not attach to, describe and watch a pool."""
    if not can_read(tables, session, pool):
        raise errors.Denied(
            f"user {session.uid} may not attach to {pool.name}, describe or watch it: its mode does not allow that; ask"
            f" its owner for a mode that does"
        )


def check_reserved(tables: Tables, session: Session, name: str) -> None:
    """Raise ``Denied`` if a name is reserved for the pools of others."""
    if (prefix := reserved_prefix(tables, session, name)) is not None:
        raise errors.Denied(
            f"user {session.uid} may not publish {name}: names that begin with {prefix!r} are reserved; use"
            f" another name, or have this user added to [names] of the broker's settings"
        )


def check_publishable(tables: Tables, session: Session, pool: Pool) -> None:
    """Raise ``Denied`` if a session may not publish and retire versions of a pool."""
    if not can_publish(tables, session, pool):
        raise errors.Denied(
            f"user {session.uid} may not publish or retire versions of {pool.name},"
            f" {error_text.belongs(tables, session, pool)}; use another name, or ask its owner for a mode that lets you"
        )


def _check_owner(session: Session, pool: Pool, where: messages.Attach | messages.Where) -> None:
    """Raise ``Denied`` if the request names owners, and the pool belongs neither to one of them nor to the session."""
    if where.owners and pool.owner not in (None, session.uid, *where.owners):
        wanted = " or ".join(map(str, dict.fromkeys(where.owners)))  # a loader may be root, and the broker's user
        raise errors.Denied(
            f"{pool.name} belongs to user {pool.owner}, and a pool of user {wanted} was asked for; have it"
            f" retired, use another name, or name its owner (--owner, $CUBROKER_OWNER or, in Python, the argument"
            f" `owner`)"
        )


def _check_expected(tables: Tables, session: Session, pool: Pool | None, body: messages.Attach) -> None:
    """Raise unless the missing version can still be published, and the request may wait for it."""
    fields.check_pool_name(body.name)
    past = visible_past(tables, session, body.name)
    if 0 < body.version <= past.last:
        raise errors.Retired(error_text.retired(body.name, body.version, pool, past.loss))
    check_reachable(tables, body)
    if not body.wait:
        raise errors.NotFound(error_text.missing(tables, session, body.name, body.version))


def check_reachable(tables: Tables, where: messages.Attach | messages.Where) -> None:
    """Raise ``NotFound`` if the request names a device, and neither that nor any of its peers is the broker's."""
    if where.device is not None and tables.accounts.keys().isdisjoint((where.device, *where.peers)):
        raise errors.NotFound(error_text.no_device(tables, where.device))


# -- granting --------------------------------------------------------------------------------------------


def lend(
    tables: Tables, session: Session, version: Version, where: messages.Attach | messages.Where
) -> messages.Attached:
    """Give a session a reader's lease on a version, with the handles of one device or of all its shards.

    Raises:
        Denied: the session may not read the pool, or the request names other owners.
        Unsupported: it is a draft that its readers may write.
        Invalid, NotFound: the request must name a device, or the version is not on the device that it names.
        OverQuota: the session or its user has as many leases as it may, or the user too much memory beyond leases.
        Unavailable: no leases are granted.
    """
    pool = version.pool
    if pool.owner != session.user.uid:
        check_readable(tables, session, pool)
        _check_owner(session, pool, where)
    draft = version.state is VersionState.DRAFT
    if draft:
        _check_draft(tables, session, version)
    if not tables.lends(durable=version.durable):
        raise errors.Unavailable(error_text.not_lending(tables))
    chosen = _choose(tables, version, where.device, where.peers)
    written = memory.replicas_for(version, chosen, where.device) if version.share == MULTICAST else ()
    check_quota(tables, session)
    if draft:
        version.lent = True
        tables.mark_dirty(Kind.STATE, version.number, pool.name)
    return attached(grant(tables, session, version, written or chosen, bound=bool(written)))


def _check_draft(tables: Tables, session: Session, draft: Version) -> None:
    """Raise ``Denied`` or ``Unsupported`` if a session may not attach to a draft."""
    if not can_read_draft(tables, session, draft):
        raise errors.Denied(
            f"user {session.uid} may not attach to {draft.label} before its seal: the mode that it will have does not"
            f" allow that; ask its owner for a mode that does"
        )
    if draft.writable:
        raise errors.Unsupported(
            f"{draft.label} cannot be attached to before its seal: it is writable by its readers, and until the seal"
            f" only its writer may write it; wait for it to be sealed"
        )
    writer = draft.holders[draft.writer_lease].session
    if draft.share == IPC and session.uid != writer.uid and not is_privileged(tables, session):
        raise errors.Unsupported(
            f"{draft.label} cannot be attached to before its seal by user {session.uid}: it is shared as {IPC}, so its"
            f" readers could write it, and its digests are still to be computed; wait for it to be sealed, or have it"
            f" created with share={VMM!r}"
        )


def serve(tables: Tables, version: Version, waiters: Iterable[AttachWaiter | CreateWaiter]) -> None:
    """Give leases on a version to requests that waited for it, in order of arrival."""
    for waiter in sorted(waiters, key=lambda waiter: waiter.arrival):
        where = waiter.body if isinstance(waiter, AttachWaiter) else waiter.body.attach
        assert where is not None
        stop_waiting(tables, waiter)
        try:
            reply: messages.Reply = lend(tables, waiter.session, version, where)
        except errors.CubrokerError as error:
            reply = messages.Failed(error.code, error.message)
        answer(tables, waiter, reply)


def serve_readers(tables: Tables, draft: Version) -> None:
    """Give leases to the requests that wait for a draft to have its memory."""
    serve(tables, draft, [each for each in draft.pool.attach_waiters if reads_draft(each.body, draft)])


def _choose(tables: Tables, version: Version, device: str | None, peers: Sequence[str]) -> tuple[Replica, ...]:
    """Return the memory for a client on ``device`` that reaches ``peers``; raises ``Invalid`` or ``NotFound``."""
    if device is None:
        if version.plan is None and len(version.replicas) > 1:
            there = error_text.listed(replica.account for replica in version.replicas.values())
            raise errors.Invalid(
                f"{version.label} is on several of the broker's devices, {there}; name one of them, as in device=0"
            )
        return tuple(version.replicas.values())
    # A shard on a peer holds other tensors, so it does not replace one here.
    wanted = (device, *peers) if version.plan is None else (device,)
    for uuid in wanted:
        if uuid in version.replicas:
            return (version.replicas[uuid],)
    there = error_text.places(version)
    here = error_text.device(tables, device)
    if version.plan is not None:
        raise errors.NotFound(
            f"{version.label} has no shard on {here}: its shards are on {there}; name one, or none for all"
        )
    if peers:
        near = ", ".join(error_text.device(tables, peer) for peer in peers)
        raise errors.NotFound(
            f"{version.label} is not on {here}, nor on one that it can reach ({near}): it is on"
            f" {there}; attach there, or load it here as well"
        )
    raise errors.NotFound(
        f"{version.label} is not on {here}; it is on {there}: attach there, load it here as well, or reach it"
        f" from here over peer access, where the hardware can"
    )


def check_quota(tables: Tables, session: Session) -> None:
    """Raise ``OverQuota`` if a session or its user may have no more leases."""
    user, quota = session.user, session.user.quota
    if len(session.leases) >= tables.limits.leases or (quota.leases is not None and user.leases >= quota.leases):
        raise error_text.too_many(session, tables.limits, error_text.LEASES)
    if quota.mapped_beyond_leases is not None and (found := memory.excess(tables, user.uid)) is not None:
        raise errors.OverQuota(error_text.too_much_beyond(user.uid, *found))


def grant(
    tables: Tables,
    session: Session,
    version: Version,
    replicas: tuple[Replica, ...],
    *,
    bound: bool,
    writes: bool = False,
) -> Lease:
    """Give a session a lease on ``replicas``, and the descriptors of that memory; its quota was checked before.

    A ``bound`` lease writes all replicas together, and also gets the multicast objects. A lease that ``writes`` is that
    of the draft's writer. If fabric handles open the memory, descriptors are sent only on request.
    """
    lease = Lease(next(tables.lease_ids), session, version, replicas, bound, since=tables.now)
    if writes:
        version.writer_lease = lease.id
    tables.leases[lease.id] = session.leases[lease.id] = version.holders[lease.id] = lease
    session.user.leases += 1
    tables.mark_dirty(Kind.LEASE, lease.id)
    tables.note(session, f"lease {lease.id} on {version.label} began")
    if (sent := send_fds(lease)) is not None:
        lease.unsent = opened_by(version) == FABRIC
        if not lease.unsent:
            tables.effects.append(sent)
    return lease


def opened_by(version: Version) -> str:
    """Return what opens a version: ``handle``, ``descriptor`` or ``FABRIC``; empty until all memory is allocated."""
    if version.state is VersionState.ALLOCATING:
        return ""
    if version.share not in BY_DESCRIPTOR:
        return "handle"
    by_descriptor = any(DESCRIPTOR in replica.handles for replica in version.replicas.values())
    return "descriptor" if by_descriptor else FABRIC


def send_fds(lease: Lease) -> events.SendFds | None:
    """Return the effect that sends all descriptors of a lease; None if it has none.

    A writer gets none of memory that its draft shares, and a draft may have no other.
    """
    version = lease.version
    if version.share not in BY_DESCRIPTOR:
        return None
    group = version.multicast_group if lease.bound else None
    objects = group.id if group is not None and group.sizes else 0
    writes = version is version.pool.draft and lease.writes
    sources: list[events.FdSource] = []
    for replica in lease.replicas:
        sources += memory.fd_sources(memory.own(version, replica)) if writes else replica.fd_sources
    if not (sources or objects):
        return None
    writable = version.writable or writes
    return events.SendFds(lease.session.id, lease.id, tuple(sources), objects, writable=writable)


def send_descriptors(tables: Tables, session: Session, body: messages.SendDescriptors) -> messages.Done:
    """Send the descriptors of a lease whose holder cannot open its fabric handles; once per lease.

    Raises:
        NotFound: the session holds no such lease.
        Invalid: the descriptors were sent already, or the lease has none.
        Unavailable: the memory was lost.
    """
    lease = own_lease(session, body.lease)
    if not lease.unsent:
        raise errors.Invalid(f"lease {lease.id} on {lease.version.label} has no descriptors that were not sent")
    if lease.version.state is VersionState.LOST:
        why = lease.version.why
        raise errors.Unavailable(f"{lease.version.label} was lost: {why}; close it, and attach to the next version")
    sent = send_fds(lease)
    assert sent is not None
    tables.effects.append(sent)
    lease.unsent = False
    tables.mark_dirty(Kind.LEASE, lease.id)
    return messages.Done()


def attached(lease: Lease) -> messages.Attached:
    """Return the answer that grants a reader's lease."""
    version = lease.version
    return messages.Attached(
        lease=lease.id,
        name=version.pool.name,
        version=version.number,
        share=version.share,
        layout=version.layout,
        replicas=tuple([messages.ReplicaHandles(each.account.device.uuid, each.handles) for each in lease.replicas]),
        writable=version.writable,
        team=memory.multicast_message(version, objects=lease.bound) if version.share == MULTICAST else None,
    )


def created(lease: Lease) -> messages.Created:
    """Return the answer that grants the writer's lease; it has no handles of memory that the draft shares."""
    version, replicas = lease.version, list[messages.ReplicaHandles]()
    for replica in lease.replicas:
        own = set(memory.own(version, replica))
        pairs = zip(replica.allocations, replica.handles, strict=True)
        handles = tuple(handle if each in own else b"" for each, handle in pairs)
        replicas.append(messages.ReplicaHandles(replica.account.device.uuid, handles))
    group = memory.multicast_message(version, objects=True)
    return messages.Created(lease.id, version.pool.name, version.number, version.share, tuple(replicas), group)


# -- the end of leases and versions ----------------------------------------------------------------------


def own_lease(session: Session, lease: int) -> Lease:
    """Return a session's lease; raises ``NotFound``, also for a lease of another session."""
    found = session.leases.get(lease)
    if found is None:
        raise no_lease(lease)
    return found


def own_draft(session: Session, lease: int, what: str = "be sealed") -> Lease:
    """Return a session's lease on a draft that it fills; raises ``NotFound``, ``Invalid`` or ``Unavailable``."""
    found = own_lease(session, lease)
    version = found.version
    if version.state is VersionState.LOST:
        why = version.why
        raise errors.Unavailable(f"{version.label} was lost before it was sealed: {why}; close it, and create it again")
    if version.state is not VersionState.DRAFT:
        state = "given up by its writer" if version.lent else "published"
        raise errors.Invalid(f"lease {lease} is on {version.label}, which is {state}; only a draft can {what}")
    if not found.writes:
        raise errors.Invalid(f"lease {lease} reads {version.label}, a draft; it can {what} by its writer's lease alone")
    return found


def no_lease(lease: int) -> errors.NotFound:
    """Return the error for a session that holds no such lease, whether or not another session does."""
    return errors.NotFound(f"this session holds no lease {lease}; it was closed already, or was never its own")


def release(tables: Tables, lease: Lease) -> bool:
    """End a lease, which has no events any more, and end its version if nothing else keeps it.

    Return whether an old version ended, which the caller has to announce: once, if it ends several leases.
    """
    version = lease.version
    del tables.leases[lease.id], lease.session.leases[lease.id], version.holders[lease.id]
    lease.session.user.leases -= 1
    if tables.ended_in_scan is not None:
        tables.ended_in_scan += [(lease.session.uid, replica) for replica in lease.replicas]
    tables.mark_dirty(Kind.LEASE, lease.id)
    tables.note(lease.session, f"lease {lease.id} on {version.label} ended")
    awaited = tables.shutdown_leases
    if awaited is not None and awaited.pop(lease.id, None) is not None and not awaited:
        tables.effects.append(events.ShutdownReady())
    if version.share in BY_DESCRIPTOR:
        tables.effects.append(events.CancelFds(lease.session.id, lease.id))
    if lease.writes:
        _give_up(tables, version)
    return end_if_unused(tables, version)


def _give_up(tables: Tables, draft: Version) -> None:
    """End a draft that its writer gave up; if it was lent, retire it, so that it stays until its readers have left."""
    if draft.lent:
        tables.transition_version(draft, VersionEvent.ABANDONED)
        withdraw(tables, draft)
    else:
        end_version(tables, draft, VersionEvent.DROPPED)


def withdraw(tables: Tables, draft: Version) -> None:
    """Remove a draft from its pool permanently; sessions know its number, so that is not given out again."""
    pool = draft.pool
    pool.draft, pool.last = None, draft.number
    for waiter in tuple(pool.attach_waiters):
        if 0 < waiter.body.version <= pool.last:  # never to be published; only readers of the history may know
            if can_read_history(tables, waiter.session, pool):
                words = error_text.retired(pool.name, waiter.body.version, pool, pool.loss)
                refuse(tables, waiter, errors.Retired(words))
            else:
                waiter.blind = True
    tables.recheck_pools[pool] = None


def end_if_unused(tables: Tables, version: Version) -> bool:
    """End a version that is out of service and has no lease, unless the policy keeps it; returns whether it ended."""
    if version.holders or version.state not in OUT_OF_SERVICE:
        return False
    if version.state is VersionState.SUPERSEDED and version in kept(tables, version.pool):
        return False
    end_version(tables, version, VersionEvent.UNUSED)
    return True


def end_unused(tables: Tables, pool: Pool) -> bool:
    """Do as :func:`end_if_unused` with all versions of a pool; costs time in proportion to their number."""
    stay = kept(tables, pool)
    unused = [each for each in pool.versions.values() if not each.holders and each.state in OUT_OF_SERVICE]
    ended = [version for version in unused if version not in stay]
    for version in ended:
        end_version(tables, version, VersionEvent.UNUSED)
    return bool(ended)


def kept(tables: Tables, pool: Pool) -> set[Version]:
    """Return the newest superseded versions of a pool, which the policy keeps; costs time in proportion to all."""
    if not (keep := tables.policy.keep):
        return set()
    old = [version for version in pool.versions.values() if version.state is VersionState.SUPERSEDED]
    return set(old[-keep:])


def end_version(tables: Tables, version: Version, event: VersionEvent) -> None:
    """End a version, and have the memory freed that only this version has, even while it is being allocated."""
    tables.transition_version(version, event)
    pool = version.pool
    version.user.layouts -= len(version.layout)
    del pool.versions[version.number]
    if pool.draft is version:
        pool.draft = None
        tables.recheck_pools[pool] = None
    if not pool.versions:
        pool.owner, pool.previous_owner = None, pool.owner
    memory.release_memory(tables, version)
    tables.drop_idle_user(version.user)
    if pool.idle:
        tables.recheck_pools[pool] = None


def announce(tables: Tables, pool: Pool) -> None:
    """Notify the sessions that watch a pool, and may read its history, which version is current.

    They are also notified when another version has ended, since some wait for that.
    """
    unowned = pool.owner is pool.previous_owner is None  # so nothing exists but the name
    for session in pool.watchers:
        if unowned or can_read_history(tables, session, pool):
            tables.effects.append(notice(session, pool))


def notice(session: Session, pool: Pool) -> events.Notify:
    """Return the effect that notifies a session which version of a pool is current."""
    return events.Notify(
        session.id, messages.PoolChanged(pool.name, 0 if pool.current is None else pool.current.number)
    )


# -- requests that wait ----------------------------------------------------------------------------------


def admit(tables: Tables, session: Session, request: int) -> None:
    """Raise unless a session and its user may have one more request that waits."""
    if request in session.unfinished:
        raise errors.Invalid(f"request {request} is unfinished; a new request needs a new id")
    user = session.user
    if len(session.unfinished) >= tables.limits.requests or exceeds(user.unfinished, 1, user.quota.requests):
        raise error_text.too_many(session, tables.limits, error_text.REQUESTS)


def enqueue(tables: Tables, waiter: Waiter) -> None:
    """Let an admitted request wait."""
    user = waiter.session.user
    waiter.since = tables.now
    waiter.session.unfinished[waiter.request] = waiter
    user.unfinished += 1
    if isinstance(waiter, AttachWaiter):
        waiter.pool.attach_waiters[waiter] = None
    elif isinstance(waiter, EventWaiter):
        waiter.queue[waiter] = None
    elif isinstance(waiter, LockWaiter):
        waiter.pool.lock_waiters[waiter] = None
    else:
        waiter.pool.queue[waiter] = None
        user.layouts += len(waiter.body.layout)
        user.memory_descriptors += waiter.descriptors
        tables.stored += waiter.stored
    tables.note(waiter.pool, f"request {waiter.request} of {waiter.session.label} began to wait")


def wait(tables: Tables, waiter: Waiter) -> None:
    """Let an admitted request wait until its time is over."""
    enqueue(tables, waiter)
    arm_timeout(tables, waiter)


def arm_timeout(tables: Tables, waiter: Waiter) -> None:
    """Set the timer at which a waiting request is refused."""
    waiter.timer = next(tables.timer_ids)
    tables.timers[waiter.timer] = waiter
    tables.effects.append(events.SetTimer(waiter.timer, waiter.body.wait))


def cancel_timeout(tables: Tables, waiter: Waiter) -> None:
    """Drop the timer of a request, if it has one."""
    if waiter.timer:
        del tables.timers[waiter.timer]
        tables.effects.append(events.CancelTimer(waiter.timer))
        waiter.timer = 0


def timer_expired(tables: Tables, event: events.TimerExpired) -> None:
    """Refuse the request whose time to wait is over."""
    waiter = tables.timers.pop(event.timer, None)
    if waiter is not None:
        waiter.timer = 0
        refuse(tables, waiter, errors.TimedOut(error_text.waited(tables, waiter)))


def cancel(tables: Tables, session: Session, body: messages.Cancel) -> messages.Done:
    """Refuse a request that waits, if it still does."""
    waiter = session.unfinished.get(body.request)
    if waiter is not None:
        refuse(tables, waiter, errors.TimedOut(f"request {body.request} was cancelled by its caller"))
    return messages.Done()


def stop_waiting(tables: Tables, waiter: Waiter) -> None:
    """Stop a request from waiting, and give back everything that was reserved for it."""
    del waiter.session.unfinished[waiter.request]
    waiter.session.user.unfinished -= 1
    cancel_timeout(tables, waiter)
    if isinstance(waiter, AttachWaiter):
        del waiter.pool.attach_waiters[waiter]
    elif isinstance(waiter, EventWaiter):
        del waiter.queue[waiter]
    elif isinstance(waiter, LockWaiter):
        del waiter.pool.lock_waiters[waiter]
    else:
        _remove_create(tables, waiter)
    if waiter.pool.idle:
        tables.recheck_pools[waiter.pool] = None
    tables.note(waiter.pool, f"request {waiter.request} of {waiter.session.label} stopped waiting")


def _remove_create(tables: Tables, waiter: CreateWaiter) -> None:
    user = waiter.session.user
    if waiter.phase is not Phase.MEMORY:
        user.layouts -= len(waiter.body.layout)
        user.memory_descriptors -= waiter.descriptors
        tables.stored -= waiter.stored
    if waiter.phase is Phase.TURN:
        del waiter.pool.queue[waiter]
        unpark(tables, waiter)
        return
    waiter.pool.writer = None
    tables.recheck_pools[waiter.pool] = None
    if waiter.phase is Phase.ROOM:
        leave_device_queues(tables, waiter)
        release_quota(tables, user, waiter.total)
        return
    draft = waiter.pool.draft
    assert draft is not None
    if draft.state is VersionState.ALLOCATING:
        end_version(tables, draft, VersionEvent.DROPPED)


def unpark(tables: Tables, waiter: CreateWaiter) -> None:
    """Take a create out of its user's queue, if it is parked; the next one there may have room now."""
    if waiter.parked:
        user, waiter.parked = waiter.session.user, False
        del user.queue[user.position(waiter)]
        tables.recheck_user(user)


def leave_device_queues(tables: Tables, waiter: CreateWaiter) -> None:
    """Take a create out of the queues of its devices; the next ones there may have room now."""
    for account in waiter.accounts:
        del account.queue[account.position(waiter)]
        tables.recheck_accounts[account] = None


def answer(tables: Tables, waiter: Waiter, body: messages.Reply) -> None:
    """Answer a request that stopped waiting."""
    tables.effects.append(events.Respond(waiter.session.id, waiter.request, body))


def refuse(tables: Tables, waiter: Waiter, error: errors.CubrokerError) -> None:
    """Stop a request from waiting, and answer it with an error."""
    stop_waiting(tables, waiter)
    answer(tables, waiter, messages.Failed(error.code, error.message))
