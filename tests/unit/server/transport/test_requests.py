from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import AsyncIterator, Generator, Sequence
from contextlib import asynccontextmanager

import msgspec
import pytest

from cubroker.protocol import layout as layouts
from cubroker.protocol import wire
from cubroker.protocol.errors import Invalid
from cubroker.protocol.layout import Layout, Outline
from cubroker.protocol.messages import (
    VERSIONS,
    Answer,
    Attach,
    Attached,
    Cancel,
    Clients,
    Close,
    Create,
    Describe,
    Description,
    DeviceList,
    Done,
    Envelope,
    Failed,
    ListClients,
    ListDevices,
    ListDigests,
    ListPools,
    Look,
    Pools,
    ReplicaHandles,
    Reply,
    Request,
    Retire,
    Retirement,
    Seal,
    Sealed,
    Where,
)
from cubroker.server.event_queue import BatchReceived, Event, EventQueue
from cubroker.server.ledger.events import RequestReceived, Respond
from cubroker.server.transport import framing, reply_cache, requests
from cubroker.server.transport.requests import LARGE as LARGE_LEASE
from cubroker.server.transport.requests import IncomingRequests, head
from cubroker.server.transport.session import SessionConnection, SessionLog
from cubroker.server.transport.unix_sockets import Peer, RejectionLog
from tests.brokers import PATIENCE, BrokerProcess
from tests.unit.protocol.samples import INFO
from tests.unit.server.clients import LAYOUT, RawClient, session
from tests.unit.server.loops import Gateway, run, until
from tests.unit.server.processes import resident

LARGE = Layout.pack([(f"layer.{number}.weight", "BF16", (64, 64)) for number in range(4000)])


def create(layout: bytes) -> Create:
    return Create("pool", layout, ("HOST-1",), "ipc", 0.0, None)


def test_the_same_id_is_done_once_and_answered_every_time(broker: BrokerProcess, client: RawClient) -> None:
    client.publish("pool")
    number = client.send(Attach("pool", 0, None, 0.0))
    for _ in range(5):
        client.send(Attach("pool", 0, None, 0.0), number)
    first, *again = [client.receive() for _ in range(6)]
    assert again == [first] * 5
    (known,) = client.clients()
    assert len(known.leases) == 1


def test_a_pipeline_of_requests_is_answered_whole(broker: BrokerProcess, client: RawClient) -> None:
    numbers = [client.send(ListDevices()) for _ in range(600)]
    expected = client.answer(numbers[0])
    assert all(client.answer(number) == expected for number in numbers[1:])


def test_a_layout_that_makes_no_sense_is_refused(broker: BrokerProcess, client: RawClient) -> None:
    device = client.devices()[0].uuid
    for size in (0, 100, 1 << 16, 8 << 20):
        refused = client.ask(Create("pool", bytes(size), (device,), "ipc", 0.0, None), Failed)
        assert refused.code == "invalid"


def test_a_large_layout_is_served_like_a_small_one(broker: BrokerProcess, client: RawClient) -> None:
    assert len(LARGE.encode()) > LARGE_LEASE
    assert client.publish("pool", LARGE) == 1
    assert client.attach("pool").layout == LARGE.encode()
    device = client.devices()[0].uuid
    instead = Create("pool", LARGE.encode(), (device,), "ipc", 0.0, Where(device))
    assert client.ask(instead, Attached).layout == LARGE.encode(), "this client asks once"


def test_a_session_hears_what_is_wrong_with_its_request(broker: BrokerProcess, client: RawClient) -> None:
    client.dealer.send(client.sign(wire.pack([client.secret, 7, 1, ["Attach", "", 0, None, 0.0]])))
    reply = client.receive()
    assert reply.id == 7
    assert isinstance(reply.body, Failed)
    assert reply.body.code == "invalid"


