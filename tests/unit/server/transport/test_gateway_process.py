"""The broker's side of a gateway: the pipe to it, the probes that notice a hang, and the process that is replaced."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import zmq

from cubroker.protocol import wire
from cubroker.protocol.errors import Unavailable
from cubroker.protocol.messages import Create, Envelope
from cubroker.protocol.wire import Digest, Keyed
from cubroker.server.event_queue import BatchReceived, Event, EventQueue, GatewayStarted
from cubroker.server.transport import framing, gateway_process
from cubroker.server.transport.gateway_process import (
    GatewayConnection,
    GatewayProbe,
    GatewayProcess,
    Gathered,
    RequestDecoder,
    watch,
)
from tests.brokers import PATIENCE
from tests.measuring import traced
from tests.unit.server.loops import run, until
from tests.unit.server.processes import alive, files, gateway_of, gateways

QUESTION = b"sixteen bytes..."

DEAF = """
import socket, sys
with socket.socket(fileno=int(sys.argv[1])) as pipe:
    {first}
    while pipe.recv(1 << 20):
        pass
"""
"""A gateway that takes what the broker sends and forwards nothing."""

LISTENS = "pipe.send(bytes([0x90]))"  # the empty batch


# -- the pipe -----------------------------------------------------------------------------------------


REQUESTS = [b"id", b"frame"]


class Consumer:
    """Stands for the broker behind the queue: what to do with requests, and how many gateways came after the first."""

    def __init__(self, receive: Callable[[Iterator[bytes]], object] = list) -> None:
        self.restarts = 0
        self.queue = EventQueue()
        self._receive = receive
        self.queue.attach(self.step)

    def step(self, event: Event) -> None:
        match event:
            case BatchReceived(requests):
                self._receive(chain.from_iterable(requests))
            case GatewayStarted():
                self.restarts += 1

    async def restarted(self, times: int) -> None:
        await until(lambda: self.restarts == times)


async def connection_over(end: socket.socket, receive: Callable[[Iterator[bytes]], object]) -> GatewayConnection:
    queue = Consumer(receive).queue
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_unix_connection(lambda: GatewayConnection(queue), sock=end)
    return connection


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[GatewayConnection, socket.socket, list[list[bytes]]]]:
    """A connection, the gateway's end of it, and the batches that came."""
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    received: list[list[bytes]] = []
    connection = await connection_over(ours, lambda frames: received.append(list(frames)))
    try:
        yield connection, theirs, received
    finally:
        connection.close()
        await connection.ended
        theirs.close()


async def taken(gateway: socket.socket) -> bytes:
    return await asyncio.get_running_loop().sock_recv(gateway, 1 << 20)


def test_a_request_in_pieces_is_put_together_and_others_may_come_in_between() -> None:
    stream = [[b"id", b"a", framing.MORE], REQUESTS, [b"id", b"b", framing.MORE], [], [b"id", b"c", framing.LAST]]
    for _ in range(2):
        assert RequestDecoder().feed(b"".join(map(framing.encode, stream))) == [REQUESTS, [], [b"id", b"abc"]]
    reader = RequestDecoder()
    assert [reader.feed(framing.encode(each)) for each in stream] == [[], [REQUESTS], [], [[]], [[b"id", b"abc"]]]


@pytest.mark.parametrize("size", [1, 20, 1000, framing.PIECE])
def test_the_layout_in_a_request_is_hashed_while_its_pieces_come(size: int) -> None:
    layout = bytes(range(256)) * 40
    body = Create("pool", layout, ("device",), "ipc", 0.0, None)
    frame = Keyed(5, bytes(16)).request(Envelope(b"", 1, 1, body))
    pieces = [frame[:64], *(frame[start : start + size] for start in range(64, len(frame), size))]
    for first in (pieces, [wire.pack(Envelope(bytes(16), 1, 1, body))]):  # a version before has none to be hashed
        reader, which = RequestDecoder(), [framing.MORE] * (len(first) - 1) + [framing.LAST]
        stream = [framing.encode([b"id", piece, last]) for piece, last in zip(first, which, strict=True)]
        ((_, whole),) = [batch for data in stream for batch in reader.feed(data)]
        assert whole == b"".join(first)
        assert isinstance(whole, Gathered)
        assert whole.digest == (Digest(layout).done() if first is pieces else b"")


def test_pieces_without_end_are_an_error_before_they_fill_memory() -> None:
    reader, piece = RequestDecoder(), framing.encode([b"id", bytes(1 << 20), framing.MORE])
    for _ in range(wire.MAX_MESSAGE >> 20):
        assert reader.feed(piece) == []
    with pytest.raises(ValueError, match="pieces of"):
        reader.feed(piece)


