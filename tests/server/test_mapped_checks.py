"""When processes are looked at, and what of it the ledger is told; what is seen is the tests'."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Collection, Coroutine
from queue import SimpleQueue
from typing import Any

import pytest

from cubroker.server import mapped_checks
from cubroker.server.ledger.events import Event, Measured, Measuring, Process
from cubroker.server.mapped_checks import Client, MappedChecks
from cubroker.server.process_memory import MemoryWatch
from tests.brokers import PATIENCE
from tests.server.loops import run, until

ALICE, BOB, EVE = 4001, 4002, 4003
OURS = os.getpid()
NEVER = 86_400.0
"""Seconds to the next look; so there is none unless something asks for one."""


class Looking(MemoryWatch):
    """Looks when the test says so, and sees what that says."""

    def __init__(self) -> None:
        self.asked: list[tuple[set[tuple[int, int]], set[int]]] = []
        self.found = SimpleQueue[list[Process] | Exception]()

    def look(self, clients: Collection[tuple[int, int]], users: Collection[int]) -> list[Process]:
        self.asked.append(({*clients}, {*users}))
        found = self.found.get(timeout=PATIENCE)
        if isinstance(found, Exception):
            raise found
        return found


class Scene:
    """Checks of one client, this process, which is Alice's."""

    def __init__(self, seconds: float) -> None:
        self.watch = Looking()
        self.told: list[Event] = []
        self.clients = [Client(OURS, ALICE, os.pidfd_open(OURS))]
        self.checks = MappedChecks(self.watch, seconds)
        self.checks.attend(self.told.append, lambda: self.clients)

    async def looks(self, times: int = 1) -> None:
        await until(lambda: len(self.watch.asked) == times)

    async def tells(self, *events: Event) -> None:
        await until(lambda: len(self.told) >= len(events))
        assert self.told == [*events]
        self.told.clear()

    def close(self) -> None:
        self.checks.stop()
        self.watch.found.put([])
        self.checks.close()
        for client in self.clients:
            if client.pidfd >= 0:
                os.close(client.pidfd)


def playing(test: Callable[[Scene], Coroutine[Any, Any, None]], seconds: float = NEVER) -> None:
    async def play() -> None:
        scene = Scene(seconds)
        try:
            await test(scene)
        finally:
            scene.close()

    run(play())


def test_it_looks_now_and_then_and_soon_after_leases_have_ended() -> None:
    async def test(scene: Scene) -> None:
        scene.checks.soon()
        scene.checks.soon()
        await scene.looks()
        await scene.tells(Measuring())
        scene.checks.soon()  # of what ends now the first look may tell nothing yet
        scene.watch.found.put([Process(OURS, ALICE, {7: 5})])
        await scene.looks(2)
        await scene.tells(Measured((Process(OURS, ALICE, {7: 5}),)), Measuring())
        scene.watch.found.put([])
        await scene.tells(Measured(()))
        assert scene.checks._timer
        assert scene.checks._timer.when() > scene.checks._loop.time() + NEVER / 2

    playing(test)

    async def again(scene: Scene) -> None:
        for _ in range(3):
            scene.watch.found.put([])
        await until(lambda: scene.told.count(Measured(())) == 3)

    playing(again, seconds=0.001)


def test_processes_without_a_session_count_of_users_who_had_one_but_not_of_root_and_the_brokers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mapped_checks, "MAX_USERS", 2)

    async def test(scene: Scene) -> None:
        for uid in (ALICE, BOB, ALICE, EVE, 0, os.geteuid()):
            scene.checks.joined(uid)
        await scene.looks()
        assert scene.watch.asked == [({(OURS, ALICE)}, {ALICE, EVE})]

    playing(test)


def test_nobody_is_looked_at_where_nobody_is_and_nothing_is_told_after_the_end() -> None:
    async def test(scene: Scene) -> None:
        ours, scene.clients = scene.clients, []
        scene.checks._begin()
        assert scene.told == []
        scene.clients = ours
        scene.checks.soon()
        await scene.looks()
        await scene.tells(Measuring())
        scene.checks.stop()
        scene.watch.found.put([Process(OURS, ALICE, {})])
        await until(lambda: not scene.checks._under_way)
        assert scene.told == []

    playing(test)


def test_what_was_found_of_a_client_that_has_ended_may_be_of_another_process() -> None:
    async def test(scene: Scene) -> None:
        with subprocess.Popen(["sleep", "infinity"]) as other:
            scene.clients += [Client(other.pid, BOB, os.pidfd_open(other.pid)), Client(77, EVE, -1)]
            scene.checks.soon()
            await scene.looks()
            assert scene.watch.asked == [({(OURS, ALICE), (other.pid, BOB)}, set())]
            other.kill()
        scene.watch.found.put([Process(OURS, ALICE, {}), Process(other.pid, BOB, {7: 5}), Process(88, BOB, {7: 5})])
        await scene.tells(Measuring(), Measured((Process(OURS, ALICE, {}), Process(88, BOB, {7: 5}))))

    playing(test)


def test_a_mistake_in_looking_leaves_everything_unknown_and_the_next_look_comes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test(scene: Scene) -> None:
        scene.checks.soon()
        scene.watch.found.put(ZeroDivisionError("a mistake"))
        await scene.tells(Measuring(), Measured(()))
        scene.checks.soon()
        scene.watch.found.put([Process(OURS, ALICE, {})])
        await scene.tells(Measuring(), Measured((Process(OURS, ALICE, {}),)))

    playing(test)
    assert [record.getMessage() for record in caplog.records] == [
        "the broker failed at looking at the memory of processes"
    ]


def test_when_looking_is_switched_off_nothing_is_known_and_what_is_under_way_counts_no_more() -> None:
    async def test(scene: Scene) -> None:
        scene.checks.soon()
        await scene.looks()
        scene.checks.adjust(0)
        await scene.tells(Measuring(), Measured(()))
        scene.checks.adjust(NEVER)
        scene.watch.found.put([Process(OURS, ALICE, {7: 5})])
        await until(lambda: not scene.checks._under_way)
        assert scene.told == []
        scene.checks.soon()
        scene.watch.found.put([Process(OURS, ALICE, {7: 5})])
        await scene.tells(Measuring(), Measured((Process(OURS, ALICE, {7: 5}),)))
        scene.checks.adjust(0)
        await scene.tells(Measured(()))
        scene.checks.soon()
        assert scene.checks._timer is None

    playing(test)
