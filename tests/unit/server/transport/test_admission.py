"""How a session comes into the ledger, the journal and the store, or into none of them: a broker, its ledger and its
store in this process, clients at the other ends of socketpairs."""

from __future__ import annotations

import asyncio
import errno
import os
import select
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import cast

import pytest

from cubroker.driver import load
from cubroker.protocol import wire
from cubroker.protocol.errors import OverQuota, Unavailable
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
from cubroker.server.broker import Broker
from cubroker.server.devices.allocator import MulticastBinder
from cubroker.server.devices.mapped_memory import MappedChecks
from cubroker.server.event_queue import BatchReceived, ClientGreeted, EventQueue, GatewayStarted
from cubroker.server.ledger import Ledger
from cubroker.server.ledger.policy import Limits, Policy
from cubroker.server.ledger.tables import Tables
from cubroker.server.monitoring.observer import LedgerObserver
from cubroker.server.store import sd_notify
from cubroker.server.store.sd_notify import Manager
from cubroker.server.store.store import AsyncNotifier, Store
from cubroker.server.takeover import restore
from cubroker.server.transport.gateway_process import GatewayProcess
from cubroker.server.transport.session import SessionLog, recall
from cubroker.server.transport.unix_sockets import Peer
from tests.brokers import PATIENCE
from tests.faults import fail_nth
from tests.stores import ROOM, FdStore
from tests.unit.server.loops import Checks, Gateway, run, until


class Stage:
    """A broker without devices, whose ``fdstore`` has what it stores."""

    def __init__(
        self, fdstore: FdStore, above: FdStore | None = None, inherited: Mapping[str, Sequence[int]] | None = None
    ) -> None:
        self.fdstore = fdstore
        self.outbox = AsyncNotifier(Manager(str(fdstore.path), above=str(above.path) if above else None, limit=ROOM))
        self.store = Store(self.outbox, inherited or {})
        if not inherited:
            self.store.begin()
        self._items = dict(self.store.journal.items())
        items = self._items.items()
        self.ledger = Ledger.restore([], os.geteuid(), Limits(), Policy(), items, self.store.limit)
        self.gateway = Gateway()
        self.queue = EventQueue()
        self.broker = Broker(
            self.queue,
            self.ledger,
            {},
            cast(MulticastBinder, None),
            load("host:1"),
            cast(GatewayProcess, self.gateway),
            LedgerObserver(self.ledger),
            cast(MappedChecks, Checks()),
            self.store,
            SessionLog(self._items),
        )

    def resume(self) -> None:
        """Take over from an earlier broker."""
        restore(self.broker, self.ledger, {}, self.store, SessionLog(self._items), self._items)

    def close(self) -> None:
        """End the broker, and leave what is stored."""
        self.broker.close("the end")
        self.store.journal.close()
        self.outbox.close()

    def greets(self) -> socket.socket:
        """Return the client's end of a connection that was let in, or was not."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        theirs.settimeout(PATIENCE)
        pidfd = os.pidfd_open(os.getpid())
        peer = Peer(os.getpid(), os.geteuid(), os.getegid(), pidfd, verified=True)
        self.queue.put(ClientGreeted(ours, peer, 1))
        return theirs

    def ask(self, welcome: Welcome, body: Request | None = None, number: int = 1) -> Answer:
        """Return the answer to a request of a session's, which comes at once."""
        self.gateway.sent.clear()
        frame = wire.pack(Envelope(welcome.secret, number, 1, body or ListClients()))
        self.queue.put(BatchReceived([(b"id", frame)]))
        ((_, answer),) = self.gateway.sent
        return wire.unpack(answer, Answer)

    def stored(self) -> dict[str, int]:
        """How many descriptors of each name the fdstore has."""
        self.fdstore.settle()
        return {name: len(descriptors) for name, descriptors in self.fdstore.stored.items()}


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
def attended(fdstore: FdStore) -> Iterator[tuple[Stage, socket.socket, Welcome]]:
    """A broker with one client, which was welcomed, for the length of a block."""
    stage = Stage(fdstore)
    with stage.greets() as client:
        welcome = hears(client)
        assert isinstance(welcome, Welcome)
        yield stage, client, welcome
    stage.close()


def failing(times: int, original: Callable[..., object], error: Exception | None = None) -> Callable[..., object]:
    """Return a function that fails so many times, by default of a mistake, and is ``original`` after that."""
    left = iter(range(times))

    def fail(*arguments: object) -> object:
        if next(left, None) is not None:
            raise error or ZeroDivisionError("a mistake")
        return original(*arguments)

    return fail


@pytest.mark.parametrize(
    ("where", "what", "times"),
    [(Tables, "user", 1), (Ledger, "recover", 1), (Ledger, "recover", 2)],
    ids=["at all", "as a whole", "and does not let go"],
)
def test_a_session_that_the_ledger_does_not_take_is_turned_away_and_leaves_nothing_behind(
    fdstore: FdStore, monkeypatch: pytest.MonkeyPatch, where: object, what: str, times: int
) -> None:
    async def test() -> None:
        stage = Stage(fdstore)
        with stage.greets() as before:
            assert isinstance(hears(before), Welcome)
            stored, journal = stage.stored(), fdstore.journal()
            with monkeypatch.context() as broken:
                broken.setattr(where, what, failing(times, getattr(where, what)))
                client = stage.greets()
            with client:
                refused = hears(client)
                assert isinstance(refused, Refused)
                assert (refused.code, "a mistake" in refused.message) == ("internal", True)
                assert client.recv(1) == b""
            assert stage.stored() == stored
            assert fdstore.journal().keys() == journal.keys()
            with stage.greets() as after:
                assert isinstance(hears(after), Welcome)
                assert len(stage.ledger.sessions()) == 2
                stage.ledger.check()
        stage.close()

    run(test())


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sd_notify, "PATIENCE", 1e6)


