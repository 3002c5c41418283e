"""Where broker and clients meet."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest

from cubroker.protocol import paths
from cubroker.protocol.errors import Denied, Invalid

SOMEBODY = 1234


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
    assert paths.default_directory(environ, uid) == Path(expected)


def test_the_own_user_and_environment_are_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBROKER_DIR", raising=False)
    assert paths.default_directory() == paths.default_directory(os.environ, os.getuid())
    monkeypatch.setenv("CUBROKER_DIR", "/there")
    assert paths.default_directory() == Path("/there")


# -- which broker a client finds -----------------------------------------------------------------------


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of a host's broker, and its socket; this user's own directory has none yet."""
    system = tmp_path / "host"
    system.mkdir(0o755)
    (system / paths.SESSION_SOCKET).touch()
    monkeypatch.setattr(paths, "SYSTEM", system)
    monkeypatch.setattr(paths, "SERVICE", "no-such-account")
    return system


def own(host: Path) -> dict[str, str]:
    return {"XDG_RUNTIME_DIR": str(host.with_name("user"))}


def test_a_client_finds_the_broker_of_its_user_and_else_that_of_the_host(host: Path) -> None:
    user = host.with_name("user") / "cubroker"
    assert paths.find_directory(own(host), SOMEBODY) == host
    user.mkdir(parents=True)
    assert paths.find_directory(own(host), SOMEBODY) == host
    (user / paths.SESSION_SOCKET).touch()
    assert paths.find_directory(own(host), SOMEBODY) == user
    assert paths.find_directory({"CUBROKER_DIR": "/there", **own(host)}, SOMEBODY) == Path("/there")
    assert paths.find_directory(own(host), 0) == host


def test_a_client_without_any_broker_is_told_of_its_users_directory(host: Path) -> None:
    (host / paths.SESSION_SOCKET).unlink()
    assert paths.find_directory(own(host), SOMEBODY) == host.with_name("user") / "cubroker"
    host.rmdir()
    assert paths.find_directory({}, SOMEBODY) == paths.directory_of(SOMEBODY)


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")


@needs_root
def test_the_hosts_broker_is_that_of_root_or_of_the_service_and_of_no_other_user(
    host: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paths, "SERVICE", "daemon")
    service = pwd.getpwnam("daemon").pw_uid
    host.parent.chmod(0o755)
    for owner in (0, service, SOMEBODY):
        os.chown(host, owner, owner)
        assert paths.find_directory(own(host), SOMEBODY) == host
    games = pwd.getpwnam("games").pw_uid
    for owner, name in ((games, rf"games \(user {games}\)"), (54_321, "user 54321")):
        os.chown(host, owner, owner)
        with pytest.raises(
            Denied, match=rf"{host} is not .* host's: it belongs to {name}, .* daemon; to use it .* name"
        ):
            paths.find_directory(own(host), SOMEBODY)
        assert paths.find_directory({"CUBROKER_DIR": str(host)}, SOMEBODY) == host


@needs_root
def test_a_directory_that_another_user_made_in_the_place_of_this_users_is_none_of_its_own(host: Path) -> None:
    host.parent.chmod(0o755)
    user = host.with_name("user") / "cubroker"
    user.mkdir(parents=True)
    (user / paths.SESSION_SOCKET).touch()
    link = host.with_name("linked") / "cubroker"
    link.parent.mkdir()
    link.symlink_to(user)
    os.chown(user, SOMEBODY, SOMEBODY)
    for owner, found in ((54_321, host), (SOMEBODY, user), (0, user)):
        os.chown(user, owner, owner)
        assert paths.find_directory(own(host), SOMEBODY) == found
    os.chown(link, 54_321, 54_321, follow_symlinks=False)  # whose target is root's
    assert paths.find_directory({"XDG_RUNTIME_DIR": str(link.parent)}, SOMEBODY) == host
    os.chown(user, 54_321, 54_321)
    user.chmod(0o700)
    os.seteuid(SOMEBODY)
    try:
        assert paths.find_directory(own(host), SOMEBODY) == host
    finally:
        os.seteuid(0)
    (host / paths.SESSION_SOCKET).unlink()
    assert paths.find_directory(own(host), SOMEBODY) == user  # which is denied by name


@needs_root
def test_between_two_strangers_directories_neither_is_taken(host: Path) -> None:
    user = host.with_name("user") / "cubroker"
    user.mkdir(parents=True)
    for directory in (host, user):
        os.chown(directory, 54_321, 54_321)
    with pytest.raises(
        Denied, match=rf"^{user} belongs to user 54321, and {host} is not trusted as the host's: it bel"
    ):
        paths.find_directory(own(host), SOMEBODY)


