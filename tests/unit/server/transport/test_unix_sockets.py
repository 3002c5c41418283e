"""The process at the other end of a connection: who it is, and what /proc tells of it."""

from __future__ import annotations

import ctypes
import errno
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cubroker.client import Broker
from cubroker.driver import system_calls
from cubroker.protocol.status import ProcessInfo
from cubroker.server.transport import unix_sockets
from cubroker.server.transport.unix_sockets import (
    BURST,
    REFILL,
    Peer,
    RateLimiter,
    RejectionLog,
    read_process,
    read_process_by_pidfd,
)
from tests.brokers import BrokerProcess, eventually
from tests.namespaces import unshare

CONNECT = "import socket, sys; s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET); s.connect(sys.argv[1])"


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(str(tmp_path / "s"))
        listening.listen()
        yield listening


def visitor(listener: socket.socket, then: str = "sys.stdin.read()") -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", f"{CONNECT}; {then}", listener.getsockname()]
    return subprocess.Popen(command, stdin=subprocess.PIPE)


def ended(pidfd: int) -> bool:
    return bool(select.select([pidfd], [], [], 0)[0])


class Without:
    """A connection on a kernel without an option, or where asking for it fails."""

    def __init__(self, connection: socket.socket, failure: int, option: int = unix_sockets.SO_PEERPIDFD) -> None:
        self._connection = connection
        self._failure = failure
        self._option = option

    def fileno(self) -> int:
        return self._connection.fileno()

    def getsockopt(self, level: int, option: int, *size: int) -> bytes | int:
        if option == self._option:
            raise OSError(self._failure, os.strerror(self._failure))
        return self._connection.getsockopt(level, option, *size)


@pytest.mark.parametrize("old_kernel", [False, True])
def test_the_kernel_says_who_connected_and_when_it_ends(listener: socket.socket, old_kernel: bool) -> None:
    with visitor(listener) as process:
        connection, _ = listener.accept()
        with connection:
            asked = Without(connection, errno.ENOPROTOOPT) if old_kernel else connection
            peer = unix_sockets.identify(asked)  # type: ignore[arg-type]
            assert (peer.pid, peer.uid, peer.gid) == (process.pid, os.getuid(), os.getgid())
            assert not os.get_inheritable(peer.pidfd)
            assert not ended(peer.pidfd)
            process.kill()
            process.wait()
            assert ended(peer.pidfd)
            os.close(peer.pidfd)


def test_a_process_that_is_gone_is_told_from_one_that_took_its_pid(listener: socket.socket) -> None:
    visitor(listener, "pass").communicate()
    connection, _ = listener.accept()
    # This process stands for one that was given the dead one's pid.
    with connection, pytest.raises(ProcessLookupError, match="hung up"):
        unix_sockets.open_pidfd(connection, os.getpid())


def test_a_process_that_is_gone_is_reported_as_such(listener: socket.socket) -> None:
    visitor(listener, "pass").communicate()
    connection, _ = listener.accept()
    with connection:
        for failure in (errno.ENOPROTOOPT, errno.EINVAL, errno.ESRCH):
            with pytest.raises(ProcessLookupError):
                unix_sockets.identify(Without(connection, failure))  # type: ignore[arg-type]
        with pytest.raises(OSError, match="Too many open files"):
            unix_sockets.identify(Without(connection, errno.EMFILE))  # type: ignore[arg-type]


def test_the_groups_of_a_process_are_known_where_the_kernel_tells_them(listener: socket.socket) -> None:
    with visitor(listener) as process:
        connection, _ = listener.accept()
        with connection:
            peer = unix_sockets.identify(connection)
            assert peer.groups == frozenset(os.getgroups())
            os.close(peer.pidfd)
            silent = Without(connection, errno.ENOPROTOOPT, unix_sockets.SO_PEERGROUPS)
            peer = unix_sockets.identify(silent)  # type: ignore[arg-type]
            assert peer.groups == frozenset()
            os.close(peer.pidfd)
        process.kill()


@pytest.mark.parametrize(
    ("options", "verified"),
    [
        pytest.param((), True, id="none"),
        pytest.param(("--mount",), True, id="mount"),
        pytest.param(("--pid", "--fork", "--kill-child"), False, id="pid"),
        pytest.param(("--user", "--map-root-user"), False, id="user"),
    ],
)
def test_a_process_of_the_brokers_user_is_verified_in_its_namespaces_alone(
    listener: socket.socket, options: tuple[str, ...], verified: bool
) -> None:
    before = unshare(*options) if options else []
    command = [*before, sys.executable, "-c", f"{CONNECT}; sys.stdin.read()", listener.getsockname()]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        connection, _ = listener.accept()
        with connection:
            peer = unix_sockets.identify(connection)
            assert unix_sockets.verify(peer, peer.pid) == verified
            assert not unix_sockets.verify(replace(peer, uid=peer.uid + 1), peer.pid)
            assert not unix_sockets.verify(replace(peer, pid=0), None)
            assert process.stdin
            process.stdin.close()
            eventually(lambda: ended(peer.pidfd), "the end of the process")
            assert not unix_sockets.verify(peer, peer.pid)
            assert not unix_sockets.verify(replace(peer, pid=os.getpid()), peer.pid), "another process has its number"
            os.close(peer.pidfd)


