"""The life of sessions and of the broker itself: sessions, draining, the broker's end and restart, and new rules.

A *session* ends with its process, or, once its connection ended, with its last lease and lock.

*Draining* by hand refuses all new leases and the requests that wait for one, until it is taken back; with a store, the
next broker drains as well. A broker that was told to end refuses leases on memory that ends with it: all memory, or, if
a store keeps durable memory for the next broker, all other memory. Once no such lease is left, the ledger emits
:class:`.events.ShutdownReady`. In both cases existing leases stay, and closing, retiring, IPC events and listings work.

*A restart* may find that memory ended with the earlier broker. A version is lost with the first of its tickets: no more
leases on it are granted, its name is free for the next version, and its holders are notified. Their mappings stay, and
count until their leases end. A version that nothing keeps, and a session without connection and leases, end as the
ledger resumes.

*New rules* end no lease. A budget, quota or limit that became smaller grants nothing until enough has ended; a larger
one serves the requests that waited for it. A create that can never have its memory any more is refused.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from cubroker.protocol.errors import Denied, OverQuota, Unavailable
from cubroker.protocol.messages import ENDING, Done, Drain, Draining, PoolLost
from cubroker.server.ledger import error_text, events, ipc_events, leases, memory, publish
from cubroker.server.ledger.leases import announce, end_if_unused, end_unused
from cubroker.server.ledger.policy import admin_reserve, exceeds
from cubroker.server.ledger.records import (
    SESSION_FDS,
    CreateWaiter,
    EventWaiter,
    Loss,
    Phase,
    Session,
    User,
    Version,
)
from cubroker.server.ledger.states import Impossible, VersionEvent, VersionState
from cubroker.server.ledger.tables import ROOT, Kind, Tables, is_admin, is_privileged

RESTARTED = "the broker was started again"

# -- sessions ------------------------------------------------------------------------------------------


def opened(tables: Tables, event: events.SessionOpened) -> None:
    """Add a session."""
    known = tables.sessions.get(event.session)
    if known is not None:
        raise Impossible(f"session {event.session} joined twice; what happened before:", known.log)
    user = tables.user(event.uid)
    session = Session(
        event.session, event.pid, user, event.gid, event.groups, verified=event.verified, process=event.process
    )
    tables.note(session, f"process {event.pid} of user {event.uid} joined")
    tables.sessions[session.id] = user.sessions[session.id] = session
    tables.last_session = max(tables.last_session, session.id)
    tables.stored += SESSION_FDS
    tables.mark_dirty(Kind.SESSION, session.id)


def connection_lost(tables: Tables, event: events.ConnectionLost) -> None:
    """Drop the waiting requests and the watches of a session; without leases and locks it ends."""
    session = tables.sessions.get(event.session)
    if session is None:
        return
    session.connected = False
    tables.mark_dirty(Kind.SESSION, session.id)
    tables.note(session, "the connection ended")
    _stop(tables, session)
    if not session.held:
        end(tables, session)


def process_exited(tables: Tables, event: events.ProcessExited) -> None:
    """End a session whose process has ended."""
    session = tables.sessions.get(event.session)
    if session is not None:
        tables.note(session, "its process has ended")
        footprint = tables.footprints.get(session.uid)
        if footprint is not None and footprint.processes.pop(session.pid, None):
            footprint.count()
        end(tables, session)


def end(tables: Tables, session: Session) -> None:
    """End a session and everything that it has."""
    _stop(tables, session)
    held = tuple(session.leases.values())
    for pool in {each.version.pool: None for each in held if ipc_events.end_lease(tables, each, "has ended")}:
        announce(tables, pool)
    for lock in tuple(session.locks.values()):
        publish.release_lock(tables, lock)
    tables.note(session, "it ended")
    tables.drop_session(session)
    tables.stored -= SESSION_FDS
    tables.mark_dirty(Kind.SESSION, session.id)
    tables.effects.append(events.ForgetSession(session.id))


def _stop(tables: Tables, session: Session) -> None:
    """Drop the waiting requests and the watches of a session."""
    for waiter in tuple(session.unfinished.values()):
        leases.stop_waiting(tables, waiter)
    for name in tuple(session.watches):
        publish.unwatch(tables, session, name)


def admission_error(tables: Tables, uid: int, *, verified: bool) -> OverQuota | None:
    """Return why a user may not open a session now; None if it may."""
    user, quota = tables.users.get(uid), tables.policy.quota_of(uid)
    used = len(user.sessions) if user else 0
    if exceeds(used, 1, quota.sessions):
        most = f" ({error_text.processes(user)})" if user and used else ""
        has = error_text.count(used, "session")
        return OverQuota(f"user {uid} has {has} of a quota of {quota.sessions}{most}; end some of them")
    if exceeds(user.descriptors if user else 0, SESSION_FDS, quota.descriptors):
        return OverQuota(error_text.too_many_descriptors(uid, SESSION_FDS, quota.descriptors, user))
    reserve = 0 if is_admin(tables, uid, verified=verified) else admin_reserve(tables.store)
    if exceeds(tables.stored + reserve, SESSION_FDS, tables.store):
        return OverQuota(error_text.store_is_full(tables, SESSION_FDS, reserve))
    return None


# -- draining and shutdown -----------------------------------------------------------------------------


def drain(tables: Tables, session: Session, body: Drain) -> Done:
    """Begin to drain by hand, or take that back.

    Raises:
        Denied: the session's user does not administer the broker.
        Unavailable: the broker ends, which cannot be taken back.
    """
    if not is_privileged(tables, session):
        uid = session.uid  # may be root's or the broker's, in another namespace
        advice = f"ask user {tables.uid}, who runs it, or root, or have {uid} listed in its setting `admins`"
        if uid == tables.uid or (uid == ROOT and tables.policy.trust_root):
            power = " with CAP_SYS_ADMIN" if uid == ROOT != tables.uid else ""
            advice = (
                f"it is not known to run in the broker's own user and pid namespaces: run it there{power},"
                f" or have {uid} listed in the broker's setting `admins`"
            )
        raise Denied(f"user {uid} may not drain the broker; {advice}")
    if tables.shutdown_leases is not None and not body.on:
        raise Unavailable(f"the broker lends nothing new: {ENDING}; wait until it was started again")
    before, tables.drained = error_text.drain_reason(tables), body.on
    _refuse_waiters(tables)
    if (now := error_text.drain_reason(tables)) != before:
        _notify(tables, tables.sessions.values(), now)
    return Done()


def start_shutdown(tables: Tables, event: events.ShutdownStarted) -> None:
    """Grant no more leases on memory that ends with the broker, and wait for the end of those that exist."""
    if tables.shutdown_leases is not None:
        raise Impossible("ShutdownStarted arrived twice")
    tables.outlives_broker = tables.outlives_broker and not event.with_store
    ending = {lease.id: lease for lease in tables.leases.values() if tables.ends_with_broker(lease.version)}
    tables.shutdown_leases = ending
    _refuse_waiters(tables)
    holders = dict.fromkeys(lease.session for lease in ending.values())
    _notify(tables, holders if tables.outlives_broker else tables.sessions.values(), ENDING)
    if not ending:
        tables.effects.append(events.ShutdownReady())


def _refuse_waiters(tables: Tables) -> None:
    """Refuse the requests that wait for a lease that is not granted any more."""
    for session in tables.sessions.values():
        for waiter in tuple(session.unfinished.values()):
            durable = waiter.durable if isinstance(waiter, CreateWaiter) else True
            if not isinstance(waiter, EventWaiter) and not tables.lends(durable=durable):
                leases.refuse(tables, waiter, Unavailable(error_text.not_lending(tables)))


def _notify(tables: Tables, sessions: Iterable[Session], why: str) -> None:
    tables.effects += [events.Notify(session.id, Draining(why)) for session in sessions if session.connected]


# -- lost memory, and a restart ------------------------------------------------------------------------


def memory_lost(tables: Tables, event: events.MemoryLost) -> None:
    """Lose the versions whose memory cannot be reached any more."""
    for version in memory.find_ticket(tables, event.ticket).versions:
        if version.state is not VersionState.LOST:
            _lose(tables, version, event.why)


def _lose(tables: Tables, version: Version, why: str) -> None:
    pool = version.pool
    tables.transition_version(version, VersionEvent.LOST)
    version.why = why
    pool.remember(Loss(version.number, why))
    if tables.resumed:
        _notify_holders(tables, version)
    was_current = pool.current is version
    if was_current:
        pool.current = None
        announce(tables, pool)
    elif pool.draft is version:
        leases.withdraw(tables, version)
    if end_if_unused(tables, version) and not was_current:
        announce(tables, pool)


def _notify_holders(tables: Tables, version: Version) -> None:
    notice = PoolLost(version.pool.name, version.number, version.why)
    sessions = dict.fromkeys(lease.session for lease in version.holders.values())
    tables.effects += [events.Notify(session.id, notice) for session in sessions if session.connected]


def resume(tables: Tables, _: events.Resumed) -> None:
    """Bind multicast versions again, and tell watchers and holders what they may have missed."""
    if tables.resumed:
        raise Impossible("Resumed arrived for a ledger that was not restored, or has already resumed")
    tables.resumed = True
    for session in tables.sessions.values():
        tables.note(session, RESTARTED)
    for pool in tables.pools.values():
        tables.note(pool, RESTARTED)
        end_unused(tables, pool)  # an earlier policy or a mistake may have kept more
        for version in pool.versions.values():
            if version.state is VersionState.LOST:
                _notify_holders(tables, version)  # the broker that lost it may have ended before it told them
            else:
                memory.bind(tables, version)
        announce(tables, pool)


# -- new rules -----------------------------------------------------------------------------------------


def reconfigure(tables: Tables, event: events.Reconfigured) -> None:
    """Apply new rules."""
    assert event.budgets.keys() == tables.accounts.keys(), "budgets of other devices"
    accept_present(tables)
    tables.policy, tables.limits = event.policy, event.limits
    for uuid, account in tables.accounts.items():
        account.device = replace(account.device, budget=event.budgets[uuid])
        tables.recheck_accounts[account] = None
    for user in tuple(tables.users.values()):
        user.quota = event.policy.quota_of(user.uid)
        _unpark_all(tables, user)
        _refuse_unaffordable(tables, user)
    for pool in tables.pools.values():
        if end_unused(tables, pool):
            announce(tables, pool)


def accept_present(tables: Tables) -> None:
    """Accept present usage, though the rules may allow less than when it was granted."""
    for account in (*tables.accounts.values(), *tables.absent.values()):
        account.grandfathered = account.allocated + account.promised
    for user in tables.users.values():
        user.grandfathered = user.used
    for session in tables.sessions.values():
        session.grandfathered = session.used


def _unpark_all(tables: Tables, user: User) -> None:
    """Offer parked creates their turn again: the new quota may have room for them."""
    for waiter in tuple(user.queue):
        leases.unpark(tables, waiter)
        tables.recheck_pools[waiter.pool] = None


def _refuse_unaffordable(tables: Tables, user: User) -> None:
    """Refuse the creates that wait for their turn and exceed the whole new quota."""
    waiters = [waiter for session in user.sessions.values() for waiter in session.unfinished.values()]
    for waiter in waiters:
        if not isinstance(waiter, CreateWaiter) or waiter.phase is not Phase.TURN:
            continue
        if exceeds(0, waiter.total, user.quota.memory):
            leases.refuse(tables, waiter, OverQuota(error_text.never_affords(user, waiter.pool.name, waiter.total)))
