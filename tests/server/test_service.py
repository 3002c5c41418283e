"""What the service manager hears of a broker, in real datagrams."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from cubroker.server.service import Service
from cubroker.server.store.notify import Manager
from cubroker.server.store.outbox import Outbox
from tests.server.loops import run, until
from tests.stores import Warehouse


@pytest.fixture
def warehouse(tmp_path: Path) -> Iterator[Warehouse]:
    house = Warehouse(tmp_path / "notify")
    yield house
    house.close()


def test_a_broker_without_a_manager_says_nothing() -> None:
    async def test() -> None:
        alone = Service(None, lambda: "fine")
        alone.ready()
        alone.reloading()
        alone.stopping()

    run(test())


def test_the_status_follows_when_it_changes_and_the_watchdog_is_fed_by_the_loop(warehouse: Warehouse) -> None:
    async def test() -> None:
        statuses = ["fine", "fine", "better"]
        outbox = Outbox(Manager(str(warehouse.path), watchdog_interval=0.01))
        told = Service(outbox, lambda: statuses.pop(0) if len(statuses) > 1 else statuses[0])
        told.ready()
        await until(lambda: warehouse.said.count(("WATCHDOG", "1")) > 3)
        told.reloading()
        told.ready()
        told.stopping()
        await until(lambda: ("STOPPING", "1") in warehouse.said)
        outbox.close()

    run(test())
    said = [each for each in warehouse.said if each[0] not in ("WATCHDOG", "MONOTONIC_USEC")]
    assert said == [
        ("READY", "1"),
        ("STATUS", "fine"),
        ("STATUS", "better"),
        ("RELOADING", "1"),
        ("READY", "1"),
        ("STATUS", "better"),
        ("STOPPING", "1"),
        ("EXTEND_TIMEOUT_USEC", "60000000"),
    ]
    assert warehouse.said[-2] == ("STOPPING", "1")


def test_a_manager_that_is_gone_is_a_line_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        outbox = Outbox(Manager(str(tmp_path / "nobody")))
        told = Service(outbox, lambda: "fine")
        with caplog.at_level(logging.WARNING):
            told.ready()
            told.stopping()
        outbox.close()

    run(test())
    assert "READY=1" in caplog.text
    assert "STOPPING=1" in caplog.text
