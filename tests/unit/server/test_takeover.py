"""What a broker is handed over: sockets, a store, or neither; and how it has its directory for itself."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from cubroker.client import Broker
from cubroker.protocol.errors import Denied, Invalid, OverQuota, Unavailable
from cubroker.protocol.messages import Welcome
from cubroker.protocol.paths import REQUEST_SOCKET, SESSION_SOCKET
from cubroker.protocol.status import ClientInfo
from cubroker.server.store.sd_notify import VARIABLES
from cubroker.server.takeover import Directory
from cubroker.server.transport.unix_sockets import Access
from tests.brokers import PATIENCE, BrokerProcess, started
from tests.stores import StoredBroker, launch, storing
from tests.unit.server.clients import connect, greet, session
from tests.unit.server.processes import gateway_of


@pytest.fixture
def kept() -> Iterator[StoredBroker]:
    with storing() as broker:
        yield broker


def test_the_manager_hears_that_the_broker_serves_and_ends(kept: StoredBroker) -> None:
    kept.settled()
    assert kept.fdstore.said[:2] == [
        ("READY", "1"),
        ("STATUS", "0 versions, 0 sessions, 0 leases; 0 of 115 MiB lent"),
    ]
    assert kept.stop() == 0
    kept.settled()
    assert kept.fdstore.said[-2:] == [("STOPPING", "1"), ("EXTEND_TIMEOUT_USEC", "60000000")]


def test_who_connects_while_there_is_no_broker_is_served_by_the_next(kept: StoredBroker) -> None:
    kept.kill()
    with connect(kept.directory) as connection:
        kept.start()
        assert isinstance(greet(connection), Welcome)


def test_the_next_broker_keeps_a_socket_on_which_more_clients_wait_than_it_has_room_for(kept: StoredBroker) -> None:
    kept.kill()
    (door,) = kept.fdstore.stored["own-door"]
    before = os.fstat(door).st_ino
    with ExitStack() as undo:
        try:
            while True:
                waiting = undo.enter_context(
                    socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
                )
                waiting.connect(str(kept.directory / SESSION_SOCKET))
        except BlockingIOError:
            pass
        kept.start()
    with session(kept.directory):
        pass
    (door,) = kept.fdstore.stored["own-door"]
    assert os.fstat(door).st_ino == before


def test_a_socket_whose_path_was_removed_is_replaced_and_stored_anew(kept: StoredBroker) -> None:
    kept.kill()
    (kept.directory / SESSION_SOCKET).unlink()
    before = os.fstat(kept.fdstore.stored["own-door"][0]).st_ino
    kept.start()
    with session(kept.directory):
        pass
    kept.restart()
    with session(kept.directory):
        pass
    (door,) = kept.fdstore.stored["own-door"]
    assert os.fstat(door).st_ino != before


def test_who_may_connect_to_sockets_that_brokers_made_is_as_the_next_broker_is_told(
    kept: StoredBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = (os.getgroups() or [os.getegid()])[-1] if os.geteuid() else 1234

    def modes() -> set[tuple[int, int]]:
        found = [(kept.directory / name).stat() for name in (SESSION_SOCKET, REQUEST_SOCKET)]
        return {(stat.S_IMODE(each.st_mode), each.st_gid) for each in found}

    assert modes() == {(0o600, os.getegid())}
    monkeypatch.setenv("CUBROKER_SOCKETS_GROUP", str(group))
    kept.restart()
    assert modes() == {(0o660, group)}
    monkeypatch.delenv("CUBROKER_SOCKETS_GROUP")
    monkeypatch.setenv("CUBROKER_SOCKETS_MODE", "0o666")
    kept.restart()
    assert modes() == {(0o666, os.getegid())}


def test_what_belongs_to_nothing_is_dropped_from_the_store(kept: StoredBroker) -> None:
    kept.kill()
    ours, theirs = socket.socketpair()
    with ours:
        kept.fdstore.stored["s99"] = [theirs.detach()]
        kept.start()
        assert ours.recv(1) == b""  # nobody has the other end any more
    kept.settled()
    assert sorted(kept.fdstore.stored) == ["ledger", "own-door", "own-requests"]
    assert "s99" in kept.log()


def test_the_gateway_which_peers_reach_hears_nothing_of_the_manager_and_the_store(kept: StoredBroker) -> None:
    try:
        environ = Path(f"/proc/{gateway_of(kept.pid)}/environ").read_bytes()
    except PermissionError:
        pytest.skip("a gateway shows its environment to root alone: run this test as root")
    names = {each.partition(b"=")[0].decode() for each in environ.split(b"\0")}
    assert "PATH" in names
    assert not names.intersection(VARIABLES)


def refused(broker: StoredBroker) -> str:
    """Start a broker that does not come up, and return what it says."""
    log = broker.directory.with_name("refusal")
    with log.open("wb") as file:
        assert broker.spawn(file.fileno()).wait(PATIENCE) == 1
    broker.settled()
    said = log.read_text()
    assert "Traceback" not in said
    return said


def test_a_first_start_that_fails_leaves_nothing_in_the_store(kept: StoredBroker) -> None:
    kept.stop()
    for name in list(kept.fdstore.stored):
        kept.fdstore.forget(name)
    kept.directory.chmod(0o777)
    assert "chmod go-w" in refused(kept)
    assert not kept.fdstore.stored
    kept.directory.chmod(0o755)
    kept.start()
    kept.settled()
    assert sorted(kept.fdstore.stored) == ["ledger", "own-door", "own-requests"]


def test_a_journal_that_cannot_be_read_is_refused_with_what_to_do_and_everything_stays(kept: StoredBroker) -> None:
    with session(kept.directory) as client:
        assert client.devices()
        kept.kill()
        (journal,) = kept.fdstore.stored["ledger"]
        before = dict(kept.fdstore.stored)
        content = os.pread(journal, 1 << 20, 0)
        os.pwrite(journal, bytes(byte ^ 1 for byte in content), 0)
        said = refused(kept)
        assert "nothing was changed" in said
        assert "stop the service and its sockets, and from version 254 on also: systemctl clean" in said
        assert kept.fdstore.stored == before
        os.pwrite(journal, content, 0)
        kept.start()
        assert client.devices()


def test_a_store_without_room_for_a_single_session_is_refused_with_how_to_make_it_larger(kept: StoredBroker) -> None:
    kept.stop()
    before = dict(kept.fdstore.stored)
    for room in (1, 4):
        kept.room = room
        said = refused(kept)
        assert f"the store takes {room} descriptor" in said
        assert "needs 5" in said
        assert "CUBROKER_STORE" in said
        assert kept.fdstore.stored == before
    kept.room = 5
    kept.start()
    with session(kept.directory) as client:
        assert client.devices()


def test_no_user_can_fill_the_store_alone() -> None:
    with storing(room=40) as broker, ExitStack() as undo:
        for _ in range(10):
            undo.enter_context(Broker(broker.directory))
        with pytest.raises(OverQuota, match=r"user \d+ has 10 sessions of a quota of 10"):
            Broker(broker.directory)


class Activated(BrokerProcess):
    """A broker that a socket unit started: its sockets listen already, and nothing else is handed over."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self.sockets = (
            _listen(directory / SESSION_SOCKET, socket.SOCK_SEQPACKET),
            _listen(directory / REQUEST_SOCKET, socket.SOCK_STREAM),
        )
        super().__init__(directory)

    def spawn(self, log: int) -> subprocess.Popen[bytes]:
        extra = os.memfd_create("stray")
        numbers = [*(each.fileno() for each in self.sockets), extra]
        try:
            return launch(self.command(), numbers, log, {"LISTEN_FDNAMES": "door:requests:stray"})
        finally:
            os.close(extra)


def _listen(path: Path, kind: socket.SocketKind) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, kind)
    listener.bind(str(path))
    path.chmod(0o640)
    listener.listen()
    return listener


def test_sockets_of_a_socket_unit_are_served_and_left_there() -> None:
    with started(Activated) as broker:
        with session(broker.directory) as client:
            (info,) = client.clients()
            assert isinstance(info, ClientInfo)
            assert info.pid == os.getpid()
        assert stat.S_IMODE((broker.directory / SESSION_SOCKET).stat().st_mode) == 0o640  # as the unit made it
        assert "closing inherited descriptors named stray" in broker.log()
        assert broker.stop() == 0
        assert all((broker.directory / name).is_socket() for name in (SESSION_SOCKET, REQUEST_SOCKET))
        with connect(broker.directory) as waiting:
            broker.start()
            assert isinstance(greet(waiting), Welcome)
        for each in broker.sockets:
            each.close()


# -- the directory ---------------------------------------------------------------------------------


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