def test_a_gateway_listens_from_its_first_empty_batch_on() -> None:
    async def test() -> None:
        async with connected() as (connection, gateway, received):
            for _ in range(2):
                gateway.send(framing.encode(()))
            gateway.send(framing.encode(REQUESTS))
            await until(lambda: received)
            assert connection.listening.done()
            assert received == [REQUESTS]

    run(test())


def test_batches_that_come_together_are_handed_over_as_one() -> None:
    async def test() -> None:
        async with connected() as (connection, gateway, received):
            others = [b"other", b"first", b"id", b"second"]
            gateway.send(b"".join(map(framing.encode, ((), REQUESTS, others))))
            await until(lambda: received)
            assert connection.listening.done()
            assert received == [REQUESTS + others]

    run(test())


def test_requests_are_read_into_room_that_is_there_already() -> None:
    async def test() -> None:
        async with connected() as (_, gateway, received):
            frame = bytes(10_000)
            batch = framing.encode([b"id", frame])
            with traced() as taken:
                for _ in range(2 * framing.FULL // len(frame)):
                    gateway.send(batch)
                    await until(lambda: received)
                    assert received.pop() == [b"id", frame]
                assert taken()[1] < framing.READ // 2

    run(test())


def test_replies_travel_in_one_batch_and_nowhere_once_the_gateway_is_gone() -> None:
    async def test() -> None:
        async with connected() as (connection, gateway, _):
            connection.send(REQUESTS)
            assert framing.BatchDecoder().feed(gateway.recv(1 << 16)) == [REQUESTS]
            gateway.shutdown(socket.SHUT_RDWR)
            await connection.ended
            connection.send(REQUESTS)
            assert connection.listening.cancelled()

    run(test())


def test_a_gateway_that_sends_no_valid_batch_is_cut_off() -> None:
    async def test() -> None:
        async with connected() as (connection, gateway, received):
            gateway.send(b"\xff" * 100)
            await connection.ended
            assert received == []

    run(test())


def test_no_request_is_read_while_earlier_replies_are_not_taken() -> None:
    async def test() -> None:
        async with connected() as (connection, gateway, received):
            connection.send([b"id", bytes(gateway_process.MAX_READING + (1 << 20))])
            gateway.send(framing.encode(REQUESTS))
            for _ in range(10):
                await asyncio.sleep(0)
            assert received == []
            while not received:
                await taken(gateway)

    run(test())


def test_a_connection_tells_when_the_gateway_is_behind_and_reads_on_meanwhile() -> None:
    async def test() -> None:
        async with connected() as (connection, gateway, received):
            assert not connection.send(REQUESTS)
            assert connection.send([b"id", bytes(gateway_process.HIGH_WATER + (1 << 20))])
            assert connection.send(())
            gateway.send(framing.encode(REQUESTS))
            await until(lambda: received)
            assert received == [REQUESTS]
            reader, got = framing.BatchDecoder(), list[list[bytes]]()
            while len(received) < 2:
                got += reader.feed(await taken(gateway))
            assert received == [REQUESTS, []]
            assert not connection.send(())
            while len(got) < 2:
                got += reader.feed(await taken(gateway))
            assert got[0] == REQUESTS
            assert not gateway_speaks(gateway)

    run(test())


def gateway_speaks(gateway: socket.socket) -> bool:
    """Whether there is anything more for the gateway to read."""
    return bool(select.select([gateway], [], [], 0)[0])


def test_requests_of_one_batch_wait_for_each_other_while_replies_are_not_taken() -> None:
    answer = bytes(gateway_process.MAX_READING // 4)

    async def test() -> None:
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        served: list[bytes] = []

        def serve(frames: Iterator[bytes]) -> None:
            for routing, frame in framing.pairs(frames):
                served.append(frame)
                connection.send((routing, answer))

        connection = await connection_over(ours, serve)
        numbers = [b"%d" % number for number in range(30)]
        theirs.send(framing.encode([part for number in numbers for part in (b"id", number)]))
        await until(lambda: served)
        assert len(served) < 10
        reader, answers = framing.BatchDecoder(), 0
        while answers < len(numbers):
            answers += len(reader.feed(await taken(theirs)))
        assert served == numbers
        connection.close()
        await connection.ended
        theirs.close()

    run(test())


def test_a_failure_at_requests_that_had_to_wait_ends_the_connection() -> None:
    async def test() -> None:
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)

        def serve(frames: Iterator[bytes]) -> None:
            if next(frames) == b"bad":
                raise ZeroDivisionError
            next(frames)
            connection.send((b"id", bytes(gateway_process.MAX_READING + (1 << 20))))
            assert list(frames) == []

        asyncio.get_running_loop().set_exception_handler(lambda _, context: mistakes.append(context["exception"]))
        mistakes: list[BaseException] = []
        connection = await connection_over(ours, serve)
        theirs.send(framing.encode((*REQUESTS, b"bad", b"frame")))
        while not connection.ended.done():
            await taken(theirs)
        assert [type(mistake) for mistake in mistakes] == [ZeroDivisionError]
        theirs.close()

    run(test())


def test_replies_past_the_bound_are_dropped() -> None:
    async def test() -> None:
        async with connected() as (connection, gateway, _):
            for _ in range(2):
                connection.send([b"id", bytes(gateway_process.MAX_UNSENT // 2 + (1 << 20))])
            connection.send([b"id", b"dropped"])
            reader, got = framing.BatchDecoder(), 0
            while got < 2:
                got += len(reader.feed(await taken(gateway)))
            connection.send([b"id", b"next"])
            assert reader.feed(await taken(gateway)) == [[b"id", b"next"]]

    run(test())


def test_the_next_step_is_the_gateways_unless_the_broker_has_to_read_or_replies_are_taken() -> None:
    async def test() -> None:
        async with connected() as (connection, gateway, received):
            assert connection.waits()
            gateway.send(framing.encode(REQUESTS))
            assert not connection.waits()  # the broker has to read that
            await until(lambda: received)
            assert connection.waits()
            connection.send([b"id", bytes(gateway_process.MAX_READING + (1 << 20))])
            assert not connection.waits()  # it took the first of this
            assert connection.waits()
            gateway.send(framing.encode(REQUESTS))
            assert connection.waits()  # nor is that read while it takes nothing
            assert await taken(gateway)
            await until(lambda: not connection.waits())  # it took some
            assert connection.waits()

    run(test())


def test_a_connection_returns_questions_and_hands_the_rest_over() -> None:
    async def test() -> None:
        ours, theirs = socket.socketpair()
        received: list[list[bytes]] = []
        connection = await connection_over(ours, lambda frames: received.append(list(frames)))
        with theirs:
            theirs.send(framing.encode([b"id", b"frame", b"probe", connection.question, b"id", b"another"]))
            await until(lambda: received)
            assert received == [[b"id", b"frame", b"id", b"another"]]
            assert framing.BatchDecoder().feed(theirs.recv(1000)) == [[b"probe", connection.question]]
            theirs.send(framing.encode([b"probe", connection.question]))
            assert await asyncio.to_thread(theirs.recv, 1000)
            assert len(received) == 1
            connection.close()
            await connection.ended
            assert not connection.waits()

    run(test())


# -- probes -------------------------------------------------------------------------------------------


class Pipe:
    """Stands for the connection to a gateway: whose turn it is, and whether it ended."""

    question = QUESTION

    def __init__(self, turns: Iterator[bool]) -> None:
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = loop.create_future()
        self.listening: asyncio.Future[None] = loop.create_future()
        self.listening.set_result(None)
        self._turns = turns

    def waits(self) -> bool:
        turn = next(self._turns, None)
        if turn is None:
            self.ended.set_result(None)
        return bool(turn)


def hangs(path: Path, turns: list[bool]) -> str:
    """Return what is said of a gateway at ``path`` in whose pipe it is its turn, or not, at each look."""
    said: list[str] = []

    async def test() -> None:
        connection: Any = Pipe(iter(turns))
        said.append(await watch(connection, path))

    run(test())
    return said[0]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_process, "INTERVAL", 0.001)


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "requests"))
        listener.listen()
        yield listener


@pytest.mark.usefixtures("quick", "listener")
def test_questions_count_when_it_is_the_gateways_turn(tmp_path: Path) -> None:
    path = tmp_path / "requests"
    assert hangs(path, [True] * 4) == "answered none of 4 probes in 0.004 s"
    assert hangs(path, [True] * 3) == ""
    assert hangs(path, [False] * 100) == ""
    assert hangs(path, [*[False] * 100, True] * 3) == ""
    assert hangs(path, [*[False] * 100, True] * 4)


@pytest.mark.usefixtures("quick")
def test_a_gateway_that_accepts_no_connection_has_as_long_as_for_its_start(
    tmp_path: Path, listener: socket.socket
) -> None:
    path = tmp_path / "requests"
    listener.listen(0)
    with socket.socket(socket.AF_UNIX) as other:
        other.connect(str(path))  # the backlog is full
        assert hangs(path, [True] * (gateway_process.UNANSWERED_AT_START - 1)) == ""
        assert hangs(path, [True] * gateway_process.UNANSWERED_AT_START)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("failure", [errno.ENOENT, errno.EMFILE, errno.ECONNREFUSED, errno.EACCES])
def test_a_question_that_cannot_be_asked_is_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: int
) -> None:
    def fail(*_: object) -> None:
        raise OSError(failure, os.strerror(failure))

    monkeypatch.setattr(GatewayProbe, "_dial", fail)
    assert hangs(tmp_path / "requests", [True] * 100) == ""