@needs_root
def test_a_directory_of_the_host_that_a_user_may_not_search_is_that_of_a_broker(host: Path) -> None:
    host.parent.chmod(0o755)
    host.chmod(0o700)  # this process stays in root's group
    os.seteuid(SOMEBODY)
    try:
        assert paths.find_directory(own(host), SOMEBODY) == host
    finally:
        os.seteuid(0)


@needs_root
def test_a_directory_of_the_host_where_others_may_write_is_not_used(host: Path) -> None:
    host.chmod(0o777)
    with pytest.raises(
        Denied, match=r"its group and everybody may write in .*\(mode 0777\), .* pose as the broker; to"
    ):
        paths.find_directory(own(host), SOMEBODY)


def test_a_directory_without_room_for_a_socket_is_refused() -> None:
    socket_path = f"/{paths.SESSION_SOCKET}"
    paths.check(Path("x" * (paths.MAX_PATH - len(socket_path))))
    with pytest.raises(Invalid, match="longer than the 107 bytes"):
        paths.check(Path("x" * (paths.MAX_PATH - len(socket_path) + 1)))
    with pytest.raises(Invalid, match="longer than the 107 bytes"):
        paths.check(Path("ü" * 50))


def test_a_directory_that_is_not_utf8_is_refused_in_printable_words() -> None:
    with pytest.raises(Invalid, match="is not UTF-8") as caught:
        paths.check(Path(os.fsdecode(b"/run/\xff")))
    assert str(caught.value).isprintable()


def test_the_longest_path_of_a_socket_is_what_the_kernel_takes(tmp_path: Path) -> None:
    import socket

    def bind(length: int) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
            server.bind("\0" + "x" * (length - 1))  # abstract: leaves no file, has the same room

    bind(paths.MAX_PATH)
    with pytest.raises(OSError, match="too long"):
        bind(paths.MAX_PATH + 2)  # the abstract kind needs no closing zero, so one more would still fit


# -- who could pose as the broker --------------------------------------------------------------------


@pytest.fixture
def top(tmp_path: Path) -> Path:
    """A folder of a user who is not root, with the folder `run` in it."""
    (tmp_path / "top" / "run").mkdir(0o755, parents=True)
    if os.geteuid() == 0:
        for each in (tmp_path / "top" / "run", tmp_path / "top", tmp_path):
            os.chown(each, SOMEBODY, -1)
    return tmp_path / "top"


def test_nobody_else_could_pose_as_the_broker_below_folders_of_its_user_and_of_root(top: Path) -> None:
    owner = top.stat().st_uid
    assert paths.exposure(top / "run", owner) == ""
    assert paths.exposure(top / "run" / "not" / "there", owner) == ""
    assert paths.exposure(Path("/"), owner) == ""
    assert paths.exposure(top / "run" / ".." / "run", owner) == ""


def test_the_owner_of_a_folder_on_the_way_could(top: Path) -> None:
    owner = top.stat().st_uid
    said = paths.exposure(top / "run", owner + 1)
    # Of several such folders the uppermost is named.
    assert f"belongs to user {owner}, who could replace {top / 'run'} and pose as the broker" in said
    assert said.endswith("; choose a directory of your own")


def test_users_outside_of_the_namespace_are_taken_for_root_above_the_directory_alone(top: Path) -> None:
    owner = top.stat().st_uid
    assert paths.exposure(top / "new", owner + 1, owner) == ""
    said = paths.exposure(top / "run", owner + 1, owner)
    assert (
        said == f"{top / 'run'} belongs to user {owner}, who could pose as the broker; choose a directory of your own"
    )


@pytest.mark.parametrize("target", ["shared/run", "../top/shared/run", "{top}/shared/run"])
def test_folders_that_a_link_leads_through_count(top: Path, target: str) -> None:
    owner, shared = top.stat().st_uid, top / "shared"
    (shared / "run").mkdir(parents=True)
    (top / "link").symlink_to(target.format(top=top))
    if os.geteuid() == 0:
        for each in (shared, shared / "run", top / "link"):
            os.chown(each, owner, -1, follow_symlinks=False)
    assert paths.exposure(top / "link", owner) == ""
    shared.chmod(0o777)
    said = paths.exposure(top / "link", owner)
    assert said.startswith(
        f"its group and everybody may write in {shared} (mode 0777), and so could replace {top}/link"
    )
    shared.chmod(0o1777)  # where names are their owners' alone
    assert paths.exposure(top / "link", owner) == ""


def test_links_that_lead_to_each_other_end(top: Path) -> None:
    (top / "one").symlink_to("two")
    (top / "two").symlink_to("one")
    with pytest.raises(OSError, match="symbolic links"):
        paths.exposure(top / "one", os.geteuid() or top.stat().st_uid)
