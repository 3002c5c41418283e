"""Create: from the request to a draft with memory, through up to three queues.

Each name has a queue for the turn as its writer. Each device has a queue for room, which a create enters when it has
its turn. Queues are in order of arrival at the broker, and no create is served before the one ahead: a small request
does not overtake a large one on the same device.

A create gets its turn and room in its user's quota together, or neither. Its bytes are reserved from then on, so no
device queue waits for a quota. A create that could have the turn, but whose user's quota has no room, is *parked*: it
keeps its place in the name's queue, where later creates of other users may overtake it, and it also enters its user's
queue, where it holds up only creates of that user.

There is no deadlock: a create with a turn, and so with bytes of a quota, waits only for devices. There is no
starvation: the oldest create that waits for devices is first in all its queues, since all have the same order. A user's
oldest parked create gets its turn as well: no other create takes bytes of that quota before it, so in time the quota
has room for it, and keeps it. The next time that the name is free, only older creates, which are finitely many, can
have the turn before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from heapq import heappop, heappush
from itertools import count

from msgspec import structs

from cubroker.protocol import errors, fields, messages
from cubroker.protocol.layout import Outline
from cubroker.protocol.messages import AUTO, BY_DESCRIPTOR, IPC, MULTICAST, SHARES, VMM
from cubroker.server.ledger import error_text, leases, memory
from cubroker.server.ledger.error_text import size
from cubroker.server.ledger.events import Allocated, AllocationFailed, Freed, MulticastBound, RequestReceived
from cubroker.server.ledger.policy import admin_reserve, exceeds
from cubroker.server.ledger.publish import find
from cubroker.server.ledger.records import (
    SESSION_FDS,
    Allocation,
    CreateWaiter,
    DeviceAccount,
    Phase,
    Pool,
    Replica,
    Session,
    User,
    Version,
)
from cubroker.server.ledger.states import MemoryEvent, VersionEvent, VersionState
from cubroker.server.ledger.tables import Kind, Tables, can_administer

MAX_LISTED = 4  #: Sizes of allocations that a message lists.


def create(tables: Tables, session: Session, body: messages.Create, event: RequestReceived) -> messages.Attached | None:
    """Begin a create; with ``attach``, lease the current version if there is one. Raises if the create is refused."""
    request, layout = event.request, event.layout
    assert layout is not None
    if not tables.lends(durable=True):
        raise errors.Unavailable(error_text.not_lending(tables))
    pool = tables.pools.get(body.name)
    if body.attach is not None and pool is not None and pool.current is not None:
        return leases.lend(tables, session, pool.current, body.attach)
    base = _base(tables, session, pool, body)
    body = _decided(tables, body, layout, base)
    if not tables.lends(durable=bool(body.durable)):
        raise errors.Unavailable(error_text.not_lending(tables))
    sizes = _checked_sizes(tables, body, layout, base)
    if body.attach is None:
        _check_writable(tables, session, pool, body)
    _check_quotas(tables, session, body, sizes)
    leases.check_quota(tables, session)
    leases.admit(tables, session, request)
    waiter = CreateWaiter(
        arrival=next(tables.arrivals),
        session=session,
        request=request,
        pool=tables.pool(body.name),
        body=body,
        sizes=sizes,
        nbytes={account: sum(each) for account, each in sizes.items()},
        outline=layout,
        base=base,
    )
    leases.enqueue(tables, waiter)
    if waiter.pool.free:  # all creates ahead of it are parked
        _offer_turn(tables, waiter)
    serve_waiters(tables)
    if session.unfinished.get(request) is waiter and waiter.phase is not Phase.MEMORY:
        if body.wait:
            leases.arm_timeout(tables, waiter)
            return None
        error: type[errors.CubrokerError] = errors.OverBudget
        if waiter.phase is Phase.TURN:
            error = errors.Exists if waiter.pool.draft or waiter.pool.writer else errors.OverQuota
        leases.refuse(tables, waiter, error(error_text.blocked(tables, waiter)))
    return None


def _decided(tables: Tables, body: messages.Create, layout: Outline, base: Version | None) -> messages.Create:
    """Return a create with its share kind and durability decided, if the request left them to the broker."""
    share, durable = body.share, body.durable
    if base is not None:
        share = base.share if share == AUTO else share
        durable = base.durable if durable is None else durable
    if share == AUTO:  # `ipc` cannot be durable
        share = VMM if durable else tables.policy.share
    if share == AUTO:  # _checked_sizes refuses devices that do not exist
        accounts = (tables.accounts.get(uuid) for uuid in body.devices)
        share = VMM if all(account is None or account.device.vmm for account in accounts) else IPC
    if durable is None:
        pieces = len(layout.allocations) * (len(body.devices) if body.plan is None else 1)
        durable = share in BY_DESCRIPTOR and _has_places(tables, pieces)
    return structs.replace(body, share=share, durable=durable)


def _has_places(tables: Tables, pieces: int) -> bool:
    """Whether the store has room for ``pieces`` that need not be durable: half of its places are left to sessions."""
    if tables.store is None or exceeds(tables.stored + admin_reserve(tables.store), pieces, tables.store):
        return False
    return tables.stored - SESSION_FDS * len(tables.sessions) + pieces <= tables.store // 2


def _checked_sizes(
    tables: Tables, body: messages.Create, layout: Outline, base: Version | None
) -> dict[DeviceAccount, tuple[int, ...]]:
    """Return the sizes to allocate on each device; raise if the create cannot be granted even on an empty device."""
    fields.check_pool_name(body.name)
    if body.share not in SHARES:
        raise errors.Invalid(f"unknown share kind {body.share[:16]!r}; use {' or '.join((AUTO, *SHARES))}")
    if body.durable and body.share not in BY_DESCRIPTOR:
        raise errors.Unsupported(
            f"{body.name} is to be durable, and memory that is shared as {body.share} ends with the broker;"
            f" use {' or '.join(BY_DESCRIPTOR)}"
        )
    if body.durable and tables.store is None:
        raise errors.Unsupported(
            f"{body.name} is to be durable, and this broker has no store that keeps memory while it is down: have it"
            f" run as the systemd service of deploy/systemd, or as `cubroker keep -- cubroker serve`; or make the pool"
            f" not durable"
        )
    if not layout.allocations:
        raise errors.Invalid(f"the layout of {body.name} has no memory; a pool needs at least one tensor")
    if len(set(body.devices)) < len(body.devices):
        raise errors.Invalid(f"create of {body.name} names a device twice: {', '.join(body.devices)}")
    if body.plan is not None:
        _check_plan(body, body.plan, len(layout.allocations))
    for uuid in body.devices:
        if uuid not in tables.accounts:
            raise errors.NotFound(error_text.no_device(tables, uuid))
    if body.attach is not None:
        leases.check_reachable(tables, body.attach)
    if base is not None and body.base is not None:
        _check_base(body, body.base, base, layout)
    sizes = {tables.accounts[uuid]: each for uuid, each in _sizes(body, layout).items()}
    for account, each in sizes.items():
        if sum(each) > account.capacity:
            raise errors.OverBudget(error_text.never_fits(body.name, sum(each), account))
    return sizes


def _check_plan(body: messages.Create, plan: tuple[int, ...], allocations: int) -> None:
    """Raise unless a plan has a device for every allocation, and an allocation for every device."""
    if body.share == MULTICAST:
        raise errors.Invalid(
            f"{body.name} is to be sharded and {MULTICAST}, which writes all replicas at once; use {VMM}"
        )
    if len(plan) != allocations:
        raise errors.Invalid(
            f"the plan of {body.name} places {len(plan)} allocations, and its layout has {allocations}; place each once"
        )
    if max(plan) >= len(body.devices):
        raise errors.Invalid(
            f"the plan of {body.name} names device {max(plan)} of {len(body.devices)}; they are counted from 0"
        )
    used = set(plan)
    if idle := [uuid for index, uuid in enumerate(body.devices) if index not in used]:
        raise errors.Invalid(
            f"the plan of {body.name} puts nothing on {', '.join(idle)}; leave out devices without allocations"
        )


def _base(tables: Tables, session: Session, pool: Pool | None, body: messages.Create) -> Version | None:
    """Return the version with which a create's version is to share memory; None: it shares none.

    Raises:
        Denied: the session may not read the pool.
        NotFound, Retired: the base does not exist, or does not exist any more.
        Invalid: the base was never sealed, or could end too early, being neither current nor leased by the session.
        Unavailable: the base's memory was lost.
    """
    if body.base is None:
        return None
    if body.attach is not None:
        raise errors.Invalid(
            f"{body.name} cannot be both an update, which is always created, and attached to if it exists; leave one"
            f" out"
        )
    if pool is not None:
        leases.check_readable(tables, session, pool)
    base = find(tables, session, body.name, body.base.version)
    if base.state is VersionState.LOST:
        raise errors.Unavailable(f"{base.label} was lost: {base.why}; publish all tensors, without a base")
    if base.state in (VersionState.ALLOCATING, VersionState.DRAFT) or base.lent:
        raise errors.Invalid(f"{base.label} is a draft, or was given up as one, and can be no base; name another one")
    if base is not base.pool.current and all(lease.session is not session for lease in base.holders.values()):
        raise errors.Invalid(
            f"{base.label} is {base.state.value} and not leased by this session, so it may end before its memory is"
            f" shared; attach to it first, or take the current version as the base"
        )
    return base


_DURABILITY = ("not durable", "durable")
_PLACEMENT = ("sharded", "replicated")


def _check_base(body: messages.Create, wanted: messages.Base, base: Version, layout: Outline) -> None:
    """Raise unless a create's version can share the memory of its base that the request names."""
    if MULTICAST in (body.share, base.share) or body.writable or base.writable:
        what = "multicast" if MULTICAST in (body.share, base.share) else "writable by its readers"
        raise errors.Unsupported(
            f"an update of {base.label} cannot share its memory: one of the two is {what}; publish all tensors, without"
            f" a base"
        )
    for name, asked, there in (
        ("share kind", body.share, base.share),
        ("durability", _DURABILITY[bool(body.durable)], _DURABILITY[base.durable]),
        ("devices", ", ".join(body.devices), ", ".join(base.replicas)),
        ("placement", _PLACEMENT[body.plan is None], _PLACEMENT[base.plan is None]),
    ):
        if asked != there:
            raise errors.Unsupported(
                f"an update of {base.label} keeps its {name}, {there}, and {asked} was asked for; leave that"
                f" out, or publish all tensors, without a base"
            )
    kept = [number for number in wanted.allocations if number is not None]
    if len(wanted.allocations) != len(layout.allocations) or len(set(kept)) < len(kept):
        raise errors.Invalid(
            f"an update of {base.label} says where {len(wanted.allocations)} of {len(layout.allocations)} allocations"
            f" come from; say it once for each, and take none twice"
        )
    places = {number: (uuid, each.nbytes) for uuid, number, each in _placed(base)}
    for new, number in enumerate(wanted.allocations):
        if number is None:
            continue
        place = next(iter(base.replicas)) if body.plan is None else body.devices[body.plan[new]]
        if places.get(number) != (place, memory.rounded(layout.allocations[new])):
            raise errors.Invalid(
                f"allocation {new} of an update of {base.label} cannot share memory with allocation {number} of"
                f" {base.label}: the sizes or devices differ"
            )


