from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from cubroker.protocol import wire
from cubroker.protocol.errors import CorruptJournal
from cubroker.protocol.fields import MAX_DESCRIPTORS, MAX_NOTICE
from cubroker.protocol.messages import (
    Answer,
    Attached,
    Close,
    Created,
    Descriptors,
    Done,
    Failed,
    Farewell,
    GatewayChanged,
    ListPools,
    Notice,
    PoolChanged,
    Pools,
    Rebound,
    ReplicaHandles,
    Seal,
    Sealed,
    Team,
    Watch,
)
from cubroker.server.event_queue import FdsDelivered
from cubroker.server.ledger.events import ConnectionLost, ProcessExited
from cubroker.server.transport import session as session_module
from cubroker.server.transport.reply_cache import Admission, Frame, Receipts, ReplyCache
from cubroker.server.transport.session import (
    LASTING,
    Changes,
    FdTransfer,
    LoggedSession,
    SessionConnection,
    SessionLog,
    recall,
)
from cubroker.server.transport.unix_sockets import Peer, RejectionLog
from tests.brokers import BrokerProcess, eventually
from tests.faults import fail_nth
from tests.unit.server.clients import RawClient, holder, session
from tests.unit.server.loops import Recorder, run, until


def leases(client: RawClient) -> list[tuple[str, int]]:
    """State and number of leases of every other session."""
    others = [other for other in client.clients() if other.session != client.welcome.session]
    return [(other.state, len(other.leases)) for other in others]


def test_a_lease_falls_when_its_holder_is_killed(broker: BrokerProcess, client: RawClient) -> None:
    client.publish("pool")
    with holder(broker.directory, "pool") as process:
        assert leases(client) == [("connected", 1)]
        process.send_signal(signal.SIGKILL)
        eventually(lambda: leases(client) == [], "the lease to fall")


@pytest.mark.slow
def test_a_holder_that_hangs_up_keeps_its_lease_until_it_ends(broker: BrokerProcess, client: RawClient) -> None:
    client.publish("pool")
    with holder(broker.directory, "pool") as process:
        assert process.stdin
        process.stdin.write("hang up\n")
        process.stdin.flush()
        eventually(lambda: leases(client) == [("detached", 1)], "the session to be detached")
        process.stdin.close()
        eventually(lambda: leases(client) == [], "the session to end with its process")


def test_a_detached_holder_may_still_give_its_lease_back(broker: BrokerProcess, client: RawClient) -> None:
    client.publish("pool")
    with session(broker.directory) as detached:
        lease = detached.attach("pool").lease
        detached.connection.close()
        eventually(lambda: leases(client) == [("detached", 1)], "the session to be detached")
        detached.ask(Close(lease), Done)
        assert leases(client) == []


def test_whatever_a_client_says_after_its_greeting_ends_the_connection(broker: BrokerProcess) -> None:
    for said in (b"", b"anything"):
        assert "sent data on the session socket" not in broker.log()
        with session(broker.directory) as talker:
            talker.connection.send(said)
            assert talker.connection.recv(1) == b""
    eventually(lambda: "sent data on the session socket" in broker.log(), "a line in the log")


def test_a_watcher_hears_of_every_publication(broker: BrokerProcess, client: RawClient) -> None:
    client.ask(Watch("pool", True), Done)
    assert client.notice() == PoolChanged("pool", 0)
    client.publish("pool")
    assert client.notice() == PoolChanged("pool", 1)


def test_sealing_twice_is_answered_twice_and_published_once(broker: BrokerProcess, client: RawClient) -> None:
    assert client.publish("pool") == 1
    lease = client.create("pool").lease
    number = client.send(Seal(lease))
    client.send(Seal(lease), number)
    assert [client.receive().body for _ in range(2)] == [Sealed(2), Sealed(2)]
    assert [pool.version for pool in client.ask(ListPools(), Pools).pools] == [2]


# -- a session alone -------------------------------------------------------------------------------


