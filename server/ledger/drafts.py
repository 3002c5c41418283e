"""Create: from the request to a draft with memory, through two lines, and at times a third.

There is one line per name, for the turn as its writer, and one line per device, for room, which a
create enters when its turn has come. Each line is in order of arrival at the broker, and nobody is
served before the one ahead: a small request does not overtake a large one on the same device.

With its turn a create gets room in its user's quota, both at once or neither; the bytes are set aside
from then on, so no line for a device ever waits for a quota. Whoever could have the turn but for
the quota *steps aside*: it keeps its place in the line for the name, while later creates of other users
may go ahead, and enters the line of its user, where it holds up that user alone. In that line, too,
nobody is served before the one ahead.

Nobody waits in a circle: who has a turn, and so bytes of a quota, waits for devices only. And nobody
starves. Of those who wait for devices, the oldest is first in all its lines, since they all have the same
order. Of those who stepped aside, take a user's oldest: nothing more is taken of that quota before it, so
in time there is room and there stays room, and the next time that the name is free it is the first of
all who can have the turn, but for older ones, of which there are only so many.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import count

from msgspec import structs

from cubroker.protocol import names
from cubroker.protocol.errors import (
    CubrokerError,
    Denied,
    Exists,
    Invalid,
    NotFound,
    OverBudget,
    OverQuota,
    Unsupported,
    from_code,
)
from cubroker.protocol.layout import Outline
from cubroker.protocol.messages import AUTO, DESCRIPTOR, Attached, Create
from cubroker.server.ledger import attaching, draining, shortages, teams, wording
from cubroker.server.ledger.attaching import check_somewhere, created
from cubroker.server.ledger.books import Books, Kind
from cubroker.server.ledger.chronicle import Story
from cubroker.server.ledger.entries import (
    BY_DESCRIPTOR,
    IPC,
    MULTICAST,
    SESSION,
    VMM,
    Allocation,
    Pool,
    Session,
    Version,
)
from cubroker.server.ledger.events import Allocated, Assembled, Freed, NotAllocated
from cubroker.server.ledger.leases import check_quota, grant
from cubroker.server.ledger.permissions import may_rule, may_write, reservation
from cubroker.server.ledger.policy import exceeds, held_back
from cubroker.server.ledger.room import allocate, lose, rounded, shift, take_off, under_way
from cubroker.server.ledger.states import Cause, Report, Stage, State
from cubroker.server.ledger.waiters import Phase, Writer
from cubroker.server.ledger.waiting import (
    admit,
    answer,
    begin,
    come_back,
    leave,
    leave_lines,
    limit,
    refuse,
    step_aside,
    unlimit,
)

SHARES = (IPC, VMM, MULTICAST)


def create(books: Books, session: Session, request: int, body: Create, layout: Outline) -> Attached | None:
    """Begin a create; with ``attach``, lease the current version if there is one. Raises what stands in the way."""
    draining.check(books, durable=True)
    pool = books.pools.get(body.name)
    if body.attach is not None and pool is not None and pool.current is not None:
        return attaching.lease(books, session, pool.current, body.attach)
    body = _decided(books, body, layout)
    draining.check(books, durable=bool(body.durable))
    _check(books, body, layout)
    if body.attach is None:
        _check_writable(books, session, pool, body)
    _check_quotas(books, session, body, layout)
    check_quota(books, session)
    admit(books, session, request)
    writer = _writer(books, session, request, body, layout)
    begin(books, writer)
    if writer.pool.free:  # whoever waits there steps aside
        _offer_turn(books, writer)
    settle(books)
    if session.unfinished.get(request) is writer and writer.phase is not Phase.MEMORY:
        _wait(books, writer)
    return None


def _decided(books: Books, body: Create, layout: Outline) -> Create:
    """Return a create of which nothing is left to the broker any more: neither its share kind nor its durability."""
    share = _share(books, body) if body.share == AUTO else body.share
    durable = body.durable
    if durable is None:
        pieces = len(layout.allocations) * (len(body.devices) if body.plan is None else 1)
        durable = share in BY_DESCRIPTOR and _has_places(books, pieces)
    return structs.replace(body, share=share, durable=durable)


def _share(books: Books, body: Create) -> str:
    """Return the share kind of a create that names none; only ``vmm`` can be what is to be durable."""
    if body.durable:
        return VMM
    if books.policy.share != AUTO:
        return books.policy.share
    accounts = (books.accounts.get(uuid) for uuid in body.devices)  # of a device that there is not, the check tells
    return VMM if all(account is None or account.device.vmm for account in accounts) else IPC


def _has_places(books: Books, pieces: int) -> bool:
    """Whether the store has room for ``pieces`` that may do without: half of its places are left to sessions."""
    if books.store is None or exceeds(books.stored + held_back(books.store), pieces, books.store):
        return False
    return books.stored - SESSION * len(books.sessions) + pieces <= books.store // 2


def _wait(books: Books, writer: Writer) -> None:
    if writer.body.wait:
        limit(books, writer)
        return
    error: type[CubrokerError] = OverBudget
    if writer.phase is Phase.TURN:
        error = Exists if writer.pool.draft or writer.pool.writer else OverQuota
    refuse(books, writer, error(wording.blocked(books, writer)))


def _check(books: Books, body: Create, layout: Outline) -> None:
    """Raise if the request can never be granted, whatever else there is."""
    names.check(body.name)
    if body.share not in SHARES:
        raise Invalid(f"unknown share kind {body.share[:16]!r}; use {' or '.join((AUTO, *SHARES))}")
    if body.durable and (body.share not in BY_DESCRIPTOR or books.store is None):
        raise Unsupported(wording.not_durable(body))
    if not layout.allocations:
        raise Invalid(f"the layout of {body.name} has no memory; a pool needs at least one tensor")
    if len(set(body.devices)) < len(body.devices):
        raise Invalid(f"create of {body.name} names a device twice: {', '.join(body.devices)}")
    if body.plan is not None:
        _check_plan(body, body.plan, len(layout.allocations))
    for uuid in body.devices:
        if uuid not in books.accounts:
            raise NotFound(wording.no_device(uuid, books.accounts))
    if body.attach is not None:
        check_somewhere(books, body.attach)
    for uuid, sizes in _sizes(body, layout).items():
        if sum(sizes) > books.accounts[uuid].most:
            raise OverBudget(wording.never_fits(body.name, sum(sizes), books.accounts[uuid]))


def _check_plan(body: Create, plan: tuple[int, ...], allocations: int) -> None:
    """Raise unless a plan has a device for every allocation, and an allocation for every device."""
    if body.share == MULTICAST:
        raise Invalid(f"{body.name} is to be sharded and {MULTICAST}, which writes all replicas at once; use {VMM}")
    if len(plan) != allocations:
        raise Invalid(
            f"the plan of {body.name} places {len(plan)} allocations, and its layout has {allocations}; place each once"
        )
    if max(plan) >= len(body.devices):
        raise Invalid(
            f"the plan of {body.name} names device {max(plan)} of {len(body.devices)}; they are counted from 0"
        )
    used = set(plan)
    idle = [uuid for index, uuid in enumerate(body.devices) if index not in used]
    if idle:
        raise Invalid(f"the plan of {body.name} puts nothing on {', '.join(idle)}; leave out what has no part in it")


def _sizes(body: Create, layout: Outline) -> dict[str, tuple[int, ...]]:
    """Return what a create allocates on each device."""
    sizes = tuple(map(rounded, layout.allocations))
    if body.plan is None:
        return dict.fromkeys(body.devices, sizes)
    shards: list[list[int]] = [[] for _ in body.devices]
    for index, size in zip(body.plan, sizes, strict=True):
        shards[index].append(size)
    return dict(zip(body.devices, map(tuple, shards), strict=True))


def _check_writable(books: Books, session: Session, pool: Pool | None, body: Create) -> None:
    if (prefix := reservation(books, session, body.name)) is not None:
        raise Denied(wording.reserved(session.uid, body.name, prefix))
    if pool is None:
        return
    if not may_write(books, session, pool):
        raise Denied(wording.not_writable(books, session, pool))
    if body.mode not in (None, pool.mode) and not may_rule(books, session, pool):
        raise Denied(wording.not_ruled(books, session, pool))


def _check_quotas(books: Books, session: Session, body: Create, layout: Outline) -> None:
    """Raise if there can never be room in the user's quota, or the store or that has none for what is asked now."""
    user = session.user
    nbytes = sum(map(rounded, layout.allocations)) * (len(body.devices) if body.plan is None else 1)
    if exceeds(0, nbytes, user.quota.memory):
        raise OverQuota(shortages.never_affords(user, body.name, nbytes))
    if exceeds(user.layouts, len(body.layout), user.quota.layouts):
        raise OverQuota(shortages.too_many_layouts(user, len(body.layout)))
    devices = ((books.accounts[uuid].device, sizes) for uuid, sizes in _sizes(body, layout).items())
    descriptors = sum(len(sizes) * device.descriptors_of(body.share) for device, sizes in devices)
    if exceeds(user.descriptors, descriptors, user.quota.descriptors):
        raise OverQuota(shortages.too_many_descriptors(user.uid, descriptors, user.quota.descriptors, user))
    pieces = sum(map(len, _sizes(body, layout).values())) if body.durable else 0
    reserve = held_back(books.store)
    if exceeds(books.stored + reserve, pieces, books.store):
        raise OverQuota(shortages.store_is_full(books, pieces, reserve))


