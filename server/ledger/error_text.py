"""Texts of refusals that are long or have more than one cause: what was requested, what prevents it, and what to do.

A text that only one check raises stands at that check. What a text says of a pool depends on what its reader may know.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from heapq import nlargest
from itertools import islice
from operator import attrgetter
from typing import NamedTuple

from cubroker.protocol.errors import OverQuota
from cubroker.protocol.messages import ENDING
from cubroker.protocol.status import MAX_SHARERS
from cubroker.server.ledger.policy import Limits
from cubroker.server.ledger.records import (
    SESSION_FDS,
    AttachWaiter,
    CreateWaiter,
    DeviceAccount,
    EventWaiter,
    Footprint,
    LockWaiter,
    Loss,
    Past,
    Phase,
    Pool,
    PoolLock,
    Session,
    Ticket,
    User,
    Version,
    Waiter,
)
from cubroker.server.ledger.states import MemoryState
from cubroker.server.ledger.tables import Tables, can_read, can_read_history, can_see_session, visible_past

NEAR_NAMES = 32
NEAR_LENGTH = 48
"""How many names are compared with a name that was not found, and the most characters of such a name.

Comparing two names costs up to the product of their lengths, and any client may ask for a name that does not exist.
With these limits the worst names cost some milliseconds, usual ones a third of a millisecond.
"""

NEAR_POOLS = 1000  #: Pools that are searched for such names, whether or not the asking session may see them.
SURVEY = 1000  #: Sessions or tickets of one user that are searched for the largest.

BY_HAND = "its operator wants everything to be given back"
"""Why a broker grants no leases."""


def count(number: int, noun: str) -> str:
    """Return ``1 lease``, ``2 leases``."""
    plural = "" if number == 1 else "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}{plural}"


def size(nbytes: int) -> str:
    """Return bytes for people, exact as long as they are whole units: ``2 MiB``, ``1.50 GiB``."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= scale:
            return f"{nbytes // scale} {unit}" if nbytes % scale == 0 else f"{nbytes / scale:.2f} {unit}"
    return f"{nbytes} bytes"


# -- the broker and its devices --------------------------------------------------------------------------


def not_lending(tables: Tables) -> str:
    """Say that no leases are granted."""
    why, hint = (
        (BY_HAND, "go on without, or ask again later") if tables.drained else (ENDING, "start it again, or wait")
    )
    return f"the broker lends nothing new: {why}; {hint}"


def drain_reason(tables: Tables) -> str:
    """Return why no leases are granted; empty if leases are granted, at least on durable memory."""
    return "" if tables.lends(durable=True) else (BY_HAND if tables.shutdown_leases is None else ENDING)


def no_device(tables: Tables, uuid: str) -> str:
    """Say that the broker has no such device."""
    return f"this broker has no device {uuid}; its devices are {listed(tables.accounts.values())}"


def device(tables: Tables, uuid: str) -> str:
    """Return a device as the broker names it; a device that the broker does not serve, by its UUID."""
    return tables.accounts[uuid].device.label if uuid in tables.accounts else f"device {uuid}"


def listed(accounts: Iterable[DeviceAccount]) -> str:
    """Return devices of the broker by index, name and the beginning of the UUID."""
    return ", ".join(account.device.listed for account in accounts)


def places(version: Version) -> str:
    """Return the devices that have memory of a version, as the broker names them."""
    accounts = [replica.account for replica in version.replicas.values()]
    return accounts[0].device.label if len(accounts) == 1 else f"the broker's devices {listed(accounts)}"


# -- versions that are not there -------------------------------------------------------------------------


def missing(tables: Tables, session: Session, name: str, number: int) -> str:
    """Say why there is no such version (0: no current one); if there never was such a pool, name similar pools."""
    pool, past = tables.pools.get(name), visible_past(tables, session, name)
    if pool is not None and pool.versions:
        return unpublished(tables, session, pool, number)
    if past.last:
        return f"no version of {name} is left: {past.last} was the last one, and {_fate(past)}; load it again"
    hint = near(tables, session, name) or "`cubroker ls` lists those that there are"
    return f"no pool is named {name!r}; {hint}"


def near(tables: Tables, session: Session, name: str) -> str:
    """Return a question that names similar pools that the session may read; empty if there are none."""
    looked_at = islice(tables.pools.values(), NEAR_POOLS)
    visible = islice((other for other in looked_at if can_read(tables, session, other)), NEAR_NAMES)
    names = [other.name for other in visible if other.versions and len(other.name) <= NEAR_LENGTH]
    near = get_close_matches(name[:NEAR_LENGTH], names)
    return f"did you mean {' or '.join(near)}?" if near else ""


