"""What threads and the event loop say to a store, and when: a loop does not wait for a manager that does not listen.

Then the journal: what it has after every commit, compaction and kill.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import os
import random
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cubroker.protocol.errors import CorruptJournal, Unavailable
from cubroker.server.store import sd_notify
from cubroker.server.store import store as store_module
from cubroker.server.store.sd_notify import Manager, close_all
from cubroker.server.store.store import (
    AREA,
    ENTRY_HEAD,
    SLOTS,
    AsyncNotifier,
    Change,
    Journal,
    JournalIndex,
    Store,
    StoreReplied,
)
from tests.faults import fail_nth
from tests.stores import ROOM, FdStore, fill
from tests.unit.server.keeper.harness import memory
from tests.unit.server.loops import run, until
from tests.unit.server.processes import all_closed, files
from tests.unit.server.store import journal_process

FOR_EVER = 1e6


class Place:
    """Where a service manager would listen, whose queue is full until it is read."""

    def __init__(self, path: Path, above: Path | None = None) -> None:
        self.channel = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.channel.bind(str(path))
        self.channel.setblocking(False)
        self.notifier = AsyncNotifier(Manager(str(path), above=str(above) if above else None))
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


@pytest.fixture
def above(tmp_path: Path) -> Iterator[Place]:
    found = Place(tmp_path / "above")
    yield found
    found.notifier.close()
    found.channel.close()


@pytest.fixture
def near(tmp_path: Path, above: Place) -> Iterator[Place]:
    """A keeper whose own manager is ``above``."""
    found = Place(tmp_path / "near", tmp_path / "above")
    yield found
    found.notifier.close()
    found.channel.close()


def test_a_descriptor_that_the_keeper_alone_has_got_is_removed_there(near: Place, above: Place) -> None:
    async def test() -> None:
        above.fill()
        with memory(b"") as file:
            assert not near.store("s1", file)
        near.notifier.remove("s1")
        assert near.read() == ["FDSTORE=1 FDNAME=s1"]
        removal = "FDSTOREREMOVE=1 FDNAME=s1"
        assert await above.read_until(removal) == [removal]
        assert await near.read_until(removal) == [removal]
        assert near.outcomes == []

    run(test())


def test_a_journal_that_the_keeper_alone_may_have_is_stored_above_by_the_next_broker(near: Place, above: Place) -> None:
    near.notifier.manager.limit = ROOM
    with closing(Journal.create()) as left:
        store = Store(near.notifier, {"ledger": [os.dup(left.descriptor)]})
        with closing(store.journal):
            store.begin()
    assert above.read() == ["FDSTORE=1 FDNAME=ledger FDPOLL=0"]


def test_a_journal_that_is_stored_twice_is_one_and_two_are_refused(near: Place) -> None:
    near.notifier.manager.limit = ROOM
    with closing(Journal.create()) as left, closing(Journal.create()) as other:
        before, own = files(os.getpid()), left.descriptor
        store = Store(near.notifier, {"ledger": [os.dup(own), os.dup(own)]})
        assert store.inherited
        store.journal.close()
        all_closed(os.getpid(), before)
        stored = [os.dup(own), os.dup(other.descriptor)]
        with pytest.raises(CorruptJournal, match="the store has 2 journals"):
            Store(near.notifier, {"ledger": stored})
        close_all(stored)


def test_a_sign_of_life_for_the_keeper_does_not_wait_for_room_at_the_manager_above(near: Place, above: Place) -> None:
    async def test() -> None:
        above.fill()
        near.notifier.say(sd_notify.status("one"), "status")
        assert near.read() == ["STATUS=one"]
        near.notifier.say(sd_notify.WATCHDOG, "life")
        assert near.read() == ["WATCHDOG=1"]
        near.fill()
        near.notifier.say(sd_notify.WATCHDOG, "life")
        above.read()
        assert await near.read_until("WATCHDOG=1") == ["STATUS=one", "WATCHDOG=1"]
        assert above.read() == ["STATUS=one"]

    run(test())


def test_of_a_keeper_and_its_manager_the_one_without_room_is_watched_and_not_for_longer_than_that(
    near: Place, above: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        loop = asyncio.get_running_loop()
        watched: set[object] = set()
        add, remove = loop.add_writer, loop.remove_writer
        monkeypatch.setattr(loop, "add_writer", lambda file, *what: (watched.add(file), add(file, *what)))
        monkeypatch.setattr(loop, "remove_writer", lambda file: (watched.discard(file), remove(file)))
        above.fill()
        with memory(b"") as file, monkeypatch.context() as soon:
            soon.setattr(sd_notify, "PATIENCE", 0.001)
            assert not near.store("s1", file)
            while not near.outcomes:
                await asyncio.sleep(0)
        near.fill()
        with memory(b"") as file:
            assert not near.store("s2", file)  # now the other one has no room
        assert len(watched) == 1
        above.read()
        stored = "FDSTORE=1 FDNAME=s2"
        assert await near.read_until(stored) == ["FDSTORE=1 FDNAME=s1", stored]
        assert await above.read_until(stored) == [stored]
        assert near.outcomes[1:] == [StoreReplied("s2", None)]
        assert not watched

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
        monkeypatch.setattr(store_module, "MOST", 1)
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
            patch.setattr(sd_notify.NotifySocket, "_transmit", forgetful)
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


# -- the journal -----------------------------------------------------------------------------------


SLOT = 40

Content = dict[bytes, bytes]
Write = tuple[int, bytes]


def content(kept: Journal) -> Content:
    return dict(kept.items())


def applied(before: Content, changes: list[Change]) -> Content:
    after = dict(before)
    for key, value in changes:
        after.pop(key, None)
        if value is not None:
            after[key] = value
    return after


def file(*writes: Write) -> int:
    """A file with these writes, in order."""
    descriptor = os.memfd_create("test", os.MFD_CLOEXEC)
    for at, data in writes:
        os.pwrite(descriptor, data, at)
    return descriptor


def reopened(kept: Journal) -> Journal:
    """The journal of a copy of the file, as another process finds it."""
    size = os.fstat(kept.descriptor).st_size
    return Journal.open(file((0, os.pread(kept.descriptor, size, 0))))


@contextmanager
def small(slack: int = 0, chunk: int = 64) -> Iterator[None]:
    """Journals that compact all the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_module, "SLACK", slack)
        patch.setattr(store_module, "CHUNK", chunk)
        yield


