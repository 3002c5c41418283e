from __future__ import annotations

import asyncio
import logging
import os
import socket
from contextlib import closing
from pathlib import Path
from typing import cast

import pytest

from cubroker.driver import load
from cubroker.protocol import wire
from cubroker.protocol.layout import Layout
from cubroker.protocol.messages import (
    DESCRIPTOR,
    VERSIONS,
    Answer,
    Attach,
    Attached,
    Close,
    Create,
    Digests,
    Done,
    Envelope,
    Failed,
    GatewayChanged,
    Greeting,
    ListDevices,
    Request,
    Seal,
    SealDigested,
    Welcome,
)
from cubroker.protocol.wire import authentication
from cubroker.server import broker as server_broker
from cubroker.server.broker import Broker
from cubroker.server.devices.allocator import DeviceAllocator, MulticastBinder
from cubroker.server.devices.mapped_memory import MappedChecks
from cubroker.server.event_queue import BatchReceived, ClientGreeted, EventQueue
from cubroker.server.ledger import Budget, HeldMemory, Ledger, snapshot
from cubroker.server.ledger.events import (
    Allocate,
    Allocated,
    Effect,
    ForgetSession,
    Free,
    Freed,
    LedgerEvent,
    Notify,
    ProcessExited,
    RequestReceived,
    Respond,
    SessionOpened,
)
from cubroker.server.ledger.snapshot import Audit
from cubroker.server.monitoring.observer import EventCounter, LedgerObserver
from cubroker.server.store.sd_notify import Manager
from cubroker.server.store.store import AsyncNotifier, Store
from cubroker.server.transport import framing
from cubroker.server.transport.gateway_process import GatewayProcess
from cubroker.server.transport.requests import IncomingRequests
from cubroker.server.transport.session import SessionLog
from cubroker.server.transport.unix_sockets import Peer
from tests.brokers import BrokerProcess, eventually, serving
from tests.faults import fail_nth
from tests.stores import ROOM, FdStore
from tests.unit.server.clients import RawClient, session
from tests.unit.server.loops import Checks, Gateway, run, until

MIB = 1 << 20


def used(client: RawClient) -> int:
    return sum(device.allocated + device.promised for device in client.devices())


def test_memory_is_counted_in_whole_blocks_and_comes_back(broker: BrokerProcess, client: RawClient) -> None:
    created = client.create("pool", Layout.pack([("x", "U8", (3 * MIB,))]))
    assert used(client) == 4 * MIB
    client.ask(Close(created.lease), Done)
    eventually(lambda: used(client) == 0, "the discarded draft's memory")


def test_a_wait_ends_with_a_publication_or_with_its_time(broker: BrokerProcess, client: RawClient) -> None:
    soon, never = client.send(Attach("soon", 0, None, 60.0)), client.send(Attach("never", 0, None, 0.05))
    timed_out = client.answer(never)
    assert isinstance(timed_out, Failed)
    assert timed_out.code == "timeout"
    with session(broker.directory) as writer:
        writer.publish("soon")
        assert isinstance(client.answer(soon), Attached)


def test_what_does_not_fit_is_refused_and_costs_nothing() -> None:
    with serving("host:1@8MiB", "100%") as broker, session(broker.directory) as client:
        client.publish("one", Layout.pack([("x", "U8", (6 * MIB,))]))
        device = client.devices()[0].uuid
        too_much = Create("two", Layout.pack([("x", "U8", (6 * MIB,))]).encode(), (device,), "ipc", 0.0, None)
        assert client.ask(too_much, Failed).code == "over_budget"
        assert used(client) == 6 * MIB


# -- without processes -----------------------------------------------------------------------------


class Memory:
    """Device memory that only notes what it is asked for."""

    def __init__(self) -> None:
        self.asked: list[Allocate | Free] = []

    def submit(self, request: Allocate | Free) -> None:
        self.asked.append(request)


WAITS = 6
"""The one request that is not answered at once."""


class Idle:
    """A ledger that nobody holds anything of."""

    last_session = 0
    drain_reason = holders_text = ""

    def held_memory(self) -> tuple[HeldMemory, ...]:
        """It has none."""
        return ()

    def shutdown_loses(self, *, with_store: bool) -> bool:
        """It lent nothing."""
        return False

    def last_words(self, session: int) -> str:
        """It has nothing to say."""
        return ""


