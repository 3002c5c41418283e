from __future__ import annotations

import os
import pwd
from collections.abc import Iterator
from pathlib import Path

import pytest

from cubroker.driver import Context, Driver, checked_calls, load
from tests import forkserver
from tests.unit.driver.hardware import SETTINGS, StandIn
from tests.unit.driver.multicast_setup import MulticastSetup, set_up_multicast
from tests.unit.driver.other_process import PRELOAD, OtherProcess

SPEC = "host:2@256MiB"


@pytest.fixture(scope="module")
def spec() -> str:
    """What the devices of a module's tests are; a module may have its own."""
    return SPEC


@pytest.fixture(scope="session", autouse=True)
def fork_server() -> None:
    """Start the fork server of other processes before any test counts its open files."""
    forkserver.prepare(PRELOAD)


@pytest.fixture
def driver(spec: str) -> Iterator[Driver]:
    driver = load(spec)
    yield driver
    driver.close()


@pytest.fixture
def context(driver: Driver) -> Context:
    return driver.context(0)


@pytest.fixture(scope="module")
def other_process(spec: str) -> Iterator[OtherProcess]:
    with OtherProcess(load(spec).spec) as other_process:  # as a client gets it from its broker
        yield other_process


@pytest.fixture
def multicast(driver: Driver) -> Iterator[MulticastSetup]:
    """A multicast object of both devices."""
    with set_up_multicast(driver) as multicast:
        yield multicast


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Path]:
    """Where NCCL's configuration files would be on a machine that has none: named in its variable, a user's, all's."""
    found = {"named": tmp_path / "conf", "user's": tmp_path / ".nccl.conf", "everybody's": tmp_path / "nccl.conf"}
    user = pwd.struct_passwd(("user", "x", os.getuid(), os.getgid(), "", str(tmp_path), "/bin/sh"))
    monkeypatch.setattr(pwd, "getpwuid", lambda _: user)
    monkeypatch.setattr(checked_calls, "NCCL_SYSTEM_FILE", found["everybody's"])
    monkeypatch.setenv("NCCL_CONF_FILE", str(found["named"]))
    return found


@pytest.fixture
def hardware(places: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> StandIn:
    """A stand-in for a GPU's driver, on a machine and in an environment that say nothing about multicast."""
    for setting in SETTINGS:
        monkeypatch.delenv(setting, raising=False)
    return StandIn()