def _placed(version: Version) -> Iterator[tuple[str, int, Allocation]]:
    """Yield the first device of each allocation of a version, its number in the layout, and the allocation."""
    seen: set[int] = set()
    for uuid, replica in version.replicas.items():
        for number, allocation in enumerate(replica.allocations):
            if allocation is not None and number not in seen:
                seen.add(number)
                yield uuid, number, allocation


def _sizes(body: messages.Create, layout: Outline) -> dict[str, tuple[int, ...]]:
    """Return the sizes of the new allocations on each device."""
    kept = body.base.allocations if body.base is not None else (None,) * len(layout.allocations)
    sizes: dict[str, list[int]] = {uuid: [] for uuid in body.devices}
    for number, nbytes in enumerate(layout.allocations):
        if kept[number] is None:
            for uuid in _homes(body, number):
                sizes[uuid].append(memory.rounded(nbytes))
    return {uuid: tuple(each) for uuid, each in sizes.items()}


def _homes(body: messages.Create, number: int) -> tuple[str, ...]:
    """Return the devices that an allocation of a create's layout is on."""
    return body.devices if body.plan is None else (body.devices[body.plan[number]],)


def _check_writable(tables: Tables, session: Session, pool: Pool | None, body: messages.Create) -> None:
    leases.check_reserved(tables, session, body.name)
    if pool is None:
        return
    leases.check_publishable(tables, session, pool)
    if body.mode not in (None, pool.mode) and not can_administer(tables, session, pool):
        raise errors.Denied(
            f"user {session.uid} may not change the mode of {pool.name}, {error_text.belongs(tables, session, pool)};"
            f" leave the mode out"
        )


