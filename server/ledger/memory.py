"""Device memory: the allocations of versions, multicast groups, and memory that processes map beyond leases.

*Allocations.* A draft is given new allocations, one ticket for each device. Later versions may share some of them. An
allocation is freed when no version has it any more, and its ticket ends when the device has freed all of its
allocations. Bytes and descriptors are counted by ticket, so nothing is counted twice.

*Multicast.* A version may have a group, which binds its replicas so that one store goes to all of them; the rest of the
ledger knows no more of groups than that. A group begins when all memory of a draft is allocated, and ends with the
version: first it is unbound, and only then is the memory freed. If the devices cannot bind, copies replace multicast
objects for all members together; the version, its leases and its end are the same.

*Beyond leases.* A lease ends when its holder says that it has unmapped the memory, and the ledger believes the holder.
So the broker also scans which of the memory that it allocated, freed or not, each process has mapped or open. Memory
that no session of the process's user leases is beyond leases. Any lease of the user counts, since a forked process has
the mappings of its parent. A client that maps after the grant and unmaps before the close never has memory beyond its
leases. Leases that end during a scan count as well, since the scan may have looked before their end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import attrgetter

from cubroker.protocol import messages
from cubroker.protocol.layout import round_up
from cubroker.protocol.messages import DESCRIPTOR, MULTICAST
from cubroker.server.ledger import events
from cubroker.server.ledger.records import (
    Allocation,
    DeviceAccount,
    Footprint,
    MulticastGroup,
    Replica,
    Session,
    Ticket,
    User,
    Version,
)
from cubroker.server.ledger.states import (
    ALLOCATED,
    GROUP,
    MEMORY,
    PROMISED,
    GroupEvent,
    Impossible,
    MemoryEvent,
    MemoryState,
)
from cubroker.server.ledger.tables import Kind, Tables

GRANULARITY = 2 << 20  #: Bytes. Smaller pieces of device memory share a block: opening one would expose others.
COPIES = "copies"  #: How replicas are written without multicast objects; with them, it is the word of the share kind.


def rounded(nbytes: int) -> int:
    """Return the bytes that an allocation takes of its device."""
    return round_up(nbytes, GRANULARITY)


def sizes_of(version: Version) -> tuple[int, ...]:
    """Return the bytes that each allocation of a version takes of a device, in the order of its layout."""
    rows = zip(*(replica.allocations for replica in version.replicas.values()), strict=True)
    return tuple(next(each.nbytes for each in row if each is not None) for row in rows)


# -- tickets -------------------------------------------------------------------------------------------


def allocate(
    tables: Tables, version: Version, account: DeviceAccount, sizes: tuple[int, ...]
) -> tuple[Allocation, ...]:
    """Promise a version memory on one device, and have it allocated; its user's quota already has it reserved."""
    if not sizes:
        return ()
    ticket = Ticket(
        next(tables.ticket_ids),
        account,
        version.pool,
        version.number,
        version.user,
        version.share,
        version.durable,
        sizes,
    )
    tables.tickets[ticket.id] = account.tickets[ticket.id] = ticket
    version.user.tickets[ticket.id] = ticket
    account.promised += ticket.nbytes
    tables.effects.append(events.Allocate(ticket.id, account.device.uuid, sizes, version.share, version.durable))
    return tuple(ticket.allocations.values())


def find_ticket(tables: Tables, number: int) -> Ticket:
    """Return a ticket by its number; raises ``Impossible`` if there is none."""
    ticket = tables.tickets.get(number)
    if ticket is None:
        raise Impossible(f"an outcome of ticket {number}, which is not in the tables")
    return ticket


def transition(tables: Tables, ticket: Ticket, event: MemoryEvent) -> None:
    """Take a ticket one step, and move its bytes between the columns of its account."""
    before = ticket.state
    ticket.state = tables.advance(MEMORY, before, event, ticket.pool, f"memory {ticket.id}")
    for state, nbytes in ((before, -ticket.nbytes), (ticket.state, ticket.nbytes)):
        _count(ticket.account, state, nbytes)


def _count(account: DeviceAccount, state: MemoryState, nbytes: int) -> None:
    if state in PROMISED:
        account.promised += nbytes
    elif state in ALLOCATED:
        account.allocated += nbytes


def has(version: Version, allocations: Iterable[Allocation]) -> None:
    """Note that a version has allocations."""
    for allocation in allocations:
        version.memory += allocation.nbytes
        version.shared += allocation.nbytes if allocation.sharers else 0
        allocation.give(version)