def _writer(books: Books, session: Session, request: int, body: Create, layout: Outline) -> Writer:
    sizes = {books.accounts[uuid]: each for uuid, each in _sizes(body, layout).items()}
    return Writer(
        arrival=next(books.arrivals),
        session=session,
        request=request,
        pool=books.pool(body.name),
        body=body,
        sizes=sizes,
        nbytes={account: sum(each) for account, each in sizes.items()},
        content=layout.nbytes,
        tensors=layout.tensors,
    )


def settle(books: Books) -> None:
    """Give turns, then room, wherever something ended, until nobody is left who can be served.

    Turns come first, so that whoever has one now takes part when room is given. Room is given to one at a time, in
    order of arrival over all devices: where there will never be enough, a refusal hands the turn on, to somebody who
    may have come before the rest.
    """
    while books.stirred_pools or books.stirred_users or books.stirred_accounts:
        _give_turns(books)
        writer = _first_in_line(books)
        if writer is None:
            books.stirred_accounts.clear()
        elif _never_fits(writer):
            _refuse_for_good(books, writer)
        else:
            _begin_draft(books, writer)


def _give_turns(books: Books) -> None:
    """Offer the turn in every pool that was stirred, and to whoever is first in the line of a user who was.

    That goes in order of arrival over all of them: they may share a quota.
    """
    offers: list[tuple[int, int, Writer, Iterator[Writer]]] = []
    serials = count()

    def offer(candidates: Iterator[Writer]) -> None:
        writer = next(candidates, None)
        if writer is not None:
            heappush(offers, (writer.arrival, next(serials), writer, candidates))

    while books.stirred_pools or books.stirred_users or offers:
        while books.stirred_users:
            user, _ = books.stirred_users.popitem()
            offer(iter(user.line[:1]))
        while books.stirred_pools:
            pool, _ = books.stirred_pools.popitem()
            if pool.free:
                offer(iter(tuple(pool.line)))
            if pool.idle and books.pools.get(pool.name) is pool:
                books.forget(pool)
        if offers:
            _, _, writer, others = heappop(offers)
            if writer.pool.free:
                _offer_turn(books, writer)
                offer(others)


