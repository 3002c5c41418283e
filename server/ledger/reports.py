"""What the ledger tells about itself: pools, clients and devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from cubroker.protocol.infos import NOBODY, BlockInfo, ClientInfo, DeviceInfo, LeaseInfo, PoolInfo, WaiterInfo
from cubroker.protocol.messages import (
    Clients,
    Describe,
    Description,
    DeviceList,
    DigestList,
    ListDigests,
    Pools,
    View,
)
from cubroker.server.ledger import mapped, teams
from cubroker.server.ledger.attaching import check_readable
from cubroker.server.ledger.books import Books
from cubroker.server.ledger.entries import Account, Allocation, Session, User, Version
from cubroker.server.ledger.leases import opened_by
from cubroker.server.ledger.permissions import may_read, may_see
from cubroker.server.ledger.policy import Quota
from cubroker.server.ledger.publishing import find
from cubroker.server.ledger.states import Stage, State
from cubroker.server.ledger.waiters import Listener, Reader, Waiter, Writer


@dataclass(frozen=True, slots=True)
class Holder:
    """Who has a session, how many leases, and whether its connection is there."""

    session: int
    pid: int
    uid: int
    leases: int
    connected: bool
    label: str


STAGES = {
    Stage.PROMISED: "promised",
    Stage.HELD: "held",
    Stage.GIVEN_UP: "given up",
    Stage.FREEING: "freeing",
}
"""What users read of the stages of memory that is on the books."""


def list_pools(books: Books, session: Session) -> Pools:
    """Return every live version that ``session`` may see, by name and number."""
    visible = (pool for pool in books.pools.values() if may_read(books, session, pool))
    pools = sorted(visible, key=lambda pool: pool.name)
    return Pools(tuple(_pool(version) for pool in pools for version in pool.versions.values()))


def list_clients(books: Books, session: Session) -> Clients:
    """Return every session that ``session`` may know of, in order of arrival, with its leases on what that may see."""
    known = (other for other in books.sessions.values() if may_see(books, session, other))
    return Clients(tuple(_client(books, session, other) for other in known))


def list_devices(books: Books) -> DeviceList:
    """Return every device, by index."""
    return DeviceList(tuple(sorted(map(_device, books.accounts.values()), key=lambda device: device.index)))


def describe(books: Books, session: Session, body: Describe) -> Description:
    """Return the state and layout of one version, a draft too if it is named.

    Raises:
        Denied: ``session`` may not read the pool.
        NotFound, Retired: there is no such version, or not any more.
    """
    version = _readable(books, session, body)
    return Description(_pool(version), version.layout, version.plan)


def list_digests(books: Books, session: Session, body: ListDigests) -> DigestList:
    """Return the digests that one version was sealed with; raises as :func:`describe` does."""
    version = _readable(books, session, body)
    return DigestList(version.number, tuple(version.replicas), version.digests)


def _readable(books: Books, session: Session, body: Describe | ListDigests) -> Version:
    pool = books.pools.get(body.name)
    if pool is not None:
        check_readable(books, session, pool)
    return find(books, session, body.name, body.version)


def holder(session: Session) -> Holder:
    """Return who has a session."""
    return Holder(session.id, session.pid, session.uid, len(session.leases), session.connected, session.label)


def onlooker(books: Books, *, everything: bool) -> Session:
    """Return a session that is on no books, of one who sees everything, or what a stranger to every pool may see."""
    uid = books.uid if everything else NOBODY
    return Session(0, 0, User(uid, Quota()), NOBODY, verified=True)


def summary(books: Books) -> str:
    """Return in one line how much there is of everything."""
    lent = sum(account.allocated for account in books.accounts.values())
    budget = sum(account.device.budget for account in books.accounts.values())
    versions = sum(len(pool.versions) for pool in books.pools.values())
    lends = "" if not books.drained and books.awaited is None else "draining; "
    return (
        f"{lends}{versions} versions, {len(books.sessions)} sessions, {len(books.leases)} leases;"
        f" {lent >> 20} of {budget >> 20} MiB lent"
    )


def view(books: Books, session: Session) -> View:
    """Return everything that ``session`` may see; of memory that on the devices that are served."""
    here = (a for a in books.allocations.values() if a.account.device.uuid in books.accounts)
    there = (a for a in here if a.stage in STAGES)  # after a mistake memory that is gone may still be on the books
    known = (other for other in books.sessions.values() if may_see(books, session, other))
    waiters = (waiter for other in known for waiter in other.unfinished.values())
    return View(
        devices=list_devices(books).devices,
        pools=list_pools(books, session).pools,
        clients=list_clients(books, session).clients,
        blocks=_blocks(books, session, there),
        waiters=tuple(_waiter(books, session, waiter) for waiter in waiters),
    )


def _blocks(books: Books, session: Session, allocations: Iterable[Allocation]) -> tuple[BlockInfo, ...]:
    """Return each piece of memory whose pool ``session`` may see, then of each device the sum of all others."""
    seen, hidden = [], Counter[tuple[str, str]]()
    for allocation in allocations:
        if may_read(books, session, allocation.version.pool):
            seen.append(_block(allocation))
        else:
            hidden[allocation.account.device.uuid, STAGES[allocation.stage]] += allocation.nbytes
    others = [
        BlockInfo(device, "", 0, State.CURRENT.value, stage, nbytes, NOBODY)
        for (device, stage), nbytes in hidden.items()
    ]
    return (*seen, *others)


def _block(allocation: Allocation) -> BlockInfo:
    version = allocation.version
    return BlockInfo(
        device=allocation.account.device.uuid,
        pool=version.pool.name,
        version=version.number,
        state=_state(version),
        stage=STAGES[allocation.stage],
        nbytes=allocation.nbytes,
        owner=version.owner,
    )


def _waiter(books: Books, session: Session, waiter: Waiter) -> WaiterInfo:
    visible = may_read(books, session, waiter.pool)
    return WaiterInfo(
        session=waiter.session.id,
        pid=waiter.session.pid,
        uid=waiter.session.uid,
        request=waiter.request,
        what=_KINDS[type(waiter)],
        pool=waiter.pool.name if visible else "",
        awaits=waiter.awaits if visible else "",
        nbytes=waiter.total if isinstance(waiter, Writer) else 0,
        since=waiter.since,
    )


_KINDS = {Reader: "attach", Writer: "create", Listener: "event"}


def _state(version: Version) -> str:
    """Return what users read of a version's state."""
    state = State.DRAFT if version.state is State.ALLOCATING else version.state
    return str(state.value)


def _pool(version: Version) -> PoolInfo:
    team = teams.message(version, objects=False)
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
        how=team.how if team else "",
        why=version.why or (team.why if team else ""),
        opened_by=opened_by(version),
        protected=version.protected,
        digest=version.digests.algorithm if version.digests else "",
    )


def _client(books: Books, asking: Session, session: Session) -> ClientInfo:
    versions = (lease.version for lease in session.leases.values())
    return ClientInfo(
        session=session.id,
        pid=session.pid,
        uid=session.uid,
        state="connected" if session.connected else "detached",
        leases=tuple(LeaseInfo(v.pool.name, v.number) for v in versions if may_read(books, asking, v.pool)),
        mapped_beyond_leases=mapped.beyond(books, session),
    )


def _device(account: Account) -> DeviceInfo:
    device = account.device
    return DeviceInfo(
        index=device.index,
        uuid=device.uuid,
        name=device.name,
        total=device.total,
        budget=device.budget,
        allocated=account.allocated,
        promised=account.promised,
    )