def _check_quotas(
    tables: Tables, session: Session, body: messages.Create, sizes: Mapping[DeviceAccount, tuple[int, ...]]
) -> None:
    """Raise if the user's quota of memory can never have room, or another quota or the store has no room now."""
    user, quota = session.user, session.user.quota
    nbytes = sum(map(sum, sizes.values()))
    if exceeds(0, nbytes, quota.memory):
        raise errors.OverQuota(error_text.never_affords(user, body.name, nbytes))
    if quota.layouts is not None and user.layouts + len(body.layout) > quota.layouts:
        raise errors.OverQuota(_too_long(user, len(body.layout)))
    descriptors = sum(len(each) * account.device.descriptors_of(body.share) for account, each in sizes.items())
    if exceeds(user.descriptors, descriptors, quota.descriptors):
        raise errors.OverQuota(error_text.too_many_descriptors(user.uid, descriptors, quota.descriptors, user))
    pieces = sum(map(len, sizes.values())) if body.durable else 0
    reserve = admin_reserve(tables.store)
    if exceeds(tables.stored + reserve, pieces, tables.store):
        raise errors.OverQuota(error_text.store_is_full(tables, pieces, reserve))


def _too_long(user: User, nbytes: int) -> str:
    assert user.quota.layouts is not None
    return (
        f"this layout takes {size(nbytes)}, and those of user {user.uid} take {size(user.layouts)} of a quota of"
        f" {size(user.quota.layouts)}; retire what is not needed, or describe fewer tensors"
    )