@contextmanager
def recorded(writes: list[Write]) -> Iterator[None]:
    """Note every write to a file."""
    pwrite = os.pwrite

    def noting(descriptor: int, data: bytes, at: int) -> int:
        writes.append((at, bytes(data)))
        return pwrite(descriptor, data, at)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwrite", noting)
        yield


def test_what_is_committed_is_found_by_whoever_opens_the_descriptor() -> None:
    with closing(Journal.create()) as kept:
        kept.commit([(b"a", b"1"), (b"b", b""), (b"c", b"3")])
        kept.commit([(b"a", b"one"), (b"c", None), (b"unknown", None)])
        kept.commit([])
        assert content(kept) == {b"a": b"one", b"b": b""}
        with closing(Journal.open(os.dup(kept.descriptor))) as again:
            assert content(again) == content(kept)
            again.commit([(b"b", None)])
            assert content(again) == {b"a": b"one"}


@pytest.mark.slow
def test_a_kill_at_any_byte_of_any_write_leaves_the_commit_before_or_this_one() -> None:
    commits = [journal_process.changes(number) for number in range(1, 20)]
    writes: list[Write] = []
    states, after = [Content()], [0]  # what there is after each commit, and how many writes that took
    with small(slack=256), recorded(writes), closing(Journal.create()) as kept:
        after[0] = len(writes)
        for changes in commits:
            kept.commit(changes)
            states.append(applied(states[-1], changes))
            after.append(len(writes))
    assert len(writes) > 2 * len(commits) + 1, "there was no compaction"
    for number, (at, data) in enumerate(writes[after[0] :], after[0]):
        commit = next(index for index, count in enumerate(after) if count > number)
        for cut in range(0, len(data), 1 if len(data) <= SLOT else 17):
            with closing(Journal.open(file(*writes[:number], (at, data[:cut])))) as found:
                assert content(found) in (states[commit - 1], states[commit])
                found.commit([(b"next", b"1")])
                with closing(reopened(found)) as again:
                    assert content(again) == content(found)


