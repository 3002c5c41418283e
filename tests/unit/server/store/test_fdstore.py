"""What threads and the event loop say to a store, and when: a loop does not wait for a manager that does not listen."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest

from cubroker.protocol.errors import Unavailable
from cubroker.server.store import fdstore, sd_notify
from cubroker.server.store.fdstore import AsyncNotifier, Store, StoreReplied
from cubroker.server.store.sd_notify import Manager
from tests.faults import fail_nth
from tests.stores import ROOM, FdStore, fill
from tests.unit.server.keeper.harness import memory
from tests.unit.server.loops import run, until
from tests.unit.server.processes import all_closed, files

FOR_EVER = 1e6


class Place:
    """Where a service manager would listen, whose queue is full until it is read."""

    def __init__(self, path: Path) -> None:
        self.channel = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.channel.bind(str(path))
        self.channel.setblocking(False)
        self.notifier = AsyncNotifier(Manager(str(path)))
        self.outcomes: list[StoreReplied] = []

    def fill(self) -> None:
        """Leave no room for a message."""
        fill(Path(self.channel.getsockname()))

    def put(self, reply: StoreReplied) -> None:
        """Note what became of a descriptor."""
        self.outcomes.append(reply)

    def store(self, name: str, descriptor: int) -> bool:
        """Have a descriptor stored."""
        return self.notifier.store(name, [descriptor], self)

    def read(self) -> list[str]:
        """Take all messages that are there."""
        messages = []
        with suppress(BlockingIOError):
            while True:
                data, descriptors, _, _ = socket.recv_fds(self.channel, 4096, 10)
                messages.append(data.decode().replace("\n", " "))
                for each in descriptors:
                    os.close(each)
        return [message for message in messages if message != "NOISE=1"]

    async def read_until(self, last: str) -> list[str]:
        """Take messages until one is ``last``."""
        messages: list[str] = []
        while last not in messages:
            messages += self.read()
            await asyncio.sleep(0)
        return messages


@pytest.fixture
def full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setattr(sd_notify, "PATIENCE", FOR_EVER)
    found = Place(tmp_path / "notify")
    found.fill()
    yield found
    found.notifier.close()
    found.channel.close()


def test_what_has_no_room_waits_in_order_and_of_statuses_and_signs_of_life_the_newest_alone(full: Place) -> None:
    async def test() -> None:
        before = files(os.getpid())
        with memory(b"") as file:
            full.notifier.say(sd_notify.ready("one"))
            for text in ("two", "three"):
                full.notifier.say(sd_notify.status(text), "status")
                full.notifier.say(sd_notify.WATCHDOG, "life")
                assert not full.store(f"s{text}", file)
                full.notifier.remove("sgone")
        full.notifier.say(sd_notify.stopping())
        assert full.outcomes == []
        assert await full.read_until("STOPPING=1") == [
            "READY=1 STATUS=one",
            "STATUS=three",
            "WATCHDOG=1",
            "FDSTORE=1 FDNAME=stwo",
            "FDSTOREREMOVE=1 FDNAME=sgone",
            "FDSTORE=1 FDNAME=sthree",
            "FDSTOREREMOVE=1 FDNAME=sgone",
            "STOPPING=1",
        ]
        assert full.outcomes == [StoreReplied("stwo", None), StoreReplied("sthree", None)]
        full.notifier.say(sd_notify.WATCHDOG, "life")
        assert full.read() == ["WATCHDOG=1"]  # at once, as there is room
        all_closed(os.getpid(), before)

    run(test())


def test_a_descriptor_that_was_not_stored_yet_and_is_to_be_removed_never_comes(full: Place) -> None:
    async def test() -> None:
        with memory(b"") as file:
            assert not full.store("s1", file)
            assert not full.store("s2", file)
        full.notifier.remove("s1")
        full.notifier.remove("s2")
        full.notifier.say(sd_notify.WATCHDOG)
        assert await full.read_until("WATCHDOG=1") == ["WATCHDOG=1"]
        assert full.outcomes == []

    run(test())


def test_a_descriptor_waits_so_long_and_not_longer_and_removals_for_ever(
    full: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        monkeypatch.setattr(sd_notify, "PATIENCE", 0.01)
        full.notifier.remove("s0")
        with memory(b"") as file:
            assert not full.store("s1", file)
            await until(lambda: full.outcomes)
        ((name, error),) = full.outcomes
        assert name == "s1"
        assert "did not take FDSTORE=1 within 0.01 s" in str(error)
        full.notifier.say(sd_notify.WATCHDOG)
        assert await full.read_until("WATCHDOG=1") == ["FDSTOREREMOVE=1 FDNAME=s0", "WATCHDOG=1"]

    run(test())


def test_more_than_so_many_descriptors_do_not_wait(full: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        monkeypatch.setattr(fdstore, "MOST", 1)
        with memory(b"") as file:
            assert not full.store("s1", file)
            with pytest.raises(Unavailable, match="1 sessions wait for the service manager already"):
                full.store("s2", file)
            full.notifier.remove("s1")
            assert not full.store("s3", file)
        assert await full.read_until("FDSTORE=1 FDNAME=s3") == ["FDSTORE=1 FDNAME=s3"]

    run(test())


def test_a_descriptor_that_cannot_be_kept_until_there_is_room_is_not_taken(full: Place) -> None:
    async def test() -> None:
        full.notifier.say(sd_notify.WATCHDOG)
        before = files(os.getpid())
        with memory(b"") as file, pytest.raises(OSError, match="Bad file descriptor"):
            full.notifier.store("s1", [file, -1], full)
        all_closed(os.getpid(), before)
        assert await full.read_until("WATCHDOG=1") == ["WATCHDOG=1"]
        assert full.outcomes == []

    run(test())


def test_whoever_waits_for_a_manager_that_goes_hears_of_it(full: Place, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        with memory(b"") as file:
            assert not full.store("s1", file)
        full.notifier.remove("s0")
        full.channel.close()
        await until(lambda: full.outcomes and "FDSTOREREMOVE=1" in caplog.text)
        assert "cannot be told FDSTORE=1: Connection refused" in str(full.outcomes)

    with caplog.at_level(logging.WARNING):
        run(test())


@pytest.mark.parametrize("unwatchable", [False, True])
def test_where_nobody_tells_when_there_is_room_it_is_tried_again(
    full: Place, monkeypatch: pytest.MonkeyPatch, unwatchable: bool
) -> None:
    async def test() -> None:
        assert not full.notifier.manager.offer(sd_notify.WATCHDOG)
        offers = [False, False, True]  # as where too many descriptors are under way, which is no matter of the queue
        monkeypatch.setattr(full.notifier.manager, "offer", lambda *_: offers.pop(0))
        if unwatchable:
            monkeypatch.setattr(asyncio.get_running_loop(), "add_writer", exhausted)
        else:
            full.read()
        full.notifier.say(sd_notify.WATCHDOG)
        await until(lambda: not offers)

    run(test())


def test_what_there_was_no_memory_to_wait_with_is_sent_with_the_next_sign_of_life(
    full: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        fail_nth(monkeypatch, asyncio.get_running_loop(), "add_writer", 1, MemoryError())
        for lives in (True, False):
            with pytest.raises(MemoryError) if lives else nullcontext():
                full.notifier.say(sd_notify.WATCHDOG, "life")
        full.notifier.remove("s1")
        last = "FDSTOREREMOVE=1 FDNAME=s1"
        assert await full.read_until(last) == ["WATCHDOG=1", last]

    run(test())


def test_what_a_thread_stores_comes_after_what_waits_to_be_removed_and_not_after_what_comes_later(full: Place) -> None:
    async def test() -> None:
        full.notifier.manager.limit = ROOM
        store = Store(full.notifier, {})
        names = [f"s{number}" for number in range(100)]
        for name in names:
            full.notifier.remove(name)
        with memory(b"") as file:
            thread = threading.Thread(target=store.hold, args=("m1.0", [file]))
            thread.start()
            last = "FDSTORE=1 FDNAME=m1.0 FDPOLL=0"
            messages: list[str] = []
            while last not in messages:
                messages += full.read()
                for _ in range(len(messages) + 100 - len(names)):  # some always wait, as where workers come and go
                    full.notifier.remove(f"s{len(names)}")
                    names.append(f"s{len(names)}")
                assert len(names) < 100_000
                await asyncio.sleep(0)
            place = messages.index(last)
            assert place >= 100
            assert messages[:place] == [f"FDSTOREREMOVE=1 FDNAME={name}" for name in names[:place]]
            thread.join()
        store.journal.close()

    run(test())


def test_a_thread_waits_no_longer_than_others_for_what_goes_before(
    full: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        full.notifier.manager.limit = ROOM
        store = Store(full.notifier, {})
        full.notifier.remove("s1")
        monkeypatch.setattr(sd_notify, "PATIENCE", 0.01)
        with memory(b"") as file, pytest.raises(Unavailable, match="did not take FDSTORE=1 within"):
            await asyncio.to_thread(store.hold, "m1.0", [file])
        store.journal.close()

    run(test())


def exhausted(*_: object) -> None:
    raise OSError("no space left")


def forgetful(*_: object) -> None:
    raise MemoryError


def test_memory_that_a_thread_could_not_drop_in_time_is_dropped_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fdstore = FdStore(tmp_path / "notify")

    def stored() -> set[str]:
        fdstore.settle()
        return set(fdstore.stored)

    async def test() -> None:
        store.attend()
        with fdstore.deaf():
            await asyncio.to_thread(store.drop, "m1.0")
            assert "cannot remove m1.0 from the store" in caplog.text
        await until(lambda: stored() == {"ledger", "m1.1", "m1.2"})
        with monkeypatch.context() as patch:
            patch.setattr(notifier.manager, "_transmit", forgetful)
            await asyncio.to_thread(store.drop, "m1.1")
            assert "cannot remove m1.1 from the store" in caplog.text
        await until(lambda: stored() == {"ledger", "m1.2"})
        removing, refusals = sd_notify.removing, [MemoryError(), MemoryError()]

        def forgetting(name: str) -> str:
            if refusals:
                raise refusals.pop()
            return removing(name)

        monkeypatch.setattr(sd_notify, "removing", forgetting)
        await asyncio.to_thread(store.drop, "m1.2")
        await until(lambda: stored() == {"ledger"})

    monkeypatch.setattr(sd_notify, "PATIENCE", 0.01)
    notifier = AsyncNotifier(Manager(str(fdstore.path), limit=ROOM))
    store = Store(notifier, {})
    try:
        store.begin()
        for name in ("m1.0", "m1.1", "m1.2"):
            with memory(b"") as file:
                store.hold(name, [file])
        assert stored() == {"ledger", "m1.0", "m1.1", "m1.2"}
        run(test())
    finally:
        store.journal.close()
        notifier.close()
        fdstore.close()