@pytest.fixture
def router(tmp_path: Path) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 0
        router.bind(f"ipc://{tmp_path / 'requests'}")
        yield router


def bounce(probe: GatewayProbe, router: zmq.Socket[bytes]) -> bool:
    """Ask, send back what comes, and return whether that is heard."""
    assert probe.ask()
    while router.poll(10):
        routing, frame = router.recv_multipart()
        assert frame == QUESTION
        router.send_multipart([routing, frame])
    return probe.answered()


def test_answers_come_back_over_libzmq_and_each_is_heard_once(tmp_path: Path, router: zmq.Socket[bytes]) -> None:
    async def test() -> None:
        probe = GatewayProbe(tmp_path / "requests", QUESTION)
        for _ in range(5):
            await until(lambda: bounce(probe, router))
            while probe.answered():
                pass
        probe.close()
        probe.close()
        assert not probe.answered()

    run(test())


def test_a_connection_that_breaks_is_made_anew(tmp_path: Path, listener: socket.socket) -> None:
    probe = GatewayProbe(tmp_path / "requests", QUESTION)
    for unread in (False, True):
        assert probe.ask()
        gateway, _ = listener.accept()
        with gateway:
            if not unread:
                gateway.recv(100)  # with something unread the connection would be reset
        assert not probe.answered()
        assert not probe.connected
    assert probe.ask()
    gateway, _ = listener.accept()
    with gateway:
        gateway.send(bytes(64))
        assert not probe.answered()
    assert probe.ask()  # found to be broken by what is sent
    assert not probe.connected
    assert probe.ask()
    assert probe.connected
    probe.close()