class Ends:
    """A session over a socketpair, the client's end of it, and what it reported."""

    def __init__(self, pid: int) -> None:
        ours, self.client = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        self.client.setblocking(False)
        self.recorder = Recorder()
        self.events = self.recorder.events
        peer = Peer(pid, os.getuid(), os.getgid(), os.pidfd_open(pid))
        self.session = SessionConnection(1, ours, peer, self.recorder.queue, RejectionLog(), 4, welcomed=True)
        self.session.watch()

    def heard(self) -> list[Notice]:
        return [notice for notice, _ in self.received()]

    def received(self) -> list[tuple[Notice, list[str]]]:
        """All that can be read now; descriptors as what they are open on, and closed."""
        notices: list[tuple[Notice, list[str]]] = []
        while True:
            try:
                data, descriptors, *_ = socket.recv_fds(self.client, 1 << 16, MAX_DESCRIPTORS)
            except BlockingIOError:
                return notices
            notices.append(
                (wire.unpack(data, Notice), [str(Path(f"/proc/self/fd/{fd}").readlink()) for fd in descriptors])
            )
            for descriptor in descriptors:
                os.close(descriptor)


@asynccontextmanager
async def ends(pid: int | None = None) -> AsyncIterator[Ends]:
    pair = Ends(pid or os.getpid())
    try:
        yield pair
    finally:
        pair.session.close()
        pair.client.close()


def test_notices_that_are_not_read_are_merged_and_lose_nothing_that_matters() -> None:
    async def test() -> None:
        async with ends() as pair:
            for version in range(20_000):
                pair.session.notify(PoolChanged(f"pool-{version % 3}", version))
            pair.session.notify(GatewayChanged())
            heard: list[Notice] = []
            while GatewayChanged() not in heard:
                heard += pair.heard()
                await asyncio.sleep(0)
            assert len(heard) < 20_000
            last = {notice.name: notice.version for notice in heard if isinstance(notice, PoolChanged)}
            assert last == {"pool-0": 19_998, "pool-1": 19_999, "pool-2": 19_997}
            pair.session.notify(PoolChanged("late", 1))
            assert pair.heard() == [PoolChanged("late", 1)]

    run(test())


def test_the_end_of_a_connection_is_reported_once_and_notices_after_it_go_nowhere() -> None:
    async def test() -> None:
        async with ends() as pair:
            pair.client.close()
            pair.session.notify(GatewayChanged())
            await until(lambda: pair.events)
            pair.session.notify(GatewayChanged())
            await asyncio.sleep(0)
            assert pair.events == [ConnectionLost(1)]

    run(test())


def test_the_end_of_a_process_is_reported_even_if_its_connection_lives_on() -> None:
    async def test() -> None:
        with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
            async with ends(process.pid) as pair:
                process.kill()
                await until(lambda: pair.events)
                assert pair.events == [ProcessExited(1)]
                assert pair.client.recv(1) == b""

    run(test())


def test_a_connection_that_breaks_is_lost() -> None:
    async def test() -> None:
        async with ends() as pair:
            pair.session.notify(GatewayChanged())
            pair.client.close()  # with a notice unread, so that reading fails with ECONNRESET
            await until(lambda: pair.events)
            assert pair.events == [ConnectionLost(1)]

    run(test())


def test_a_notice_is_heard_however_long_it_is_and_long_ones_wait_for_whoever_does_not_read() -> None:
    def rebound(lease: int) -> Rebound:
        return Rebound(lease, (), Team("multicast", "it works", (1 << 40,) * 4096))

    async def test() -> None:
        async with ends() as pair:
            for lease in range(1, 101):
                pair.session.notify(rebound(lease))
            pair.session.notify(Farewell("x" * 20_000))
            heard = pair.heard()
            assert 1 <= len(heard) < 10
            while Farewell("x" * 20_000) not in heard:
                heard += pair.heard()
                await asyncio.sleep(0)
            assert heard == [*map(rebound, range(1, 101)), Farewell("x" * 20_000)]

    run(test())


def test_a_notice_that_no_client_reads_whole_is_a_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with ends() as pair:
            pair.session.notify(Farewell("x" * MAX_NOTICE))
            pair.session.notify(GatewayChanged())
            assert pair.heard() == [GatewayChanged()]
            assert "session 1: dropped a message of 655" in caplog.text

    run(test())


