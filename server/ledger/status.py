"""Listings and descriptions of what a session may see, and the event logs of pools and sessions."""

from __future__ import annotations

from collections import Counter, defaultdict

from cubroker.protocol import fields, messages
from cubroker.protocol.errors import Denied, NotFound
from cubroker.protocol.messages import BY_DESCRIPTOR
from cubroker.protocol.status import (
    HIDDEN_ID,
    MAX_SHARERS,
    BlockInfo,
    ClientInfo,
    DeviceInfo,
    LeaseInfo,
    Line,
    PoolInfo,
    SharedBytes,
    SharingInfo,
    WaiterInfo,
)
from cubroker.server.ledger import error_text, memory
from cubroker.server.ledger.leases import check_readable, opened_by
from cubroker.server.ledger.publish import find
from cubroker.server.ledger.records import (
    AttachWaiter,
    CreateWaiter,
    EventWaiter,
    LockWaiter,
    Session,
    Ticket,
    Version,
    Waiter,
)
from cubroker.server.ledger.states import MemoryState, VersionState
from cubroker.server.ledger.tables import Tables, can_read, can_read_history, can_see_session

STAGES = {
    MemoryState.PROMISED: "promised",
    MemoryState.HELD: "held",
    MemoryState.CANCELLED: "given up",
    MemoryState.FREEING: "freeing",
}
"""The words that users read for the states of memory."""


def list_pools(tables: Tables, session: Session, _: messages.ListPools | None = None) -> messages.Pools:
    """Return every live version that ``session`` may see, by name and number."""
    visible = (pool for pool in tables.pools.values() if can_read(tables, session, pool))
    pools = sorted(visible, key=lambda pool: pool.name)
    return messages.Pools(tuple(_pool(version) for pool in pools for version in pool.versions.values()))


def list_clients(tables: Tables, session: Session, _: messages.ListClients | None = None) -> messages.Clients:
    """Return the sessions that ``session`` may see, oldest first, with their leases on pools that it may read."""

    def info(other: Session) -> ClientInfo:
        return ClientInfo(
            session=other.id,
            pid=other.pid,
            uid=other.uid,
            state="connected" if other.connected else "detached",
            leases=tuple(
                LeaseInfo(lease.version.pool.name, lease.version.number, lease.since)
                for lease in other.leases.values()
                if can_read(tables, session, lease.version.pool)
            ),
            mapped_beyond_leases=memory.bytes_beyond_leases(tables, other),
            locks=tuple(held.pool.name for held in other.locks.values() if can_read(tables, session, held.pool)),
            process=other.process,
        )

    return messages.Clients(
        tuple(info(each) for each in tables.sessions.values() if can_see_session(tables, session, each))
    )


def list_devices(tables: Tables, session: Session, _: messages.ListDevices | None = None) -> messages.DeviceList:
    """Return every device, by index."""
    infos = (
        DeviceInfo(
            index=(device := account.device).index,
            uuid=device.uuid,
            name=device.name,
            total=device.total,
            budget=device.budget,
            allocated=account.allocated,
            promised=account.promised,
        )
        for account in tables.accounts.values()
    )
    return messages.DeviceList(tuple(sorted(infos, key=lambda device: device.index)))


def describe(tables: Tables, session: Session, body: messages.Describe) -> messages.Description:
    """Return the state and layout of one version; of a draft too, if the request names its number.

    Raises:
        Denied: ``session`` may not read the pool.
        NotFound, Retired: the version does not exist, or does not exist any more.
    """
    version = _readable(tables, session, body)
    return messages.Description(_pool(version), version.layout, version.plan, _sharing(version))


def list_digests(tables: Tables, session: Session, body: messages.ListDigests) -> messages.DigestList:
    """Return the digests that one version was sealed with; raises as :func:`describe` does."""
    version = _readable(tables, session, body)
    return messages.DigestList(version.number, tuple(version.replicas), version.digests)


def _readable(tables: Tables, session: Session, body: messages.Describe | messages.ListDigests) -> Version:
    pool = tables.pools.get(body.name)
    if pool is not None:
        check_readable(tables, session, pool)
    return find(tables, session, body.name, body.version)


def view(tables: Tables, session: Session, _: messages.Look | None = None) -> messages.View:
    """Return everything that ``session`` may see; memory on devices that are not served is left out."""
    return messages.View(
        devices=list_devices(tables, session).devices,
        pools=list_pools(tables, session).pools,
        clients=list_clients(tables, session).clients,
        blocks=_blocks(tables, session),
        waiters=_waiters(tables, session),
    )


def _blocks(tables: Tables, session: Session) -> tuple[BlockInfo, ...]:
    """Return the memory of the pools that ``session`` may see, then for each device the sums of all other memory."""
    seen, hidden = [], Counter[tuple[str, str]]()
    for ticket in tables.tickets.values():
        device, pool = ticket.account.device.uuid, ticket.pool
        if ticket.state not in STAGES or device not in tables.accounts:  # gone: left by a mistake
            continue
        parts, shared = _parts(ticket)
        for (version, stage), nbytes in parts.items():
            if can_read(tables, session, pool):
                known = pool.versions.get(version)
                state = VersionState.ENDED.value if known is None else _state(known)
                also = _told(shared[version]) if stage == "held" and version in shared else ()
                seen.append(BlockInfo(device, pool.name, version, state, stage, nbytes, ticket.user.uid, also))
            else:
                hidden[device, stage] += nbytes
    others = [
        BlockInfo(device, "", 0, VersionState.CURRENT.value, stage, nbytes, HIDDEN_ID)
        for (device, stage), nbytes in hidden.items()
    ]
    return (*seen, *others)