def test_root_is_verified_by_naming_the_first_process_and_others_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 4900)
    root, other = unix_sockets.Peer(17, 0, 0, -1), unix_sockets.Peer(17, 4901, 4901, -1)
    assert unix_sockets.verify(root, unix_sockets.INIT)
    for peer, named in (
        (root, 17),
        (root, None),
        (other, unix_sockets.INIT),
        (replace(root, pid=unix_sockets.INIT), unix_sockets.INIT),
    ):
        assert not unix_sockets.verify(peer, named)


# -- refusals in the log -----------------------------------------------------------------------------


def peer(uid: int) -> Peer:
    return Peer(4711, uid, uid, -1)


def test_a_refusal_is_one_line_that_says_who_and_what(caplog: pytest.LogCaptureFixture) -> None:
    RejectionLog().log(4711, 1001, "user 1001 may not attach to a")
    assert caplog.messages == ["process 4711 (user 1001) was refused: user 1001 may not attach to a"]


def test_a_user_that_is_refused_all_the_time_has_few_lines_and_others_have_theirs(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(unix_sockets, "monotonic", lambda: now)
    log = RejectionLog()
    for _ in range(1000):
        log.log(4711, 1001, "no")
    assert len(caplog.messages) == BURST
    log.log(4712, 1002, "no")
    assert len(caplog.messages) == BURST + 1
    now += REFILL
    log.log(4711, 1001, "no")
    log.log(4711, 1001, "no")
    assert caplog.messages[BURST + 1 :] == [
        f"process 4711 (user 1001) was refused: no ({1000 - BURST} more refusals of this user are not in the log)"
    ]
    now += 1000 * REFILL
    for _ in range(1000):
        log.log(4711, 1001, "no")
    assert len(caplog.messages) == 2 * BURST + 2


def test_only_so_many_users_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unix_sockets, "MAX_USERS", 3)
    limiter = RateLimiter(1, 1000.0)
    assert [limiter.take(uid) for uid in (1, 2, 3, 4)] == [0] * 4
    assert limiter.take(4) is None
    assert limiter.take(1) == 0, "the least recently refused was forgotten"


# -- what /proc tells ----------------------------------------------------------------------------------

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
        eventually(
            lambda: (info := read_process_by_pidfd(pidfd)) and info.name == "cat",
            "the program to begin",
        )
        info = read_process_by_pidfd(pidfd)
        assert info is not None
        assert same(info, read_process(child.pid))
        assert before - 1 <= info.started <= time.time() + 1
        child.kill()
        child.wait()
        assert read_process_by_pidfd(pidfd) is None
        assert read_process(child.pid) is None


def test_control_characters_of_a_name_are_escaped() -> None:
    libc = ctypes.CDLL(None)
    name = Path("/proc/self/comm").read_bytes().rstrip(b"\n")
    libc.prctl(SET_NAME, b"a\x1b[2J\n) b\xff")
    try:
        info = read_process(os.getpid())
    finally:
        libc.prctl(SET_NAME, name)
    assert info is not None
    assert info.name == "a\\x1b[2J\\n) b\N{REPLACEMENT CHARACTER}"


@pytest.fixture
def cgroup(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str | None]:
    """The cgroup of a process of which /proc tells this."""
    told, read = [""], Path.read_text

    def reading(path: Path, *args: Any, **options: Any) -> str:
        return told[0] if path == Path(f"/proc/{os.getpid()}/cgroup") else read(path, *args, **options)

    def found(text: str) -> str | None:
        told[0] = text
        info = read_process(os.getpid())
        assert info is not None
        return info.cgroup

    monkeypatch.setattr(Path, "read_text", reading)
    return found


def test_the_cgroup_is_that_of_the_hierarchy_which_tells_most(cgroup: Callable[[str], str | None]) -> None:
    unit = "12:memory:/user\n1:name=systemd:/system.slice/vllm.service\n0::/\n"
    assert cgroup(unit) == "/system.slice/vllm.service"
    assert cgroup("2:pids:/x\n0::/docker/" + "ab" * 32) == "/docker/" + "ab" * 32
    assert cgroup("0::/\n1:cpu:/\n") is None
    assert cgroup("0::/a:b\x1b") == "/a:b\\x1b"
    long = cgroup("0::/" + "x" * 5000 + "/end.scope")
    assert long is not None
    assert (len(long), long[-10:]) == (512, "/end.scope")


def test_a_pidfd_that_is_none_tells_nothing() -> None:
    reading, writing = os.pipe()
    assert read_process_by_pidfd(reading) is None
    os.close(reading)
    os.close(writing)
    assert read_process_by_pidfd(reading) is None


@pytest.mark.slow
def test_clients_are_told_with_their_processes(broker: BrokerProcess) -> None:
    script = "import sys; from cubroker.client import Broker; b = Broker(sys.argv[1]); print(flush=True); input()"
    command = [sys.executable, "-c", script, str(broker.directory)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        with Broker(broker.directory) as client:
            told = {each.pid: each.process for each in client.clients()}
            assert same(told[child.pid], read_process(child.pid))
            assert same(told[os.getpid()], read_process(os.getpid()))
        child.communicate(b"\n")
