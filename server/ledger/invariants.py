"""What always holds of the ledger's books, as assertions; run after every step of a test, and at will elsewhere."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import astuple
from functools import partial

from cubroker.server.ledger.books import Books
from cubroker.server.ledger.digests import fit
from cubroker.server.ledger.draining import goes
from cubroker.server.ledger.entries import BY_DESCRIPTOR, SESSION, Account, Lease, Pool, Session, User, Version
from cubroker.server.ledger.leases import FABRIC, OUT_OF_SERVICE, is_kept, opened_by
from cubroker.server.ledger.signals import EPITAPHS
from cubroker.server.ledger.states import ALLOCATED, PROMISED, Bond, Stage, State
from cubroker.server.ledger.waiters import Listener, Phase, Reader, Waiter, Writer

Part = tuple[str, Callable[[], None]]
"""Something to check, and what it is about."""

MISTAKES = (AssertionError, LookupError, AttributeError, TypeError, ValueError)
"""What checking books raises that do not agree."""


def check(books: Books) -> None:
    """Assert that all records agree, that nothing is left to do, and that nobody waits who could be served."""
    assert not books.stirred_pools
    assert not books.stirred_users
    assert not books.stirred_accounts
    assert not books.effects
    for _, part in _parts(books):
        part()


def disagreements(books: Books) -> list[str]:
    """Return every part of the books that contradicts itself or another, and the first thing that is not so there."""
    found = []
    for label, part in _parts(books):
        try:
            part()
        except MISTAKES as error:
            found.append(f"{label}: {in_words(error)}")
    return found


def in_words(error: Exception) -> str:
    """Return what is not so, as the line says it that found out."""
    (*_, frame) = traceback.extract_tb(error.__traceback__)
    return f"not so is {frame.line}"


def _parts(books: Books) -> Iterator[Part]:
    for account in (*books.accounts.values(), *books.absent.values()):
        yield f"device {account.device.uuid}", partial(_check_account, books, account)
    yield "devices that are not served", partial(_check_absent, books)
    for user in books.users.values():
        yield f"user {user.uid}", partial(_check_user, books, user)
    for session in books.sessions.values():
        yield session.label, partial(_check_session, books, session)
    leases = Counter(lease.version for session in books.sessions.values() for lease in session.leases.values())
    for name, pool in books.pools.items():
        yield f"pool {name}", partial(_check_pool, books, pool, name)
        for version in pool.versions.values():
            yield f"version {version.label}", partial(_check_version, books, version, leases.pop(version, 0))
    yield "leases", partial(_check_leases, books, leases)
    yield "memory", partial(_check_memory, books)
    yield "teams", partial(_check_teams, books)
    yield "the store", partial(_check_store, books)
    yield "draining", partial(_check_draining, books)
    yield "events", partial(_check_events, books)
    yield "timers", partial(_check_timers, books)


def _check_leases(books: Books, elsewhere: Counter[Version]) -> None:
    assert not elsewhere, "a lease on a version that no pool has"
    held = {lease for session in books.sessions.values() for lease in session.leases.values()}
    assert held == {*books.leases.values()}


def _check_memory(books: Books) -> None:
    held = {a.ticket for p in books.pools.values() for v in p.versions.values() for a in v.replicas.values()}
    for ticket, allocation in books.allocations.items():
        ours = allocation.stage in (Stage.PROMISED, Stage.HELD)
        assert ours == (ticket in held), "memory that no version has is not being freed, or the other way round"


def _check_teams(books: Books) -> None:
    bound = {version.team for pool in books.pools.values() for version in pool.versions.values()} - {None}
    for number, team in books.teams.items():
        assert team.id == number
        assert (team.bond in (Bond.ASSEMBLING, Bond.READY)) == (team in bound)
        for allocation in team.version.replicas.values():
            assert books.allocations[allocation.ticket].stage in ALLOCATED, "a team's memory went before it"
    assert bound <= set(books.teams.values())


def _check_events(books: Books) -> None:
    signals = [signal for session in books.sessions.values() for signal in session.signals.values()]
    assert sorted(signals, key=lambda signal: signal.id) == list(books.signals.values())


def _check_timers(books: Books) -> None:
    for timer, waiter in books.timers.items():
        assert waiter.timer == timer
        assert waiter.session.unfinished[waiter.request] is waiter


def _check_draining(books: Books) -> None:
    waiters = [waiter for session in books.sessions.values() for waiter in session.unfinished.values()]
    assert not books.drained or all(isinstance(waiter, Listener) for waiter in waiters), "somebody waits in vain"
    if books.awaited is not None:
        assert all(books.leases[number] is lease for number, lease in books.awaited.items())
        going = {lease.id for lease in books.leases.values() if goes(books, lease.version)}
        assert going <= books.awaited.keys(), "a lease that goes with the broker was granted"


def _check_store(books: Books) -> None:
    waiters = [waiter for session in books.sessions.values() for waiter in session.unfinished.values()]
    waiting = sum(w.stored for w in waiters if isinstance(w, Writer) and w.phase is not Phase.MEMORY)
    pieces = sum(allocation.stored for allocation in books.allocations.values())
    assert books.stored == SESSION * len(books.sessions) + pieces + waiting
    assert books.store is None or books.stored <= max(books.store, books.tolerated_store)


def _check_account(books: Books, account: Account) -> None:
    allocations = account.allocations.values()
    assert all(books.allocations[allocation.ticket] is allocation for allocation in allocations)
    assert all(allocation.account is account for allocation in allocations)
    assert all(allocation.nbytes == sum(allocation.sizes) for allocation in allocations)
    assert account.promised == sum(allocation.nbytes for allocation in allocations if allocation.stage in PROMISED)
    held = sum(allocation.nbytes for allocation in allocations if allocation.stage in ALLOCATED)
    assert account.allocated == account.lost + held
    most = max(account.device.budget, account.tolerated)
    assert account.allocated + account.promised <= most, "more is allocated and promised than the budget allows"
    assert account.line == sorted(account.line, key=lambda writer: writer.arrival)
    for writer in account.line:
        assert writer.phase is Phase.ROOM
        assert account in writer.accounts
    if account.line:
        first = account.line[0]
        served = all(other.line[0] is first and other.room >= nbytes for other, nbytes in first.nbytes.items())
        assert not served, "somebody waits for room that there is"


def _check_absent(books: Books) -> None:
    for uuid, account in books.absent.items():
        assert account.device.uuid == uuid
        assert uuid not in books.accounts
        assert account.allocations, "nothing is on a device that is not served"
        assert not account.device.budget
        there = {allocation.version.state for allocation in account.allocations.values()}
        assert not books.resumed or there <= {State.LOST, State.ENDED}, "somebody is lent what is on no device"


def _check_user(books: Books, user: User) -> None:
    sessions, quota = user.sessions.values(), user.quota
    assert not user.idle
    assert quota == books.policy.quota_of(user.uid)
    assert list(sessions) == [session for session in books.sessions.values() if session.user is user]
    assert list(user.allocations.values()) == [a for a in books.allocations.values() if a.version.user is user]
    writers = [w for session in sessions for w in session.unfinished.values() if isinstance(w, Writer)]
    aside = sum(writer.total for writer in writers if writer.phase is Phase.ROOM)
    assert user.memory == aside + sum(allocation.nbytes for allocation in user.allocations.values())
    assert user.leases == sum(len(session.leases) for session in sessions)
    assert user.unfinished == sum(len(session.unfinished) for session in sessions)
    assert user.watches == sum(len(session.watches) for session in sessions)
    assert user.events == sum(len(session.signals) for session in sessions)
    versions = (v for pool in books.pools.values() for v in pool.versions.values() if v.user is user)
    layouts = [v.layout for v in versions] + [w.body.layout for w in writers if w.phase is not Phase.MEMORY]
    assert user.layouts == sum(map(len, layouts))
    pieces = sum(a.descriptors for a in user.allocations.values())
    assert user.pieces == pieces + sum(w.descriptors for w in writers if w.phase is not Phase.MEMORY)
    _check_quota(user)
    assert user.line == sorted((w for w in writers if w.aside), key=lambda writer: writer.arrival)
    if user.line:
        assert not (user.line[0].pool.free and user.affords(user.line[0])), "somebody waits for a quota that there is"


def _check_quota(user: User) -> None:
    for used, limit, tolerated in zip(*map(astuple, (user.used, user.quota, user.tolerated)), strict=True):
        assert limit is None or used <= max(limit, tolerated)


def _check_session(books: Books, session: Session) -> None:
    for used, limit, tolerated in zip(*map(astuple, (session.used, books.limits, session.tolerated)), strict=True):
        assert used <= max(limit, tolerated)
    if not session.connected:
        assert session.leases or not books.resumed
        assert not session.unfinished
        assert not session.watches
    assert session.id <= books.last_session
    for number, lease in session.leases.items():
        assert lease.id == number
        assert 0 < lease.id <= books.lease_ids.last
        assert lease.session is session
        assert lease.version.holders[lease.id] is lease
        assert all(allocation in lease.version.replicas.values() for allocation in lease.allocations)
        assert lease.version.state not in (State.ALLOCATING, State.ENDED)
        assert not lease.unsent or opened_by(lease.version) == FABRIC
        _check_signals(books, lease)
    assert session.signals == {event: s for lease in session.leases.values() for event, s in lease.signals.items()}
    for name, pool in session.watches.items():
        assert books.pools[name] is pool
        assert session in pool.watchers
    for request, waiter in session.unfinished.items():
        assert waiter.request == request
        assert waiter.session is session
        assert books.pools[waiter.pool.name] is waiter.pool
        match waiter:
            case Reader():
                _check_reader(books, waiter)
            case Listener():
                _check_listener(books, waiter)
            case _:
                _check_writer(books, waiter)


def _check_signals(books: Books, lease: Lease) -> None:
    version = lease.version
    for event, signal in lease.signals.items():
        assert signal.id == event
        assert signal.lease is lease
        assert books.signals[event] is signal
        assert version.signals[signal.name] is signal
        assert all(listener.signal is signal for listener in signal.listeners)
    assert version.writable or not (lease.signals or lease.listeners)
    for listener in lease.listeners:
        assert listener.lease is lease
        assert lease.session.unfinished[listener.request] is listener


def _check_listener(books: Books, listener: Listener) -> None:
    assert listener in listener.lease.listeners
    assert listener in listener.line
    assert books.timers[listener.timer] is listener
    version, signal = listener.lease.version, listener.signal
    if signal is None:
        assert listener.name not in version.signals, "the event that it waits for is there"
    else:
        assert signal.lease.version is version
        assert version.signals[signal.name] is signal
        assert signal.generation <= listener.after, "the generation that it waits for is there"


def _check_reader(books: Books, reader: Reader) -> None:
    wanted = reader.body.version
    assert reader in reader.pool.readers
    assert books.timers[reader.timer] is reader
    assert reader.blind == (0 < wanted <= reader.pool.last), "what it waits for will never be there"
    assert wanted or reader.pool.current is None, "what it waits for is there"


def _check_writer(books: Books, writer: Writer) -> None:
    pool = writer.pool
    assert (writer.phase is Phase.TURN) == (writer in pool.line)
    assert writer.phase is Phase.TURN or not writer.aside
    assert (writer.phase is not Phase.TURN) == (pool.writer is writer)
    assert all((writer.phase is Phase.ROOM) == (writer in account.line) for account in writer.accounts)
    assert (writer.phase is Phase.MEMORY) == (writer.timer == 0)
    assert writer.timer == 0 or books.timers[writer.timer] is writer
    assert writer.phase is Phase.MEMORY or writer.body.attach is None or pool.current is None


def _check_pool(books: Books, pool: Pool, name: str) -> None:
    assert name == pool.name
    assert name not in books.numbers
    assert not pool.idle
    assert (pool.owner is None) == (not pool.versions)
    current = [version for version in pool.versions.values() if version.state is State.CURRENT]
    assert current == ([] if pool.current is None else [pool.current])
    drafts = [version for version in pool.versions.values() if version.number > pool.last]
    assert drafts == ([] if pool.draft is None else [pool.draft])
    assert not pool.free or all(writer.aside for writer in pool.line), "somebody waits for a turn that nobody has"
    if pool.draft is not None:
        assert pool.draft.number == pool.last + 1
        assert pool.draft.state in (State.ALLOCATING, State.DRAFT)
    if pool.writer is not None:
        allocating = pool.draft is not None and pool.draft.state is State.ALLOCATING
        assert allocating == (pool.writer.phase is Phase.MEMORY)
    waiters: list[Waiter] = [*pool.readers, *pool.line, *([pool.writer] if pool.writer else [])]
    for waiter in waiters:
        assert waiter.session.unfinished[waiter.request] is waiter
    assert all(session.watches[pool.name] is pool for session in pool.watchers)
    assert all(books.sessions[session.id] is session for session in pool.watchers)


def _check_version(books: Books, version: Version, leases: int) -> None:
    pool, state = version.pool, version.state
    assert not version.durable or (version.share in BY_DESCRIPTOR and books.store is not None)
    assert state is not State.LOST or version.why
    if version.digests is not None:
        assert state not in (State.ALLOCATING, State.DRAFT)
        assert not version.writable
        assert fit(version, version.digests)
    assert pool.versions[version.number] is version
    assert version.leases == leases
    kept = is_kept(books, version) or (state in OUT_OF_SERVICE and not books.resumed)
    assert leases or state in (State.ALLOCATING, State.CURRENT) or kept, "nothing keeps a version"
    assert state is not State.ALLOCATING or not leases
    assert state is not State.DRAFT or leases == 1
    assert version.replicas
    assert all(books.signals[signal.id] is signal for signal in version.signals.values())
    assert len(version.epitaphs) <= EPITAPHS
    assert all(listener.lease.version is version for listener in version.openers)
    assert version.team is None or version.several
    if version.several and state not in (State.ALLOCATING, State.LOST) and books.resumed:
        assert version.team is not None
        assert version.team.bond in (Bond.ASSEMBLING, Bond.READY)
    assert version.plan is None or set(version.plan) == set(range(len(version.replicas)))
    for uuid, allocation in version.replicas.items():
        assert allocation.version is version
        assert 0 < allocation.ticket <= books.tickets.last
        assert allocation.account.device.uuid == uuid
        if state is not State.ALLOCATING:
            assert allocation.stage is Stage.HELD
            assert len(allocation.sizes) == sum(map(bool, allocation.handles))
    if version.plan is not None and state is not State.ALLOCATING:
        copies = zip(*(allocation.handles for allocation in version.replicas.values()), strict=True)
        assert [[bool(handle) for handle in there].index(True) for there in copies] == list(version.plan)