def insist(client: RawClient, body: Request, number: int | None = None) -> Reply:
    """Ask until there is an answer, which may be dropped on its way while there are too many."""
    while True:
        number = client.send(body, number)
        while client.dealer.poll(200):
            data = client.dealer.recv()
            if data and (answer := client.authentication.read(data)) and answer.id == number:
                return answer.body


@pytest.mark.slow
def test_many_who_wait_for_one_large_layout_share_it(broker: BrokerProcess, client: RawClient) -> None:
    layout = Layout.pack([(f"{number:0100d}", "U8", (1,)) for number in range(20_000)])
    data, attach = layout.encode(), Attach("pool", 0, None, 60.0)
    with session(broker.directory) as writer:
        lease, before = writer.create("pool", layout).lease, resident(broker.pid)
        waiting = [client.send(attach) for _ in range(60)]
        assert not client.clients()[0].leases  # by now they wait
        assert insist(writer, Seal(lease)) == Sealed(1)
        clients = insist(writer, ListClients())
        assert isinstance(clients, Clients)
        assert len(clients.clients[0].leases) == len(waiting)
        assert resident(broker.pid) - before < len(waiting) * len(data) // 2
    for number in (waiting[0], waiting[-1]):
        attached = insist(client, attach, number)
        assert isinstance(attached, Attached)
        assert attached.layout == data


# -- without a broker ------------------------------------------------------------------------------


def framed(session: SessionConnection, number: int, body: Request, oldest: int = 1) -> bytes:
    """A request of a session as it travels."""
    client = session.authentication
    return client.request(Envelope(client.secret, number, oldest, body))


class Desk:
    """Requests with one session; what was asked of the ledger, and what was sent to the gateway."""

    def __init__(self, log: SessionLog | None = None, version: int = VERSIONS[-1]) -> None:
        ours, self.client = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        peer = Peer(os.getpid(), 0, 0, os.pidfd_open(os.getpid()))
        self.queue = EventQueue()
        self.session = SessionConnection(1, ours, peer, self.queue, RejectionLog(), version)
        self.asked: list[RequestReceived] = []
        self.gateway = Gateway()
        self.sent = self.gateway.sent
        self.answer: Reply | None = None  # what the ledger says to everything, if that is at once
        self.requests = IncomingRequests(self.queue, asyncio.get_running_loop(), log)
        self.requests.enter(self.session)
        self.queue.attach(self.step)

    def step(self, event: Event) -> None:
        """Take a batch or a turn, as the broker does."""
        if isinstance(event, BatchReceived) and not self.gateway.behind:
            self.requests.turns.resume()
        incoming = self.requests
        for outcome in incoming.decode(event.requests) if isinstance(event, BatchReceived) else incoming.turns.step():
            if isinstance(outcome, Respond):
                self.respond(outcome.request, outcome.body)
            else:
                self.asked.append(outcome)
                if self.answer:
                    self.respond(outcome.request, self.answer)
        self.flush()

    def receive(self, frames: Sequence[bytes]) -> None:
        self.queue.put(BatchReceived(framing.pairs(frames)))

    def respond(self, number: int, body: Reply) -> None:
        self.requests.respond(self.session, number, body)

    def flush(self) -> None:
        for batch in self.requests.replies():
            if self.gateway.send(batch):
                self.requests.turns.pause()

    def frame(self, number: int, body: Request, oldest: int = 1) -> bytes:
        return framed(self.session, number, body, oldest)

    def send(self, *bodies: Request, oldest: int = 1) -> None:
        frames = [self.frame(number, body, oldest) for number, body in enumerate(bodies, start=1)]
        self.receive([part for frame in frames for part in (b"id", frame)])

    def replies(self) -> list[Answer]:
        frames = [frame for batch in self.sent for _, frame in framing.pairs(batch)]
        return [self.session.authentication.read(frame) or wire.unpack(frame, Answer) for frame in frames]


@asynccontextmanager
async def desk(scribe: SessionLog | None = None, version: int = VERSIONS[-1]) -> AsyncIterator[Desk]:
    opened = Desk(scribe, version)
    try:
        yield opened
    finally:
        opened.requests.turns.close()
        opened.session.close()
        opened.client.close()


