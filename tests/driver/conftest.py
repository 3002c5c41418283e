from __future__ import annotations

from collections.abc import Iterator

import pytest

from cubroker.driver import Driver, load
from tests.driver.cast import Cast, casting
from tests.driver.hardware import SETTINGS, StandIn
from tests.driver.neighbour import Neighbour

SPEC = "host:2@256MiB"


@pytest.fixture(scope="module")
def spec() -> str:
    """What the devices of a module's tests are; a module may have its own."""
    return SPEC


@pytest.fixture
def driver(spec: str) -> Iterator[Driver]:
    driver = load(spec)
    yield driver
    driver.close()


@pytest.fixture(scope="module")
def neighbour(spec: str) -> Iterator[Neighbour]:
    with Neighbour(load(spec).spec) as neighbour:  # as a client gets it from its broker
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