class Mistaken(Idle):
    """A ledger that fails at whatever is asked, and goes on; of some events it says what cannot be carried out."""

    def admission_error(self, uid: int, *, verified: bool) -> None:
        """Everybody may come in."""

    def holder(self, session: int) -> None:
        """It has no records."""

    def leased_pool(self, session: int, lease: int) -> str:
        """It has no leases."""
        return ""

    def recover(self) -> list[Effect]:
        """Nothing came of what failed."""
        return []

    def audit(self) -> Audit:
        """It has no books."""
        return Audit((), (), "")

    def handle(self, event: LedgerEvent, now: float) -> list[Effect]:
        match event:
            case SessionOpened():
                return []
            case RequestReceived(request=number) if number == WAITS:
                return []
            case RequestReceived():
                raise ZeroDivisionError("a mistake")
            case ProcessExited():
                return [ForgetSession(event.session)]
            case Freed(ticket):
                return [
                    Notify(7, GatewayChanged()),  # there is no such session
                    Respond(1, ticket, Failed("invalid", "\ud800")),  # no text
                    Free(ticket, "device"),
                ]
        raise KeyError(event)


class Obedient(Idle):
    """A ledger that wants the same whatever happens."""

    def __init__(self, effects: list[Effect]) -> None:
        self._effects = effects

    def handle(self, _: LedgerEvent, now: float) -> list[Effect]:
        return self._effects


class Counter(EventCounter):
    """Notes the codes of what was answered."""

    def __init__(self) -> None:
        self.answered: list[tuple[str, str]] = []

    def request_answered(self, request: str, seconds: float, code: str = "") -> None:
        self.answered.append((request, code))


class Stage:
    """A broker with one session over a socketpair, on a ledger that fails."""

    def __init__(self) -> None:
        ours, self.client = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        self.gateway = Gateway()
        self.sent = self.gateway.sent
        self.memory = Memory()
        memory = {"device": cast(DeviceAllocator, self.memory)}
        self.queue = EventQueue()
        self.counter = Counter()
        ledger = cast(Ledger, Mistaken())
        self.broker = Broker(
            self.queue,
            ledger,
            memory,
            cast(MulticastBinder, None),
            load("host:1"),
            cast(GatewayProcess, self.gateway),
            LedgerObserver(ledger, self.counter),
            cast(MappedChecks, Checks()),
        )
        self.queue.put(ClientGreeted(ours, Peer(os.getpid(), 0, 0, os.pidfd_open(os.getpid())), VERSIONS[-1]))
        welcome = wire.unpack(self.client.recv(1000), Greeting)
        assert isinstance(welcome, Welcome)
        self.authentication = authentication(welcome.version, welcome.session, welcome.secret)

    def ask(self, number: int) -> list[Answer]:
        self.sent.clear()
        envelope = Envelope(self.authentication.secret, number, 1, ListDevices())
        self.queue.put(BatchReceived([(b"id", self.authentication.request(envelope))]))
        return self.answers()

    def answers(self) -> list[Answer]:
        frames = [frame for batch in self.sent for _, frame in framing.pairs(batch)]
        return [self.authentication.read(frame) or wire.unpack(frame, Answer) for frame in frames]