def _parts(ticket: Ticket) -> tuple[Counter[tuple[int, str]], dict[int, Counter[tuple[int, ...]]]]:
    """Return the bytes of a ticket, by stage and by the oldest version that has them; if none has, the first that had.

    Also return, by the oldest version, the bytes that more than one version has, by the numbers of these versions. If
    there are more than ``MAX_SHARERS``, their numbers are left out.
    """
    parts, shared = Counter[tuple[int, str]](), defaultdict[int, Counter[tuple[int, ...]]](Counter)
    for allocation in ticket.allocations.values():
        state, oldest = ticket.state, allocation.oldest
        if state is MemoryState.HELD and not oldest:
            state = MemoryState.FREEING
        version = oldest.number if oldest else ticket.version
        parts[version, STAGES[state]] += allocation.nbytes
        if allocation.sharers > 1:
            few = allocation.versions if allocation.sharers <= MAX_SHARERS else ()
            shared[version][tuple(each.number for each in few)] += allocation.nbytes
    return parts, shared


def _told(shared: Counter[tuple[int, ...]]) -> tuple[SharedBytes, ...]:
    """Return the largest sets of versions that share bytes, then all other shared bytes as those of an empty set."""
    told = [SharedBytes(*item) for item in shared.most_common() if item[0]][:MAX_SHARERS]
    rest = shared.total() - sum(each.nbytes for each in told)
    return (*told, SharedBytes((), rest)) if rest else tuple(told)


def _waiters(tables: Tables, session: Session) -> tuple[WaiterInfo, ...]:
    return tuple(
        WaiterInfo(
            session=other.id,
            pid=other.pid,
            uid=other.uid,
            request=waiter.request,
            what=_KINDS[type(waiter)],
            pool=waiter.pool.name if (visible := can_read(tables, session, waiter.pool)) else "",
            awaits=_awaits(waiter) if visible else "",
            nbytes=waiter.total if isinstance(waiter, CreateWaiter) else 0,
            since=waiter.since,
        )
        for other in tables.sessions.values()
        if can_see_session(tables, session, other)
        for waiter in other.unfinished.values()
    )


_KINDS = {AttachWaiter: "attach", CreateWaiter: "create", EventWaiter: "event", LockWaiter: "lock"}


def _awaits(waiter: Waiter) -> str:
    if isinstance(waiter, AttachWaiter):
        return f"version {waiter.body.version}" if waiter.body.version else "a current version"
    if isinstance(waiter, EventWaiter):
        return f"event {waiter.name!r}" + (f" past generation {waiter.after}" if waiter.ipc_event else "")
    if isinstance(waiter, LockWaiter):
        return "the lock of the name"
    return "room in its user's quota" if waiter.parked else waiter.phase.value


def _state(version: Version) -> str:
    """Return the word that users read for a version's state."""
    state = VersionState.DRAFT if version.state is VersionState.ALLOCATING else version.state
    return str(state.value)


def _pool(version: Version) -> PoolInfo:
    group = memory.multicast_message(version, objects=False)
    return PoolInfo(
        name=version.pool.name,
        version=version.number,
        state=_state(version),
        nbytes=version.nbytes,
        tensors=version.tensors,
        share=version.share,
        devices=tuple(version.replicas),
        durable=version.durable,
        leases=version.leases,
        owner=version.owner,
        group=version.pool.group,
        mode=version.pool.mode,
        sharded=version.plan is not None,
        writable=version.writable,
        how=group.how if group else "",
        why=version.why or (group.why if group else ""),
        opened_by=opened_by(version),
        protected=version.share in BY_DESCRIPTOR and not version.writable,
        digest=version.digests.algorithm if version.digests else "",
        memory=version.memory,
        shared=version.shared,
        published=version.published,
    )


def _sharing(version: Version) -> tuple[SharingInfo, ...]:
    """Return how much memory a version shares with each other version, oldest first."""
    by_size = defaultdict[int, Counter[int]](Counter)  # the allocations of each other version: few have other sizes
    for allocation in version.allocations:
        by_size[allocation.nbytes].update(allocation.given)
    allocations, nbytes = Counter[int](), Counter[int]()
    for size, numbers in by_size.items():
        for number, count in numbers.items():
            allocations[number] += count
            nbytes[number] += count * size
    others = sorted(version.pool.versions.keys() & allocations.keys() - {version.number})
    return tuple(SharingInfo(other, allocations[other], nbytes[other]) for other in others)


def tell(tables: Tables, session: Session, body: messages.Tell) -> messages.Story:
    """Return the last events of a pool or of a session, also if that has ended.

    Raises:
        Denied: ``session`` may not read the pool.
        NotFound: nothing is known of it, or the other session is another user's.
    """
    if body.pool is None:
        other = tables.sessions.get(body.session) or tables.past_sessions.get(body.session)
        if other is None or not can_see_session(tables, session, other):
            raise NotFound(
                f"nothing is known of a session {body.session} of user {session.uid}; `cubroker clients` lists those"
                f" that there are, and administrators may read the events of all"
            )
        log = other.log
    else:
        fields.check_pool_name(body.pool)
        pool = tables.pools.get(body.pool) or tables.past_pools.get(body.pool)
        readable = pool is not None and can_read_history(tables, session, pool)
        if pool is not None and pool.owner is not None and not readable:
            raise Denied(
                f"user {session.uid} may not read the events of {body.pool}; ask its owner for a mode that lets you"
            )
        if pool is None or not readable or not pool.log:
            hint = error_text.near(tables, session, body.pool) or "`cubroker ls` lists those that there are"
            raise NotFound(f"nothing is known of a pool {body.pool}; {hint}")
        log = pool.log
    return messages.Story(tuple(Line(time, text) for time, text in log))
