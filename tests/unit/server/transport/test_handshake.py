from __future__ import annotations

import array
import errno
import logging
import os
import resource
import select
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from cubroker.protocol import wire
from cubroker.protocol.messages import Hello, Pong, Refused, Welcome
from cubroker.protocol.paths import SESSION_SOCKET
from cubroker.server.event_queue import ClientGreeted, Event, EventQueue
from cubroker.server.transport import admission
from cubroker.server.transport.admission import Listener, answer_ping
from cubroker.server.transport.unix_sockets import Peer
from tests.brokers import BrokerProcess, eventually
from tests.faults import fail_nth
from tests.unit.server.clients import HELLO, RawClient, connect, greet, hear, session
from tests.unit.server.loops import run, until
from tests.unit.server.processes import all_closed, files, open_files

pytestmark = pytest.mark.usefixtures("looking_at_nobody")

PING = wire.pack(Hello("cubroker", (1,), ping=True))
BAD = [
    (b"\xc1 garbage", "invalid"),
    (wire.pack(Hello("kubroker", (1,))), "invalid"),
    (wire.pack(["cubroker"]), "invalid"),
    (HELLO + bytes(admission.MAX_HELLO), "invalid"),
    (wire.pack(Hello("cubroker", (98, 99))), "unsupported"),
]


def test_a_bad_greeting_is_refused_and_the_connection_closed(broker: BrokerProcess) -> None:
    for hello, code in BAD:
        with connect(broker.directory) as connection:
            connection.send(hello)
            assert refusal(connection) == code


def test_the_newest_common_version_is_spoken_and_every_session_has_its_own_secret(broker: BrokerProcess) -> None:
    with connect(broker.directory) as one, connect(broker.directory) as other:
        first, second = greet(one, wire.pack(Hello("cubroker", (7, 1)))), greet(other)
    assert isinstance(first, Welcome)
    assert isinstance(second, Welcome)
    assert (first.version, first.driver) == (1, f"host:2@{64 << 20}")
    assert first.session != second.session
    assert first.secret != second.secret


def test_who_hangs_up_before_greeting_leaves_nothing(broker: BrokerProcess, client: RawClient) -> None:
    before = files(broker.pid)
    guests = [connect(broker.directory) for _ in range(10)]
    guests[0].send(b"")  # an empty packet looks like the end
    assert guests[0].recv(1) == b""
    guests[1].send(b"a refusal of this has no reader")
    for guest in guests:
        guest.close()
    all_closed(broker.pid, before)
    assert len(client.clients()) == 1


def test_a_broker_out_of_descriptors_waits_for_some_and_serves_on(broker: BrokerProcess, client: RawClient) -> None:
    limits = resource.prlimit(broker.pid, resource.RLIMIT_NOFILE)
    taken = {int(file.name) for file in open_files(broker.pid)}
    lowest_free = min(set(range(len(taken) + 1)) - taken)
    resource.prlimit(broker.pid, resource.RLIMIT_NOFILE, (lowest_free, limits[1]))
    with connect(broker.directory) as late:
        late.send(HELLO)
        eventually(lambda: "no new sessions for now" in broker.log(), "the broker to run out")
        assert client.devices()
        resource.prlimit(broker.pid, resource.RLIMIT_NOFILE, limits)
        assert isinstance(hear(late), Welcome)
    with session(broker.directory) as other:
        assert other.devices()
    assert broker.log().count("no new sessions for now") == 1


# -- a door alone ----------------------------------------------------------------------------------


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK) as listening:
        listening.bind(str(tmp_path / SESSION_SOCKET))
        listening.listen()
        yield listening


@asynccontextmanager
async def opened(
    listener: socket.socket, patience: float = admission.PATIENCE, obstacle: str = ""
) -> AsyncIterator[Listener]:
    class Pongs:
        def step(self, event: Event) -> None:
            assert isinstance(event, ClientGreeted)
            assert event.ping, "no client asks for a session in these tests"
            answer_ping(event, obstacle)

    queue = EventQueue()
    queue.attach(Pongs().step)
    door = Listener(listener, queue, patience)
    door.open()
    try:
        yield door
    finally:
        door.close()


def test_who_pings_hears_how_the_broker_fares_and_opens_no_session(broker: BrokerProcess, client: RawClient) -> None:
    for _ in range(3):
        with connect(broker.directory) as connection:
            assert greet(connection, PING) == Pong(1, "")
            assert connection.recv(1) == b""
    assert len(client.clients()) == 1
    with connect(broker.directory) as connection:
        welcome = greet(connection)
    assert isinstance(welcome, Welcome)
    assert welcome.session == 2


def test_who_pings_hears_why_nobody_new_is_served(listener: socket.socket, tmp_path: Path) -> None:
    async def test() -> None:
        with connect(tmp_path) as guest, connect(tmp_path) as gone:
            for each in (gone, guest):
                each.send(PING)
            gone.close()
            async with opened(listener, obstacle="it rains"):
                await until(lambda: readable(guest))
            assert hear(guest) == Pong(1, "it rains")

    run(test())