def assemble(version: Version) -> bool:
    """Collect the handles of a version; return False while some of its memory is being allocated.

    If one allocation is opened by descriptor, all are: a lease has handles of one kind.
    """
    tickets = {allocation.ticket: None for allocation in version.allocations}
    if any(ticket.state is not MemoryState.HELD for ticket in tickets):
        return False
    kinds = {handle for ticket in tickets for handle in ticket.handles}
    mixed = DESCRIPTOR in kinds and len(kinds) > 1
    for replica in version.replicas.values():
        here = replica.allocations
        found = (b"" if each is None else each.ticket.handles[each.number] for each in here)
        replica.handles = tuple(handle and DESCRIPTOR for handle in found) if mixed else tuple(found)
        replica.fd_sources = fd_sources(each for each in here if each is not None)
    return True


def fd_sources(allocations: Iterable[Allocation]) -> tuple[events.FdSource, ...]:
    """Return where the descriptors of allocations come from, in order."""
    found = []
    for ticket, group in groupby(allocations, key=attrgetter("ticket")):
        numbers = tuple(each.number for each in group)
        whole = numbers == tuple(range(len(ticket.sizes)))
        found.append(events.FdSource(ticket.account.device.uuid, ticket.id, () if whole else numbers))
    return tuple(found)


def own(version: Version, replica: Replica) -> list[Allocation]:
    """Return the allocations of a replica that were made for its version, and not for an earlier one."""
    return [each for each in replica.allocations if each is not None and each.ticket.version == version.number]


def remove(tables: Tables, ticket: Ticket, event: MemoryEvent, numbers: Sequence[int] = ()) -> None:
    """Remove allocations of a ticket (by default all) that the device has freed; a waiting create may have room then.

    With the last of them, ``event`` changes the ticket's state, and the ticket is removed.
    """
    user, account = ticket.user, ticket.account
    numbers = numbers or tuple(ticket.allocations)
    if any(number not in ticket.allocations for number in numbers):
        raise Impossible(f"an outcome of memory {ticket.id} that the device has already")
    nbytes = sum(ticket.sizes[number] for number in numbers)
    if len(numbers) == len(ticket.allocations):
        transition(tables, ticket, event)
    elif any(ticket.allocations[number].oldest for number in numbers):
        raise Impossible(f"memory {ticket.id} of {ticket.label} was freed, and versions have it")
    else:
        _count(account, ticket.state, -nbytes)
    for number in numbers:
        del ticket.allocations[number]
    ticket.nbytes -= nbytes
    user.memory_descriptors -= len(numbers) * ticket.descriptors_each
    tables.stored -= len(numbers) * ticket.durable
    if not ticket.allocations:
        del tables.tickets[ticket.id], account.tickets[ticket.id], user.tickets[ticket.id]
        if not account.tickets:
            tables.absent.pop(account.device.uuid, None)
    tables.recheck_accounts[account] = None
    release_quota(tables, user, nbytes)
    tables.drop_idle_user(user)


def release_quota(tables: Tables, user: User, nbytes: int) -> None:
    """Give bytes back to a user's quota."""
    user.memory -= nbytes
    tables.recheck_user(user)


# -- multicast groups ----------------------------------------------------------------------------------


def bind(tables: Tables, version: Version) -> bool:
    """Have the replicas of a version bound, all of which are allocated; return False if there is nothing to bind."""
    if not version.is_multicast:
        return False
    tickets = tuple({allocation.ticket: None for allocation in version.allocations})
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
    """Send each lease that writes all replicas of a restored version the new objects, or the replicas that it lacks."""
    group = version.multicast_group
    assert group is not None
    for lease in version.holders.values():
        if not lease.bound:
            continue
        session, others = lease.session, tuple[Replica, ...]()
        if not lease.writes:  # the writer's lease has all replicas
            lease.replicas = _reachable(version, lease.replicas[0])
            others = lease.replicas[1:]
            tables.mark_dirty(Kind.LEASE, lease.id)
        if session.connected:
            replicas = tuple(messages.ReplicaHandles(other.account.device.uuid, other.handles) for other in others)
            told = messages.Rebound(lease.id, replicas, messages.Team(group.how, group.why, group.sizes))
            tables.effects.append(events.Notify(session.id, told))
            sources = tuple(source for other in others for source in other.fd_sources)
            if sources or group.sizes:
                objects = group.id if group.sizes else 0
                tables.effects.append(
                    events.SendFds(session.id, lease.id, sources, objects, rebound=True, writable=True)
                )


def release_memory(tables: Tables, version: Version) -> None:
    """Have the memory freed that only an ended version had; its group is unbound first, even while it is being bound.

    If the version ended because a ticket could not be allocated, that ticket does not exist any more.
    """
    group = version.multicast_group
    if group is not None:
        _transition_group(tables, group, GroupEvent.RELEASED)
        tables.effects.append(events.UnbindMulticast(group.id))
    unused: dict[Ticket, list[int]] = {}
    for ticket in {allocation.ticket: None for allocation in version.allocations}:
        tables.mark_dirty(Kind.MEMORY, ticket.id, version.pool.name)  # its entry may have to go
    for allocation in version.allocations:
        if (heir := allocation.note_end()) is not None:
            heir.shared -= allocation.nbytes
        if not allocation.given and allocation.number in allocation.ticket.allocations:
            unused.setdefault(allocation.ticket, []).append(allocation.number)
    for ticket, numbers in unused.items():
        if not ticket.used:
            transition(tables, ticket, MemoryEvent.RELEASED)
        if group is None:
            _free(tables, ticket, numbers)


