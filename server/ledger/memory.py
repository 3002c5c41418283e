"""Device memory: tickets and the bytes that they take, what binds them together, and what processes map beyond leases.

*Multicast.* A version may have a group, which binds its replicas so that one store goes to all of them; the rest of the
ledger knows no more of it. A group begins when all memory of a draft is allocated, and ends with the version: it is
unbound first, and only then is the memory freed. Where the devices cannot bind, copies take the place of multicast
objects, for all members together; the version, its leases and its end are the same.

*Beyond leases.* A lease ends when its holder says that it has unmapped the memory, and the ledger believes it. So the
broker also scans what every process has mapped or open of memory that it allocated, freed or not. Memory that no
session of the process's user leases is beyond leases. Any lease of the user counts, since a forked process has the
mappings of its parent. A client that maps after the grant and unmaps before the close has nothing beyond its leases at
any moment; leases that end during a scan count as well, since it may have looked before.
"""

from __future__ import annotations

from cubroker.protocol import messages
from cubroker.protocol.layout import round_up
from cubroker.protocol.messages import MULTICAST
from cubroker.server.ledger import events
from cubroker.server.ledger.model import Account, Footprint, MulticastGroup, Session, Ticket, User, Version
from cubroker.server.ledger.tables import Kind, Tables
from cubroker.server.ledger.transitions import (
    ALLOCATED,
    GROUP,
    MEMORY,
    PROMISED,
    GroupEvent,
    Impossible,
    MemoryEvent,
    VersionState,
)

GRANULARITY = 2 << 20
"""Bytes. Smaller pieces of device memory share a block, and opening one would expose its neighbours."""

COPIES = "copies"
"""How replicas are written without multicast objects; with them, the word is the share kind's."""


def rounded(nbytes: int) -> int:
    """Return the bytes that an allocation takes of its device."""
    return round_up(nbytes, GRANULARITY)


def sizes_of(version: Version) -> tuple[int, ...]:
    """Return the bytes that each allocation of a version takes of a device, in the order of its layout."""
    shards = [iter(ticket.sizes) for ticket in version.replicas.values()]
    return tuple(shards[0]) if version.plan is None else tuple(next(shards[index]) for index in version.plan)


# -- tickets -------------------------------------------------------------------------------------------


def allocate(tables: Tables, version: Version, account: Account, sizes: tuple[int, ...]) -> None:
    """Promise a version memory on one device, and have it allocated; its user's quota has it reserved already."""
    ticket = Ticket(next(tables.ticket_ids), account, version, sizes, sum(sizes))
    version.replicas[account.device.uuid] = ticket
    tables.tickets[ticket.id] = account.tickets[ticket.id] = ticket
    version.user.tickets[ticket.id] = ticket
    account.promised += ticket.nbytes
    tables.effects.append(events.Allocate(ticket.id, account.device.uuid, sizes, version.share, version.durable))


def find_ticket(tables: Tables, number: int) -> Ticket:
    """Return a ticket by its number; raises ``Impossible`` if there is none."""
    ticket = tables.tickets.get(number)
    if ticket is None:
        raise Impossible(f"an outcome of ticket {number}, which is not in the tables")
    return ticket


def transition(tables: Tables, ticket: Ticket, event: MemoryEvent) -> None:
    """Take a ticket one step, and move its bytes between the columns of its account."""
    before = ticket.state
    ticket.state = tables.advance(MEMORY, before, event, ticket.version.pool, f"memory {ticket.id}")
    for state, nbytes in ((before, -ticket.nbytes), (ticket.state, ticket.nbytes)):
        if state in PROMISED:
            ticket.account.promised += nbytes
        elif state in ALLOCATED:
            ticket.account.allocated += nbytes


def free(tables: Tables, ticket: Ticket) -> None:
    """Have released memory freed."""
    tables.effects.append(events.Free(ticket.id, ticket.account.device.uuid))


def remove(tables: Tables, ticket: Ticket, event: MemoryEvent) -> None:
    """Remove a ticket whose device has the bytes again, so a waiting create may have room."""
    transition(tables, ticket, event)
    user, account = ticket.version.user, ticket.account
    del tables.tickets[ticket.id], account.tickets[ticket.id]
    del user.tickets[ticket.id]
    tables.recheck_accounts[account] = None
    if not account.tickets:
        tables.absent.pop(account.device.uuid, None)
    user.memory_descriptors -= ticket.descriptors
    tables.stored -= ticket.stored
    release_quota(tables, user, ticket.nbytes)
    tables.drop_idle_user(user)


def release_quota(tables: Tables, user: User, nbytes: int) -> None:
    """Give bytes back to a user's quota."""
    user.memory -= nbytes
    tables.recheck_user(user)


# -- multicast groups ----------------------------------------------------------------------------------


def bind(tables: Tables, version: Version) -> bool:
    """Have the replicas of a version bound, all of which are allocated; False if there is nothing to bind."""
    if not version.is_multicast:
        return False
    tickets = tuple(version.replicas.values())
    version.multicast_group = group = MulticastGroup(next(tables.ticket_ids), version)
    tables.multicast_groups[group.id] = group
    members = tuple((ticket.account.device.uuid, ticket.id) for ticket in tickets)
    tables.effects.append(events.BindMulticast(group.id, tickets[0].sizes, members))
    return True


def bound(tables: Tables, event: events.MulticastBound) -> Version:
    """Note how a group was bound, and return its version; raises ``Impossible`` if it is not being bound."""
    group = _find_group(tables, event.group)
    _transition_group(tables, group, GroupEvent.BOUND)
    group.how, group.why, group.sizes = event.how, event.why, event.sizes
    return group.version


