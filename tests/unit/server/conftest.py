from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.brokers import BrokerProcess
from tests.stores import FdStore
from tests.unit.server.clients import RawClient, session


@pytest.fixture
def client(broker: BrokerProcess) -> Iterator[RawClient]:
    """A session of the broker."""
    with session(broker.directory) as opened:
        yield opened


@pytest.fixture
def fdstore(tmp_path: Path) -> Iterator[FdStore]:
    """A store that keeps what is sent to it, for the length of a test."""
    store = FdStore(tmp_path / "notify")
    yield store
    store.close()