def serve_waiters(tables: Tables) -> None:
    """Give turns, then room, at all pools, users and devices to recheck, until no create can be served.

    Turns are given first, so that creates that get one take part when room is given. Room is given to one create at a
    time, in order of arrival over all devices. If a device can never have enough, the create is refused, and its turn
    passes on, maybe to a create that is older than the others that wait for room.
    """
    while tables.recheck_pools or tables.recheck_users or tables.recheck_accounts:
        _give_turns(tables)
        heads = {account.queue[0] for account in tables.recheck_accounts if account.queue}
        waiter = min(filter(_is_ready, heads), key=lambda waiter: waiter.arrival, default=None)
        if waiter is None:
            tables.recheck_accounts.clear()
        elif (account := _too_small(waiter)) is not None:  # the capacity has shrunk since the create began to wait
            why = error_text.never_fits(waiter.pool.name, waiter.nbytes[account], account)
            leases.refuse(tables, waiter, errors.OverBudget(why))
        else:
            _begin_draft(tables, waiter)


def _give_turns(tables: Tables) -> None:
    """Offer the turn in every pool to recheck, and to the first parked create of every user to recheck.

    Offers are in order of arrival over all pools and users, since creates of one user share a quota.
    """
    offers: list[tuple[int, int, CreateWaiter, Iterator[CreateWaiter]]] = []
    serials = count()

    def offer(candidates: Iterator[CreateWaiter]) -> None:
        waiter = next(candidates, None)
        if waiter is not None:
            heappush(offers, (waiter.arrival, next(serials), waiter, candidates))

    while tables.recheck_pools or tables.recheck_users or offers:
        while tables.recheck_users:
            user, _ = tables.recheck_users.popitem()
            offer(iter(user.queue[:1]))
        while tables.recheck_pools:
            pool, _ = tables.recheck_pools.popitem()
            if pool.free:
                offer(iter(tuple(pool.queue)))
            if pool.idle and tables.pools.get(pool.name) is pool:
                tables.drop_pool(pool)
        if offers:
            _, _, waiter, others = heappop(offers)
            if waiter.pool.free:
                _offer_turn(tables, waiter)
                offer(others)


