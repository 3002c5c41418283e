"""The ledger's refusals in words: what was asked, what stood in the way, what to do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from heapq import nlargest
from itertools import islice

from cubroker.protocol.messages import Create
from cubroker.server.ledger.books import Books
from cubroker.server.ledger.entries import (
    BY_DESCRIPTOR,
    Account,
    Lease,
    Loss,
    Past,
    Pool,
    Session,
    Signal,
    Version,
)
from cubroker.server.ledger.permissions import ROOT, heard, may_hear, may_read
from cubroker.server.ledger.shortages import size, state, too_much_memory
from cubroker.server.ledger.states import State
from cubroker.server.ledger.waiters import Listener, Phase, Reader, Waiter, Writer

NEAR_NAMES = 32
NEAR_LENGTH = 48
"""Names that are compared with one that was not found, and characters of the longest of them.

Comparing two names costs up to the product of their lengths, and any client may ask for what is not
there: with these limits the worst names cost some milliseconds, usual ones a third of one.
"""

NEAR_POOLS = 1000
"""Pools that are looked at for such names, whether or not the asker may see them."""

DROPPED, GIVEN_BACK, ENDED = "closed it", "gave back the lease that it belonged to", "has ended"
"""How an event ended: what whoever made it did."""


def no_pool(name: str, pools: Iterable[Pool], past: Past) -> str:
    """Say that there is no pool of this name, and what became of it; or, if there never was, which name is near."""
    if past.last:
        return f"no version of {name} is left: {past.last} was the last one, and {_fate(past)}; load it again"
    names = [pool.name for pool in islice(pools, NEAR_NAMES) if pool.versions and len(pool.name) <= NEAR_LENGTH]
    near = get_close_matches(name[:NEAR_LENGTH], names)
    hint = f"did you mean {' or '.join(near)}?" if near else "the list of pools has the names there are"
    return f"no pool is named {name!r}; {hint}"


def unpublished(books: Books, session: Session, pool: Pool, number: int) -> str:
    """Say why a version (0: the current one) is not there yet, as far as the asker may know."""
    past = heard(books, session, pool.name)
    draft = pool.draft if may_read(books, session, pool) else None
    if number == 0:
        return f"{pool.name} has no current version: {_no_current(past, draft)}"
    if draft is not None and draft.number == number:
        return f"{_being_written(draft)}; wait for it to be sealed"
    last = f"the last published one is {past.last}" if past.last else "none was published that you may read"
    return f"{pool.name} has no version {number}: {last}; wait for it, or ask for another"


def _no_current(past: Past, draft: Version | None) -> str:
    if draft is not None:
        return f"{_being_written(draft)}; wait for it to be sealed"
    if past.last:
        return f"{_fate(past)}, and {past.last} was the last one; load it again"
    return "none was published that you may read; wait for it, or load it"


def _being_written(draft: Version) -> str:
    return f"{draft.label} is being written by {draft.writer}"


def _fate(past: Past) -> str:
    """What became of the last version of a name, which is not in service any more."""
    if past.loss is not None and past.loss.number == past.last:
        return f"it was lost ({past.loss.why})"
    return "it was retired"


def retired(name: str, number: int, current: int, loss: Loss | None) -> str:
    """Say that a version is out of service for good."""
    hint = f"the current one is {current}" if current else "no other one is current"
    if loss is not None and loss.number == number:
        return f"{name}@{number} was lost: {loss.why}; {hint}"
    return f"{name}@{number} was retired or replaced and is out of service; {hint}"


def lost_draft(version: Version) -> str:
    """Say that a draft cannot be published."""
    return f"{version.label} was lost before it was sealed: {version.why}; close it, and create it again"


def lost(version: Version) -> str:
    """Say that nothing of a version can be opened any more."""
    return f"{version.label} was lost: {version.why}; close it, and attach to the next version"


def not_durable(body: Create) -> str:
    """Say why a pool cannot be durable."""
    if body.share not in BY_DESCRIPTOR:
        return (
            f"{body.name} is to be durable, and memory that is shared as {body.share} ends with the broker;"
            f" use {' or '.join(BY_DESCRIPTOR)}"
        )
    return (
        f"{body.name} is to be durable, and this broker has no store that keeps memory while it is down: have it run as"
        f" the systemd service of deploy/systemd, or as `cubroker keep -- cubroker serve`; or make the pool not durable"
    )


def not_here(version: Version, uuid: str, peers: Sequence[str]) -> str:
    """Say that a version has nothing on a device, nor what would do in its place on the asker's ``peers``."""
    there = ", ".join(version.replicas)
    if version.plan is not None:
        return f"{version.label} has no shard on device {uuid}: its shards are on {there}; name one, or none for all"
    if peers:
        return (
            f"{version.label} is not on device {uuid}, nor on one that it can reach ({', '.join(peers)}): it is on"
            f" {there}; attach there, or load it here as well"
        )
    return (
        f"{version.label} is not on device {uuid}; it is on {there}: attach there, load it here as well, or reach it"
        f" from here over peer access, where the hardware can"
    )


