from __future__ import annotations

from collections.abc import Iterator

import pytest

from cubroker.driver import Driver, load
from tests.driver.cast import Cast, casting
from tests.driver.hardware import SETTINGS, StandIn
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


@pytest.fixture
def cast(driver: Driver) -> Iterator[Cast]:
    """A multicast object of both devices."""
    with casting(driver) as cast:
        yield cast


@pytest.fixture
def hardware(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """A stand-in for a GPU's driver, in an environment that says nothing about multicast."""
    for setting in SETTINGS:
        monkeypatch.delenv(setting, raising=False)
    return StandIn()
