from __future__ import annotations

from collections.abc import Iterator

import pytest

from cubroker.driver import Driver, load
from tests.driver.neighbour import Neighbour

SPEC = "host:2@256MiB"


@pytest.fixture
def driver() -> Iterator[Driver]:
    driver = load(SPEC)
    yield driver
    driver.close()


@pytest.fixture(scope="module")
def neighbour() -> Iterator[Neighbour]:
    with Neighbour(SPEC) as neighbour:
        yield neighbour
