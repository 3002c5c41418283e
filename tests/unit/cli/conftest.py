from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cubroker.client import Broker
from tests.brokers import BrokerProcess, eventually
from tests.unit.client.conftest import given_back


@pytest.fixture
def directory(shared: BrokerProcess) -> Iterator[Path]:
    """Where a broker serves that lends nothing when a test begins, and whose pools are retired when it ends."""
    yield shared.directory
    given_back(shared.directory)
    with Broker(shared.directory) as broker:
        eventually(lambda: len(broker.clients()) == 1, "sessions of a test to end")