def unpublished(tables: Tables, session: Session, pool: Pool, number: int) -> str:
    """Say why a version (0: the current one) is not published yet."""
    past = visible_past(tables, session, pool.name)
    draft = pool.draft if can_read(tables, session, pool) else None
    if number:
        if draft is not None and draft.number == number:
            return f"{_being_written(draft)}; wait for it to be sealed"
        last = f"the last published one is {past.last}" if past.last else "none was published that you may read"
        return f"{pool.name} has no version {number}: {last}; wait for it, or ask for another"
    if draft is not None:
        why = f"{_being_written(draft)}; wait for it to be sealed"
    elif past.last:
        why = f"{_fate(past)}, and {past.last} was the last one; load it again"
    else:
        why = "none was published that you may read; wait for it, or load it"
    return f"{pool.name} has no current version: {why}"


def held(tables: Tables, session: Session, name: str) -> str:
    """Name the newest version of a pool that is out of service and still leased; empty if the session can see none."""
    pool = tables.pools.get(name)
    if pool is None or not can_read(tables, session, pool):
        return ""
    left = [version for version in pool.versions.values() if version.leases and version is not pool.draft]
    return f". {left[-1].label} is still held; name that version if you mean it" if left else ""


def _being_written(draft: Version) -> str:
    return f"{draft.label} is being written by {draft.writer}"


def _fate(past: Past) -> str:
    """Say what became of the last version of a name, which is not in service any more."""
    if past.loss is not None and past.loss.number == past.last:
        return f"it was lost ({past.loss.why})"
    return "it was retired"


def retired(name: str, number: int, pool: Pool | None, loss: Loss | None) -> str:
    """Say that a version is permanently out of service."""
    current = None if pool is None else pool.current
    hint = "no other one is current" if current is None else f"the current one is {current.number}"
    if loss is not None and loss.number == number:
        return f"{name}@{number} was lost: {loss.why}; {hint}"
    return f"{name}@{number} was retired or replaced, or never sealed, and is out of service; {hint}"


def belongs(tables: Tables, session: Session, pool: Pool) -> str:
    """Say which user a pool belongs to, if the session may read that in the list of pools."""
    if not can_read(tables, session, pool):
        return "whose owner does not allow it"
    return f"which belongs to user {pool.owner} and group {pool.group}, with mode {pool.mode:03o}"


# -- what a request waits for ----------------------------------------------------------------------------


def waited(tables: Tables, waiter: Waiter) -> str:
    """Say what a request waited for in vain."""
    name, seconds = waiter.pool.name, f"waited {waiter.body.wait:g} s"
    if isinstance(waiter, AttachWaiter):
        why = unpublished(tables, waiter.session, waiter.pool, waiter.body.version)
        there = waiter.pool.versions and can_read(tables, waiter.session, waiter.pool)
        known = there or visible_past(tables, waiter.session, name).last
        meant = "" if known else near(tables, waiter.session, name)
        return f"attach to {name} {seconds} for it to be published: {why}" + (f". Or {meant}" if meant else "")
    if isinstance(waiter, EventWaiter):
        return f"{seconds} in vain: {not_recorded(waiter)}"
    if isinstance(waiter, LockWaiter):
        assert waiter.pool.lock is not None
        return f"{seconds} in vain: {locked(tables, waiter.session, waiter.pool.lock)}"
    return f"create of {name} {seconds} for {waiter.phase.value}: {blocked(tables, waiter)}"


def no_event(version: Version, name: str) -> str:
    """Say that an event does not exist, and which events do."""
    there = ", ".join(repr(known) for known in islice(version.ipc_events, NEAR_NAMES))
    return f"{version.label} has no event {name!r}; it has {there or 'none'}; wait until another process has made it"


def not_recorded(waiter: EventWaiter) -> str:
    """Say what a request for an event waits for."""
    ipc_event = waiter.ipc_event
    if ipc_event is None:
        return no_event(waiter.lease.version, waiter.name)
    maker = ipc_event.lease.session
    lost = "" if maker.connected else ", which has lost its connection"
    return f"{ipc_event.label} is at generation {ipc_event.generation}; {maker.label} makes the next one{lost}"


def locked(tables: Tables, session: Session, held: PoolLock) -> str:
    """Say which session has the lock of a name, if the asking session may see that."""
    holder = held.session
    who = holder.label if can_see_session(tables, session, holder) else "a session of another user"
    lost = "" if holder.connected else ", which has lost its connection and whose process lives"
    return f"{who} has the lock of {held.pool.name}{lost}; wait until it is given back, or use another name"


