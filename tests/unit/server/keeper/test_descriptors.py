"""What a kept process stores, and what it finds of that when it starts again."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from cubroker.server.keeper.keeper import MOST_BYTES
from cubroker.server.store.sd_notify import SCM_MAX_FD
from tests.brokers import eventually
from tests.unit.server.keeper.harness import Keep, contents, memory
from tests.unit.server.processes import descriptors


@pytest.fixture
def keep(tmp_path: Path) -> Iterator[Keep]:
    with Keep(tmp_path, "--descriptors", "300", "--pause", "0") as process:
        yield process


@pytest.mark.slow
def test_what_is_stored_is_there_again_after_a_kill_and_again_after_the_next(keep: Keep) -> None:
    pupil = keep.next()
    with memory(b"weights") as file:
        pupil.store("m1.0", file)
    for _ in range(3):
        pupil = keep.again(pupil)
        assert pupil.inherited == {"m1.0": 1}
        assert contents(pupil.give("m1.0")) == [b"weights"]


@pytest.mark.slow
def test_what_was_stored_right_before_the_kill_is_there(keep: Keep) -> None:
    pupil = keep.next()
    for number in range(8):
        with memory(b"%d" % number) as file:
            pupil.store(f"m{number}", file)
        pupil = keep.again(pupil)
    assert len(pupil.inherited) == 8
    assert contents(pupil.give("m7")) == [b"7"]


def test_a_connection_stays_open_while_the_process_is_away(keep: Keep) -> None:
    pupil = keep.next()
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            pupil.store("s1", theirs.fileno(), poll=True)
        pupil.kill()
        ours.send(b"are you there?")
        pupil = keep.next()
        (back,) = pupil.give("s1")
        with socket.socket(fileno=back) as connection:
            assert connection.recv(100) == b"are you there?"
            connection.send(b"yes")
        assert ours.recv(100) == b"yes"


def test_a_listening_socket_and_a_pidfd_come_back_as_what_they_are(keep: Keep, tmp_path: Path) -> None:
    pupil = keep.next()
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process, socket.socket(socket.AF_UNIX) as door:
        door.bind(str(tmp_path / "door"))
        door.listen()
        pidfd = os.pidfd_open(process.pid)
        pupil.store("s1", pidfd)
        os.close(pidfd)
        pupil.store("door", door.fileno())
        pupil = keep.again(pupil)
        (listener,), (pidfd,) = pupil.give("door"), pupil.give("s1")
        with socket.socket(fileno=listener) as found, socket.socket(socket.AF_UNIX) as visitor:
            visitor.connect(str(tmp_path / "door"))
            found.accept()[0].close()
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        assert not poll.poll(0)
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        assert poll.poll(60_000)
        os.close(pidfd)


def test_names_are_shared_and_removed_as_one(keep: Keep) -> None:
    pupil = keep.next()
    with memory(b"a") as one, memory(b"b") as two, memory(b"c") as three:
        pupil.store("both", one, two)
        pupil.store("other", three)
    pupil = keep.again(pupil)
    assert sorted(contents(pupil.give("both"))) == [b"a", b"b"]
    pupil.say("removing", "both")
    pupil.say("removing", "never stored")
    pupil = keep.again(pupil)
    assert pupil.inherited == {"other": 1}


def test_what_is_stored_twice_is_kept_once_and_the_same_file_opened_twice_is_kept_twice(keep: Keep) -> None:
    pupil = keep.next()
    with memory(b"x") as file:
        again = os.open(f"/proc/self/fd/{file}", os.O_RDWR)
        pupil.store("x", file, file)
        pupil.store("y", file)
        pupil.store("y", again)
        os.close(again)
    pupil = keep.again(pupil)
    assert pupil.inherited == {"x": 1, "y": 1}


def test_what_hangs_up_is_removed_unless_that_was_asked_otherwise(keep: Keep) -> None:
    pupil = keep.next()
    ends = [socket.socketpair() for _ in range(3)]
    for (_, theirs), name in zip(ends, ("gone", "left", "open"), strict=True):
        pupil.store(name, theirs.fileno(), poll=name != "left")
        theirs.close()
    with memory(b"") as file:
        pupil.store("memory", file, poll=True)
    pupil.barrier()
    before = descriptors(keep.process.pid)
    for ours, _ in ends[:2]:
        ours.close()
    eventually(lambda: descriptors(keep.process.pid) == before - 1, "the one that hung up to be closed")
    pupil = keep.again(pupil)
    assert pupil.inherited == {"left": 1, "open": 1, "memory": 1}
    ends[2][0].close()


def test_many_connections_that_hang_up_at_once_leave_nothing(keep: Keep) -> None:
    pupil = keep.next()
    pupil.barrier()
    before = descriptors(keep.process.pid)
    ends = [socket.socketpair() for _ in range(200)]
    pupil.store("s", *(theirs.fileno() for _, theirs in ends), poll=True)
    pupil.barrier()
    assert descriptors(keep.process.pid) == before + 200
    for pair in ends:
        for end in pair:
            end.close()
    eventually(lambda: descriptors(keep.process.pid) == before, "all to be closed")
    assert keep.again(pupil).inherited == {}


def test_past_the_limit_it_says_loudly_what_it_drops_and_keeps_the_rest(tmp_path: Path) -> None:
    with Keep(tmp_path, "--descriptors", "3") as keep:
        pupil = keep.next()
        assert pupil.hello["limit"] == 3
        files = [os.memfd_create(str(number)) for number in range(5)]
        pupil.store("first", *files[:2])
        pupil.store("second", *files[2:])
        for file in files:
            os.close(file)
        pupil.barrier()
        assert "THE STORE IS FULL with 3 of 3 descriptors" in keep.says("2 named 'second' are dropped")
        pupil = keep.again(pupil)
        assert pupil.inherited == {"first": 2, "second": 1}
        pupil.say("removing", "first")
        with memory(b"") as file:
            pupil.store("third", file)
        assert keep.again(pupil).inherited == {"second": 1, "third": 1}


@pytest.mark.slow
def test_names_that_would_not_fit_in_the_environment_are_dropped_since_the_next_start_would_fail(
    tmp_path: Path,
) -> None:
    with Keep(tmp_path, "--descriptors", "2000", "--pause", "0") as keep:
        pupil = keep.next()
        most = MOST_BYTES // 256
        with memory(b"") as one:
            for number in range(most + 2):
                another = os.open(f"/proc/self/fd/{one}", os.O_RDWR)
                pupil.raw(b"FDSTORE=1\nFDPOLL=0\nFDNAME=%0255d" % number, another)
                os.close(another)
        pupil.barrier()
        keep.says(f"{most * 256} of {MOST_BYTES} bytes of names: 1 named")
        assert len(keep.again(pupil).inherited) == most


@pytest.mark.slow
def test_as_many_as_the_limit_come_back_whatever_numbers_they_have(tmp_path: Path) -> None:
    with Keep(tmp_path, "--descriptors", "1000", "--pause", "0") as keep:
        pupil = keep.next()
        for first in range(0, 1000, 100):
            files = [os.memfd_create("m") for _ in range(100)]
            for number, file in enumerate(files, first):
                os.write(file, b"%d" % number)
                pupil.store(f"m{number}", file)
                os.close(file)
        for removed in (0, 333):
            pupil = keep.again(pupil)
            assert len(pupil.inherited) == 1000 - removed
            for number in (1, 500, 998):
                assert contents(pupil.give(f"m{number}")) == [b"%d" % number]
            for number in range(0, 999, 3):
                pupil.say("removing", f"m{number}")


def test_one_message_carries_as_many_as_the_kernel_lets_it(keep: Keep) -> None:
    pupil = keep.next()
    with memory(b"") as file:
        files = [os.open(f"/proc/self/fd/{file}", os.O_RDWR) for _ in range(SCM_MAX_FD)]
    pupil.raw(b"FDSTORE=1\nFDNAME=all\nFDPOLL=0", *files)
    for one in files:
        os.close(one)
    assert keep.again(pupil).inherited == {"all": SCM_MAX_FD}


def test_descriptors_are_inherited_once_and_close_on_exec(keep: Keep) -> None:
    pupil = keep.next()
    assert pupil.hello["variables"] == {}
    with memory(b"") as file:
        pupil.store("a", file)
    pupil = keep.again(pupil)
    assert pupil.hello["variables"] == {"LISTEN_PID": str(pupil.pid), "LISTEN_FDS": "1", "LISTEN_FDNAMES": "a"}
    assert pupil.hello["left"] == []
    assert pupil.hello["inheritable"] == []


def test_a_descriptor_without_a_name_or_with_an_impossible_one_is_kept_as_stored(keep: Keep) -> None:
    pupil = keep.next()
    with memory(b"1") as one, memory(b"2") as two, memory(b"3") as three:
        pupil.raw(b"FDSTORE=1\nFDPOLL=0", one)
        pupil.raw(b"FDSTORE=1\nFDPOLL=0\nFDNAME=a:b", two)
        pupil.raw(b"FDSTORE=1\nFDPOLL=0\nFDNAME=", three)
    keep.says("'a:b' is no name")
    assert sorted(contents(keep.again(pupil).give("stored"))) == [b"1", b"2", b"3"]


def test_a_file_that_cannot_be_watched_is_kept_until_it_is_removed(keep: Keep) -> None:
    pupil = keep.next()
    nested = [select.epoll()]
    with contextlib.suppress(OSError):  # the kernel allows so many and no more, and the keeper's own would be one more
        while nested.append(select.epoll()) is None:
            nested[-1].register(nested[-2], select.EPOLLIN)
    pupil.store("nested", nested[-2].fileno(), poll=True)
    keep.says("'nested' cannot be watched for a hangup")
    for each in nested:
        each.close()
    assert keep.again(pupil).inherited == {"nested": 1}
