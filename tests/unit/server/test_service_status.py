"""What the service manager hears of a broker, in real datagrams."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from cubroker.server.main import ServiceStatus
from cubroker.server.store import sd_notify
from cubroker.server.store.sd_notify import Manager
from cubroker.server.store.store import AsyncNotifier
from tests.faults import fail_nth
from tests.stores import FdStore
from tests.unit.server.loops import run, until


class Statuses:
    """Says one after another, and then the last one."""

    def __init__(self, *statuses: str) -> None:
        self._statuses = list(statuses)

    def status(self) -> str:
        return self._statuses.pop(0) if len(self._statuses) > 1 else self._statuses[0]


def test_a_broker_without_a_manager_says_nothing() -> None:
    async def test() -> None:
        alone = ServiceStatus(None, Statuses("fine"))
        alone.ready()
        alone.reloading()
        alone.stopping()

    run(test())


def test_a_keeper_that_would_have_the_next_broker_stand_by_hears_that_it_can(fdstore: FdStore) -> None:
    async def test() -> None:
        notifier = AsyncNotifier(Manager(str(fdstore.path)))
        ServiceStatus(notifier, Statuses("fine"), standby=True).ready()
        await until(lambda: ("STATUS", "fine") in fdstore.said)
        notifier.close()

    run(test())
    assert fdstore.said == [("READY", "1"), ("X_STANDS_BY", "1"), ("STATUS", "fine")]


def test_the_status_follows_when_it_changes_and_the_watchdog_is_fed_by_the_loop(fdstore: FdStore) -> None:
    async def test() -> None:
        notifier = AsyncNotifier(Manager(str(fdstore.path), watchdog_interval=0.01))
        told = ServiceStatus(notifier, Statuses("fine", "fine", "better"))
        told.ready()
        await until(lambda: fdstore.said.count(("WATCHDOG", "1")) > 3)
        told.reloading()
        told.ready()
        told.stopping()
        await until(lambda: ("STOPPING", "1") in fdstore.said)
        notifier.close()

    run(test())
    said = [each for each in fdstore.said if each[0] not in ("WATCHDOG", "MONOTONIC_USEC")]
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
    assert fdstore.said[-2] == ("STOPPING", "1")


def test_the_watchdog_is_fed_after_a_moment_without_memory_for_a_status(
    fdstore: FdStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        notifier = AsyncNotifier(Manager(str(fdstore.path), watchdog_interval=0.01))
        statuses = Statuses("fine")
        told = ServiceStatus(notifier, statuses)
        count = fail_nth(monkeypatch, statuses, "status", 2, MemoryError())  # the first of a timer's
        told.ready()
        await until(lambda: count() > 2)
        await until(lambda: fdstore.said.count(("WATCHDOG", "1")) > 2)
        told.stopping()
        notifier.close()

    run(test())


def test_a_status_that_there_was_no_memory_to_send_is_sent_later(
    fdstore: FdStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        notifier = AsyncNotifier(Manager(str(fdstore.path), watchdog_interval=0.01))
        told = ServiceStatus(notifier, Statuses("fine", "fine", "better"))
        told.ready()
        fail_nth(monkeypatch, sd_notify, "status", 1, MemoryError())
        await until(lambda: ("STATUS", "better") in fdstore.said)
        told.stopping()
        notifier.close()

    run(test())


@pytest.mark.parametrize("ends", [False, True])
def test_the_end_of_a_reload_that_there_was_no_memory_to_report_is_reported_later(
    fdstore: FdStore, monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    async def test() -> None:
        notifier = AsyncNotifier(Manager(str(fdstore.path), watchdog_interval=0.01))
        told = ServiceStatus(notifier, Statuses("fine", "fine", "better"), standby=True)
        told.ready()
        told.reloading()
        fail_nth(monkeypatch, sd_notify, "ready", 1, MemoryError())
        with pytest.raises(MemoryError):
            told.ready()
        if ends:
            told.draining(1.0)
        await until(lambda: fdstore.said.count(("STATUS", "better")) == 1)
        told.stopping()
        notifier.close()

    run(test())
    said = [each for each in fdstore.said if each[0] not in ("WATCHDOG", "MONOTONIC_USEC", "STATUS")]
    ready = [("READY", "1"), ("X_STANDS_BY", "1")]
    end = [("STOPPING", "1"), ("EXTEND_TIMEOUT_USEC", "61000000")] if ends else ready
    assert said[:5] == [*ready, ("RELOADING", "1"), *end], "a broker that ends is not ready any more"


def test_a_manager_that_is_gone_is_a_line_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        notifier = AsyncNotifier(Manager(str(tmp_path / "nobody")))
        told = ServiceStatus(notifier, Statuses("fine"))
        with caplog.at_level(logging.WARNING):
            told.ready()
            told.stopping()
        notifier.close()

    run(test())
    assert "READY=1" in caplog.text
    assert "STOPPING=1" in caplog.text
