"""Where broker and clients meet."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cubroker.protocol import directory
from cubroker.protocol.errors import Invalid


@pytest.mark.parametrize(
    ("environ", "uid", "expected"),
    [
        ({"CUBROKER_DIR": "/there", "XDG_RUNTIME_DIR": "/run/user/5"}, 5, "/there"),
        ({"CUBROKER_DIR": "/there"}, 0, "/there"),
        ({"CUBROKER_DIR": "", "XDG_RUNTIME_DIR": "/run/user/5"}, 5, "/run/user/5/cubroker"),
        ({"XDG_RUNTIME_DIR": "/run/user/0"}, 0, "/run/cubroker"),
        ({}, 5, "/tmp/cubroker-5"),
    ],
)
def test_the_default_directory(environ: dict[str, str], uid: int, expected: str) -> None:
    assert directory.default_directory(environ, uid) == Path(expected)


def test_the_own_user_and_environment_are_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBROKER_DIR", raising=False)
    assert directory.default_directory() == directory.default_directory(os.environ, os.getuid())
    monkeypatch.setenv("CUBROKER_DIR", "/there")
    assert directory.default_directory() == Path("/there")


def test_a_directory_without_room_for_a_socket_is_refused() -> None:
    socket_path = f"/{directory.SESSION_SOCKET}"
    directory.check(Path("x" * (directory.MAX_PATH - len(socket_path))))
    with pytest.raises(Invalid, match="longer than the 107 bytes"):
        directory.check(Path("x" * (directory.MAX_PATH - len(socket_path) + 1)))
    with pytest.raises(Invalid, match="longer than the 107 bytes"):
        directory.check(Path("ü" * 50))


def test_a_directory_that_is_not_utf8_is_refused_in_printable_words() -> None:
    with pytest.raises(Invalid, match="is not UTF-8") as caught:
        directory.check(Path(os.fsdecode(b"/run/\xff")))
    assert str(caught.value).isprintable()


def test_the_longest_path_of_a_socket_is_what_the_kernel_takes(tmp_path: Path) -> None:
    import socket

    def bind(length: int) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
            server.bind("\0" + "x" * (length - 1))  # abstract: leaves no file, has the same room

    bind(directory.MAX_PATH)
    with pytest.raises(OSError, match="too long"):
        bind(directory.MAX_PATH + 2)  # the abstract kind needs no closing zero, so one more would still fit
