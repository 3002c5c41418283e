"""How a session comes into the ledger, the journal and the store, or into none of them: a broker, its ledger and its
store in this process, clients at the other ends of socketpairs."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import pytest

from cubroker.driver import load
from cubroker.protocol import wire
from cubroker.protocol.messages import (
    Answer,
    Clients,
    Done,
    Drain,
    Draining,
    Envelope,
    GatewayChanged,
    Greeting,
    ListClients,
    Notice,
    Refused,
    Request,
    Welcome,
)
from cubroker.server.answers import Frame
from cubroker.server.assembly import Assembly
from cubroker.server.broker import Broker
from cubroker.server.ledger import Ledger, drafts, sessions
from cubroker.server.peers import Peer
from cubroker.server.scribe import Scribe
from cubroker.server.store import notify
from cubroker.server.store.notify import Manager
from cubroker.server.store.outbox import Outbox
from cubroker.server.store.store import Store
from tests.brokers import PATIENCE
from tests.server.loops import run, until
from tests.stores import ROOM, Warehouse


class Stage:
    """A broker without devices, whose ``warehouse`` has what it stores."""

    def __init__(self, warehouse: Warehouse) -> None:
        self.warehouse = warehouse
        self.outbox = Outbox(Manager(str(warehouse.path), limit=ROOM))
        self.store = Store(self.outbox, {})
        self.store.begin()
        self.ledger = Ledger([], os.geteuid(), store=self.store.limit)
        self.answers: list[Frame] = []
        self.broker = Broker(
            self.ledger,
            {},
            cast(Assembly, None),
            load("host:1"),
            self.answers.extend,
            store=self.store,
            scribe=Scribe(),
        )

    def close(self) -> None:
        """End the broker, and leave what is stored."""
        self.broker.close("the end")
        self.store.close()
        self.outbox.close()

    def greets(self) -> socket.socket:
        """Return the client's end of a connection that was let in, or was not."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        theirs.settimeout(PATIENCE)
        pidfd = os.pidfd_open(os.getpid())
        self.broker.admit(ours, Peer(os.getpid(), os.geteuid(), os.getegid(), pidfd, verified=True), 1)
        return theirs

    def ask(self, welcome: Welcome, body: Request | None = None, number: int = 1) -> Answer:
        """Return the answer to a request of a session's, which comes at once."""
        self.answers.clear()
        self.broker.receive([b"id", wire.pack(Envelope(welcome.secret, number, 1, body or ListClients()))])
        _, answer = self.answers
        assert isinstance(answer, bytes)
        return wire.unpack(answer, Answer)

    def stored(self) -> dict[str, int]:
        """How many descriptors of each name the warehouse has."""
        self.warehouse.settle()
        return {name: len(descriptors) for name, descriptors in self.warehouse.stored.items()}


@pytest.fixture
def warehouse(tmp_path: Path) -> Iterator[Warehouse]:
    house = Warehouse(tmp_path / "notify")
    yield house
    house.close()


def hears(client: socket.socket) -> Greeting:
    return wire.unpack(client.recv(4096), Greeting)


def told(client: socket.socket) -> list[Notice]:
    """The notices that are there to be read."""
    notices: list[Notice] = []
    while speaks(client):
        notices.append(wire.unpack(client.recv(4096), Notice))
    return notices


def speaks(client: socket.socket) -> bool:
    """Whether the broker has said something, or hung up."""
    return bool(select.select([client], [], [], 0)[0])


@contextmanager
def attended(warehouse: Warehouse) -> Iterator[tuple[Stage, socket.socket, Welcome]]:
    """A broker with one client, which was welcomed, for the length of a block."""
    stage = Stage(warehouse)
    with stage.greets() as client:
        welcome = hears(client)
        assert isinstance(welcome, Welcome)
        yield stage, client, welcome
    stage.close()


def failing(times: int) -> Callable[..., None]:
    """Return what fails so many times, and does nothing after that."""
    left = iter(range(times))

    def fail(*_: object) -> None:
        if next(left, None) is not None:
            raise ZeroDivisionError("a mistake")

    return fail


