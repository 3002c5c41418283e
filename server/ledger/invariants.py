"""Invariants of the ledger's tables, as assertions; checked after every step of a test, and after mistakes."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import astuple
from functools import partial

from cubroker.protocol.messages import BY_DESCRIPTOR, MULTICAST
from cubroker.server.ledger import memory
from cubroker.server.ledger.ipc_events import MAX_ENDED_REASONS
from cubroker.server.ledger.leases import FABRIC, OUT_OF_SERVICE, PUBLISHED, kept, opened_by, reads_draft
from cubroker.server.ledger.policy import Limits, Quota
from cubroker.server.ledger.publish import digests_fit
from cubroker.server.ledger.records import (
    SESSION_FDS,
    Allocation,
    AttachWaiter,
    CreateWaiter,
    DeviceAccount,
    EventWaiter,
    Lease,
    LockWaiter,
    Phase,
    Pool,
    Session,
    User,
    Version,
    Waiter,
)
from cubroker.server.ledger.states import ALLOCATED, PROMISED, GroupState, MemoryState, VersionState
from cubroker.server.ledger.tables import Tables

Part = tuple[str, Callable[[], None]]  #: The part of the tables that a check is about, and the check.

MISTAKES = (AssertionError, LookupError, AttributeError, TypeError, ValueError)
"""The exceptions that a check of contradictory tables raises."""


def check(tables: Tables) -> None:
    """Assert that all records agree, that nothing is left to do, and that no request waits that could be served."""
    assert not tables.recheck_pools
    assert not tables.recheck_users
    assert not tables.recheck_accounts
    assert not tables.effects
    for _, part in _parts(tables):
        part()


def disagreements(tables: Tables) -> list[str]:
    """Return every part of the tables that contradicts itself or another, with the first failed assertion."""
    found = []
    for label, part in _parts(tables):
        try:
            part()
        except MISTAKES as error:
            found.append(f"{label}: {in_words(error)}")
    return found


def in_words(error: Exception) -> str:
    """Return the source line of the failed assertion."""
    (*_, frame) = traceback.extract_tb(error.__traceback__)
    return f"failed: {frame.line}"


def _parts(tables: Tables) -> Iterator[Part]:
    for account in (*tables.accounts.values(), *tables.absent.values()):
        yield f"device {account.device.uuid}", partial(_check_account, tables, account)
    yield "devices that are not served", partial(_check_absent, tables)
    for user in tables.users.values():
        yield f"user {user.uid}", partial(_check_user, tables, user)
    for session in tables.sessions.values():
        yield session.label, partial(_check_session, tables, session)
    leases = Counter(lease.version for session in tables.sessions.values() for lease in session.leases.values())
    for name, pool in tables.pools.items():
        yield f"pool {name}", partial(_check_pool, tables, pool, name)
        stay = kept(tables, pool)
        for version in pool.versions.values():
            check = partial(_check_version, tables, version, leases.pop(version, 0), stays=version in stay)
            yield f"version {version.label}", check
    yield "leases", partial(_check_leases, tables, leases)
    yield "memory", partial(_check_memory, tables)
    yield "multicast groups", partial(_check_groups, tables)
    yield "the store", partial(_check_store, tables)
    yield "draining", partial(_check_draining, tables)
    yield "events", partial(_check_events, tables)
    yield "locks", partial(_check_locks, tables)
    yield "timers", partial(_check_timers, tables)


def _check_leases(tables: Tables, elsewhere: Counter[Version]) -> None:
    assert not elsewhere, "a lease on a version that no pool has"
    held = {lease for session in tables.sessions.values() for lease in session.leases.values()}
    assert held == {*tables.leases.values()}


def _check_memory(tables: Tables) -> None:
    had: dict[Allocation, list[Version]] = {}
    for pool in tables.pools.values():
        for version in sorted(pool.versions.values(), key=lambda version: version.number):
            for allocation in version.allocations:
                had.setdefault(allocation, []).append(version)
    for number, ticket in tables.tickets.items():
        assert ticket.id == number
        ours = ticket.state in (MemoryState.PROMISED, MemoryState.HELD)
        assert ours == ticket.used, "memory that no version has is not being freed, or the other way round"
        assert ticket.allocations
        assert ticket.nbytes == sum(each.nbytes for each in ticket.allocations.values())
        for index, allocation in ticket.allocations.items():
            assert (allocation.ticket, allocation.number) == (ticket, index)
            assert allocation.versions == tuple(had.pop(allocation, ())), "a version and its memory do not agree"
            assert all(version.pool is ticket.pool for version in allocation.versions)
            assert all(version.number >= ticket.version for version in allocation.versions)
    assert not had, "a version has memory that is gone"


def _check_shared(version: Version) -> None:
    assert all(version.share == each.ticket.share for each in version.allocations)
    assert all(version.durable == each.ticket.durable for each in version.allocations)
    assert version.memory == sum(each.nbytes for each in version.allocations)
    assert version.shared == sum(each.nbytes for each in version.allocations if each.oldest is not version)
    if any(each.sharers > 1 for each in version.allocations):
        assert version.share != MULTICAST
        assert not version.writable, "other versions would change as well"


def _check_groups(tables: Tables) -> None:
    bound = {version.multicast_group for pool in tables.pools.values() for version in pool.versions.values()} - {None}
    for number, group in tables.multicast_groups.items():
        assert group.id == number
        assert (group.state in (GroupState.BINDING, GroupState.BOUND)) == (group in bound)
        for allocation in group.version.allocations:
            assert allocation.ticket.allocations[allocation.number] is allocation, "a group's memory went before it"
            assert allocation.ticket.state in ALLOCATED
    assert bound <= set(tables.multicast_groups.values())


def _check_events(tables: Tables) -> None:
    ipc_events = [ipc_event for session in tables.sessions.values() for ipc_event in session.ipc_events.values()]
    assert sorted(ipc_events, key=lambda ipc_event: ipc_event.id) == list(tables.ipc_events.values())


def _check_locks(tables: Tables) -> None:
    held = {lock.id: lock for session in tables.sessions.values() for lock in session.locks.values()}
    assert held == tables.locks
    for number, lock in held.items():
        assert lock.id == number
        assert 0 < number <= tables.lock_ids.last
        assert lock.session.locks[number] is lock
        assert tables.pools[lock.pool.name].lock is lock
    assert sum(pool.lock is not None for pool in tables.pools.values()) == len(held)


def _check_timers(tables: Tables) -> None:
    for timer, waiter in tables.timers.items():
        assert waiter.timer == timer
        assert waiter.session.unfinished[waiter.request] is waiter


def _check_draining(tables: Tables) -> None:
    waiters = [waiter for session in tables.sessions.values() for waiter in session.unfinished.values()]
    assert not tables.drained or all(isinstance(waiter, EventWaiter) for waiter in waiters), "a request waits in vain"
    if tables.shutdown_leases is not None:
        assert all(tables.leases[number] is lease for number, lease in tables.shutdown_leases.items())
        going = {lease.id for lease in tables.leases.values() if tables.ends_with_broker(lease.version)}
        assert going <= tables.shutdown_leases.keys(), "a lease that goes with the broker was granted"


def _check_store(tables: Tables) -> None:
    waiters = [waiter for session in tables.sessions.values() for waiter in session.unfinished.values()]
    waiting = sum(w.stored for w in waiters if isinstance(w, CreateWaiter) and w.phase is not Phase.MEMORY)
    pieces = sum(ticket.stored for ticket in tables.tickets.values())
    assert tables.stored == SESSION_FDS * len(tables.sessions) + pieces + waiting
    assert tables.store is None or tables.stored <= max(tables.store, tables.grandfathered_store)


def _check_account(tables: Tables, account: DeviceAccount) -> None:
    tickets = account.tickets.values()
    assert all(tables.tickets[ticket.id] is ticket for ticket in tickets)
    assert all(ticket.account is account for ticket in tickets)
    assert account.promised == sum(ticket.nbytes for ticket in tickets if ticket.state in PROMISED)
    held = sum(ticket.nbytes for ticket in tickets if ticket.state in ALLOCATED)
    assert account.allocated == account.lost + held
    capacity = max(account.device.budget, account.grandfathered)
    assert account.allocated + account.promised <= capacity, "more is allocated and promised than the budget allows"
    assert account.queue == sorted(account.queue, key=lambda writer: writer.arrival)
    for writer in account.queue:
        assert writer.phase is Phase.ROOM
        assert account in writer.accounts
    if account.queue:
        first = account.queue[0]
        served = all(other.queue[0] is first and other.available >= nbytes for other, nbytes in first.nbytes.items())
        assert not served, "a create waits for room that there is"


def _check_absent(tables: Tables) -> None:
    for uuid, account in tables.absent.items():
        assert account.device.uuid == uuid
        assert uuid not in tables.accounts
        assert account.tickets, "nothing is on a device that is not served"
        assert not account.device.budget
        there = {version.state for ticket in account.tickets.values() for version in ticket.versions}
        assert not tables.resumed or there <= {VersionState.LOST}, "a lease is on memory of a device that is not served"


def _check_user(tables: Tables, user: User) -> None:
    sessions, quota = user.sessions.values(), user.quota
    assert not user.idle
    assert quota == tables.policy.quota_of(user.uid)
    assert list(sessions) == [session for session in tables.sessions.values() if session.user is user]
    assert list(user.tickets.values()) == [a for a in tables.tickets.values() if a.user is user]
    writers = [w for session in sessions for w in session.unfinished.values() if isinstance(w, CreateWaiter)]
    parked = sum(writer.total for writer in writers if writer.phase is Phase.ROOM)
    assert user.memory == parked + sum(ticket.nbytes for ticket in user.tickets.values())
    assert user.leases == sum(len(session.leases) for session in sessions)
    assert user.unfinished == sum(len(session.unfinished) for session in sessions)
    assert user.watches == sum(len(session.watches) for session in sessions)
    assert user.events == sum(len(session.ipc_events) for session in sessions)
    assert user.locks == sum(len(session.locks) for session in sessions)
    versions = (v for pool in tables.pools.values() for v in pool.versions.values() if v.user is user)
    layouts = [v.layout for v in versions] + [w.body.layout for w in writers if w.phase is not Phase.MEMORY]
    assert user.layouts == sum(map(len, layouts))
    pieces = sum(a.descriptors for a in user.tickets.values())
    assert user.memory_descriptors == pieces + sum(w.descriptors for w in writers if w.phase is not Phase.MEMORY)
    _check_usage(user.used, user.quota, user.grandfathered)
    assert user.queue == sorted((w for w in writers if w.parked), key=lambda writer: writer.arrival)
    if user.queue:
        assert not (user.queue[0].pool.free and user.affords(user.queue[0])), "a create waits for a quota that has room"


def _check_usage(*usage: Limits | Quota) -> None:
    """Check usage against the limits; usage from before the limits became lower may exceed them."""
    for used, limit, grandfathered in zip(*map(astuple, usage), strict=True):
        assert limit is None or used <= max(limit, grandfathered)


def _check_session(tables: Tables, session: Session) -> None:
    _check_usage(session.used, tables.limits, session.grandfathered)
    if not session.connected:
        assert session.held or not tables.resumed
        assert not session.unfinished
        assert not session.watches
    assert session.id <= tables.last_session
    for number, lease in session.leases.items():
        assert lease.id == number
        assert 0 < lease.id <= tables.lease_ids.last
        assert lease.session is session
        assert lease.version.holders[lease.id] is lease
        assert all(replica in lease.version.replicas.values() for replica in lease.replicas)
        assert lease.version.state not in (VersionState.ALLOCATING, VersionState.ENDED)
        assert not lease.unsent or opened_by(lease.version) == FABRIC
        _check_ipc_events(tables, lease)
    assert session.ipc_events == {
        event: s for lease in session.leases.values() for event, s in lease.ipc_events.items()
    }
    for name, pool in session.watches.items():
        assert tables.pools[name] is pool
        assert session in pool.watchers
    for request, waiter in session.unfinished.items():
        assert waiter.request == request
        assert waiter.session is session
        assert tables.pools[waiter.pool.name] is waiter.pool
        match waiter:
            case AttachWaiter():
                _check_attach_waiter(tables, waiter)
            case EventWaiter():
                _check_event_waiter(tables, waiter)
            case LockWaiter():
                assert waiter in waiter.pool.lock_waiters
                assert tables.timers[waiter.timer] is waiter
            case _:
                _check_create_waiter(tables, waiter)


def _check_ipc_events(tables: Tables, lease: Lease) -> None:
    version = lease.version
    for event, ipc_event in lease.ipc_events.items():
        assert ipc_event.id == event
        assert ipc_event.lease is lease
        assert tables.ipc_events[event] is ipc_event
        assert version.ipc_events[ipc_event.name] is ipc_event
        assert all(waiter.ipc_event is ipc_event for waiter in ipc_event.event_waiters)
    assert version.writable or not lease.ipc_events


def _check_event_waiter(tables: Tables, waiter: EventWaiter) -> None:
    assert waiter.session.leases[waiter.lease.id] is waiter.lease
    assert waiter in waiter.queue
    assert tables.timers[waiter.timer] is waiter
    version, ipc_event = waiter.lease.version, waiter.ipc_event
    assert version.writable
    if ipc_event is None:
        assert waiter.name not in version.ipc_events, "the event that it waits for is there"
    else:
        assert ipc_event.lease.version is version
        assert version.ipc_events[ipc_event.name] is ipc_event
        assert ipc_event.generation <= waiter.after, "the generation that it waits for is there"


def _check_attach_waiter(tables: Tables, waiter: AttachWaiter) -> None:
    wanted = waiter.body.version
    assert waiter in waiter.pool.attach_waiters
    assert tables.timers[waiter.timer] is waiter
    assert waiter.blind == (0 < wanted <= waiter.pool.last), "what it waits for will never be there"
    assert wanted or waiter.pool.current is None, "what it waits for is there"
    assert waiter.pool.draft is None or not reads_draft(waiter.body, waiter.pool.draft), "the draft is there"


def _check_create_waiter(tables: Tables, writer: CreateWaiter) -> None:
    pool = writer.pool
    assert (writer.phase is Phase.TURN) == (writer in pool.queue)
    assert writer.phase is Phase.TURN or not writer.parked
    assert (writer.phase is not Phase.TURN) == (pool.writer is writer)
    assert all((writer.phase is Phase.ROOM) == (writer in account.queue) for account in writer.accounts)
    assert (writer.phase is Phase.MEMORY) == (writer.timer == 0)
    assert writer.timer == 0 or tables.timers[writer.timer] is writer
    assert writer.phase is Phase.MEMORY or writer.body.attach is None or pool.current is None


def _check_pool(tables: Tables, pool: Pool, name: str) -> None:
    assert name == pool.name
    assert name not in tables.past_names
    assert not pool.idle
    assert (pool.owner is None) == (not pool.versions)
    current = [version for version in pool.versions.values() if version.state is VersionState.CURRENT]
    assert current == ([] if pool.current is None else [pool.current])
    drafts = [version for version in pool.versions.values() if version.number > pool.last]
    assert drafts == ([] if pool.draft is None else [pool.draft])
    assert not pool.free or all(writer.parked for writer in pool.queue), "a create waits for a turn that is free"
    if pool.draft is not None:
        assert pool.draft.number == pool.last + 1
        assert pool.draft.state in (VersionState.ALLOCATING, VersionState.DRAFT)
    if pool.writer is not None:
        allocating = pool.draft is not None and pool.draft.state is VersionState.ALLOCATING
        assert allocating == (pool.writer.phase is Phase.MEMORY)
    assert pool.lock is not None or not pool.lock_waiters, "a request waits for a lock that is free"
    waiters: list[Waiter] = [
        *pool.lock_waiters,
        *pool.attach_waiters,
        *pool.queue,
        *([pool.writer] if pool.writer else []),
    ]
    for waiter in waiters:
        assert waiter.session.unfinished[waiter.request] is waiter
    assert all(session.watches[pool.name] is pool for session in pool.watchers)
    assert all(tables.sessions[session.id] is session for session in pool.watchers)


def _check_version(tables: Tables, version: Version, leases: int, *, stays: bool) -> None:
    pool, state = version.pool, version.state
    assert not version.durable or (version.share in BY_DESCRIPTOR and tables.store is not None)
    assert state is not VersionState.LOST or version.why
    if version.digests is not None:
        assert state not in (VersionState.ALLOCATING, VersionState.DRAFT)
        assert not version.writable
        assert digests_fit(version, version.digests)
    assert pool.versions[version.number] is version
    assert tables.users[version.user.uid] is version.user
    assert version.leases == leases
    stays = stays or (state in OUT_OF_SERVICE and not tables.resumed)
    assert leases or state in (VersionState.ALLOCATING, VersionState.CURRENT) or stays, "nothing keeps a version"
    assert state is not VersionState.ALLOCATING or not leases
    if state is VersionState.DRAFT:
        assert version.writer_lease in version.holders, "nothing writes a draft"
        assert version.lent or leases == 1
    assert not version.lent or state not in PUBLISHED
    assert version.replicas
    assert all(tables.ipc_events[ipc_event.id] is ipc_event for ipc_event in version.ipc_events.values())
    assert len(version.ended_reasons) <= MAX_ENDED_REASONS
    assert all(waiter.lease.version is version for waiter in version.open_waiters)
    assert version.multicast_group is None or version.is_multicast
    if version.is_multicast and state not in (VersionState.ALLOCATING, VersionState.LOST) and tables.resumed:
        assert version.multicast_group is not None
        assert version.multicast_group.state in (GroupState.BINDING, GroupState.BOUND)
    assert version.plan is None or set(version.plan) == set(range(len(version.replicas)))
    _check_shared(version)
    for index, (uuid, replica) in enumerate(version.replicas.items()):
        assert replica.account.device.uuid == uuid
        for number, allocation in enumerate(replica.allocations):
            assert (allocation is not None) == (version.plan is None or version.plan[number] == index)
            if allocation is not None:
                assert 0 < allocation.ticket.id <= tables.ticket_ids.last
                assert allocation.ticket.account is replica.account
                assert state is VersionState.ALLOCATING or allocation.ticket.state is MemoryState.HELD
        if state is not VersionState.ALLOCATING:
            assert list(map(bool, replica.handles)) == [each is not None for each in replica.allocations]
            here = [allocation for allocation in replica.allocations if allocation is not None]
            assert replica.fd_sources == memory.fd_sources(here)