def _offer_turn(tables: Tables, waiter: CreateWaiter) -> None:
    if waiter not in waiter.pool.queue:
        return  # its pool and its user both made the offer, and at the first one it was refused
    session = waiter.session
    try:
        _check_writable(tables, session, waiter.pool, waiter.body)
    except errors.Denied as error:
        leases.refuse(tables, waiter, error)
        return
    if not session.user.affords(waiter):
        if not waiter.parked:
            waiter.parked = True
            session.user.queue.insert(session.user.position(waiter), waiter)
        return
    del waiter.pool.queue[waiter]
    leases.unpark(tables, waiter)
    session.user.memory += waiter.total
    waiter.pool.writer = waiter
    waiter.phase = Phase.ROOM
    for account in waiter.accounts:
        account.queue.insert(account.position(waiter), waiter)
        tables.recheck_accounts[account] = None


def _is_ready(waiter: CreateWaiter) -> bool:
    """Whether a create is first in all its queues, and there is room for it now or there never will be."""
    if any(account.queue[0] is not waiter for account in waiter.accounts):
        return False
    fits = all(account.available >= nbytes for account, nbytes in waiter.nbytes.items())
    return fits or _too_small(waiter) is not None


def _too_small(waiter: CreateWaiter) -> DeviceAccount | None:
    """Return a device that can never have room for a create; None if there is no such device."""
    return next((account for account, nbytes in waiter.nbytes.items() if account.capacity < nbytes), None)


def _begin_draft(tables: Tables, waiter: CreateWaiter) -> None:
    try:
        _base(tables, waiter.session, waiter.pool, waiter.body)  # the base may have ended since the request
    except errors.CubrokerError as error:
        return leases.refuse(tables, waiter, error)
    leases.leave_device_queues(tables, waiter)
    leases.cancel_timeout(tables, waiter)
    waiter.phase = Phase.MEMORY
    pool, session = waiter.pool, waiter.session
    version = Version(
        pool=pool,
        number=pool.last + 1,
        user=session.user,
        writer=session.label,
        mode=waiter.body.mode,
        share=waiter.body.share,
        plan=waiter.body.plan,
        writable=waiter.body.writable,
        durable=waiter.durable,
        layout=waiter.body.layout,
        tensors=waiter.outline.tensors,
        nbytes=waiter.outline.nbytes,
    )
    pool.draft = pool.versions[version.number] = version
    if pool.owner is None:
        if pool.previous_owner not in (None, session.uid):
            pool.log.clear()  # the new owner may not read what happened before
        pool.owner, pool.group = session.uid, session.gid
        pool.mode = tables.policy.mode if version.mode is None else version.mode
        tables.mark_dirty(Kind.NAME, name=pool.name)
    for account, sizes in waiter.sizes.items():
        new = iter(memory.allocate(tables, version, account, sizes))
        version.replicas[account.device.uuid] = Replica(account, tuple(_allocations(waiter, account, new)))
    memory.has(version, version.allocations)
    return _assemble(tables, version)


def _allocations(
    waiter: CreateWaiter, account: DeviceAccount, new: Iterator[Allocation]
) -> Iterator[Allocation | None]:
    """Yield each allocation of a draft on one device: a ``new`` one, the base's, or None if it is on another device."""
    body, base, uuid = waiter.body, waiter.base, account.device.uuid
    for number in range(len(waiter.outline.allocations)):
        kept = None if body.base is None else body.base.allocations[number]
        if uuid not in _homes(body, number):
            yield None
        elif base is None or kept is None:
            yield next(new)
        else:
            yield base.replicas[uuid].allocations[kept]


def memory_allocated(tables: Tables, event: Allocated) -> None:
    """Note memory that a device allocated; once a draft has all its memory, grant it, or have it bound first."""
    ticket = memory.find_ticket(tables, event.ticket)
    assert len(event.handles) == len(ticket.sizes)
    memory.transition(tables, ticket, MemoryEvent.ALLOCATED)
    ticket.handles = event.handles
    for version in ticket.versions:  # none if its draft has ended
        _assemble(tables, version)