def test_the_kernel_may_have_no_memory_for_an_answer_for_a_while(
    listener: socket.socket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        async with opened(listener):
            for hello, expected in ((PING, Pong), (BAD[0][0], Refused)):
                with connect(tmp_path) as guest, monkeypatch.context() as patch:
                    guest.send(hello)
                    fail_nth(patch, socket.socket, "send", 1, OSError(errno.ENOBUFS, "no memory now"))
                    await until(lambda: readable(guest))
                    assert isinstance(hear(guest), expected)
                    assert guest.recv(1) == b""

    run(test())


def test_a_connection_that_the_kernel_never_has_memory_for_ends_unanswered(
    listener: socket.socket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.ENOBUFS, "no memory now")

    async def test() -> None:
        async with opened(listener):
            with connect(tmp_path) as guest, monkeypatch.context() as patch:
                guest.send(PING)
                patch.setattr(socket.socket, "send", refuse)
                patch.setattr("cubroker.server.transport.session.PAUSE", 0.0)
                await until(lambda: readable(guest))
                assert guest.recv(1) == b""

    run(test())


def refusal(connection: socket.socket) -> str:
    refused = hear(connection)
    assert isinstance(refused, Refused)
    assert connection.recv(1) == b""
    return refused.code


def readable(connection: socket.socket) -> bool:
    return bool(select.select([connection], [], [], 0)[0])


def test_a_peer_that_says_nothing_is_turned_away_in_time(listener: socket.socket, tmp_path: Path) -> None:
    async def test() -> None:
        with connect(tmp_path) as silent:
            async with opened(listener, patience=0.01):
                await until(lambda: readable(silent))
            assert refusal(silent) == "timeout"

    run(test())


def test_descriptors_that_a_system_delivers_are_not_kept(listener: socket.socket, tmp_path: Path) -> None:
    async def test() -> None:
        reading, writing = os.pipe()
        with connect(tmp_path) as guest, open(reading, "rb") as pipe:
            guest.sendmsg([b"junk"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [writing] * 50))])
            os.close(writing)
            async with opened(listener):
                await until(lambda: readable(guest))
            assert refusal(guest) == "invalid"
            assert pipe.read() == b""

    run(test())


def test_silent_peers_cannot_fill_the_door(
    listener: socket.socket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        guests = [connect(tmp_path) for _ in range(5)]
        async with opened(listener):
            await until(lambda: readable(guests[1]))
            assert not any(map(readable, guests[2:]))
        assert [refusal(guest) for guest in guests] == ["over_quota"] * 2 + ["unavailable"] * 3
        for guest in guests:
            guest.close()

    monkeypatch.setattr(admission, "MAX_PENDING", 3)
    run(test())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can connect as another user")
def test_a_user_who_fills_the_door_turns_out_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    def guest(uid: int) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        os.seteuid(uid)
        try:
            connection.connect(address)
        finally:
            os.seteuid(0)
        return connection

    async def test() -> None:
        guests = [guest(uid) for uid in (0, 4001, 4001, 4001, 4002, 4001)]
        async with opened(listening):
            await until(lambda: readable(guests[3]))
        codes = ["unavailable", "over_quota", "over_quota", "over_quota", "unavailable", "unavailable"]
        refused = [hear(guest) for guest in guests]
        assert [each.code for each in refused if isinstance(each, Refused)] == codes
        assert "user 4001 has 3 of the 3 connections that may be open without a greeting" in str(refused[1])
        for connection in guests:
            connection.close()

    monkeypatch.setattr(admission, "MAX_PENDING", 3)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK) as listening:
        listening.bind("")  # a name that every user can reach
        listening.listen()
        address = listening.getsockname()
        run(test())


def test_a_closing_door_turns_away_who_stands_in_it(listener: socket.socket, tmp_path: Path) -> None:
    async def test() -> None:
        with connect(tmp_path) as guest:
            async with opened(listener):
                before = files(os.getpid())
                await until(lambda: files(os.getpid()) - before)  # the broker's end of the connection
            assert refusal(guest) == "unavailable"

    run(test())


@pytest.mark.parametrize(("failure", "pauses"), [(errno.EMFILE, True), (errno.ENODATA, False)])
def test_a_peer_that_cannot_be_identified_is_turned_away(
    listener: socket.socket,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    failure: int,
    pauses: bool,
) -> None:
    def fail(_: socket.socket) -> Peer:
        raise OSError(failure, os.strerror(failure))

    async def test() -> None:
        with connect(tmp_path) as guest:
            guest.send(HELLO)
            async with opened(listener):
                await until(lambda: readable(guest))
            assert refusal(guest) == "unavailable"

    monkeypatch.setattr(admission, "identify", fail)
    with caplog.at_level(logging.ERROR):
        run(test())
    assert ("no new sessions" in caplog.text) == pauses


def test_a_peer_that_is_gone_already_leaves_nothing(
    listener: socket.socket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: socket.socket) -> Peer:
        raise ProcessLookupError

    async def test() -> None:
        with connect(tmp_path) as guest:
            async with opened(listener):
                await until(lambda: readable(guest))
            assert guest.recv(1) == b""

    monkeypatch.setattr(admission, "identify", fail)
    run(test())