@asynccontextmanager
async def visitor(at: Desk, uid: int) -> AsyncIterator[SessionConnection]:
    """A session of another user."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    session = SessionConnection(
        2, ours, Peer(os.getpid(), uid, uid, os.pidfd_open(os.getpid())), at.queue, RejectionLog(), 4
    )
    at.requests.enter(session)
    try:
        yield session
    finally:
        session.close()
        theirs.close()


def test_an_account_is_one_for_a_user_and_goes_with_the_last_session() -> None:
    async def test() -> None:
        async with desk() as at, visitor(at, 1) as first, visitor(at, 1) as second, visitor(at, 2) as other:
            first.replies.account.nbytes += 7
            assert second.replies.account is first.replies.account
            assert other.replies.account is not first.replies.account
            for each in (first, second):
                each.replies.move(reply_cache.ReplyAccount())
            async with visitor(at, 1) as late:
                assert late.replies.account.nbytes == 0

    run(test())


def test_a_batch_is_answered_with_a_batch() -> None:
    async def test() -> None:
        async with desk() as at:
            at.send(Retire("pool", 0), Close(1))
            assert at.sent == []
            at.respond(1, Retirement(1, 0))
            at.respond(2, Done())
            at.flush()
            at.flush()
            assert len(at.sent) == 1
            assert at.replies() == [Answer(1, Retirement(1, 0)), Answer(2, Done())]
            at.send(Retire("pool", 0), Close(1), oldest=2)  # the first is answered for good
            assert len(at.sent) == 2
            assert at.replies()[2:] == [Answer(2, Done())]
            assert len(at.asked) == 2

    run(test())


def test_what_was_only_told_is_asked_of_the_ledger_again() -> None:
    async def test() -> None:
        async with desk() as at:
            at.send(ListDevices())
            at.respond(1, Pools(()))
            at.send(ListDevices())
            assert [asked.request for asked in at.asked] == [1, 1]

    run(test())


def test_an_answer_that_comes_later_is_written_down_with_what_it_answers() -> None:
    async def test() -> None:
        scribe = SessionLog()
        async with desk(scribe) as at:
            at.send(Seal(7))
            scribe.changes()
            at.respond(1, Sealed(1))
            assert b"a/1/1" in dict(scribe.changes())

    run(test())


def test_a_batch_of_large_answers_is_sent_in_parts() -> None:
    async def test() -> None:
        async with desk() as at:
            at.send(ListDevices(), ListPools())
            assert not at.requests.full
            for number in (1, 2):
                at.respond(number, Failed("invalid", "x" * framing.FULL))
                assert at.requests.full
            at.flush()
            assert [len(batch) for batch in at.sent] == [2, 2]
            assert not at.requests.full

    run(test())


def test_an_answer_that_no_client_would_read_is_replaced_by_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with desk() as at:
            at.send(ListDevices())
            at.respond(1, Description(INFO, bytes(2000)))
            at.flush()
            (refused,) = at.replies()
            assert isinstance(refused.body, Failed)
            assert refused.body.code == "over_quota"

    monkeypatch.setattr(wire, "MAX_MESSAGE", 1000)
    run(test())


def test_a_flood_of_requests_is_refused_past_the_bound() -> None:
    async def test() -> None:
        async with desk() as at:
            at.send(*[ListDevices()] * (reply_cache.MAX_REQUESTS + 1))
            (refused,) = at.replies()
            assert isinstance(refused.body, Failed)
            assert (refused.id, refused.body.code) == (reply_cache.MAX_REQUESTS + 1, "over_quota")

    run(test())


def test_a_request_that_was_refused_is_not_done_when_its_copy_comes() -> None:
    async def test() -> None:
        async with desk() as at:
            late = reply_cache.MAX_REQUESTS + 1
            at.send(*[ListDevices()] * late)
            at.respond(1, Done())
            at.receive([b"id", at.frame(late, ListDevices(), oldest=2)])
            assert [answer.id for answer in at.replies()] == [late, 1, late]
            assert len(at.asked) == reply_cache.MAX_REQUESTS
            at.receive([b"id", at.frame(late + 1, ListDevices(), oldest=late + 1)])
            assert at.asked[-1].request == late + 1

    run(test())


def test_what_gives_back_is_not_refused_but_done_when_there_is_room() -> None:
    async def test() -> None:
        async with desk() as at:
            at.send(*[ListDevices()] * reply_cache.MAX_REQUESTS)
            for number in range(1, reply_cache.MAX_REQUESTS + 1):
                at.respond(number, Done())
            at.flush()
            at.sent.clear()
            last = (Cancel(1), Close(1), Seal(1))
            for oldest in (1, 4):
                for number, body in enumerate(last, start=reply_cache.MAX_REQUESTS + 1):
                    at.receive([b"id", at.frame(number, body, oldest)])
                assert at.sent == []
            assert [asked.body for asked in at.asked[-3:]] == [*last]
            assert len(at.asked) == reply_cache.MAX_REQUESTS + 3

    run(test())


def test_a_failure_at_one_request_is_logged_and_answered_and_the_others_are_served(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def unpack(data: bytes, shape: object) -> object:
        if head(data)[1] == 2:
            raise MemoryError
        return decode(data, shape)

    async def test() -> None:
        async with desk() as at:
            with monkeypatch.context() as broken:
                broken.setattr(wire, "unpack", unpack)
                at.send(ListDevices(), ListDevices(), ListDevices())
            assert [asked.request for asked in at.asked] == [1, 3]
            message = "the broker itself failed at this request: MemoryError(); its log says more"
            assert at.replies() == [Answer(2, Failed("internal", message))]

    decode = wire.unpack
    with caplog.at_level(logging.ERROR):
        run(test())
    assert caplog.text.count("the broker failed at a request of ") == 1
    assert caplog.text.count("Traceback") == 1


def test_strangers_are_ignored() -> None:
    async def test() -> None:
        async with desk() as at:
            for junk in (b"", b"junk", wire.pack([b"secret", 1, 1, ["Nonsense"]]), wire.pack([bytes(16), 1, 1, []])):
                at.receive([b"id", junk])
            assert at.sent == []
            at.receive([b"id", wire.pack(Envelope(bytes(16), 1, 1, ListDevices()))])
            (denied,) = at.replies()
            assert isinstance(denied.body, Failed)
            assert denied.body.code == "denied"

    run(test())


def test_a_cancel_does_not_overtake_the_create_that_it_is_meant_for() -> None:
    async def test() -> None:
        async with desk() as at:
            at.send(create(LARGE.encode()), Cancel(1), ListDevices(), create(LAYOUT.encode()))
            await until(lambda: len(at.asked) == 4)
            assert [asked.request for asked in at.asked] == [3, 1, 2, 4]
            outlines = {asked.request: asked.layout for asked in at.asked}
            assert outlines == {1: LARGE.outline, 2: None, 3: None, 4: LAYOUT.outline}
            at.receive([b"id", at.frame(5, Cancel(1))])
            assert at.asked[-1].request == 5

    run(test())


def test_a_cancel_that_comes_before_what_it_is_meant_for_waits_to_be_sent_again() -> None:
    """As to the next broker, to which the gateway of the last one did not bring the other: it is sent again as well."""

    async def test() -> None:
        async with desk() as at:
            never, cancel = at.frame(1, Attach("never", 0, None, 600.0)), at.frame(2, Cancel(1))
            for frame in (cancel, never, cancel):
                at.receive([b"id", frame])
            assert [asked.request for asked in at.asked] == [1, 2]
            at.receive([b"id", at.frame(3, Cancel(7))])  # of which it knows that it was not sent yet
            assert at.asked[-1].request == 3

    run(test())


def counted(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Return a list of the layouts that are checked from now on."""
    checked: list[bytes] = []

    def outline(data: bytes) -> Generator[None, None, Outline]:
        checked.append(data)
        return (yield from check(data))

    check = layouts.outline
    monkeypatch.setattr(layouts, "outline", outline)
    return checked


