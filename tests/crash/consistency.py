"""Whether what a broker says of itself is whole: its three tables agree, and all that they name is there."""

from __future__ import annotations

import os
import select
from collections import Counter
from collections.abc import Collection

from cubroker.client import Broker
from cubroker.driver.buffers import round_up
from cubroker.driver.host.shared_memory import BLOCK
from cubroker.protocol.errors import NotFound, Retired
from cubroker.protocol.status import ClientInfo, DeviceInfo, PoolInfo
from tests.brokers import eventually


def settles(broker: Broker, pids: Collection[int]) -> None:
    """Wait until the broker has no session but those of ``pids`` and nothing under way, and its tables agree."""
    found: list[str] = []

    def agree() -> bool:
        found[:] = disagreements(broker, pids)
        return not found

    try:
        eventually(agree, "the tables to agree")
    except AssertionError as error:
        raise AssertionError(f"{error}: {'; '.join(found)}") from None


def disagreements(broker: Broker, pids: Collection[int]) -> list[str]:
    """Return what is wrong, or still under way, where only ``pids`` should have sessions."""
    clients, pools, devices = broker.clients(), broker.pools(), broker.devices()
    try:
        expected = _expected(broker, pools)
    except (NotFound, Retired) as error:
        return [f"the tables changed meanwhile: {error}"]
    return [*_of_clients(clients, pids), *_of_pools(clients, pools), *_of_devices(devices, expected)]


def lives(pid: int) -> bool:
    """Whether any thread of a process lives, by the kernel's word."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        return not select.select([pidfd], [], [], 0)[0]
    finally:
        os.close(pidfd)


def _of_clients(clients: tuple[ClientInfo, ...], pids: Collection[int]) -> list[str]:
    dead = [f"session {client.session} is of a dead process" for client in clients if not lives(client.pid)]
    there = sorted(client.pid for client in clients)
    return dead + ([f"sessions of {there}, not of {sorted(pids)}"] if there != sorted(pids) else [])


def _of_pools(clients: tuple[ClientInfo, ...], pools: tuple[PoolInfo, ...]) -> list[str]:
    held = Counter((lease.pool, lease.version) for client in clients for lease in client.leases)
    counted = Counter({(pool.name, pool.version): pool.leases for pool in pools})
    idle = [pool for pool in pools if pool.state != "current" and not pool.leases]
    return [f"{pool.state} {pool.name} {pool.version} has no lease" for pool in idle] + (
        [f"clients hold {held}, pools count {counted}"] if +held != +counted else []
    )


def _of_devices(devices: tuple[DeviceInfo, ...], expected: Counter[str]) -> list[str]:
    return [
        f"device {device.index} has {device.allocated} bytes and {device.promised} promised,"
        f" its versions have {expected[device.uuid]}"
        for device in devices
        if device.promised or device.allocated != expected[device.uuid]
    ]


def _expected(broker: Broker, pools: tuple[PoolInfo, ...]) -> Counter[str]:
    """Return what each device should have, if no sharded version shares memory with a living one."""
    expected: Counter[str] = Counter()
    for pool in pools:
        _, layout, homes = broker.describe(pool.name, pool.version)
        sizes = [round_up(nbytes, BLOCK) for nbytes in layout.allocations]
        for uuid in pool.devices:
            here = (size for number, size in enumerate(sizes) if not homes or homes[number] == uuid)
            expected[uuid] += sum(here) - pool.shared // len(pool.devices)
    return expected
