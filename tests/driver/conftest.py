from __future__ import annotations

import os
import pwd
from collections.abc import Iterator
from pathlib import Path

import pytest

from cubroker.driver import Driver, load, nccl
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
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """Where NCCL's configuration files would be on a machine that has none: named in its variable, a user's, all's."""
    found = {"named": tmp_path / "conf", "user's": tmp_path / ".nccl.conf", "everybody's": tmp_path / "nccl.conf"}
    user = pwd.struct_passwd(("user", "x", os.getuid(), os.getgid(), "", str(tmp_path), "/bin/sh"))
    monkeypatch.setattr(pwd, "getpwuid", lambda _: user)
    monkeypatch.setattr(nccl, "SYSTEM", found["everybody's"])
    monkeypatch.setenv("NCCL_CONF_FILE", str(found["named"]))
    return found


@pytest.fixture
def hardware(places: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """A stand-in for a GPU's driver, on a machine and in an environment that say nothing about multicast."""
    for setting in SETTINGS:
        monkeypatch.delenv(setting, raising=False)
    return StandIn()