def test_a_file_of_which_nothing_was_committed_is_no_journal() -> None:
    writes: list[Write] = []
    with recorded(writes):
        Journal.create().close()
    ((at, data),) = writes
    for cut in range(len(data)):
        descriptor = file((at, data[:cut]))
        with pytest.raises(CorruptJournal, match="no journal"):
            Journal.open(descriptor)
        os.close(descriptor)


def test_damage_of_any_byte_that_counts_is_refused() -> None:
    with closing(Journal.create()) as kept:
        kept.commit([(b"a", b"1"), (b"b", bytes(50))])
        kept.commit([(b"a", None)])
        size = os.fstat(kept.descriptor).st_size
        for at in range(AREA, size):
            good = os.pread(kept.descriptor, 1, at)
            os.pwrite(kept.descriptor, bytes([good[0] ^ 0x10]), at)
            with pytest.raises(CorruptJournal, match="damaged: the frame at byte"):
                Journal.open(kept.descriptor)
            os.pwrite(kept.descriptor, good, at)
        with closing(reopened(kept)) as again:
            assert content(again) == {b"b": bytes(50)}


def test_a_journal_that_lost_its_end_or_both_slots_is_refused() -> None:
    with closing(Journal.create()) as kept:
        kept.commit([(b"a", b"1")])
        os.ftruncate(kept.descriptor, os.fstat(kept.descriptor).st_size - 1)
        with pytest.raises(CorruptJournal, match="the newest slot refers to bytes"):
            Journal.open(kept.descriptor)
        for at in SLOTS:
            os.pwrite(kept.descriptor, b"x", at + 9)
        with pytest.raises(CorruptJournal, match="no journal"):
            Journal.open(kept.descriptor)


def test_a_journal_of_an_unknown_format_is_refused_and_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(Journal.create()) as kept:
        with monkeypatch.context() as later:
            later.setattr(store_module, "FORMAT", 2)
            kept.commit([(b"a", b"1")])
        before = os.pread(kept.descriptor, 1 << 20, 0)
        with pytest.raises(CorruptJournal, match="format 2, and this build knows 1"):
            Journal.open(kept.descriptor)
        assert os.pread(kept.descriptor, 1 << 20, 0) == before


def test_a_slot_of_something_else_does_not_count() -> None:
    with closing(Journal.create()) as kept:
        with pytest.MonkeyPatch.context() as other:
            other.setattr(store_module, "MAGIC", b"strange!")
            kept.commit([(b"a", b"1")])
        with closing(reopened(kept)) as again:
            assert content(again) == {}


def test_a_descriptor_of_something_else_is_refused_and_stays_open() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(CorruptJournal, match="no journal"):
        Journal.open(ours.fileno())


def test_content_that_was_replaced_takes_no_memory_for_long() -> None:
    with small(slack=4096), closing(Journal.create()) as kept:
        kept.commit([(b"stays", b"s" * 5000)])
        for number in range(500):
            kept.commit([(b"changes", number.to_bytes(2) * 1000)])
            assert os.fstat(kept.descriptor).st_blocks * 512 < 64 << 10
            assert os.fstat(kept.descriptor).st_size < 128 << 10
        assert content(kept) == {b"stays": b"s" * 5000, b"changes": (499).to_bytes(2) * 1000}
        kept.commit([(b"stays", None), (b"changes", None)])
        with closing(reopened(kept)) as again:
            assert content(again) == {}


def test_what_a_kill_left_elsewhere_is_given_back_by_the_next_who_opens_it() -> None:
    with closing(Journal.create()) as kept:
        kept.commit([(b"a", b"1")])
        os.pwrite(kept.descriptor, bytes(1 << 20), 64 << 10)
        with closing(Journal.open(os.dup(kept.descriptor))):
            assert os.fstat(kept.descriptor).st_blocks * 512 <= 2 * AREA


