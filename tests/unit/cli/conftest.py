from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from cubroker.client import Broker
from tests.brokers import BrokerProcess, eventually, serving

NUMBERS = count(1)


@pytest.fixture(scope="module")
def shared() -> Iterator[BrokerProcess]:
    """A broker process for all tests of a module, with two host devices of 64 MiB."""
    with serving() as process:
        yield process


@pytest.fixture
def directory(shared: BrokerProcess) -> Iterator[Path]:
    """Where a broker serves that lends nothing when a test begins, and whose pools are retired when it ends."""
    yield shared.directory
    with Broker(shared.directory) as broker:
        for pool in broker.pools():
            if pool.state != "retired":
                broker.retire(pool.name, pool.version)

        def free() -> bool:
            held = any(device.allocated or device.promised for device in broker.devices())
            return not held and not broker.pools() and len(broker.clients()) == 1

        eventually(free, "what a test has used to be free")


@pytest.fixture
def name() -> str:
    """The name of a pool that there was not before, so that its first version is 1."""
    return f"pool-{next(NUMBERS)}"
