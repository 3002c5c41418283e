from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.brokers import BrokerProcess, serving
from tests.integration.hostile.hostile_peers import Witness, witnessed


@pytest.fixture(scope="module")
def witness() -> Iterator[Witness]:
    """A client of one broker for all tests of a module: what one of them breaks, the next one notices."""
    with serving() as process, witnessed(process) as witness:
        yield witness


@pytest.fixture
def broker(witness: Witness) -> BrokerProcess:
    """The broker of ``witness``."""
    return witness.process