def blocked(tables: Tables, waiter: CreateWaiter) -> str:
    """Say what keeps a create from its draft: its quota, another writer, or a device."""
    if waiter.phase is not Phase.TURN:
        return _no_room(tables, waiter)
    if not waiter.pool.free:
        return _taken(tables, waiter.session, waiter.pool)
    user = waiter.session.user
    assert user.quota.memory is not None
    ahead = user.position(waiter)
    line = f", behind {count(ahead, 'earlier create')} of this user" if ahead else ""
    largest = _largest(islice(user.tickets.values(), SURVEY), state)
    return (
        f"{waiter.pool.name} needs {size(waiter.total)} of the quota of user {user.uid}: of"
        f" {size(user.quota.memory)}, {size(user.memory)} are used or set aside{largest}{line};"
        f" retire what is not needed, or wait"
    )


def _taken(tables: Tables, session: Session, pool: Pool) -> str:
    """Say who has the turn as the writer of a pool."""
    if pool.draft is not None and can_read(tables, session, pool):
        return f"{_being_written(pool.draft)}; wait for its turn to end, or use another name"
    writer = pool.writer
    if pool.draft is None and writer is not None:
        known: Pool | Past = pool
        if pool.owner is None:  # apply the owner, group and mode that the pool will have
            mode = tables.policy.mode if writer.body.mode is None else writer.body.mode
            known = Past(previous_owner=writer.session.uid, group=writer.session.gid, mode=mode)
        if can_read_history(tables, session, known):
            return (
                f"the next version of {pool.name} is to be written by {writer.session.label}, which waits for room;"
                f" wait as well, or use another name"
            )
    return f"another session is writing {pool.name}; wait until it ends, or use another name"


def _no_room(tables: Tables, waiter: CreateWaiter) -> str:
    """Say which device has no room for a create, and what takes it."""
    account = next((account for account, nbytes in waiter.nbytes.items() if account.available < nbytes), None)
    if account is None:
        account = next(account for account in waiter.accounts if account.queue[0] is not waiter)
        return (
            f"{waiter.pool.name} needs {size(waiter.nbytes[account])} on {account.device.label}, behind"
            f" {count(account.position(waiter), 'earlier request')} for room there; wait as well, or retire what is"
            f" not needed"
        )
    there = account.tickets.values()
    visible = [ticket for ticket in there if can_read(tables, waiter.session, ticket.pool)]
    hidden = sum(ticket.nbytes for ticket in there) - sum(ticket.nbytes for ticket in visible)
    private = f"; private pools have {size(hidden)}" if hidden else ""
    largest = _largest(visible, lambda ticket: f"{state(ticket)}, user {ticket.user.uid}, {_leases(ticket)}")
    return (
        f"{waiter.pool.name} needs {size(waiter.nbytes[account])} on {account.device.label}: of its budget of"
        f" {size(account.device.budget)}, {size(account.allocated)} are allocated{_lost(account)} and"
        f" {size(account.promised)} promised{largest}{private}; retire what is not needed, or wait"
    )


def never_fits(name: str, nbytes: int, account: DeviceAccount) -> str:
    """Say that a request is larger than a device's whole budget."""
    device = account.device
    return (
        f"{name} needs {size(nbytes)} on {device.label}, whose whole budget is"
        f" {size(device.budget)}{_lost(account)};"
        f" give the broker a larger budget, or spread the tensors over several pools and devices"
    )


def _lost(account: DeviceAccount) -> str:
    return f" ({size(account.lost)} of it lost: the driver did not take it back)" if account.lost else ""


def state(ticket: Ticket) -> str:
    """Return the state of each version that has memory of a ticket; that of the ticket while it is not held."""
    if ticket.state is not MemoryState.HELD:
        return str(ticket.state.value)
    states = [str(version.state.value) for version in ticket.versions]
    if len(states) > MAX_SHARERS:
        return ", ".join(f"{number} {state}" for state, number in Counter(states).most_common())
    return ", ".join(states)


def _label(ticket: Ticket) -> str:
    """Return the versions that have memory of a ticket; if none has, the version for which it was allocated."""
    versions = ticket.versions
    if len(versions) > MAX_SHARERS:
        return f"{versions[0].label} to {versions[-1].label} ({len(versions)} versions)"
    return ", ".join(version.label for version in versions) or ticket.label


def _leases(ticket: Ticket) -> str:
    return count(sum(version.leases for version in ticket.versions), "lease")