def _assemble(tables: Tables, version: Version) -> None:
    """Grant a draft to its writer once all its memory is allocated, or have the memory bound first."""
    if memory.assemble(version) and not memory.bind(tables, version):
        _fill(tables, version)


def multicast_bound(tables: Tables, event: MulticastBound) -> None:
    """Note that replicas were bound, or are written by copies: grant the draft, or update leases after a restart."""
    version = memory.bound(tables, event)
    if version.state is VersionState.ALLOCATING:
        _fill(tables, version)
    elif version.state not in (VersionState.LOST, VersionState.ENDED):
        memory.rebound(tables, version)


def _fill(tables: Tables, version: Version) -> None:
    waiter = version.pool.writer
    assert waiter is not None
    try:
        leases.check_quota(tables, waiter.session)
    except errors.OverQuota as error:
        leases.refuse(tables, waiter, error)
        return
    # The journal gets the memory that this version alone has: new, or shared with versions that have ended meanwhile.
    for ticket in {allocation.ticket for allocation in version.allocations if allocation.sharers == 1}:
        tables.mark_dirty(Kind.MEMORY, ticket.id, ticket.pool.name)
    tables.transition_version(version, VersionEvent.FILLED)
    leases.stop_waiting(tables, waiter)
    replicas = tuple(version.replicas.values())
    lease = leases.grant(tables, waiter.session, version, replicas, bound=version.is_multicast, writes=True)
    leases.answer(tables, waiter, leases.created(lease))
    leases.serve_readers(tables, version)


def set_layout(tables: Tables, session: Session, body: messages.SetLayout, event: RequestReceived) -> messages.Done:
    """Replace the layout of a draft with another one of the same memory.

    Raises:
        NotFound, Invalid, Unavailable: the session has no such lease, the lease writes no draft, or the draft was lost.
        Invalid: the layout describes other memory.
        OverQuota: the layout takes more bytes than the user's quota has room for.
    """
    layout = event.layout
    assert layout is not None
    version = leases.own_draft(session, body.lease, "get another layout").version
    user, sizes = version.user, memory.sizes_of(version)
    if tuple(map(memory.rounded, layout.allocations)) != sizes:
        raise errors.Invalid(
            f"the layout of {version.label} cannot be set: it has allocations of {_listed(layout.allocations)} bytes,"
            f" and the draft's memory is {_listed(sizes)}; keep the allocations of the layout that it was created with"
        )
    if exceeds(user.layouts, len(body.layout) - len(version.layout), user.quota.layouts):
        raise errors.OverQuota(_too_long(user, len(body.layout)))
    user.layouts += len(body.layout) - len(version.layout)
    version.layout, version.tensors, version.nbytes = body.layout, layout.tensors, layout.nbytes
    tables.mark_dirty(Kind.VERSION, version.number, version.pool.name)
    tables.note(version.pool, f"version {version.number} has another layout, of {layout.tensors} tensors")
    return messages.Done()


def _listed(sizes: tuple[int, ...]) -> str:
    return ", ".join(map(str, sizes[:MAX_LISTED])) + (f", … ({len(sizes)})" if len(sizes) > MAX_LISTED else "")


def allocation_failed(tables: Tables, event: AllocationFailed) -> None:
    """Note that a device could not allocate memory: end its draft, and answer the create with the reason."""
    ticket = memory.find_ticket(tables, event.ticket)
    wanted = ticket.used
    memory.remove(tables, ticket, MemoryEvent.FAILED)
    ticket.account.lose(event.unfreed)
    if wanted:
        waiter = ticket.pool.writer
        assert waiter is not None
        leases.refuse(tables, waiter, errors.from_code(event.code, event.message))


def memory_freed(tables: Tables, event: Freed) -> None:
    """Note that a device freed memory; a ticket that was cancelled and then failed does not exist any more."""
    ticket = tables.tickets.get(event.ticket)
    if ticket is not None:
        memory.remove(tables, ticket, MemoryEvent.FREED, event.numbers)
        ticket.account.lose(event.unfreed)
