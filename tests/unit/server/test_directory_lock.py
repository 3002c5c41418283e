from __future__ import annotations

import fcntl
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from cubroker.protocol.errors import Denied, Invalid, Unavailable
from cubroker.server.directory_lock import Directory
from cubroker.server.transport.unix_sockets import Access


def test_a_directory_is_made_with_sockets_for_its_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "run"
    with Directory(path) as place:
        assert stat.S_IMODE(path.stat().st_mode) & 0o755 == stat.S_IMODE(path.stat().st_mode)
        for name in ("session.sock", "broker.zmq", "lock"):
            assert stat.S_IMODE((path / name).stat().st_mode) == 0o600
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
            client.connect(str(place.path / "session.sock"))
    assert [entry.name for entry in path.iterdir()] == ["lock"]


def test_what_is_made_on_the_way_can_be_written_by_nobody_else(tmp_path: Path) -> None:
    path, before = tmp_path / "deep" / "run", os.umask(0)
    try:
        with Directory(path):
            assert [stat.S_IMODE(each.stat().st_mode) for each in (path.parent, path)] == [0o755, 0o755]
        assert os.umask(0o077) == 0
        with Directory(tmp_path / "private" / "run"):
            assert stat.S_IMODE((tmp_path / "private").stat().st_mode) == 0o700
    finally:
        os.umask(before)


def test_one_at_a_time_and_the_next_takes_over(tmp_path: Path) -> None:
    with Directory(tmp_path), pytest.raises(Unavailable, match=f"process {os.getpid()}"), Directory(tmp_path):
        pass
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as killed:
        killed.bind(str(tmp_path / "session.sock"))
    (tmp_path / "lock").write_text("12345678901234567890 and more\n")
    with Directory(tmp_path):
        assert (tmp_path / "lock").read_text() == f"{os.getpid()}\n"


def test_a_path_too_long_for_a_socket_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 100)
    with pytest.raises(Invalid, match="longer than the 107 bytes"), Directory(path):
        pass
    assert not path.exists()


def test_the_directory_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    if tmp_path.stat().st_uid == 0:
        os.chown(tmp_path, 1234, -1)
    with pytest.raises(Denied, match="could pose as the broker"), Directory(tmp_path):
        pass


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o702, 0o770, 0o2770, 0o720])
@pytest.mark.parametrize("access", [Access(), Access(0o660, os.getgid())])
def test_a_directory_that_others_may_write_is_refused(tmp_path: Path, mode: int, access: Access) -> None:
    path = tmp_path / "run"
    path.mkdir()
    path.chmod(mode)
    with pytest.raises(Denied, match="could pose as the broker") as refused, Directory(path, access):
        pass
    who = {0o777: "its group and everybody", 0o1777: "its group and everybody", 0o702: "everybody"}
    assert str(refused.value).startswith(f"{who.get(mode, 'its group')} may write in {path} (mode {mode:04o})")
    assert list(path.iterdir()) == []
    assert f"chmod go-w {path}" in str(refused.value)
    path.chmod(mode & ~0o022)
    with Directory(path, access):
        assert stat.S_IMODE(path.stat().st_mode) & 0o022 == 0


# -- the lock ----------------------------------------------------------------------------------------


def link(lock: Path) -> None:
    lock.symlink_to(lock.with_name("precious"))


def hard_link(lock: Path) -> None:
    lock.hardlink_to(lock.with_name("precious"))


def fifo(lock: Path) -> None:
    os.mkfifo(lock)


def folder(lock: Path) -> None:
    lock.mkdir()


def left_socket(lock: Path) -> None:
    with socket.socket(socket.AF_UNIX) as end:
        end.bind(str(lock))


