from __future__ import annotations

import errno
import fcntl
import os
import random
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cubroker.protocol.errors import CorruptJournal
from cubroker.server.store import journal
from cubroker.server.store.journal import AREA, ENTRY_HEAD, SLOTS, Change, Journal, JournalIndex
from tests.unit.server.store import journal_process

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
        patch.setattr(journal, "SLACK", slack)
        patch.setattr(journal, "CHUNK", chunk)
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
            later.setattr(journal, "FORMAT", 2)
            kept.commit([(b"a", b"1")])
        before = os.pread(kept.descriptor, 1 << 20, 0)
        with pytest.raises(CorruptJournal, match="format 2, and this build knows 1"):
            Journal.open(kept.descriptor)
        assert os.pread(kept.descriptor, 1 << 20, 0) == before


def test_a_slot_of_something_else_does_not_count() -> None:
    with closing(Journal.create()) as kept:
        with pytest.MonkeyPatch.context() as other:
            other.setattr(journal, "MAGIC", b"strange!")
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