def test_an_effect_that_fails_keeps_none_of_the_others_from_being_carried_out(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        stage = Stage()
        stage.queue.put(Freed(5))  # nobody waits for this answer
        assert stage.memory.asked == [Free(5, "device")]
        assert stage.sent == []
        assert stage.ask(WAITS) == []
        stage.queue.put(Freed(WAITS))
        (answer,) = stage.answers()
        assert isinstance(answer.body, Failed)
        assert (answer.id, answer.body.code) == (WAITS, "internal")
        assert "surrogates not allowed" in answer.body.message
        stage.broker.close("the end")
        stage.client.close()

    with caplog.at_level(logging.ERROR):
        run(test())
    assert caplog.text.count("the broker failed at Notify") == 2
    assert caplog.text.count("the broker failed at Respond") == 2


@pytest.mark.parametrize(
    ("body", "ends"),
    [(Close(1), True), (Seal(1), True), (SealDigested(1, Digests("x", ())), True), (ListDevices(), False)],
)
def test_processes_are_checked_soon_after_a_request_that_may_end_a_lease(
    monkeypatch: pytest.MonkeyPatch, body: Request, ends: bool
) -> None:
    async def test() -> None:
        stage, checks = Stage(), Checks()
        monkeypatch.setattr(Mistaken, "handle", lambda *_: [])
        monkeypatch.setattr(stage.broker, "_checks", checks)
        stage.queue.put(RequestReceived(1, 1, body))
        assert checks.wanted == ends
        stage.broker.close("the end")
        stage.client.close()

    run(test())


class Scarce(dict[int, dict[int, int]]):
    """A table that there is no memory to grow, once."""

    short = True

    def __setitem__(self, key: int, value: dict[int, int]) -> None:
        if self.short:
            self.short = False
            raise MemoryError
        super().__setitem__(key, value)


def test_the_ledger_hears_of_memory_when_its_descriptors_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases on it would be granted before, and get no descriptors."""

    async def test() -> None:
        stage, heard, notes = Stage(), list[LedgerEvent](), Scarce()
        monkeypatch.setattr(server_broker, "RETRY", 0.0)
        monkeypatch.setattr(Mistaken, "handle", lambda ledger, event, _: heard.append(event) or [])
        monkeypatch.setattr(stage.broker, "_descriptors", notes)
        stage.queue.put(allocated := Allocated(5, (b"",), (7,)))
        assert not heard
        await until(lambda: heard)
        assert heard == [allocated]
        assert notes == {5: {0: 7}}
        stage.broker.close("the end")
        stage.client.close()

    run(test())


def test_the_ledger_hears_of_the_end_of_a_process_without_memory_for_what_else_comes_of_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        stage = Stage()
        fail_nth(monkeypatch, IncomingRequests, "hang_up", 1, MemoryError())
        stage.queue.put(ProcessExited(1))
        assert not stage.broker.sessions.by_number
        stage.broker.close("the end")
        stage.client.close()

    with caplog.at_level(logging.ERROR):
        run(test())
    assert "the broker failed at taking note of ProcessExited(session=1)" in caplog.text


def test_descriptors_are_known_for_as_long_as_they_are_open(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        stage = Stage()
        known = stage.broker._descriptors
        for effects in ([], [Free(1, "device")], []):
            monkeypatch.setattr(stage.broker, "_ledger", Obedient(effects))
            stage.queue.put(Allocated(1, (DESCRIPTOR,), (77,)))
            assert known == ({} if effects else {1: {0: 77}})
        stage.queue.put(Freed(1))  # as it is told of a free that overtook the outcome of its allocation
        assert known == {}
        stage.broker.close("the end")
        stage.client.close()

    run(test())


def test_what_comes_after_the_end_is_for_the_next_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        stage = Stage()
        stage.broker.close("the end")
        monkeypatch.setattr(stage.broker, "_ledger", Obedient([Free(1, "device")]))
        stage.queue.put(Allocated(1, (DESCRIPTOR,), (77,)))
        assert stage.ask(1) == []
        assert stage.memory.asked == []
        stage.client.close()

    run(test())


def test_a_mistake_in_the_ledger_is_logged_answered_and_survived(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        stage = Stage()
        for number in (1, 2):
            (answer,) = stage.ask(number)
            assert isinstance(answer.body, Failed)
            assert (answer.id, answer.body.code) == (number, "internal")
            assert answer.body.message.startswith(
                "the broker itself failed at this request: ZeroDivisionError('a mistake');"
            )
        assert stage.counter.answered == [("ListDevices", "internal")] * 2, "a request that failed was answered"
        stage.queue.put(RequestReceived(1, 99, ListDevices()))  # never admitted, so there is nobody to tell
        stage.queue.put(RequestReceived(2, 1, ListDevices()))
        assert len(stage.sent) == 1
        stage.queue.put(ProcessExited(1))
        assert stage.ask(3) == [], "nobody is there who could know that an answer is the broker's"
        stage.broker.close("the end")
        stage.client.close()

    with caplog.at_level(logging.ERROR):
        run(test())
    assert "the broker failed at RequestReceived(session=1, request=1, body=ListDevices()" in caplog.text
    assert caplog.text.count("Traceback") == 4  # one for each of those events


def test_what_there_is_no_memory_to_write_down_is_written_down_before_anyone_hears_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        with closing(FdStore(tmp_path / "notify")):
            store = Store(AsyncNotifier(Manager(str(tmp_path / "notify"), limit=ROOM)), {})
            queue, ledger = EventQueue(), Ledger([Budget(0, "HOST-0", "device", 1, 1)], 0, store=ROOM)
            nothing, gateway = cast(MulticastBinder, None), cast(GatewayProcess, Gateway())
            seen, checks = LedgerObserver(ledger), cast(MappedChecks, Checks())
            broker = Broker(queue, ledger, {}, nothing, load("host:1"), gateway, seen, checks, store, SessionLog())
            ours, client = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ours.setblocking(False)
            client.setblocking(False)
            fail_nth(monkeypatch, snapshot, "encode", 1, MemoryError())
            queue.put(ClientGreeted(ours, Peer(os.getpid(), 0, 0, os.pidfd_open(os.getpid())), VERSIONS[-1]))
            assert not dict(store.journal.items())
            with pytest.raises(BlockingIOError):
                client.recv(1000)
            assert await asyncio.get_running_loop().sock_recv(client, 1000), "the welcome"
            written = {key: value for key, value in store.journal.items() if key.startswith(snapshot.PREFIX)}
            assert written == ledger.snapshot()
            broker.close("the end")
            client.close()
            store.journal.close()
            store.notifier.close()

    with caplog.at_level(logging.ERROR):
        run(test())
    assert "cannot write to the journal, so requests wait: " in caplog.text
