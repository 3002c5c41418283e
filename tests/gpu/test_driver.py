"""A GPU does what every driver does: the host driver's own conformance tests, on real hardware."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cubroker.driver import Driver, load
from tests.driver.conformance import *  # noqa: F403
from tests.driver.conformance_capture import *  # noqa: F403
from tests.driver.conformance_devices import *  # noqa: F403
from tests.driver.conformance_digest import *  # noqa: F403
from tests.driver.conformance_fabric import *  # noqa: F403
from tests.driver.conformance_vmm import *  # noqa: F403
from tests.driver.neighbour import Neighbour


@pytest.fixture(scope="module")
def driver() -> Iterator[Driver]:
    driver = load("cuda")
    yield driver
    driver.close()


@pytest.fixture(scope="module")
def neighbour() -> Iterator[Neighbour]:
    with Neighbour("cuda") as neighbour:
        yield neighbour