def unbound(tables: Tables, event: events.MulticastUnbound) -> None:
    """Have the memory of a group freed, now that nothing is bound to it."""
    group = _find_group(tables, event.group)
    _transition_group(tables, group, GroupEvent.UNBOUND)
    del tables.multicast_groups[group.id]
    for ticket in {allocation.ticket: None for allocation in group.version.allocations}:
        _free(tables, ticket, tuple(ticket.allocations))


def _free(tables: Tables, ticket: Ticket, numbers: Sequence[int]) -> None:
    """Have released memory freed."""
    whole = len(numbers) == len(ticket.sizes)
    tables.effects.append(events.Free(ticket.id, ticket.account.device.uuid, () if whole else tuple(numbers)))


def _transition_group(tables: Tables, group: MulticastGroup, event: GroupEvent) -> None:
    group.state = tables.advance(GROUP, group.state, event, group.version.pool, f"multicast group {group.id}")


def _find_group(tables: Tables, number: int) -> MulticastGroup:
    group = tables.multicast_groups.get(number)
    if group is None:
        raise Impossible(f"an outcome of multicast group {number}, which is not in the tables")
    return group


def replicas_for(version: Version, chosen: tuple[Replica, ...], device: str | None) -> tuple[Replica, ...]:
    """Return the memory of a lease that writes all replicas from ``device``; empty if it writes only ``chosen``.

    A reader of a read-only version does not write, and a multicast object is of use only on a device with a replica.
    """
    writes_all = version.is_multicast and version.writable and device in version.replicas
    return _reachable(version, chosen[0]) if writes_all else ()


def _reachable(version: Version, here: Replica) -> tuple[Replica, ...]:
    """Return the replicas that a lease maps to write all of them, ``here`` first; with objects, only ``here``."""
    if version.multicast_group is None or version.multicast_group.how != COPIES:
        return (here,)
    return (here, *(other for other in version.replicas.values() if other is not here))


def multicast_message(version: Version, *, objects: bool) -> messages.Team | None:
    """Return how all replicas are written together, with the sizes of the ``objects`` for leases that get them.

    None: it is no multicast version. While its group is not bound yet, the fields are empty.
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
    """Remember, from now until :func:`scan_finished`, the leases that end."""
    tables.ended_in_scan = []


def scan_finished(tables: Tables, event: events.ProcessScanFinished) -> None:
    """Note what processes refer to beyond leases; nothing is known of processes that the scan does not report."""
    leased: dict[int, set[events.AllocationId]] = {}
    footprints: dict[int, Footprint] = {}
    for process in event.processes:
        memory = process.memory
        if memory:
            if process.uid not in leased:
                leased[process.uid] = _leased(tables, process.uid)
            memory = {each: size for each, size in memory.items() if each not in leased[process.uid]}
        footprints.setdefault(process.uid, Footprint()).processes[process.pid] = memory
    for footprint in footprints.values():
        footprint.count()
    tables.footprints, tables.ended_in_scan = footprints, None


def _leased(tables: Tables, uid: int) -> set[events.AllocationId]:
    """Return the allocations that a user leases, or leased since the scan began."""
    user = tables.users.get(uid)
    leases = (lease for session in (user.sessions.values() if user else ()) for lease in session.leases.values())
    replicas = {replica for lease in leases for replica in lease.replicas}
    replicas.update(replica for holder, replica in tables.ended_in_scan or () if holder == uid)
    # Thousands of versions may share memory, so each allocation is looked at once.
    allocations = set[Allocation | None]().union(*(replica.allocations for replica in replicas))
    return {each.id for each in allocations if each is not None}


def bytes_beyond_leases(tables: Tables, session: Session) -> int | None:
    """Return the bytes that a session's process refers to beyond leases; None: unknown."""
    footprint = tables.footprints.get(session.uid)
    memory = None if footprint is None else footprint.processes.get(session.pid)
    return None if memory is None else sum(memory.values())


def excess(tables: Tables, uid: int) -> tuple[Footprint, int] | None:
    """Return a user's footprint and its quota if the footprint exceeds the quota, else None."""
    limit, footprint = tables.policy.quota_of(uid).mapped_beyond_leases, tables.footprints.get(uid)
    if limit is None or footprint is None or footprint.nbytes <= limit:
        return None
    return footprint, limit