@pytest.mark.usefixtures("unhurried")
def test_while_whoever_keeps_the_store_does_not_read_sessions_are_served_and_new_ones_wait(
    fdstore: FdStore,
) -> None:
    async def test() -> None:
        with attended(fdstore) as (stage, _, welcome), stage.greets() as leaver:
            assert isinstance(hears(leaver), Welcome)
            with fdstore.deaf(), stage.greets() as impatient:
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
            # The leaver's removal was posted after the newcomer, and may wait for room once more.
            await until(lambda: stage.stored() == {"ledger": 1, "s1": 2, "s4": 2})
            newcomer.close()

    run(test())


@pytest.mark.usefixtures("unhurried")
def test_a_session_that_waits_to_be_welcomed_is_told_of_nothing_else_before(fdstore: FdStore) -> None:
    async def test() -> None:
        with attended(fdstore) as (stage, client, welcome):
            with fdstore.deaf():
                newcomer = stage.greets()
                stage.queue.put(GatewayStarted())
                for number, on in enumerate((True, False, True), start=1):
                    assert isinstance(stage.ask(welcome, Drain(on), number).body, Done)
                assert GatewayChanged() in told(client)
            await until(lambda: speaks(newcomer))
            assert isinstance(hears(newcomer), Welcome)
            assert Draining(stage.ledger.drain_reason) in told(newcomer)
            newcomer.close()

    run(test())


def test_a_client_that_could_not_be_welcomed_yet_is_so_by_the_next_broker(
    fdstore: FdStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def short(*_: object) -> int:
        raise OSError(errno.ENOBUFS, "no memory now")

    async def test() -> None:
        with attended(fdstore) as (stage, _, _):
            with monkeypatch.context() as patch:
                patch.setattr(socket.socket, "send", short)
                newcomer = stage.greets()
                await until(lambda: not stage.broker.sessions.unwelcomed)
                await asyncio.sleep(0)
                stage.queue.put(GatewayStarted())
            remembered, _ = recall(dict(stage.store.journal.items()), [1, 2])
            assert [remembered[number].welcomed for number in (1, 2)] == [True, False]
            await until(lambda: speaks(newcomer))
            assert isinstance(hears(newcomer), Welcome)
            newcomer.close()

    run(test())


@pytest.mark.usefixtures("unhurried")
@pytest.mark.parametrize("error", [None, Unavailable("it is gone"), OSError(errno.EMFILE, "no descriptor is left")])
def test_a_client_whose_session_the_keeper_alone_has_got_is_welcomed_once_the_manager_above_has_it_or_turned_away(
    fdstore: FdStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    above = FdStore(tmp_path / "above")
    clients: list[socket.socket] = []

    async def killed() -> None:
        stage = Stage(fdstore, above)
        above.settle()
        heard.enter_context(above.deaf())
        clients.append(stage.greets())
        assert stage.stored() == {"ledger": 1, "s1": 2}
        stage.close()

    async def following() -> None:
        stage = Stage(fdstore, above, {name: [*map(os.dup, each)] for name, each in fdstore.stored.items()})
        if error:
            monkeypatch.setattr(AsyncNotifier, "store", failing(1, AsyncNotifier.store, error))
        stage.resume()
        stage.queue.put(GatewayStarted())
        (client,) = clients
        assert speaks(client) == bool(error)
        heard.close()
        await until(lambda: speaks(client))
        assert isinstance(hears(client), Refused if error else Welcome)
        above.settle()
        assert len(above.stored.get("s1", ())) == (0 if error else 2)
        client.close()
        stage.close()

    with closing(above), ExitStack() as heard:
        run(killed())
        run(following())


@pytest.mark.parametrize("admitted", [False, True], ids=["at once", "by the ledger"])
def test_who_is_turned_away_hears_why_once_the_kernel_has_memory_for_it(
    fdstore: FdStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, admitted: bool
) -> None:
    async def test() -> None:
        with attended(fdstore) as (stage, _, _):
            stored = stage.stored()
            if admitted:
                monkeypatch.setattr(Tables, "user", failing(1, Tables.user))
            else:
                monkeypatch.setattr(Ledger, "admission_error", lambda *_, **__: OverQuota("too many sessions"))
            fail_nth(monkeypatch, socket.socket, "send", 1, OSError(errno.ENOBUFS, "no memory now"))
            with stage.greets() as newcomer:
                assert not speaks(newcomer)
                newcomer.send(b"a session that is turned away is not heard")
                await until(lambda: speaks(newcomer))
                refused = hears(newcomer)
                assert isinstance(refused, Refused)
                assert refused.code == ("internal" if admitted else "over_quota")
                assert newcomer.recv(1) == b""
            assert stage.stored() == stored
        assert not [each for each in caplog.records if each.name == "asyncio"]

    run(test())


def test_a_session_that_the_store_does_not_take_in_time_is_turned_away_and_the_others_are_served(
    fdstore: FdStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        with attended(fdstore) as (stage, _, welcome):
            with fdstore.deaf():
                monkeypatch.setattr(sd_notify, "PATIENCE", 0.01)
                with stage.greets() as newcomer:
                    await until(lambda: speaks(newcomer))
                    refused = hears(newcomer)
                    assert isinstance(refused, Refused)
                    assert refused.code == "unavailable"
                    assert "did not take FDSTORE=1 within 0.01 s" in refused.message
                    assert newcomer.recv(1) == b""
                assert isinstance(stage.ask(welcome).body, Clients)
            assert stage.stored() == {"ledger": 1, "s1": 2}
            assert [each.id for each in stage.ledger.sessions()] == [1]
            assert not any(b"2" in key for key in fdstore.journal())

    run(test())