def which_device(version: Version) -> str:
    """Say that a device has to be named."""
    return f"{version.label} is on several devices, {', '.join(version.replicas)}; say which one to attach to"


def no_device(uuid: str, known: Iterable[str]) -> str:
    """Say that the broker has no such device."""
    return f"this broker has no device {uuid}; it has {', '.join(known)}"


def no_lease(lease: int) -> str:
    """Say that a session holds no such lease, whether or not another one does."""
    return f"this session holds no lease {lease}; it was closed already, or was never its own"


def not_writable(books: Books, session: Session, pool: Pool) -> str:
    """Say that a user may not publish or retire versions of a pool."""
    return (
        f"user {session.uid} may not publish or retire versions of {pool.name}, {_belongs(books, session, pool)};"
        f" use another name, or ask its owner for a mode that lets you"
    )


def not_readable(uid: int, pool: Pool) -> str:
    """Say that a user may not attach to a pool."""
    return (
        f"user {uid} may not attach to {pool.name}, describe or watch it, as its mode says; ask its owner for one that"
        f" lets you"
    )


def not_owned(pool: Pool, owners: Sequence[int]) -> str:
    """Say that a pool, which the asker may read, has another owner than was asked for."""
    wanted = " or ".join(map(str, owners))
    return (
        f"{pool.name} belongs to user {pool.owner}, and a pool of user {wanted} was asked for; have it retired, use"
        f" another name, or name its owner (--owner, $CUBROKER_OWNER or, in Python, the argument `owner`)"
    )


def reserved(uid: int, name: str, prefix: str) -> str:
    """Say that a name is reserved for others."""
    return (
        f"user {uid} may not publish {name}: names that begin with {prefix!r} are reserved; use another name, or have"
        f" this user added to [names] of the broker's settings"
    )


def not_ruled(books: Books, session: Session, pool: Pool) -> str:
    """Say that a user may not change the mode of a pool."""
    return (
        f"user {session.uid} may not change the mode of {pool.name}, {_belongs(books, session, pool)};"
        f" leave the mode out"
    )


def not_administrator(books: Books, session: Session) -> str:
    """Say that a session's user does not administer the broker, although its number may be root's or the broker's."""
    advice = f"ask user {books.uid}, who runs it, or root, or have {session.uid} listed in its setting `admins`"
    if session.uid == books.uid or (session.uid == ROOT and books.policy.trust_root):
        power = " with CAP_SYS_ADMIN" if session.uid == ROOT != books.uid else ""
        advice = (
            f"it is not known to run in the broker's own user and pid namespaces: run it there{power},"
            f" or have {session.uid} listed in the broker's setting `admins`"
        )
    return f"user {session.uid} may not drain the broker; {advice}"


def _belongs(books: Books, session: Session, pool: Pool) -> str:
    """Whose pool it is, for those who may read that in the list of pools."""
    if not may_read(books, session, pool):
        return "as its mode says"
    return f"which belongs to user {pool.owner} and group {pool.group}, with mode {pool.mode:03o}"


def not_for_events(lease: Lease) -> str:
    """Say why nobody can make an event on a version."""
    version = lease.version
    if version.state is State.DRAFT:
        return f"lease {lease.id} is on {version.label}, a draft; seal it and attach, then make events on it"
    return f"{version.label} is read-only, and events are made on writable pools; create it with writable=True"


def event_exists(signal: Signal) -> str:
    """Say that an event's name is taken."""
    return f"{signal.label} exists: {signal.lease.session.label} made it; open it, or use another name"


def no_event(version: Version, name: str) -> str:
    """Say that nobody has made an event, and which there are."""
    there = ", ".join(repr(known) for known in islice(version.signals, NEAR_NAMES))
    return f"{version.label} has no event {name!r}; it has {there or 'none'}; wait for somebody to make it"


def not_its_event(event: int) -> str:
    """Say that a session did not make an event."""
    return f"this session has no event {event}; it was closed already, or another one made it"


def event_over(signal: Signal, how: str) -> str:
    """Say that an event has ended."""
    return f"{signal.label} ended at generation {signal.generation}: {signal.lease.session.label} {how}; open it anew"


def unknown_event(version: Version, event: int) -> str:
    """Say that an event has ended so long ago that nobody knows how, or never was one."""
    return f"event {event} of {version.label} has ended, or never was one; open it anew"