def _largest(tickets: Iterable[Ticket], what: Callable[[Ticket], str]) -> str:
    largest = nlargest(3, tickets, key=lambda ticket: ticket.nbytes)
    words = ", ".join(f"{_label(ticket)} {size(ticket.nbytes)} ({what(ticket)})" for ticket in largest)
    return f"; the largest are {words}" if words else ""


# -- limits and quotas -----------------------------------------------------------------------------------


class Countable(NamedTuple):
    """A kind of thing of which a session and a user may have only a limited number, with the words for refusals."""

    #: The field of :class:`Limits` and of ``Quota``.
    field: str
    #: What one of them is called.
    noun: str
    #: How to get rid of some of them.
    remedy: str


LEASES = Countable("leases", "lease", "close")
REQUESTS = Countable("requests", "unfinished request", "cancel")
WATCHES = Countable("watches", "watch", "end")
LOCKS = Countable("locks", "lock", "release")
IPC_EVENTS = Countable("events", "event", "close")


def too_many(session: Session, limits: Limits, kind: Countable) -> OverQuota:
    """Return the refusal of one more to a session that has as many as it may have, or whose user has."""
    user, of = session.user, attrgetter(kind.field)

    def used(session: Session) -> int:
        return int(of(session.used))

    if used(session) >= (limit := of(limits)):
        has = count(limit, kind.noun)
        return OverQuota(f"this session has {has}, the most that one may have; {kind.remedy} some of them")
    largest = nlargest(3, filter(used, islice(user.sessions.values(), SURVEY)), key=used)
    words = ", ".join(f"session {each.id} (pid {each.pid}) {used(each)}" for each in largest)
    most = f" ({words})" if words else ""
    has = count(of(user.used), kind.noun)
    return OverQuota(f"user {user.uid} has {has} of a quota of {of(user.quota)}{most}; {kind.remedy} some of them")


def processes(user: User) -> str:
    """Say which processes have most of a user's sessions."""
    pids = Counter(session.pid for session in islice(user.sessions.values(), SURVEY))
    return ", ".join(f"{number} of process {pid}" for pid, number in pids.most_common(3))


def too_many_descriptors(uid: int, more: int, limit: int | None, user: User | None) -> str:
    """Say that a user has as many of the broker's descriptors as it may have, and what takes most of them."""
    used, takers = 0, ""
    if user:
        largest = nlargest(3, islice(user.tickets.values(), SURVEY), key=lambda ticket: ticket.descriptors)
        memory = (f"{_label(each)} {each.descriptors} ({state(each)})" for each in largest if each.descriptors)
        kinds = ((count(len(user.sessions), "session"), processes(user)), ("memory", ", ".join(memory)))
        words = "; ".join(f"{kind}, {which}" for kind, which in kinds if which)
        used, takers = user.descriptors, f" ({words})" if words else ""
    return (
        f"this takes {more} of the broker's descriptors, and user {uid} has {used} of a quota of {limit}{takers};"
        f" end some sessions, or retire memory that is not needed"
    )


def never_affords(user: User, name: str, nbytes: int) -> str:
    """Say that a create is larger than its user's whole quota."""
    assert user.quota.memory is not None
    return (
        f"{name} needs {size(nbytes)} on all devices together, and the quota of user {user.uid} is"
        f" {size(user.quota.memory)}; ask for a larger quota, or make it smaller"
    )


def store_is_full(tables: Tables, more: int, reserve: int) -> str:
    """Say that the store has no room for ``more`` descriptors; ``reserve`` of its places are for administrators."""
    sessions = SESSION_FDS * len(tables.sessions)
    kept = f", {reserve} of them held back for root, administrators and the broker's own user" if reserve else ""
    return (
        f"this takes {count(more, 'place')} of the broker's store, which has {tables.store}{kept}: {sessions} are"
        f" taken by {count(len(tables.sessions), 'session')}, and {tables.stored - sessions} by durable memory; end"
        f" some sessions, retire durable versions, or give it a larger store"
    )


def too_much_beyond(uid: int, footprint: Footprint, limit: int) -> str:
    """Say that a user has more memory beyond its leases than it may, and which processes have it."""
    sizes = ((sum((memory or {}).values()), pid) for pid, memory in footprint.processes.items())
    largest = nlargest(3, (pair for pair in sizes if pair[0]))
    who = ", ".join(f"process {pid} {size(nbytes)}" for nbytes, pid in largest)
    pids = " ".join(str(pid) for _, pid in largest)
    return (
        f"processes of user {uid} have {size(footprint.nbytes)} of the broker's memory mapped or open that no lease of"
        f" this user covers, of a quota of {size(limit)} ({who}); unmap it and close its descriptors there, or end"
        f" these processes (kill {pids})"
    )
