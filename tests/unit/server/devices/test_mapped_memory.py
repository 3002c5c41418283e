"""Which of the broker's files a process has mapped or open, as /proc tells of real processes; and when it looks."""

from __future__ import annotations

import mmap
import os
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Coroutine, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from cubroker.driver.host import shared_memory
from cubroker.driver.system_calls import FileId, file_id
from cubroker.server.devices.allocator import MemoryWatch
from cubroker.server.devices.mapped_memory import (
    FileWatch,
    MappedChecks,
    SessionProcess,
    processes,
    references,
    started,
    user,
)
from cubroker.server.event_queue import Event as QueuedEvent
from cubroker.server.event_queue import EventQueue, MappedCheckDone, MappedCheckDue
from cubroker.server.ledger.events import (
    AllocationId,
    LedgerEvent,
    ProcessMemory,
    ProcessScanFinished,
    ProcessScanStarted,
)
from tests.brokers import PATIENCE
from tests.unit.server.loops import plans, run, until

MIB = 1 << 20
OURS, UID = os.getpid(), os.geteuid()

HELD_BY_A_THREAD = """
import ctypes, mmap, os, sys, threading
if sys.argv[2] == "mapped":
    held = mmap.mmap(int(sys.argv[1]), 1 << 20)
    os.close(int(sys.argv[1]))
def stay():
    sys.stdin.read()
    os._exit(0)
threading.Thread(target=stay).start()
print("held", flush=True)
ctypes.CDLL(None).syscall(ctypes.c_long(60), ctypes.c_long(0))
"""
"""Ends its first thread alone, by the system call exit, and stays until its input ends."""


@contextmanager
def shared(nbytes: int = MIB) -> Iterator[tuple[int, FileId]]:
    descriptor = shared_memory.create(nbytes)
    try:
        yield descriptor, file_id(descriptor)
    finally:
        with suppress(OSError):  # a test has closed it
            shared_memory.close(descriptor)


def test_memory_is_found_by_mapping_and_by_descriptor_and_not_by_its_name() -> None:
    with shared() as (one, first), shared() as (two, second), mmap.mmap(two, MIB):
        assert references(OURS, {first, second}) == {first, second}
        assert references(OURS, {second}) == {second}, "nobody asks for the other"
        assert references(OURS, {FileId(first.device, 1)}) == set()
        shared_memory.close(one)
        assert references(OURS, {first, second}) == {second}
        shared_memory.close(two)
        assert references(OURS, {first, second}) == {second}, "it is still mapped"


def test_a_path_that_looks_like_memory_misleads_nobody(tmp_path: Path) -> None:
    file = tmp_path / "a file /memfd:cubroker-host"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.parent.joinpath("a file ").mkdir()
    file.write_bytes(b"x")
    with file.open("r+b") as opened, mmap.mmap(opened.fileno(), 1), shared() as (_, known):
        assert references(OURS, {known}) == {known}


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the number of the system call is that of x86-64")
@pytest.mark.parametrize("how", ["mapped", "open"])
def test_a_process_whose_first_thread_has_ended_is_looked_at_all_the_same(how: str) -> None:
    with shared() as (descriptor, known):
        command = [sys.executable, "-c", HELD_BY_A_THREAD, str(descriptor), how]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[descriptor]) as process:
            assert process.stdout
            assert process.stdout.readline() == b"held\n"
            while Path(f"/proc/{process.pid}/maps").read_bytes():
                assert process.poll() is None
            assert references(process.pid, {known}) == {known}
            process.kill()


def test_a_process_that_has_ended_is_told_apart_from_one_that_nobody_may_look_at() -> None:
    with subprocess.Popen(["true"]) as process:
        pass
    with pytest.raises(ProcessLookupError):
        references(process.pid, ())
    assert user(process.pid) == -1
    assert started(process.pid) is None
    assert user(OURS) == UID
    assert started(OURS) == started(OURS)
    assert (OURS, UID) in set(processes({UID}))
    assert (OURS, UID) not in set(processes({UID + 1}))


def test_freed_memory_is_known_as_long_as_it_is_found() -> None:
    files = FileWatch()
    with shared() as (_, first), shared() as (_, second):
        files.allocated({first: (AllocationId(7, 0), MIB), second: (AllocationId(7, 1), 2 * MIB)})
        assert files.look({(OURS, UID)}, ()) == [
            ProcessMemory(OURS, UID, {AllocationId(7, 0): MIB, AllocationId(7, 1): 2 * MIB})
        ]
        for _ in range(2):
            files.freed([AllocationId(7, 0), AllocationId(7, 1)])
        assert files.look({(OURS, 0)}, ()) == [
            ProcessMemory(OURS, 0, {AllocationId(7, 0): MIB, AllocationId(7, 1): 2 * MIB})
        ]
    assert files.look({(OURS, UID), (0, UID)}, ()) == [ProcessMemory(0, UID, None), ProcessMemory(OURS, UID, {})]