def not_recorded(listener: Listener) -> str:
    """Say what somebody waits for in vain with an event."""
    signal = listener.signal
    if signal is None:
        return no_event(listener.lease.version, listener.name)
    maker = signal.lease.session
    lost = "" if maker.connected else ", which has lost its connection"
    return f"{signal.label} is at generation {signal.generation}; {maker.label} makes the next one{lost}"


def taken(books: Books, session: Session, pool: Pool) -> str:
    """Say who has the turn as the writer of a pool, as far as the asker may know."""
    if pool.draft is not None and may_read(books, session, pool):
        return f"{_being_written(pool.draft)}; wait for its turn to end, or use another name"
    if pool.draft is None and pool.writer is not None and may_hear(books, session, _coming(books, pool.writer)):
        return (
            f"the next version of {pool.name} is to be written by {pool.writer.session.label}, which waits for room;"
            f" wait as well, or use another name"
        )
    return f"somebody else is writing {pool.name}; wait for the end of that, or use another name"


def _coming(books: Books, writer: Writer) -> Pool | Past:
    """Who may know of a pool that a create is to make: as those who may when it is there."""
    if writer.pool.owner is not None:
        return writer.pool
    mode = books.policy.mode if writer.body.mode is None else writer.body.mode
    return Past(heir=writer.session.uid, group=writer.session.gid, mode=mode)


def never_fits(name: str, nbytes: int, account: Account) -> str:
    """Say that a request is larger than a device's whole budget."""
    device = account.device
    return (
        f"{name} needs {size(nbytes)} on device {device.uuid}, whose whole budget is"
        f" {size(device.budget)}{_lost(account)};"
        f" give the broker a larger budget, or spread the tensors over several pools and devices"
    )


def _lost(account: Account) -> str:
    return f" ({size(account.lost)} of it lost to a failed allocation)" if account.lost else ""


def no_room(books: Books, writer: Writer) -> str:
    """Say which device has no room for a create, and what takes it."""
    account = next((account for account, nbytes in writer.nbytes.items() if account.room < nbytes), None)
    if account is None:
        first = next(account for account in writer.accounts if account.line[0] is not writer)
        return (
            f"{writer.pool.name} needs {size(writer.nbytes[first])} on device {first.device.uuid}, where"
            f" {first.place(writer)} earlier requests wait for room; wait as well,"
            f" or retire what is not needed"
        )
    device = account.device
    return (
        f"{writer.pool.name} needs {size(writer.nbytes[account])} on device {device.uuid}: of its budget of"
        f" {size(device.budget)}, {size(account.allocated)} are allocated{_lost(account)} and"
        f" {size(account.promised)} promised"
        f"{_holders(books, writer.session, account)}; retire what is not needed, or wait"
    )


def _holders(books: Books, session: Session, account: Account) -> str:
    """What takes most of a device: of pools that are not for ``session`` to see, all together and no name."""
    there = account.allocations.values()
    visible = [each for each in there if may_read(books, session, each.version.pool)]
    words = []
    for allocation in nlargest(3, visible, key=lambda allocation: allocation.nbytes):
        version = allocation.version
        what = f"{state(allocation)}, user {version.owner}, {version.leases} leases"
        words.append(f"{version.label} {size(allocation.nbytes)} ({what})")
    largest = f"; the largest are {', '.join(words)}" if words else ""
    hidden = sum(each.nbytes for each in there) - sum(each.nbytes for each in visible)
    return largest + (f"; private pools have {size(hidden)}" if hidden else "")


def waited(books: Books, waiter: Waiter) -> str:
    """Say what a request waited for in vain."""
    name, seconds = waiter.pool.name, f"waited {waiter.body.wait:g} s"
    if isinstance(waiter, Reader):
        why = unpublished(books, waiter.session, waiter.pool, waiter.body.version)
        return f"attach to {name} {seconds} for it to be published: {why}"
    if isinstance(waiter, Listener):
        return f"{seconds} in vain: {not_recorded(waiter)}"
    return f"create of {name} {seconds} for {waiter.phase.value}: {blocked(books, waiter)}"


def blocked(books: Books, writer: Writer) -> str:
    """Say what keeps a create from its draft."""
    if writer.phase is Phase.TURN:
        if writer.pool.free:
            return too_much_memory(writer)
        return taken(books, writer.session, writer.pool)
    return no_room(books, writer)


def still_draft(books: Books, session: Session, version: Version) -> str:
    """Say that a draft cannot be retired."""
    assert version.state in (State.ALLOCATING, State.DRAFT)
    writer = version.writer if may_read(books, session, version.pool) else "another session"
    return f"{version.label} is a draft of {writer}; it ends when that session closes it, or ends itself"