@pytest.mark.parametrize("which", [0, 1])
def test_a_commit_that_there_is_no_memory_for_changes_nothing(which: int) -> None:
    pwrite, calls = os.pwrite, iter(range(1000))

    def failing(descriptor: int, data: bytes, at: int) -> int:
        pwrite(descriptor, data[: len(data) // 2], at)
        if next(calls) == which:
            raise OSError(errno.ENOSPC, "no space")
        return len(data) // 2

    with closing(Journal.create()) as kept:
        kept.commit([(b"a", b"1")])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                os, "pwrite", lambda fd, data, at: failing(fd, data, at) if len(data) > 1 else pwrite(fd, data, at)
            )
            with pytest.raises(OSError, match="no space"):
                kept.commit([(b"a", b"2"), (b"b", b"3")])
        assert content(kept) == {b"a": b"1"}
        with closing(reopened(kept)) as again:
            assert content(again) == {b"a": b"1"}
        kept.commit([(b"b", b"4")])
        with closing(reopened(kept)) as again:
            assert content(again) == {b"a": b"1", b"b": b"4"}


def test_an_index_that_is_interrupted_still_counts_the_bytes_that_it_has() -> None:
    def interrupted() -> Iterator[Change]:
        yield b"key", b"a longer value"
        yield b"other", b"value"
        yield b"other", None
        raise MemoryError

    index = JournalIndex()
    with pytest.raises(MemoryError):
        index.note(0, interrupted())
    assert index.nbytes == sum(ENTRY_HEAD + len(key) + size for key, (_, size) in index.places.items()) > 0


def test_a_compaction_that_there_is_no_memory_for_is_tried_again() -> None:
    pwrite = os.pwrite

    def refuse(descriptor: int, data: bytes, at: int) -> int:
        if at not in SLOTS and len(data) > 600:
            raise OSError(errno.ENOSPC, "no space")
        return pwrite(descriptor, data, at)

    with small(slack=64, chunk=10_000), closing(Journal.create()) as kept:
        kept.commit([(b"%d" % number, bytes(100)) for number in range(5)])
        kept.commit([(b"5", bytes(100))])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "pwrite", refuse)
            for _ in range(20):
                kept.commit([(b"0", bytes(200))])
        large = os.fstat(kept.descriptor).st_size
        kept.commit([(b"0", bytes(100))])
        assert os.fstat(kept.descriptor).st_size > large, "it was written elsewhere"
        with closing(reopened(kept)) as again:
            assert content(again) == content(kept) == {b"%d" % number: bytes(100) for number in range(6)}


def test_there_is_no_journal_where_there_is_no_memory_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    descriptor = file()
    monkeypatch.setattr(os, "memfd_create", lambda *_: descriptor)

    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "pwrite", refuse)
    with pytest.raises(OSError, match="no space"):
        Journal.create()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


CHANGES = st.lists(st.tuples(st.binary(max_size=3), st.one_of(st.none(), st.binary(max_size=200))), max_size=5)


@pytest.mark.slow
@settings(
    max_examples=150,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(commits=st.lists(CHANGES, max_size=30), reopens=st.sets(st.integers(0, 29)), slack=st.sampled_from((0, 300)))
def test_a_journal_has_what_a_dict_would_have(commits: list[list[Change]], reopens: set[int], slack: int) -> None:
    expected: Content = {}
    with small(slack):
        kept = Journal.create()
        for number, changes in enumerate(commits):
            kept.commit(changes)
            expected = applied(expected, changes)
            assert list(kept.items()) == list(expected.items())
            if number in reopens:
                kept = Journal.open(kept.descriptor)
                assert list(kept.items()) == list(expected.items())
        kept.close()


@pytest.mark.slow
def test_what_a_process_said_that_it_committed_is_there_after_it_was_killed() -> None:
    chance = random.Random(5)
    said = number = 0
    expected: dict[bytes, bytes] = {}
    with closing(Journal.create()) as kept:
        for _ in range(10):
            said = _kill_after(kept.descriptor, chance.randrange(1, 200), said)
            with closing(Journal.open(os.dup(kept.descriptor))) as found:
                before, number = number, int(content(found)[journal_process.NUMBER])
                assert number in (said, said + 1)
                journal_process.advance(expected, before, number)
                assert content(found) == expected


def _kill_after(descriptor: int, commits: int, said: int) -> int:
    """Have a process commit, kill it after so many that it told of, and return the last number that it told."""
    command = [sys.executable, journal_process.__file__, str(descriptor)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, pass_fds=[descriptor]) as process:
        assert process.stdout is not None
        fcntl.fcntl(process.stdout, fcntl.F_SETPIPE_SZ, 4096)  # or it runs thousands of commits ahead
        for _ in range(commits):
            said = int(process.stdout.readline())
        process.kill()
        rest = process.stdout.read().split(b"\n")[:-1]  # an unfinished line was not said
    return int(rest[-1]) if rest else said
