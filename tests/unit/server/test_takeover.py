"""What a broker is handed over: sockets, a store, or neither."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from cubroker.client import Broker
from cubroker.protocol.errors import OverQuota
from cubroker.protocol.messages import Welcome
from cubroker.protocol.paths import REQUEST_SOCKET, SESSION_SOCKET
from cubroker.protocol.status import ClientInfo
from cubroker.server.store.sd_notify import VARIABLES
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