def test_of_freed_memory_what_nobody_has_is_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FileWatch, "MAX_FREED", 2)
    files = FileWatch()
    with shared() as (_, held):
        files.allocated({held: (AllocationId(1, 0), MIB)})
        files.allocated({FileId(1, 1): (AllocationId(2, 0), MIB)})
        files.freed([AllocationId(1, 0)])
        files.freed([AllocationId(2, 0)])
        assert files.look({(OURS, UID)}, ()) == [ProcessMemory(OURS, UID, {AllocationId(1, 0): MIB})]
        files.allocated({FileId(1, 2): (AllocationId(3, 0), MIB)})
        files.freed([AllocationId(3, 0)])
        files.allocated({FileId(1, 3): (AllocationId(4, 0), MIB)})
        files.freed([AllocationId(4, 0)])
        assert files.look({(OURS, UID)}, ()) == [ProcessMemory(OURS, UID, {AllocationId(1, 0): MIB})]


def test_processes_without_a_session_are_looked_at_for_their_users() -> None:
    files = FileWatch()
    with shared() as (descriptor, known):
        assert files.look((), {UID}) == [], "there is nothing to look for"
        files.allocated({known: (AllocationId(7, 0), MIB)})
        with subprocess.Popen(["sleep", "infinity"], pass_fds=[descriptor]) as other:
            found = {each.pid: each.memory for each in files.look({(OURS, UID)}, {UID})}
            assert found[OURS] == found[other.pid] == {AllocationId(7, 0): MIB}
            other.kill()


@pytest.mark.slow
def test_descriptors_that_are_closed_meanwhile_are_no_error() -> None:
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            for end in socket.socketpair():
                end.close()

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        with shared() as (_, known):
            for _ in range(300):
                assert references(OURS, {known}) == {known}
    finally:
        stop.set()
        thread.join()


def test_a_broker_without_a_descriptor_left_knows_nothing_and_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    files = FileWatch()
    with shared() as (_, known):
        files.allocated({known: (AllocationId(7, 0), MIB)})
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        free = os.open(os.devnull, os.O_RDONLY)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
        try:
            assert files.look({(OURS, UID)}, {UID}) == [ProcessMemory(OURS, UID, None)]
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert "the processes of users without a session cannot be checked" in caplog.text
        assert files.look({(OURS, UID)}, ()) == [ProcessMemory(OURS, UID, {AllocationId(7, 0): MIB})]


# -- when processes are looked at -------------------------------------------------------------------

ALICE, BOB, EVE = 4001, 4002, 4003
NEVER = 86_400.0
"""Seconds to the next look; so there is none unless something asks for one."""


class Looking(MemoryWatch):
    """Looks when the test says so, and sees what that says."""

    def __init__(self) -> None:
        self.asked: list[tuple[set[tuple[int, int]], set[int]]] = []
        self.found = SimpleQueue[list[ProcessMemory] | Exception]()

    def look(self, clients: Collection[tuple[int, int]], users: Collection[int]) -> list[ProcessMemory]:
        self.asked.append(({*clients}, {*users}))
        found = self.found.get(timeout=PATIENCE)
        if isinstance(found, Exception):
            raise found
        return found


class Scene:
    """Checks of one client, this process, which is Alice's, in a queue whose other events are noted."""

    def __init__(self, seconds: float) -> None:
        self.watch = Looking()
        self.told: list[QueuedEvent] = []
        self.finished = 0
        self.clients = [SessionProcess(OURS, ALICE, os.pidfd_open(OURS))]
        self.queue = EventQueue()
        self.checks = MappedChecks(self.queue, self.watch, seconds)
        self.queue.attach(self.step)

    def step(self, event: QueuedEvent) -> None:
        match event:
            case MappedCheckDue():
                self.checks.begin(self.clients)
            case MappedCheckDone():
                self.checks.finish(event, self.clients)
                self.finished += 1
            case _:
                self.told.append(event)

    async def looks(self, times: int = 1) -> None:
        await until(lambda: len(self.watch.asked) == times)

    async def tells(self, *events: LedgerEvent) -> None:
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
        planned = plans()
        scene.checks.soon()
        scene.checks.soon()
        await scene.looks()
        await scene.tells(ProcessScanStarted())
        scene.checks.soon()  # of what ends now the first look may tell nothing yet
        scene.watch.found.put([ProcessMemory(OURS, ALICE, {AllocationId(7, 0): 5})])
        await scene.looks(2)
        await scene.tells(
            ProcessScanFinished((ProcessMemory(OURS, ALICE, {AllocationId(7, 0): 5}),)), ProcessScanStarted()
        )
        scene.watch.found.put([])
        await scene.tells(ProcessScanFinished(()))
        (left,) = (each.left for each in planned if each.args == (MappedCheckDue(),) and each.left)
        assert left > NEVER / 2

    playing(test)

    async def again(scene: Scene) -> None:
        for _ in range(3):
            scene.watch.found.put([])
        await until(lambda: scene.told.count(ProcessScanFinished(())) == 3)

    playing(again, seconds=0.001)