def _offer_turn(books: Books, writer: Writer) -> None:
    if writer not in writer.pool.line:
        return  # its pool was stirred, and its user, and it was refused the first time
    session = writer.session
    try:
        _check_writable(books, session, writer.pool, writer.body)
    except Denied as error:
        refuse(books, writer, error)
        return
    if session.user.affords(writer):
        _take_turn(books, writer)
    else:
        step_aside(writer)


def _take_turn(books: Books, writer: Writer) -> None:
    del writer.pool.line[writer]
    come_back(books, writer)
    writer.session.user.memory += writer.total
    writer.pool.writer = writer
    writer.phase = Phase.ROOM
    for account in writer.accounts:
        account.line.insert(account.place(writer), writer)
        books.stirred_accounts[account] = None


def _first_in_line(books: Books) -> Writer | None:
    """Return who came first of those that can be given room now, or never will be."""
    heads = {account.line[0] for account in books.stirred_accounts if account.line}
    return min(filter(_is_ready, heads), key=lambda writer: writer.arrival, default=None)


def _is_ready(writer: Writer) -> bool:
    if any(account.line[0] is not writer for account in writer.accounts):
        return False
    return _never_fits(writer) or all(account.room >= nbytes for account, nbytes in writer.nbytes.items())


def _never_fits(writer: Writer) -> bool:
    return any(account.most < nbytes for account, nbytes in writer.nbytes.items())


