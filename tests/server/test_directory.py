from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from cubroker.protocol.errors import Denied, Invalid, Unavailable
from cubroker.server.config import Access
from cubroker.server.directory import Directory


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
    (tmp_path / "session.sock").touch()
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


def test_a_lock_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("data")
    (tmp_path / "run").mkdir(0o755)
    (tmp_path / "run" / "lock").symlink_to(precious)
    with pytest.raises(Unavailable, match=r"serve in .*; choose another directory"), Directory(tmp_path / "run"):
        pass
    assert precious.read_text() == "data"


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


@pytest.mark.skipif(os.geteuid() == 0, reason="root may give a file to any group")
def test_a_group_that_the_broker_is_not_in_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Denied, match="cannot serve in"), Directory(tmp_path, Access(0o660, 4321)):
        pass