def test_processes_without_a_session_count_of_users_who_had_one_but_not_of_root_and_the_brokers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(MappedChecks, "MAX_USERS", 2)

    async def test(scene: Scene) -> None:
        for uid in (ALICE, BOB, ALICE, EVE, 0, os.geteuid()):
            scene.checks.joined(uid)
        await scene.looks()
        assert scene.watch.asked == [({(OURS, ALICE)}, {ALICE, EVE})]

    playing(test)


def test_nobody_is_looked_at_where_nobody_is_and_nothing_is_told_after_the_end() -> None:
    async def test(scene: Scene) -> None:
        ours, scene.clients = scene.clients, []
        scene.queue.put(MappedCheckDue())
        assert scene.told == []
        scene.clients = ours
        scene.checks.soon()
        await scene.looks()
        await scene.tells(ProcessScanStarted())
        scene.checks.stop()
        scene.watch.found.put([ProcessMemory(OURS, ALICE, {})])
        await until(lambda: scene.finished)
        assert scene.told == []

    playing(test)


def test_what_was_found_of_a_client_that_has_ended_may_be_of_another_process() -> None:
    async def test(scene: Scene) -> None:
        with subprocess.Popen(["sleep", "infinity"]) as other:
            scene.clients += [SessionProcess(other.pid, BOB, os.pidfd_open(other.pid)), SessionProcess(77, EVE, -1)]
            scene.checks.soon()
            await scene.looks()
            assert scene.watch.asked == [({(OURS, ALICE), (other.pid, BOB)}, set())]
            other.kill()
        scene.watch.found.put(
            [
                ProcessMemory(OURS, ALICE, {}),
                ProcessMemory(other.pid, BOB, {AllocationId(7, 0): 5}),
                ProcessMemory(88, BOB, {AllocationId(7, 0): 5}),
            ]
        )
        await scene.tells(
            ProcessScanStarted(),
            ProcessScanFinished((ProcessMemory(OURS, ALICE, {}), ProcessMemory(88, BOB, {AllocationId(7, 0): 5}))),
        )

    playing(test)


def test_a_mistake_in_looking_leaves_everything_unknown_and_the_next_look_comes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def test(scene: Scene) -> None:
        scene.checks.soon()
        scene.watch.found.put(ZeroDivisionError("a mistake"))
        await scene.tells(ProcessScanStarted(), ProcessScanFinished(()))
        scene.checks.soon()
        scene.watch.found.put([ProcessMemory(OURS, ALICE, {})])
        await scene.tells(ProcessScanStarted(), ProcessScanFinished((ProcessMemory(OURS, ALICE, {}),)))

    playing(test)
    assert [record.getMessage() for record in caplog.records] == [
        "the broker failed at checking which memory processes have mapped"
    ]


def test_when_looking_is_switched_off_nothing_is_known_and_what_is_under_way_counts_no_more() -> None:
    async def test(scene: Scene) -> None:
        planned = plans()
        scene.checks.soon()
        await scene.looks()
        scene.checks.adjust(0)
        await scene.tells(ProcessScanStarted(), ProcessScanFinished(()))
        scene.checks.adjust(NEVER)
        scene.watch.found.put([ProcessMemory(OURS, ALICE, {AllocationId(7, 0): 5})])
        await until(lambda: scene.finished)
        assert scene.told == []
        scene.checks.soon()
        scene.watch.found.put([ProcessMemory(OURS, ALICE, {AllocationId(7, 0): 5})])
        await scene.tells(
            ProcessScanStarted(), ProcessScanFinished((ProcessMemory(OURS, ALICE, {AllocationId(7, 0): 5}),))
        )
        scene.checks.adjust(0)
        await scene.tells(ProcessScanFinished(()))
        scene.checks.soon()
        assert not any(each.left for each in planned if each.args == (MappedCheckDue(),))

    playing(test)
