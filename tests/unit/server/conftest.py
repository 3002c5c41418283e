from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.brokers import BrokerProcess
from tests.unit.server.clients import RawClient, session


@pytest.fixture
def client(broker: BrokerProcess) -> Iterator[RawClient]:
    """A session of the broker."""
    with session(broker.directory) as opened:
        yield opened
