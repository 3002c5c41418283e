"""What a broker reads in /proc of the processes that connect."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cubroker.client import Broker
from cubroker.driver import system_calls
from cubroker.protocol.status import ProcessInfo
from cubroker.server import process_info
from tests.brokers import BrokerProcess, eventually

SET_NAME = 15  # PR_SET_NAME


@contextmanager
def process(*arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Start a process, and yield it with a pidfd of it."""
    with subprocess.Popen(arguments, stdin=subprocess.PIPE) as child:
        pidfd = system_calls.pidfd_open(child.pid)
        try:
            yield child, pidfd
        finally:
            child.kill()
            os.close(pidfd)


def same(one: ProcessInfo | None, other: ProcessInfo | None) -> bool:
    """Whether two looks saw one process; the clock may be set between them."""
    assert one is not None
    assert other is not None
    return (one.name, one.cgroup) == (other.name, other.cgroup) and abs(one.started - other.started) < 1


def test_a_process_has_a_name_and_an_age() -> None:
    before = time.time()
    with process("cat") as (child, pidfd):
        eventually(lambda: (info := process_info.read_by_pidfd(pidfd)) and info.name == "cat", "the program to begin")
        info = process_info.read_by_pidfd(pidfd)
        assert info is not None
        assert same(info, process_info.read(child.pid))
        assert before - 1 <= info.started <= time.time() + 1
        child.kill()
        child.wait()
        assert process_info.read_by_pidfd(pidfd) is None
        assert process_info.read(child.pid) is None


def test_control_characters_of_a_name_are_escaped() -> None:
    libc = ctypes.CDLL(None)
    name = Path("/proc/self/comm").read_bytes().rstrip(b"\n")
    libc.prctl(SET_NAME, b"a\x1b[2J\n) b\xff")
    try:
        info = process_info.read(os.getpid())
    finally:
        libc.prctl(SET_NAME, name)
    assert info is not None
    assert info.name == "a\\x1b[2J\\n) b\N{REPLACEMENT CHARACTER}"


def test_the_cgroup_is_that_of_the_hierarchy_which_tells_most() -> None:
    unit = "12:memory:/user\n1:name=systemd:/system.slice/vllm.service\n0::/\n"
    assert process_info._cgroup(unit) == "/system.slice/vllm.service"
    assert process_info._cgroup("2:pids:/x\n0::/docker/" + "ab" * 32) == "/docker/" + "ab" * 32
    assert process_info._cgroup("0::/\n1:cpu:/\n") is None
    assert process_info._cgroup("0::/a:b\x1b") == "/a:b\\x1b"
    long = process_info._cgroup("0::/" + "x" * 5000 + "/end.scope")
    assert long is not None
    assert (len(long), long[-10:]) == (512, "/end.scope")


def test_a_pidfd_that_is_none_tells_nothing() -> None:
    reading, writing = os.pipe()
    assert process_info.read_by_pidfd(reading) is None
    os.close(reading)
    os.close(writing)
    assert process_info.read_by_pidfd(reading) is None


@pytest.mark.slow
def test_clients_are_told_with_their_processes(broker: BrokerProcess) -> None:
    script = "import sys; from cubroker.client import Broker; b = Broker(sys.argv[1]); print(flush=True); input()"
    command = [sys.executable, "-c", script, str(broker.directory)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        with Broker(broker.directory) as client:
            told = {each.pid: each.process for each in client.clients()}
            assert same(told[child.pid], process_info.read(child.pid))
            assert same(told[os.getpid()], process_info.read(os.getpid()))
        child.communicate(b"\n")
