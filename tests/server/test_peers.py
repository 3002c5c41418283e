from __future__ import annotations

import errno
import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cubroker.server import peers
from tests.brokers import eventually
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

    def __init__(self, connection: socket.socket, failure: int, option: int = peers.SO_PEERPIDFD) -> None:
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
            peer = peers.identify(asked)  # type: ignore[arg-type]
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
        peers.open_pidfd(connection, os.getpid())


def test_a_process_that_is_gone_is_reported_as_such(listener: socket.socket) -> None:
    visitor(listener, "pass").communicate()
    connection, _ = listener.accept()
    with connection:
        for failure in (errno.ENOPROTOOPT, errno.EINVAL, errno.ESRCH):
            with pytest.raises(ProcessLookupError):
                peers.identify(Without(connection, failure))  # type: ignore[arg-type]
        with pytest.raises(OSError, match="Too many open files"):
            peers.identify(Without(connection, errno.EMFILE))  # type: ignore[arg-type]


def test_the_groups_of_a_process_are_known_where_the_kernel_tells_them(listener: socket.socket) -> None:
    with visitor(listener) as process:
        connection, _ = listener.accept()
        with connection:
            peer = peers.identify(connection)
            assert peer.groups == frozenset(os.getgroups())
            os.close(peer.pidfd)
            silent = Without(connection, errno.ENOPROTOOPT, peers.SO_PEERGROUPS)
            peer = peers.identify(silent)  # type: ignore[arg-type]
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
            peer = peers.identify(connection)
            assert peers.verify(peer, peer.pid) == verified
            assert not peers.verify(replace(peer, uid=peer.uid + 1), peer.pid)
            assert not peers.verify(replace(peer, pid=0), None)
            assert process.stdin
            process.stdin.close()
            eventually(lambda: ended(peer.pidfd), "the end of the process")
            assert not peers.verify(peer, peer.pid)
            assert not peers.verify(replace(peer, pid=os.getpid()), peer.pid), "another process has its number"
            os.close(peer.pidfd)


def test_root_is_verified_by_naming_the_first_process_and_others_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 4900)
    root, other = peers.Peer(17, 0, 0, -1), peers.Peer(17, 4901, 4901, -1)
    assert peers.verify(root, peers.INIT)
    for peer, named in ((root, 17), (root, None), (other, peers.INIT), (replace(root, pid=peers.INIT), peers.INIT)):
        assert not peers.verify(peer, named)