def _refuse_for_good(books: Books, writer: Writer) -> None:
    """Refuse a create that a device had room for when it began to wait, and never will again."""
    account, nbytes = next((account, nbytes) for account, nbytes in writer.nbytes.items() if account.most < nbytes)
    refuse(books, writer, OverBudget(wording.never_fits(writer.pool.name, nbytes, account)))


def _begin_draft(books: Books, writer: Writer) -> None:
    leave_lines(books, writer)
    unlimit(books, writer)
    writer.phase = Phase.MEMORY
    pool, session = writer.pool, writer.session
    version = Version(
        pool=pool,
        number=pool.last + 1,
        user=session.user,
        writer=session.label,
        mode=writer.body.mode,
        share=writer.body.share,
        plan=writer.body.plan,
        writable=writer.body.writable,
        durable=writer.durable,
        layout=writer.body.layout,
        tensors=writer.tensors,
        nbytes=writer.content,
    )
    pool.draft = pool.versions[version.number] = version
    if pool.owner is None:
        if pool.heir not in (None, session.uid):
            pool.story = Story(books.clock)  # what happened before is not for the new owner to tell
        pool.owner, pool.group = session.uid, session.gid
        pool.mode = books.policy.mode if version.mode is None else version.mode
        books.mark(Kind.NAME, name=pool.name)
    for account, sizes in writer.sizes.items():
        allocate(books, version, account, sizes)


def allocated(books: Books, event: Allocated) -> None:
    """Note memory that a device allocated; the writer has its draft once all of it is there."""
    allocation = under_way(books, event.ticket)
    assert len(event.handles) == len(allocation.sizes)
    shift(allocation, Report.ALLOCATED)
    version = allocation.version
    if version.state is State.ALLOCATING:
        allocation.handles = _spread(allocation, event.handles)
        if all(other.stage is Stage.HELD for other in version.replicas.values()):
            _complete(books, version)


def _complete(books: Books, version: Version) -> None:
    """All memory is there: fill the draft, or have it bound together first."""
    handles = {handle for allocation in version.replicas.values() for handle in allocation.handles}
    if DESCRIPTOR in handles and handles - {DESCRIPTOR, b""}:  # so that a lease has handles of one kind
        for allocation in version.replicas.values():
            allocation.handles = tuple(handle and DESCRIPTOR for handle in allocation.handles)
    if not teams.assemble(books, version):
        _fill(books, version)


def assembled(books: Books, event: Assembled) -> None:
    """Note that memory was bound together, or has to do without: the writer has its draft; or it was, once more."""
    version = teams.assembled(books, event)
    if version.state is State.ALLOCATING:
        _fill(books, version)
    elif version.state not in (State.LOST, State.ENDED):
        teams.rebind(books, version)


def _spread(allocation: Allocation, handles: tuple[bytes, ...]) -> tuple[bytes, ...]:
    """Return a handle for each allocation of the layout, ``b""`` for those on other devices."""
    version = allocation.version
    plan = version.plan
    if plan is None:
        return handles
    here, rest = list(version.replicas).index(allocation.account.device.uuid), iter(handles)
    return tuple(next(rest) if index == here else b"" for index in plan)


def _fill(books: Books, version: Version) -> None:
    writer = version.pool.writer
    assert writer is not None
    try:
        check_quota(books, writer.session)
    except OverQuota as error:
        refuse(books, writer, error)
        return
    books.move(version, Cause.FILLED)
    leave(books, writer)
    lease = grant(books, writer.session, version, tuple(version.replicas.values()), bound=version.several)
    answer(books, writer, created(lease))


def not_allocated(books: Books, event: NotAllocated) -> None:
    """Note memory that a device could not allocate: its draft ends, and its writer is told why."""
    allocation = under_way(books, event.ticket)
    take_off(books, allocation, Report.FAILED)
    lose(allocation.account, event.kept)
    version = allocation.version
    if version.state is State.ALLOCATING:
        del version.replicas[allocation.account.device.uuid]
        writer = version.pool.writer
        assert writer is not None
        refuse(books, writer, from_code(event.code, event.message))


def freed(books: Books, event: Freed) -> None:
    """Note memory that a device has again. A ticket that failed after it was given up is off the books already."""
    allocation = books.allocations.get(event.ticket)
    if allocation is not None:
        take_off(books, allocation, Report.FREED)
