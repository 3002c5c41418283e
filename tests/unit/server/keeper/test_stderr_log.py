"""What a keeper says, wherever its standard error leads."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import resource
from pathlib import Path

import pytest

from cubroker.server.keeper.keeper import StderrLog


@pytest.mark.parametrize("number", [errno.EAGAIN, errno.EOPNOTSUPP])
def test_a_file_gets_every_line_whatever_its_file_system_says_of_writing_without_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_: object) -> int:  # as XFS and btrfs do with a file that grows, and ext4 with any
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "pwritev", refuse)
    with open(tmp_path / "log", "wb") as log:
        remarks = StderrLog(log.fileno())
        for text in ("one", "two"):
            remarks.say(text)
    assert (tmp_path / "log").read_text() == "cubroker keep: one\ncubroker keep: two\n"


@pytest.mark.parametrize("number", [None, errno.EOPNOTSUPP])
def test_what_a_full_pipe_does_not_take_is_counted(monkeypatch: pytest.MonkeyPatch, number: int | None) -> None:
    def refuse(*_: object) -> int:
        raise OSError(number, os.strerror(number or 0))

    if number:
        monkeypatch.setattr(os, "pwritev", refuse)
    reading, writing = os.pipe()
    with open(reading, "rb", 0) as reader, open(writing, "wb", 0) as writer:
        os.set_blocking(writing, False)
        while writer.write(b"x" * 4096):
            pass
        os.set_blocking(writing, True)  # a write without a flag would wait for ever
        remarks = StderrLog(writing)
        remarks.say("lost")
        os.set_blocking(reading, False)
        while reader.read(1 << 16):
            pass
        for text in ("here", "there"):
            remarks.say(text)
        lines = [b"cubroker keep: here (lines lost before this one: 1)", b"cubroker keep: there"]
        assert (reader.read() or b"").splitlines() == lines


def test_a_line_that_a_full_disk_cuts_off_is_completed_and_lost_ones_are_counted(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with open(tmp_path / "log", "wb") as log:
        remarks = StderrLog(log.fileno())
        resource.setrlimit(resource.RLIMIT_FSIZE, (30, hard))  # a write beyond it is cut off, or fails
        try:
            for text in ("one", "two", "three"):
                remarks.say(text)
            assert (tmp_path / "log").read_text() == "cubroker keep: one\ncubroker ke"
            resource.setrlimit(resource.RLIMIT_FSIZE, (32, hard))  # room for a part of the rest
            remarks.say("four")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert (tmp_path / "log").read_text() == "cubroker keep: one\ncubroker keep"
        for text in ("five", "six"):
            remarks.say(text)
    assert (tmp_path / "log").read_text().splitlines() == [
        "cubroker keep: one",
        "cubroker keep: two",
        "cubroker keep: five (lines lost before this one: 2)",
        "cubroker keep: six",
    ]


@pytest.mark.slow
def test_a_terminal_that_nobody_reads_takes_what_it_has_room_for() -> None:
    master, terminal = os.openpty()
    with open(master, "rb", 0) as reader, open(terminal, "wb", 0):
        remarks = StderrLog(terminal)
        for _ in range(1000):
            remarks.say("x" * 1000)
        os.set_blocking(master, False)
        with contextlib.suppress(BlockingIOError):
            while reader.read(1 << 16):
                pass
        remarks.say("here")
        assert re.search(rb"cubroker keep: here \(lines lost before this one: \d+\)", reader.read() or b"")
