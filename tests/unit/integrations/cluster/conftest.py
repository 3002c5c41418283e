from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from cubroker.client import Broker
from tests.brokers import BrokerProcess, eventually, serving
from tests.unit.integrations.cluster.hosts import Certificates

NUMBERS = count(1)


@pytest.fixture
def name() -> str:
    """The name of a pool that there was not before, so that its first version is 1."""
    return f"pool-{next(NUMBERS)}"


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    """An authority with a certificate for this host."""
    pytest.importorskip("cryptography")
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def shared() -> Iterator[BrokerProcess]:
    """A broker for all tests of a module, with two host devices of 64 MiB."""
    with serving() as process:
        yield process


@pytest.fixture
def directory(shared: BrokerProcess) -> Iterator[Path]:
    """Where a broker serves that has no pool when a test begins, and no lease when it ends."""
    yield shared.directory
    with Broker(shared.directory) as broker:
        eventually(lambda: not any(pool.leases for pool in broker.pools()), "leases to end")
        for pool in broker.pools():
            if pool.state != "retired":
                broker.retire(pool.name, pool.version)
        eventually(lambda: not broker.pools(), "pools to go")
        eventually(lambda: not any(device.allocated for device in broker.devices()), "memory to be free")
