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
from cubroker.server.books import Books
from cubroker.server.publishing import find
from cubroker.server.records import Account, Session, Version
from cubroker.server.states import State


def list_pools(books: Books) -> Pools:
    """Return every live version, by name and number."""
    pools = sorted(books.pools.values(), key=lambda pool: pool.name)
    return Pools(tuple(_pool(version) for pool in pools for version in pool.versions.values()))


def list_clients(books: Books) -> Clients:
    """Return every session, in order of arrival."""
    return Clients(tuple(map(_client, books.sessions.values())))


def list_devices(books: Books) -> DeviceList:
    """Return every device, by index."""
    return DeviceList(tuple(sorted(map(_device, books.accounts.values()), key=lambda device: device.index)))


def describe(books: Books, body: Describe) -> Description:
    """Return the state and layout of one version, a draft too if it is named; raises ``NotFound`` or ``Retired``."""
    version = find(books, body.name, body.version)
    return Description(_pool(version), version.layout)


def _pool(version: Version) -> PoolInfo:
    state = State.DRAFT if version.state is State.ALLOCATING else version.state
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
    )


def _client(session: Session) -> ClientInfo:
    return ClientInfo(
        session=session.id,
        pid=session.pid,
        uid=session.uid,
        state="connected" if session.connected else "detached",
        leases=tuple(LeaseInfo(lease.version.pool.name, lease.version.number) for lease in session.leases.values()),
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