@pytest.mark.slow
@pytest.mark.parametrize("ended", ["leave", "hang_up"])
def test_nothing_is_checked_for_a_session_that_is_over_and_all_that_it_had_is_given_back(
    ended: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = counted(monkeypatch)

    async def test() -> None:
        async with desk() as at, visitor(at, uid=0) as other:
            data = [named(number, 10_000).encode() for number in range(5)]
            at.send(*map(create, data))
            assert at.session.replies.account.nbytes > sum(map(len, data))
            getattr(at.requests, ended)(at.session)
            assert other.replies.account.nbytes == 0
            at.receive([b"other", framed(other, 1, create(LARGE.encode()))])
            await until(lambda: at.asked)
            assert [asked.session for asked in at.asked] == [other.number]
            assert checked == [data[0], LARGE.encode()], "the first was under way"

    run(test())


def test_a_layout_that_many_sessions_of_a_user_offer_is_checked_and_kept_once(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = counted(monkeypatch)

    async def test() -> None:
        async with desk() as at, visitor(at, uid=0) as other:
            frames = [framed(who, 1, create(LARGE.encode())) for who in (at.session, other)]
            at.receive([part for frame in frames for part in (b"id", frame)])
            await until(lambda: len(at.asked) == 2)
            first, second = (asked.body for asked in at.asked)
            assert isinstance(first, Create)
            assert isinstance(second, Create)
            assert first.layout is second.layout
            assert len(checked) == 1

    run(test())


def test_a_layout_that_was_found_right_is_not_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = counted(monkeypatch)
    wrong = msgspec.msgpack.encode(([("a", "BF16", (2,), 0, 0), ("a", "BF16", (2,), 0, 256)], (512,)))

    async def test() -> None:
        async with desk() as at, visitor(at, uid=1000) as other:
            for number, who in enumerate((at.session, at.session, other), 1):
                at.receive([b"id", framed(who, 2 * number, create(LARGE.encode()))])
                await until(lambda number=number: len(at.asked) == number)
                at.requests.respond(who, 2 * number, Done())  # which leaves no request that holds the layout
            assert checked == [LARGE.encode()]
            for number in (9, 10):
                at.receive([b"id", framed(at.session, number, create(wrong))])
                await until(lambda number=number: len(checked) == number - 7)

    run(test())


def named(number: int, tensors: int = 500) -> Layout:
    return Layout.pack([(f"{number}.layer.{each}.weight", "BF16", (64, 64)) for each in range(tensors)])


DEAR = create(LAYOUT.encode()), ListPools(), ListClients(), Look(), Describe("pool", 0), ListDigests("pool", 0)


@pytest.mark.parametrize("body", DEAR)
@pytest.mark.parametrize("uid", [0, 1000])
def test_dear_requests_of_a_session_wait_for_no_flood_of_anothers(body: Request, uid: int) -> None:
    async def test() -> None:
        async with desk() as at, visitor(at, uid) as other:
            at.send(*[create(named(number).encode()) for number in range(10)], *[Look()] * 94)
            at.receive([b"other", framed(other, 1, body)])
            await until(lambda: len(at.asked) == 105)
            assert [asked.request for asked in at.asked if asked.session == at.session.number] == [*range(1, 105)]
            assert other.number in [asked.session for asked in at.asked[:3]]

    run(test())


def test_cheap_requests_wait_for_no_dear_ones_of_the_same_session() -> None:
    async def test() -> None:
        async with desk() as at:
            at.send(*[create(named(number).encode()) for number in range(3)], ListDevices(), Close(1))
            assert [asked.request for asked in at.asked if asked.request != 1] == [4, 5]
            await until(lambda: len(at.asked) == 5)

    run(test())


def test_a_session_that_acknowledges_nothing_is_told_no_more_than_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reply_cache, "MAX_BYTES", 100_000)

    async def test() -> None:
        async with desk() as at:
            at.answer = Description(INFO, bytes(60_000))
            at.send(*[Describe("pool", 0)] * 3)
            await until(lambda: len(at.replies()) == 3)
            refused = at.replies()[-1]
            assert isinstance(refused.body, Failed)
            assert (refused.id, refused.body.code) == (3, "over_quota")
            at.receive([b"id", at.frame(4, Describe("pool", 0), oldest=4)])
            await until(lambda: len(at.replies()) == 4)
            assert isinstance(at.replies()[-1].body, Description)

    run(test())


def test_dear_requests_wait_while_the_gateway_is_behind_with_answers() -> None:
    async def test() -> None:
        async with desk() as at:
            at.gateway.behind = True
            at.send(ListDevices(), Look(), Look())
            at.respond(1, DeviceList(()))
            at.flush()
            at.receive([])
            for _ in range(10):
                await asyncio.sleep(0)
            assert [asked.request for asked in at.asked] == [1, 2]
            at.gateway.behind = False
            at.receive([])
            await until(lambda: len(at.asked) == 3)

    run(test())


def test_large_leases_are_sent_in_turn_and_a_copy_of_the_request_sends_none_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(requests, "QUANTUM", PATIENCE)  # a turn is a lease, however long the machine takes for it

    def lease(number: int) -> Attached:
        return Attached(number, "pool", 1, "ipc", bytes(LARGE_LEASE + 1), (ReplicaHandles("HOST-0", (bytes(64),)),))

    async def test() -> None:
        async with desk() as at:
            at.send(*[Attach("pool", 0, None, 0.0)] * 3)
            for number in (1, 2, 3):
                at.respond(number, lease(number))
            for _ in range(5):
                at.receive([b"id", at.frame(3, Attach("pool", 0, None, 0.0))])
            assert [answer.id for answer in at.replies()] == [1]
            await until(lambda: len(at.replies()) >= 3)
            for _ in range(10):
                await asyncio.sleep(0)
            assert at.replies() == [Answer(number, lease(number)) for number in (1, 2, 3)]
            assert len(at.asked) == 3

    run(test())


def test_a_large_lease_that_a_create_is_answered_with_at_once_is_sent() -> None:
    lease = Attached(7, "pool", 1, "ipc", LARGE.encode(), (ReplicaHandles("HOST-0", (bytes(64),)),))

    async def test() -> None:
        async with desk() as at:
            at.answer = lease
            at.send(create(LARGE.encode()), create(LARGE.encode()))
            await until(lambda: len(at.replies()) >= 2)
            assert at.replies() == [Answer(1, lease), Answer(2, lease)]
            assert len(at.asked) == 2

    run(test())


def test_what_waits_for_its_turn_at_the_end_is_no_mistake(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with desk() as at:
            at.send(Look(), Look())
            at.requests.turns.close()
            for _ in range(10):
                await asyncio.sleep(0)
            assert [asked.request for asked in at.asked] == [1]

    run(test())
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("error", "code"),
    [(Invalid("wrong"), "invalid"), (MemoryError(), "internal"), (RuntimeError("a mistake"), "internal")],
)
def test_a_layout_that_cannot_be_checked_is_answered(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception, code: str
) -> None:
    def fail(_: bytes) -> Generator[None, None, Outline]:
        yield
        raise error

    async def test() -> None:
        async with desk() as at:
            at.send(create(LARGE.encode()), create(LAYOUT.encode()))
            await until(lambda: len(at.sent) == 2)
            assert {answer.id for answer in at.replies()} == {1, 2}
            assert all(isinstance(answer.body, Failed) and answer.body.code == code for answer in at.replies())

    monkeypatch.setattr(layouts, "outline", fail)
    run(test())
    assert ("Traceback" in caplog.text) is isinstance(error, RuntimeError)