def test_an_answer_in_parts_is_one(tmp_path: Path, listener: socket.socket) -> None:
    probe = GatewayProbe(tmp_path / "requests", QUESTION)
    assert probe.ask()
    gateway, _ = listener.accept()
    with gateway:
        for byte in bytes(64) + QUESTION[:-1]:
            gateway.send(bytes([byte]))
            assert not probe.answered()
        gateway.send(QUESTION[-1:])
        assert probe.answered()
        assert not probe.answered()
    probe.close()


# -- the process --------------------------------------------------------------------------------------


@asynccontextmanager
async def running(tmp_path: Path) -> AsyncIterator[tuple[GatewayProcess, Consumer]]:
    """A gateway, started and connected, and what stands for its broker."""
    path = tmp_path / "requests"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        gateway, broker = GatewayProcess(listener, path), Consumer()
        gateway.start()
        try:
            await gateway.connect(broker.queue)
            yield gateway, broker
        finally:
            await gateway.stop()


def test_a_gateway_that_cannot_be_started_again_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = 0
    spawn = subprocess.Popen

    def scarce(command: Sequence[str], **options: Any) -> Any:
        nonlocal attempts
        attempts += 1
        if attempts < 3:
            raise OSError(11, "Resource temporarily unavailable")
        return spawn(command, **options)

    async def test() -> None:
        async with running(tmp_path) as (gateway, broker):
            monkeypatch.setattr(subprocess, "Popen", scarce)
            assert not gateway.obstacle()
            os.kill(gateway_of(os.getpid()), signal.SIGKILL)
            await until(lambda: attempts)
            assert gateway.obstacle() == "its gateway is being started again"
            await until(lambda: broker.restarts)
            assert broker.restarts == 1
            assert not gateway.obstacle()
            assert attempts == 3
            gateway.send([b"nobody", b"hears this"])

    run(test())


def test_a_gateway_that_cannot_be_started_at_all_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any, **__: Any) -> Any:
        raise FileNotFoundError(2, "no python")

    async def test() -> None:
        with pytest.raises(Unavailable, match="no python"):
            async with running(tmp_path):
                pass

    monkeypatch.setattr(subprocess, "Popen", never)
    run(test())


def test_answers_for_a_gateway_that_is_gone_are_dropped(tmp_path: Path) -> None:
    async def test() -> None:
        async with running(tmp_path) as (gateway, broker):
            await gateway.stop()
            gateway.send([b"nobody", b"hears this"])
            assert broker.restarts == 0

    run(test())