def test_a_shortage_of_the_system_delays_the_answer_to_a_greeting_and_notices(monkeypatch: pytest.MonkeyPatch) -> None:
    scarce = [OSError(number, "short of something") for number in (errno.ENOMEM, errno.ENOBUFS)]
    send, refusals = socket.socket.send, [*scarce, MemoryError()]

    def short(connection: socket.socket, data: bytes) -> int:
        if refusals:
            raise refusals.pop()
        return send(connection, data)

    async def test() -> None:
        async with ends() as pair:
            pair.session.welcomed = False
            pair.session.notify(PoolChanged("pool", 1))
            pair.session.welcome(wire.pack(Farewell("the answer")))
            pair.session.notify(PoolChanged("pool", 2))
            pair.session.notify(GatewayChanged())
            heard: list[Notice] = []
            while len(heard) < 3:
                heard += pair.heard()
                await asyncio.sleep(0.001)
            assert heard == [Farewell("the answer"), PoolChanged("pool", 2), GatewayChanged()]

    monkeypatch.setattr(socket.socket, "send", short)
    run(test())


# -- descriptors -------------------------------------------------------------------------------------


@pytest.fixture
def files() -> Iterator[dict[int, dict[int, int]]]:
    """Descriptors of two tickets: 3 of the first, 40 of the second."""
    counts = ((100, 3), (200, 40))
    made = {ticket: {number: _file(ticket + number) for number in range(count)} for ticket, count in counts}
    yield made
    for descriptors in made.values():
        for descriptor in descriptors.values():
            os.close(descriptor)


def _file(number: int) -> int:
    return os.memfd_create(f"file-{number}")


def named(*numbers: int) -> list[str]:
    return [f"/memfd:file-{number} (deleted)" for number in numbers]


def test_descriptors_come_in_order_in_packets_and_between_the_notices_around_them(
    files: dict[int, dict[int, int]],
) -> None:
    async def test() -> None:
        async with ends() as pair:
            pair.session.notify(PoolChanged("before", 1))
            pair.session.notify(
                FdTransfer(
                    7,
                    (
                        (200, ()),
                        (100, ()),
                    ),
                    files,
                )
            )
            pair.session.notify(PoolChanged("after", 1))
            received: list[tuple[Notice, list[str]]] = []
            while not received or received[-1][0] != PoolChanged("after", 1):
                received += pair.received()
                await asyncio.sleep(0)
            assert received == [
                (PoolChanged("before", 1), []),
                (Descriptors(7, 16), named(*range(200, 216))),
                (Descriptors(7, 16, 16), named(*range(216, 232))),
                (Descriptors(7, 11, 32), named(*range(232, 240), 100, 101, 102)),
                (PoolChanged("after", 1), []),
            ]

    run(test())


def test_two_packets_of_descriptors_are_on_their_way_to_a_client_that_does_not_read_and_none_is_lost(
    files: dict[int, dict[int, int]],
) -> None:
    async def test() -> None:
        async with ends() as pair:
            for lease in range(1, 101):
                pair.session.notify(FdTransfer(lease, ((200, ()),), files))
                await asyncio.sleep(0)
            assert pair.heard() == [Descriptors(1, 16), Descriptors(1, 16, 16)]
            received: list[tuple[Notice, list[str]]] = []
            while len(received) < 298:
                received += pair.received()
                await asyncio.sleep(0)
            assert received[0] == (Descriptors(1, 8, 32), named(*range(232, 240)))
            assert [notice for notice, _ in received[1:]] == [
                Descriptors(lease, count, first)
                for lease in range(2, 101)
                for count, first in ((16, 0), (16, 16), (8, 32))
            ]
            assert sum(len(descriptors) for _, descriptors in received) == 40 * 100 - 32

    run(test())


def test_descriptors_of_a_lease_that_has_ended_are_not_sent(files: dict[int, dict[int, int]]) -> None:
    async def test() -> None:
        async with ends() as pair:
            for lease in (1, 2, 3):
                pair.session.notify(FdTransfer(lease, ((200, ()),), files))
            pair.session.cancel_fds(1)  # of which two packets are on their way
            pair.session.cancel_fds(2)
            pair.session.cancel_fds(9)
            received: list[Notice] = []
            while len(received) < 5:
                received += pair.heard()
                await asyncio.sleep(0)
            assert received == [
                Descriptors(lease, count, first)
                for lease, count, first in ((1, 16, 0), (1, 16, 16), (3, 16, 0), (3, 16, 16), (3, 8, 32))
            ]

    run(test())


