"""Which files of the broker's a process has mapped or open, as /proc tells of real processes."""

from __future__ import annotations

import mmap
import os
import resource
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from cubroker.driver.host import descriptors, memory
from cubroker.driver.linux import FileId, file_id
from cubroker.server import process_memory
from cubroker.server.ledger.events import Process
from cubroker.server.process_memory import Files, processes, references, started, user

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
OURS, UID = os.getpid(), os.geteuid()

MAPPED_BY_A_THREAD = """
import ctypes, mmap, os, sys, threading
held = mmap.mmap(int(sys.argv[1]), 1 << 20)
os.close(int(sys.argv[1]))
def stay():
    sys.stdin.read()
    os._exit(0)
threading.Thread(target=stay).start()
print("mapped", flush=True)
ctypes.CDLL(None).syscall(ctypes.c_long(60), ctypes.c_long(0))
"""
"""Ends its first thread alone, by the system call exit, and stays until its input ends."""


@contextmanager
def shared(nbytes: int = MIB) -> Iterator[tuple[int, FileId]]:
    descriptor = memory.create(nbytes)
    try:
        yield descriptor, file_id(descriptor)
    finally:
        with suppress(OSError):  # a test has closed it
            descriptors.close(descriptor)


def test_memory_is_found_by_mapping_and_by_descriptor_and_not_by_its_name() -> None:
    with shared() as (one, first), shared() as (two, second), mmap.mmap(two, MIB):
        assert references(OURS, {first, second}) == {first, second}
        assert references(OURS, {second}) == {second}, "nobody asks for the other"
        assert references(OURS, {FileId(first.device, 1)}) == set()
        descriptors.close(one)
        assert references(OURS, {first, second}) == {second}
        descriptors.close(two)
        assert references(OURS, {first, second}) == {second}, "it is still mapped"


def test_a_path_that_looks_like_memory_misleads_nobody(tmp_path: Path) -> None:
    file = tmp_path / "a file /memfd:cubroker-host"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.parent.joinpath("a file ").mkdir()
    file.write_bytes(b"x")
    with file.open("r+b") as opened, mmap.mmap(opened.fileno(), 1), shared() as (_, known):
        assert references(OURS, {known}) == {known}


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the number of the system call is that of x86-64")
def test_a_process_whose_first_thread_has_ended_is_looked_at_all_the_same() -> None:
    with shared() as (descriptor, known):
        command = [sys.executable, "-c", MAPPED_BY_A_THREAD, str(descriptor)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=[descriptor]) as process:
            assert process.stdout
            assert process.stdout.readline() == b"mapped\n"
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
    files = Files()
    with shared() as (_, first), shared() as (_, second):
        files.allocated(7, {first: MIB, second: 2 * MIB})
        assert files.look({(OURS, UID)}, ()) == [Process(OURS, UID, {7: 3 * MIB})]
        files.freed(7)
        files.freed(7)
        assert files.look({(OURS, 0)}, ()) == [Process(OURS, 0, {7: 3 * MIB})]
    assert files.look({(OURS, UID), (0, UID)}, ()) == [Process(0, UID, None), Process(OURS, UID, {})]


def test_of_freed_memory_what_nobody_has_is_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_memory, "MAX_FREED", 2)
    files = Files()
    with shared() as (_, held):
        files.allocated(1, {held: MIB})
        files.allocated(2, {FileId(1, 1): MIB})
        files.freed(1)
        files.freed(2)
        assert files.look({(OURS, UID)}, ()) == [Process(OURS, UID, {1: MIB})]
        files.allocated(3, {FileId(1, 2): MIB})
        files.freed(3)
        files.allocated(4, {FileId(1, 3): MIB})
        files.freed(4)
        assert files.look({(OURS, UID)}, ()) == [Process(OURS, UID, {1: MIB})]


def test_processes_without_a_session_are_looked_at_for_their_users() -> None:
    files = Files()
    with shared() as (descriptor, known):
        assert files.look((), {UID}) == [], "there is nothing to look for"
        files.allocated(7, {known: MIB})
        with subprocess.Popen(["sleep", "infinity"], pass_fds=[descriptor]) as other:
            found = {each.pid: each.memory for each in files.look({(OURS, UID)}, {UID})}
            assert found[OURS] == found[other.pid] == {7: MIB}
            other.kill()


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
    files = Files()
    with shared() as (_, known):
        files.allocated(7, {known: MIB})
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        free = os.open(os.devnull, os.O_RDONLY)
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
        try:
            assert files.look({(OURS, UID)}, {UID}) == [Process(OURS, UID, None)]
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert "the processes of users without a session cannot be looked at" in caplog.text
        assert files.look({(OURS, UID)}, ()) == [Process(OURS, UID, {7: MIB})]