def rebound(tables: Tables, version: Version) -> None:
    """Send every lease that writes all replicas of a restored version the new objects, or the replicas it had not."""
    group = version.multicast_group
    assert group is not None
    for lease in version.holders.values():
        if not lease.bound:
            continue
        session, others = lease.session, tuple[Ticket, ...]()
        if version.state is not VersionState.DRAFT:  # whose lease has all replicas
            lease.tickets = _reachable(version, lease.tickets[0])
            others = lease.tickets[1:]
            tables.mark_dirty(Kind.LEASE, lease.id)
        if session.connected:
            replicas = tuple(messages.Replica(other.account.device.uuid, other.handles) for other in others)
            told = messages.Rebound(lease.id, replicas, messages.Team(group.how, group.why, group.sizes))
            tables.effects.append(events.Notify(session.id, told))
            tickets = tuple((other.account.device.uuid, other.id) for other in others)
            if tickets or group.sizes:
                objects = group.id if group.sizes else 0
                tables.effects.append(
                    events.SendFds(session.id, lease.id, tickets, objects, rebound=True, writable=True)
                )


def release_memory(tables: Tables, version: Version) -> None:
    """Have the memory of a version that ended freed; a group is unbound first, also while it is being bound."""
    group = version.multicast_group
    if group is not None:
        _transition_group(tables, group, GroupEvent.RELEASED)
        tables.effects.append(events.UnbindMulticast(group.id))
    for ticket in version.replicas.values():
        transition(tables, ticket, MemoryEvent.RELEASED)
        if group is None:
            free(tables, ticket)


def unbound(tables: Tables, event: events.MulticastUnbound) -> None:
    """Have the memory of a group freed, now that nothing is bound to it."""
    group = _find_group(tables, event.group)
    _transition_group(tables, group, GroupEvent.UNBOUND)
    del tables.multicast_groups[group.id]
    for ticket in group.version.replicas.values():
        free(tables, ticket)


def _transition_group(tables: Tables, group: MulticastGroup, event: GroupEvent) -> None:
    group.state = tables.advance(GROUP, group.state, event, group.version.pool, f"multicast group {group.id}")


def _find_group(tables: Tables, number: int) -> MulticastGroup:
    group = tables.multicast_groups.get(number)
    if group is None:
        raise Impossible(f"an outcome of multicast group {number}, which is not in the tables")
    return group


def tickets_for(version: Version, chosen: tuple[Ticket, ...], device: str | None) -> tuple[Ticket, ...]:
    """Return the memory of a lease that writes all replicas from ``device``; empty if it writes only ``chosen``.

    A reader of a read-only version does not write, and an object is of use only on a device that has a replica.
    """
    writes_all = version.is_multicast and version.writable and device in version.replicas
    return _reachable(version, chosen[0]) if writes_all else ()


def _reachable(version: Version, here: Ticket) -> tuple[Ticket, ...]:
    """Return the replicas that are mapped to write all of them, ``here`` first: with objects, that one alone."""
    if version.multicast_group is None or version.multicast_group.how != COPIES:
        return (here,)
    return (here, *(other for other in version.replicas.values() if other is not here))


def multicast_message(version: Version, *, objects: bool) -> messages.Team | None:
    """Return how all replicas are written at once, with the sizes of the ``objects`` for leases that get them.

    None: it is no multicast version. While the group is being bound, nothing is known.
    """
    if version.share != MULTICAST:
        return None
    if not version.is_multicast:
        return messages.Team(COPIES, "it is on one device, so there is nothing to bind together")
    group = version.multicast_group
    if group is None:
        return messages.Team("", "")
    return messages.Team(group.how, group.why, group.sizes if objects else ())


# -- memory beyond leases ------------------------------------------------------------------------------


def scan_started(tables: Tables, _: events.ProcessScanStarted) -> None:
    """Remember the leases that end until :func:`scan_finished`."""
    tables.ended_in_scan = set()


def scan_finished(tables: Tables, event: events.ProcessScanFinished) -> None:
    """Note what processes refer to beyond leases; nothing is known of the others."""
    leased: dict[tuple[int, int], bool] = dict.fromkeys(tables.ended_in_scan or (), True)

    def is_leased(uid: int, number: int) -> bool:
        if (uid, number) not in leased:
            ticket = tables.tickets.get(number)  # None: it was freed
            holders = () if ticket is None else ticket.version.holders.values()
            leased[uid, number] = any(lease.session.uid == uid and ticket in lease.tickets for lease in holders)
        return leased[uid, number]

    footprints: dict[int, Footprint] = {}
    for process in event.processes:
        memory = process.memory
        if memory is not None:
            memory = {number: size for number, size in memory.items() if not is_leased(process.uid, number)}
        footprints.setdefault(process.uid, Footprint()).processes[process.pid] = memory
    for footprint in footprints.values():
        footprint.count()
    tables.footprints, tables.ended_in_scan = footprints, None


def bytes_beyond_leases(tables: Tables, session: Session) -> int | None:
    """Return the bytes that a session's process refers to beyond leases; None: unknown."""
    footprint = tables.footprints.get(session.uid)
    memory = None if footprint is None else footprint.processes.get(session.pid)
    return None if memory is None else sum(memory.values())


def excess(tables: Tables, uid: int) -> tuple[Footprint, int] | None:
    """Return a user's footprint and its quota if that is exceeded."""
    limit, footprint = tables.policy.quota_of(uid).mapped_beyond_leases, tables.footprints.get(uid)
    if limit is None or footprint is None or footprint.nbytes <= limit:
        return None
    return footprint, limit