def test_a_shortage_of_the_system_delays_descriptors_and_what_comes_after_them(
    files: dict[int, dict[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    scarce = [OSError(number, "short of something") for number in (errno.ETOOMANYREFS, errno.ENOMEM)]
    send_fds, refusals = socket.send_fds, [MemoryError(), *scarce]

    def short(*arguments: Any) -> int:
        if refusals:
            raise refusals.pop()
        return send_fds(*arguments)

    async def test() -> None:
        async with ends() as pair:
            pair.session.notify(FdTransfer(1, ((100, ()),), files))
            pair.session.notify(GatewayChanged())
            received: list[tuple[Notice, list[str]]] = []
            while len(received) < 2:
                received += pair.received()
                await asyncio.sleep(0.001)
            assert received == [(Descriptors(1, 3), named(100, 101, 102)), (GatewayChanged(), [])]

    monkeypatch.setattr(socket, "send_fds", short)
    run(test())


def test_what_is_lent_in_the_place_of_descriptors_is_opened_for_each_packet_and_closed(
    files: dict[int, dict[int, int]], caplog: pytest.LogCaptureFixture
) -> None:
    """A shortage at opening delays it; what this process may not open is in the log, and nobody waits behind it."""
    refusals = [errno.EMFILE, errno.ENFILE]
    lent: set[int] = set()

    @contextmanager
    def lend(descriptors: Sequence[int]) -> Iterator[Sequence[int]]:
        if refusals:
            raise OSError(refusals.pop(), "short of something")
        opened = [_file(900 + place) for place in range(len(descriptors))]
        lent.update(opened)
        try:
            yield opened
        finally:
            lent.difference_update(opened)
            for descriptor in opened:
                os.close(descriptor)

    async def test() -> None:
        async with ends() as pair:
            pair.session.notify(
                FdTransfer(
                    1,
                    (
                        (100, ()),
                        (200, ()),
                    ),
                    files,
                    readers=SimpleNamespace(for_reading=lend),
                )
            )
            received: list[tuple[Notice, list[str]]] = []
            while len(received) < 3:
                received += pair.received()
                await asyncio.sleep(0.001)
            assert [names for _, names in received] == [
                named(*range(900, 916)),
                named(*range(900, 916)),
                named(*range(900, 911)),
            ]
            assert not lent
            for lease, failure in ((2, errno.EACCES), (3, errno.ENOENT)):
                refusals.append(failure)
                pair.session.notify(FdTransfer(lease, ((100, ()),), files, readers=SimpleNamespace(for_reading=lend)))
                pair.session.notify(GatewayChanged())
                assert pair.heard() == [GatewayChanged()]
                assert f"session 1 is not sent the memory of lease {lease}, which this broker cannot" in caplog.text

    run(test())


def test_descriptors_for_whoever_has_hung_up_go_nowhere(files: dict[int, dict[int, int]]) -> None:
    async def test() -> None:
        async with ends() as pair:
            pair.client.close()
            pair.session.notify(FdTransfer(1, ((200, ()),), files))
            await until(lambda: pair.events)
            pair.session.notify(FdTransfer(2, ((200, ()),), files))
            await until(lambda: ConnectionLost(1) in pair.events)
            assert [each for each in pair.events if not isinstance(each, FdsDelivered)] == [ConnectionLost(1)]

    run(test())


# -- what the journal has of a session -------------------------------------------------------------


ATTACHED = Attached(7, "pool", 3, "vmm", b"layout", (ReplicaHandles("device", (b"descriptor",)),))


class Client:
    """Stands for a session, whose number, secret and answers are all that matters here."""

    def __init__(self, number: int, version: int = 1) -> None:
        self.number = number
        self.version = version
        self.secret = os.urandom(16)
        self.replies = ReplyCache()

    def ask(self, number: int, answer: Answer | None = None, oldest: int = 1, received: tuple[int, ...] = ()) -> None:
        assert self.replies.admit(number, oldest, b"id", 10, received) is Admission.NEW
        if answer:
            body = answer.body
            frame: Frame = answer if isinstance(body, Attached | Created) else wire.pack(answer)
            self.replies.settle(number, frame, lasting=type(body) in LASTING)

    @property
    def session(self) -> SessionConnection:
        return cast(SessionConnection, self)


class Book:
    """A journal in a dict."""

    def __init__(self) -> None:
        self.entries: dict[bytes, bytes] = {}

    def write(self, changes: Changes) -> None:
        for key, value in changes:
            if value is None:
                self.entries.pop(key, None)
            else:
                self.entries[key] = value


def remembered_of(book: Book, session: int) -> LoggedSession:
    remembered, stray = recall(book.entries, [session])
    assert not stray
    return remembered[session]


def test_a_session_is_read_as_it_was_written() -> None:
    scribe, book, client = SessionLog(), Book(), Client(5)
    scribe.opened(client.session, welcomed=False)
    book.write(scribe.changes())
    assert not remembered_of(book, 5).welcomed
    scribe.opened(client.session, welcomed=True)
    scribe.asked(client.session)
    client.ask(1, Answer(1, Sealed(2)))
    client.ask(2, Answer(2, ATTACHED))
    client.ask(3, Answer(3, Failed("exists", "it is there")))
    client.ask(4, Answer(4, Pools(())))
    client.ask(6)
    scribe.undelivered(5, 7)
    scribe.undelivered(5, 8)
    scribe.delivered(8)
    book.write(scribe.changes())
    assert scribe.changes() == []
    remembered = remembered_of(book, 5)
    assert (remembered.secret, remembered.version, remembered.welcomed) == (client.secret, 1, True)
    assert remembered.undelivered_fds == [7]
    answers = remembered.reply_cache({7: ATTACHED}.get)
    assert answers.lasting == {1, 2, 3}
    assert answers.admit(1, 1, b"id", 10) == wire.pack(Answer(1, Sealed(2)))
    assert answers.admit(2, 1, b"id", 10) == Answer(2, ATTACHED)
    assert answers.admit(3, 1, b"id", 10) == wire.pack(Answer(3, Failed("exists", "it is there")))
    assert [answers.admit(number, 1, b"id", 10) for number in (4, 6)] == [Admission.NEW] * 2  # to be worked out anew


def test_what_there_was_no_memory_to_encode_is_written_the_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    for at in range(1, 100):
        scribe, book, client = SessionLog(), Book(), Client(5)
        scribe.opened(client.session, welcomed=True)
        scribe.asked(client.session)
        client.ask(1, Answer(1, Done()))
        client.ask(2, Answer(2, ATTACHED))
        with monkeypatch.context() as patch:
            calls = fail_nth(patch, session_module, "_encode", at, MemoryError())
            with suppress(MemoryError):
                book.write(scribe.changes())
        book.write(scribe.changes())
        assert sorted(remembered_of(book, 5).replies) == [1, 2]
        assert scribe.changes() == []
        if calls() < at:
            break
    assert at > 3


@pytest.mark.parametrize(("version", "key"), [(1, b"s/5"), (3, b"s/5"), (4, b"k/5")])
def test_a_secret_that_is_not_what_requests_carry_has_another_key(version: int, key: bytes) -> None:
    """So that a broker that knows no other refuses the journal, and does not leave clients without an answer."""
    scribe, book, client = SessionLog(), Book(), Client(5, version)
    scribe.opened(client.session, welcomed=True)
    book.write(scribe.changes())
    assert list(book.entries) == [key]
    remembered = remembered_of(book, 5)
    assert (remembered.secret, remembered.version, remembered.no_secret) == (client.secret, version, False)
    scribe.closed(client.session)
    book.write(scribe.changes())
    assert not book.entries


def test_what_was_received_is_not_kept_and_not_done_again() -> None:
    scribe, book, client = SessionLog(), Book(), Client(1)
    scribe.opened(client.session, welcomed=True)
    for number in (1, 2, 3):
        scribe.asked(client.session)
        client.ask(number, Answer(number, Done()))
        book.write(scribe.changes())
    scribe.asked(client.session)
    client.ask(4, oldest=2, received=(3,))
    book.write(scribe.changes())
    remembered = remembered_of(book, 1)
    assert sorted(remembered.replies) == [2]
    assert remembered.receipts == Receipts(2, 0, (3, 4))
    answers = remembered.reply_cache(lambda lease: None)
    assert answers.receipts == remembered.receipts
    assert [answers.admit(number, 2, b"id", 10) for number in (1, 3)] == [Admission.STALE] * 2


def test_the_answer_of_a_lease_that_is_over_is_forgotten() -> None:
    scribe, book, client = SessionLog(), Book(), Client(1)
    scribe.opened(client.session, welcomed=True)
    scribe.asked(client.session)
    client.ask(1, Answer(1, ATTACHED))
    book.write(scribe.changes())
    again, scribe = Client(1), SessionLog()
    again.replies = remembered_of(book, 1).reply_cache(lambda lease: None)
    assert not again.replies.lasting
    scribe.asked(again.session)
    book.write(scribe.changes())
    assert sorted(book.entries) == [b"r/1", b"s/1"]


@pytest.mark.parametrize("restarted", [False, True])
def test_nothing_is_left_of_a_session_that_ends_with_answers_that_are_not_kept_any_more(restarted: bool) -> None:
    scribe, book, client = SessionLog(), Book(), Client(1)
    scribe.opened(client.session, welcomed=True)
    scribe.asked(client.session)
    client.ask(1, Answer(1, ATTACHED))
    book.write(scribe.changes())
    if restarted:
        client.replies = remembered_of(book, 1).reply_cache(lambda lease: None)
    else:
        scribe.asked(client.session)
        client.ask(2, Answer(2, Done()), oldest=2)
    scribe.closed(client.session)
    book.write(scribe.changes())
    assert not book.entries


def test_nothing_is_left_of_a_session_that_is_over() -> None:
    scribe, book, client = SessionLog(), Book(), Client(1)
    scribe.opened(client.session, welcomed=True)
    scribe.asked(client.session)
    client.ask(1, Answer(1, Done()))
    book.write(scribe.changes())
    assert sorted(book.entries) == [b"a/1/1", b"r/1", b"s/1"]
    scribe.asked(client.session)
    scribe.closed(client.session)
    book.write(scribe.changes())
    assert not book.entries


@pytest.mark.parametrize(
    ("key", "value", "complaint"),
    [
        (b"s/1", b"\xc1", "an invalid"),
        (b"r/2", msgspec.msgpack.encode([0, 0]), "an invalid"),
        (b"a/1/1", msgspec.msgpack.encode("text"), "an invalid"),
        (b"d/1", msgspec.msgpack.encode("9"), "an invalid"),
        (b"x/1", b"", "x/1, and this build does not know"),
        (b"s/1/2", b"", "s/1/2, and this build does not know"),
        (b"a/1", b"", "a/1, and this build does not know"),
        (b"r/-1", b"", "does not know"),
        (b"\xff", b"", "does not know"),
    ],
)
def test_what_nobody_can_have_written_is_refused(key: bytes, value: bytes, complaint: str) -> None:
    scribe, book, client = SessionLog(), Book(), Client(1)
    scribe.opened(client.session, welcomed=True)
    book.write([*scribe.changes(), (b"l/format", b"the ledger's"), (key, value)])
    with pytest.raises(CorruptJournal, match=complaint):
        recall(book.entries, [1])


def test_what_belongs_to_no_session_is_named_and_struck_out() -> None:
    scribe, book, client = SessionLog(), Book(), Client(1)
    for each in (client.session, Client(2).session):
        scribe.opened(each, welcomed=True)
    scribe.undelivered(3, 8)
    book.write(
        [*scribe.changes(), (b"r/2", msgspec.msgpack.encode([0, 0, []])), (b"a/3/1", msgspec.msgpack.encode([b"", 0]))]
    )
    remembered, stray = recall(book.entries, [1])
    assert sorted(remembered) == [1]
    assert sorted(stray) == [b"a/3/1", b"d/8", b"r/2", b"s/2"]
    scribe.forget(stray)
    book.write(scribe.changes())
    assert sorted(book.entries) == [b"s/1"]


def test_a_session_whose_secret_is_not_written_down_is_mute_and_nothing_else_is_believed_of_it() -> None:
    book = Book()
    book.write([(b"r/1", msgspec.msgpack.encode([4, 0, []])), (b"d/8", msgspec.msgpack.encode(1))])
    remembered, stray = recall(book.entries, [1, 2])
    assert [remembered[number].no_secret for number in (1, 2)] == [True, True]
    assert remembered[1].undelivered_fds == []
    assert sorted(stray) == [b"d/8", b"r/1"]


def test_listings_are_not_written_down() -> None:
    """Refusals are: what was cancelled must not wait again because the answer to its cancel is known."""
    assert [type(body) in LASTING for body in (Done(), ATTACHED, Pools(()), Failed("denied", "no"))] == [
        True,
        True,
        False,
        True,
    ]


def test_every_broker_that_goes_on_is_counted() -> None:
    book = Book()
    for restarts in (1, 2, 3):
        scribe = SessionLog(book.entries)
        assert scribe.restarts == restarts
        book.write(scribe.changes())
    assert SessionLog().restarts == 0
    with pytest.raises(CorruptJournal):
        SessionLog({b"n": b"\xc1"})