@pytest.mark.parametrize(
    ("put", "why"),
    [
        (link, "is no regular file"),
        (hard_link, "has 2 hard links, and so may be another file as well"),
        (fifo, "is no regular file"),
        (folder, "is no regular file"),
        (left_socket, "is no regular file"),
    ],
)
def test_a_lock_that_is_no_file_of_a_brokers_is_refused_and_left_as_it_is(
    tmp_path: Path, put: Callable[[Path], None], why: str
) -> None:
    precious, lock = tmp_path / "precious", tmp_path / "lock"
    precious.write_text("data")
    put(lock)
    before = lock.lstat()
    with pytest.raises(Unavailable) as refused, Directory(tmp_path):
        pass
    assert str(refused.value) == f"cannot serve in {tmp_path}: {lock} {why}; remove it, or choose another directory"
    assert precious.read_text() == "data"
    assert os.path.samestat(lock.lstat(), before)
    assert not (tmp_path / "session.sock").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_lock_of_another_user_is_refused(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    lock.write_text("data")
    os.chown(lock, 1234, -1)
    with pytest.raises(Unavailable, match=f"{lock} belongs to user 1234; remove it"), Directory(tmp_path):
        pass
    assert lock.read_text() == "data"


def test_a_lock_that_is_removed_while_it_is_taken_is_taken_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lock on a file without a name keeps no other broker out."""
    removed: list[int] = []
    flock = fcntl.flock

    def remove_before(descriptor: int, operation: int) -> None:
        if len(removed) < 2:
            removed.append(os.fstat(descriptor).st_ino)
            (tmp_path / "lock").unlink()
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", remove_before)
    with Directory(tmp_path), pytest.raises(Unavailable, match=f"process {os.getpid()}"), Directory(tmp_path):
        pass
    assert len(removed) == 2


def test_what_a_lock_says_of_its_holder_is_not_believed_blindly(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    with Directory(tmp_path):
        lock.write_bytes(b"\xff\xfe no number")
        with pytest.raises(Unavailable, match=r"another broker \(process unknown\) serves"), Directory(tmp_path):
            pass


# -- sockets -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["session.sock", "broker.zmq"])
def test_a_file_that_is_no_socket_is_not_removed(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("data")
    with pytest.raises(Unavailable, match=f"{name}: there is a file that is not a socket; remove it"):
        Directory(tmp_path).__enter__()
    assert (tmp_path / name).read_text() == "data"
    assert {entry.name for entry in tmp_path.iterdir()} == {name, "lock"}


@pytest.mark.parametrize(
    ("name", "kind"), [("session.sock", socket.SOCK_SEQPACKET), ("broker.zmq", socket.SOCK_STREAM)]
)
def test_a_socket_that_a_process_listens_on_is_not_removed(tmp_path: Path, name: str, kind: int) -> None:
    with socket.socket(socket.AF_UNIX, kind) as listener, socket.socket(socket.AF_UNIX, kind) as waiting:
        listener.bind(str(tmp_path / name))
        listener.listen(0)
        for _ in range(2):
            with pytest.raises(Unavailable, match=f"{name}") as refused, Directory(tmp_path):
                pass
            assert "choose another directory" in str(refused.value)
            while (connection := accepted(listener)) is not None:
                connection.close()
            waiting.connect_ex(str(tmp_path / name))  # and is never accepted: the backlog stays full
        assert {entry.name for entry in tmp_path.iterdir()} == {name, "lock"}


def accepted(listener: socket.socket) -> socket.socket | None:
    listener.setblocking(False)
    try:
        return listener.accept()[0]
    except BlockingIOError:
        return None


def test_a_socket_of_another_kind_is_refused(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.bind(str(tmp_path / "session.sock"))
        with pytest.raises(Unavailable, match=r"session\.sock: Protocol wrong type for socket; remove it"):
            Directory(tmp_path).__enter__()


# -- who else could pose as the broker ---------------------------------------------------------------


def test_a_directory_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(Denied, match="choose another directory or user"), Directory(tmp_path):
        pass


@pytest.mark.parametrize(
    ("access", "before", "after"),
    [
        (Access(), 0o700, 0o700),
        (Access(0o660), 0o700, 0o710),
        (Access(0o666), 0o700, 0o711),
        (Access(0o606), 0o700, 0o701),
        (Access(0o666), 0o755, 0o755),
    ],
)
def test_whoever_may_connect_may_pass_through_the_directory(
    tmp_path: Path, access: Access, before: int, after: int
) -> None:
    path = tmp_path / "run"
    path.mkdir()
    path.chmod(before)
    with Directory(path, access):
        assert stat.S_IMODE(path.stat().st_mode) == after
        for name in ("session.sock", "broker.zmq"):
            assert stat.S_IMODE((path / name).stat().st_mode) == access.mode
        assert stat.S_IMODE((path / "lock").stat().st_mode) == 0o600


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to any group")
@pytest.mark.parametrize(("mode", "group"), [(0o700, 4321), (0o755, os.getgid())])
def test_sockets_and_a_private_directory_belong_to_the_group_that_may_connect(
    tmp_path: Path, mode: int, group: int
) -> None:
    path = tmp_path / "run"
    path.mkdir()
    path.chmod(mode)
    with Directory(path, Access(0o660, 4321)):
        assert path.stat().st_gid == group
        for name in ("session.sock", "broker.zmq"):
            assert (path / name).stat().st_gid == 4321


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to any group")
def test_a_directory_behind_a_symbolic_link_belongs_to_the_group_that_may_connect(tmp_path: Path) -> None:
    there, path = tmp_path / "there", tmp_path / "cubroker"
    there.mkdir(mode=0o700)
    path.symlink_to(there)
    with Directory(path, Access(0o660, 4321)):
        assert (there.stat().st_gid, path.lstat().st_gid) == (4321, os.getegid())


@pytest.mark.skipif(os.geteuid() == 0, reason="root may give a file to any group")
def test_a_group_that_the_broker_is_not_in_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Denied, match="cannot serve in"), Directory(tmp_path, Access(0o660, 4321)):
        pass


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702, 0o2775])
def test_a_directory_below_a_folder_that_others_may_write_is_refused(tmp_path: Path, mode: int) -> None:
    shared, path = tmp_path / "shared", tmp_path / "shared" / "deep" / "run"
    shared.mkdir()
    shared.chmod(mode)
    for _ in ("not there yet", "there"):
        with pytest.raises(Denied) as refused, Directory(path):
            pass
        said = str(refused.value)
        assert f" may write in {shared} (mode {mode:04o}), and so could replace {path} and pose as the broker" in said
        assert f"; chmod go-w {shared}, or choose another directory" in said
        assert list(path.parent.rglob("*")) in ([], [path])
        path.mkdir(parents=True, exist_ok=True)
    shared.chmod(mode & ~0o022)
    with Directory(path):
        pass


def test_a_directory_below_a_sticky_folder_is_served_where_each_name_there_is_the_brokers_own(tmp_path: Path) -> None:
    shared, path = tmp_path / "shared", tmp_path / "shared" / "deep" / "run"
    shared.mkdir()
    shared.chmod(0o1777)
    with Directory(path):
        pass
    if os.geteuid() == 0:
        os.chown(shared / "deep", 1234, -1)
        with pytest.raises(Denied, match=f"{shared / 'deep'} belongs to user 1234, who could replace {path} and pose"):
            Directory(path).__enter__()
