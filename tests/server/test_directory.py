from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from cubroker.protocol.errors import Denied, Invalid, Unavailable
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


def test_a_lock_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("data")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "lock").symlink_to(precious)
    with pytest.raises(Unavailable, match="cannot serve in"), Directory(tmp_path / "run"):
        pass
    assert precious.read_text() == "data"


def test_a_directory_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(Denied, match="choose another directory or user"), Directory(tmp_path):
        pass