@pytest.mark.parametrize(
    ("where", "what", "times"),
    [(sessions, "joined", 1), (drafts, "settle", 1), (drafts, "settle", 2)],
    ids=["at all", "as a whole", "and does not let go"],
)
def test_a_session_that_the_ledger_does_not_take_is_turned_away_and_leaves_nothing_behind(
    warehouse: Warehouse, monkeypatch: pytest.MonkeyPatch, where: object, what: str, times: int
) -> None:
    async def test() -> None:
        stage = Stage(warehouse)
        with stage.greets() as before:
            assert isinstance(hears(before), Welcome)
            stored, journal = stage.stored(), warehouse.journal()
            with monkeypatch.context() as broken:
                broken.setattr(where, what, failing(times))
                client = stage.greets()
            with client:
                refused = hears(client)
                assert isinstance(refused, Refused)
                assert (refused.code, "a mistake" in refused.message) == ("internal", True)
                assert client.recv(1) == b""
            assert stage.stored() == stored
            assert warehouse.journal().keys() == journal.keys()
            with stage.greets() as after:
                assert isinstance(hears(after), Welcome)
                assert len(stage.ledger.sessions()) == 2
                stage.ledger.check()
        stage.close()

    run(test())


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notify, "PATIENCE", 1e6)


@pytest.mark.usefixtures("unhurried")
def test_while_whoever_keeps_the_store_does_not_read_sessions_are_served_and_new_ones_wait(
    warehouse: Warehouse,
) -> None:
    async def test() -> None:
        with attended(warehouse) as (stage, _, welcome), stage.greets() as leaver:
            assert isinstance(hears(leaver), Welcome)
            with warehouse.deaf(), stage.greets() as impatient:
                newcomer = stage.greets()
                leaver.close()
                impatient.close()
                await until(lambda: len(stage.ledger.sessions()) == 2)
                answer = stage.ask(welcome)
                assert isinstance(answer.body, Clients)
                assert [each.session for each in answer.body.clients] == [1, 4]
                assert not speaks(newcomer)
            await until(lambda: speaks(newcomer))
            assert isinstance(hears(newcomer), Welcome)
            assert stage.stored() == {"ledger": 1, "s1": 2, "s4": 2}
            newcomer.close()

    run(test())


@pytest.mark.usefixtures("unhurried")
def test_a_session_that_waits_to_be_welcomed_is_told_of_nothing_else_before(warehouse: Warehouse) -> None:
    async def test() -> None:
        with attended(warehouse) as (stage, client, welcome):
            with warehouse.deaf():
                newcomer = stage.greets()
                stage.broker.gateway_changed()
                for number, on in enumerate((True, False, True), start=1):
                    assert isinstance(stage.ask(welcome, Drain(on), number).body, Done)
                assert GatewayChanged() in told(client)
            await until(lambda: speaks(newcomer))
            assert isinstance(hears(newcomer), Welcome)
            assert Draining(stage.broker.draining) in told(newcomer)
            newcomer.close()

    run(test())


def test_a_session_that_the_store_does_not_take_in_time_is_turned_away_and_the_others_are_served(
    warehouse: Warehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        with attended(warehouse) as (stage, _, welcome):
            with warehouse.deaf():
                monkeypatch.setattr(notify, "PATIENCE", 0.01)
                with stage.greets() as newcomer:
                    await until(lambda: speaks(newcomer))
                    refused = hears(newcomer)
                    assert isinstance(refused, Refused)
                    assert refused.code == "unavailable"
                    assert "did not take FDSTORE=1 within 0.01 s" in refused.message
                    assert newcomer.recv(1) == b""
                assert isinstance(stage.ask(welcome).body, Clients)
            assert stage.stored() == {"ledger": 1, "s1": 2}
            assert [each.session for each in stage.ledger.sessions()] == [1]
            assert not any(b"2" in key for key in warehouse.journal())

    run(test())
