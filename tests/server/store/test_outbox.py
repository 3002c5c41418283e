"""What a loop says to a service manager that does not listen: it waits, in order, and the loop does not."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from cubroker.protocol.errors import Unavailable
from cubroker.server.store import notify, outbox, words
from cubroker.server.store.notify import Manager
from cubroker.server.store.outbox import Outbox
from tests.server.loops import run, until
from tests.server.processes import all_closed, files
from tests.server.store.keeping import memory
from tests.stores import fill

FOR_EVER = 1e6


class Place:
    """Where a service manager would listen, whose queue is full until it is read."""

    def __init__(self, path: Path) -> None:
        self.channel = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.channel.bind(str(path))
        self.channel.setblocking(False)
        self.outbox = Outbox(Manager(str(path)))
        self.outcomes: list[Unavailable | None] = []

    def fill(self) -> None:
        """Leave no room for a message."""
        fill(Path(self.channel.getsockname()))

    def store(self, name: str, descriptor: int) -> bool:
        """Have a descriptor stored, and note what became of it."""
        return self.outbox.store(name, [descriptor], self.outcomes.append)

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
def full(place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setattr(notify, "PATIENCE", FOR_EVER)
    found = Place(place / "notify")
    found.fill()
    yield found
    found.outbox.close()
    found.channel.close()


def test_what_has_no_room_waits_in_order_and_of_statuses_and_signs_of_life_the_newest_alone(full: Place) -> None:
    async def test() -> None:
        before = files(os.getpid())
        with memory(b"") as file:
            full.outbox.say(words.ready("one"))
            for text in ("two", "three"):
                full.outbox.say(words.status(text), "status")
                full.outbox.say(words.WATCHDOG, "life")
                assert not full.store(f"s{text}", file)
                full.outbox.remove("sgone")
        full.outbox.say(words.stopping())
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
        assert full.outcomes == [None, None]
        full.outbox.say(words.WATCHDOG, "life")
        assert full.read() == ["WATCHDOG=1"]  # at once, as there is room
        all_closed(os.getpid(), before)

    run(test())


def test_a_descriptor_that_was_not_stored_yet_and_is_to_be_removed_never_comes(full: Place) -> None:
    async def test() -> None:
        with memory(b"") as file:
            assert not full.store("s1", file)
            assert not full.store("s2", file)
        full.outbox.remove("s1")
        full.outbox.remove("s2")
        full.outbox.say(words.WATCHDOG)
        assert await full.read_until("WATCHDOG=1") == ["WATCHDOG=1"]
        assert full.outcomes == []

    run(test())


def test_a_descriptor_waits_so_long_and_not_longer_and_removals_for_ever(
    full: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        monkeypatch.setattr(notify, "PATIENCE", 0.01)
        full.outbox.remove("s0")
        with memory(b"") as file:
            assert not full.store("s1", file)
            await until(lambda: full.outcomes)
        (error,) = full.outcomes
        assert "did not take FDSTORE=1 within 0.01 s" in str(error)
        full.outbox.say(words.WATCHDOG)
        assert await full.read_until("WATCHDOG=1") == ["FDSTOREREMOVE=1 FDNAME=s0", "WATCHDOG=1"]

    run(test())


def test_more_than_so_many_descriptors_do_not_wait(full: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        monkeypatch.setattr(outbox, "MOST", 1)
        with memory(b"") as file:
            assert not full.store("s1", file)
            with pytest.raises(Unavailable, match="1 sessions wait for the service manager already"):
                full.store("s2", file)
            full.outbox.remove("s1")
            assert not full.store("s3", file)
        assert await full.read_until("FDSTORE=1 FDNAME=s3") == ["FDSTORE=1 FDNAME=s3"]

    run(test())


def test_a_descriptor_that_cannot_be_kept_until_there_is_room_is_not_taken(full: Place) -> None:
    async def test() -> None:
        full.outbox.say(words.WATCHDOG)
        before = files(os.getpid())
        with memory(b"") as file, pytest.raises(OSError, match="Bad file descriptor"):
            full.outbox.store("s1", [file, -1], full.outcomes.append)
        all_closed(os.getpid(), before)
        assert await full.read_until("WATCHDOG=1") == ["WATCHDOG=1"]
        assert full.outcomes == []

    run(test())


def test_whoever_waits_for_a_manager_that_goes_hears_of_it(full: Place, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        with memory(b"") as file:
            assert not full.store("s1", file)
        full.outbox.remove("s0")
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
        assert not full.outbox.manager.offer(words.WATCHDOG)
        offers = [False, False, True]  # as where too many descriptors are under way, which is no matter of the queue
        monkeypatch.setattr(full.outbox.manager, "offer", lambda *_: offers.pop(0))
        if unwatchable:
            monkeypatch.setattr(asyncio.get_running_loop(), "add_writer", exhausted)
        else:
            full.read()
        full.outbox.say(words.WATCHDOG)
        await until(lambda: not offers)

    run(test())


def exhausted(*_: object) -> None:
    raise OSError("no space left")
