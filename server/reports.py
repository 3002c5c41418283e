"""What the ledger tells about itself: pools, clients and devices."""

from __future__ import annotations

from cubroker.protocol.messages import (
    ClientInfo,
    Clients,
    Describe,
    Description,
    DeviceInfo,
    DeviceList,
    LeaseInfo,
    PoolInfo,
    Pools,
)
from cubroker.server import teams
from cubroker.server.attaching import check_readable
from cubroker.server.books import Books
from cubroker.server.permissions import may_read
from cubroker.server.publishing import find
from cubroker.server.records import Account, Session, Version
from cubroker.server.states import State


def list_pools(books: Books, session: Session) -> Pools:
    """Return every live version that ``session`` may see, by name and number."""
    visible = (pool for pool in books.pools.values() if may_read(books, session, pool))
    pools = sorted(visible, key=lambda pool: pool.name)
    return Pools(tuple(_pool(version) for pool in pools for version in pool.versions.values()))


def list_clients(books: Books, session: Session) -> Clients:
    """Return every session, in order of arrival, with its leases on what ``session`` may see."""
    return Clients(tuple(_client(books, session, other) for other in books.sessions.values()))


def list_devices(books: Books) -> DeviceList:
    """Return every device, by index."""
    return DeviceList(tuple(sorted(map(_device, books.accounts.values()), key=lambda device: device.index)))


def describe(books: Books, session: Session, body: Describe) -> Description:
    """Return the state and layout of one version, a draft too if it is named.

    Raises:
        Denied: ``session`` may not read the pool.
        NotFound, Retired: there is no such version, or not any more.
    """
    pool = books.pools.get(body.name)
    if pool is not None:
        check_readable(books, session, pool)
    version = find(books, session, body.name, body.version)
    return Description(_pool(version), version.layout)


def _pool(version: Version) -> PoolInfo:
    state = State.DRAFT if version.state is State.ALLOCATING else version.state
    team = teams.message(version, objects=False)
    return PoolInfo(
        name=version.pool.name,
        version=version.number,
        state=state.value,
        nbytes=version.nbytes,
        tensors=version.tensors,
        share=version.share,
        devices=tuple(version.replicas),
        durable=False,
        leases=version.leases,
        owner=version.owner,
        group=version.pool.group,
        mode=version.pool.mode,
        sharded=version.plan is not None,
        writable=version.writable,
        how=team.how if team else "",
        why=team.why if team else "",
    )


def _client(books: Books, asking: Session, session: Session) -> ClientInfo:
    versions = (lease.version for lease in session.leases.values())
    return ClientInfo(
        session=session.id,
        pid=session.pid,
        uid=session.uid,
        state="connected" if session.connected else "detached",
        leases=tuple(LeaseInfo(v.pool.name, v.number) for v in versions if may_read(books, asking, v.pool)),
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