def test_a_gateway_that_fails_ends_by_itself_and_its_reason_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        async with running(tmp_path) as (gateway, broker):
            for times in (1, 2):
                gateway.send([b"a routing id without a frame"])
                await broker.restarted(times)

    monkeypatch.setattr(gateway_process, "GRACE", PATIENCE)  # a busy machine takes its time to end a process
    with caplog.at_level(logging.WARNING):
        run(test())
    assert caplog.text.count("Traceback") == 2
    assert caplog.text.count("ended with status 1 (ValueError: ") == 2


def test_a_gateway_that_hangs_after_its_pipe_has_closed_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        async with running(tmp_path) as (gateway, _):
            pid = gateway_of(os.getpid())
            os.kill(pid, signal.SIGSTOP)
            await gateway.stop()
            assert not alive(pid)

    monkeypatch.setattr(gateway_process, "GRACE", 0.01)
    run(test())


TALKS = "import sys; sys.stderr.write('much\\n' * 200_000 + 'the end')"


def test_a_gateway_that_says_much_is_heard_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    spawn = subprocess.Popen

    def talkative(command: Sequence[str], **options: Any) -> Any:
        return spawn([command[0], "-c", TALKS], **options)

    async def test() -> None:
        with pytest.raises(Unavailable, match="the end"):
            async with running(tmp_path):
                pass

    monkeypatch.setattr(subprocess, "Popen", talkative)
    with caplog.at_level(logging.ERROR):
        run(test())
    assert caplog.text.count("much") < gateway_process.LAST_WORDS


def test_a_gateway_that_is_stopped_as_it_starts_leaves_no_process(tmp_path: Path) -> None:
    async def test() -> None:
        with socket.socket(socket.AF_UNIX) as listener:
            gateway = GatewayProcess(listener, tmp_path / "requests")
            gateway.start()
            await asyncio.sleep(0)  # the task has begun
            await gateway.stop()

    run(test())
    assert not gateways(os.getpid())


def playing(program: str, spawn: Any, while_true: Callable[[], bool] = lambda: True) -> Callable[..., Any]:
    """Return what starts ``program`` in the place of a gateway, as long as it is to."""

    def start(command: Sequence[str], **options: Any) -> Any:
        if while_true():
            python, _, _, _, *arguments = command  # -P -m cubroker.server.transport.gateway
            command = [python, "-c", program, *arguments]
        return spawn(command, **options)

    return start


def test_a_gateway_whose_pipe_answers_and_that_forwards_nothing_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    starts = 0

    def first() -> bool:
        nonlocal starts
        starts += 1
        return starts == 1

    async def test() -> None:
        async with running(tmp_path) as (gateway, broker):
            await until(lambda: broker.restarts)
            assert broker.restarts == 1
            assert not gateway.obstacle()

    spawn = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", playing(DEAF.format(first=LISTENS), spawn, first))
    with caplog.at_level(logging.WARNING):
        run(test())
    assert "answered none of 4 probes in 2 s, so it was killed, and ended with status -9" in caplog.text


def test_a_gateway_that_hangs_before_it_listens_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        with pytest.raises(Unavailable, match="answered none of 3 probes"):
            async with running(tmp_path):
                pass

    spawn = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", playing(DEAF.format(first="pass"), spawn))
    monkeypatch.setattr(gateway_process, "UNANSWERED_AT_START", 3)
    run(test())
    assert not gateways(os.getpid())


@pytest.mark.slow
def test_gateways_that_hang_again_and_again_leave_nothing_behind(tmp_path: Path) -> None:
    async def test() -> None:
        async with running(tmp_path) as (_, broker):
            for times in (1, 2):
                os.kill(gateway_of(os.getpid()), signal.SIGSTOP)
                await broker.restarted(times)
        assert not gateways(os.getpid())

    before = files(os.getpid())
    run(test())
    assert files(os.getpid()) <= before


@pytest.mark.slow
def test_a_broker_that_does_not_come_to_look_blames_nobody(tmp_path: Path) -> None:
    """As one does that is stopped for a while, or whose machine is suspended."""

    async def test() -> None:
        async with running(tmp_path) as (_, broker):
            pid = gateway_of(os.getpid())
            time.sleep(2 * gateway_process.UNANSWERED * gateway_process.INTERVAL)  # all is to stand still
            await asyncio.sleep(2 * gateway_process.INTERVAL)
            assert gateway_of(os.getpid()) == pid
            assert broker.restarts == 0

    run(test())
