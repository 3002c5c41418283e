from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from cubroker.server.transport import framing
from cubroker.server.transport.framing import BatchDecoder, encode, pairs
from cubroker.server.transport.gateway import HIGH_WATER, LARGE, WEIGHT, Gateway, bind
from tests.brokers import PATIENCE, eventually
from tests.measuring import traced


class Bench:
    """A gateway on a thread, with the test in the broker's place and a client beside it."""

    def __init__(self, path: Path) -> None:
        self.broker, pipe = socket.socketpair()
        self.broker.settimeout(PATIENCE)
        self._batches = BatchDecoder()
        self._context = zmq.Context()
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            listener.listen()
            router = bind(self._context, listener.detach(), str(path))
        self._address = f"ipc://{path}"
        self.client = self.connect()
        pipe.setblocking(False)
        self._thread = threading.Thread(target=self._run, args=(pipe, router))
        self._thread.start()
        assert self.take() == [[]], "it says that it listens"

    def _run(self, pipe: socket.socket, router: zmq.Socket[bytes]) -> None:
        with pipe, router:
            Gateway(pipe, router).run()

    def connect(self) -> zmq.Socket[bytes]:
        client = self._context.socket(zmq.DEALER)
        client.setsockopt(zmq.LINGER, 0)
        client.setsockopt(zmq.RCVHWM, 1)
        client.setsockopt(zmq.SNDHWM, 0)
        client.connect(self._address)
        return client

    def take(self) -> list[list[bytes]]:
        """Return the batches that the gateway has sent, one at least."""
        whole: list[list[bytes]] = []
        while not whole:
            whole = self._batches.feed(self.broker.recv(1 << 20))
        return whole

    def requests(self, count: int) -> list[tuple[bytes, bytes]]:
        """Return the next ``count`` requests."""
        taken: list[tuple[bytes, bytes]] = []
        while len(taken) < count:
            taken += [pair for batch in self.take() for pair in pairs(batch)]
        assert len(taken) == count
        return taken

    def waiting(self, routing: bytes) -> list[int]:
        """Return the lengths of all that waits for the client, who reads until something new comes last."""
        lengths, last = list[int](), 0
        while True:
            if not self.client.poll(200):  # nothing waits any more, or it is slow
                last += 1
                self.broker.sendall(encode([routing, b"last %d" % last]))
            elif (message := self.client.recv()) == b"last %d" % last:
                return lengths
            elif not message.startswith(b"last"):
                lengths.append(len(message))

    def end(self) -> None:
        self.broker.close()
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()

    def close(self) -> None:
        self.end()
        self.client.close()
        self._context.term()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path / "requests")
    yield bench
    bench.close()


def test_requests_go_one_way_and_answers_the_other(bench: Bench) -> None:
    for number in range(2 * framing.MAX_MESSAGES):
        bench.client.send(b"%d" % number)
    taken = bench.requests(2 * framing.MAX_MESSAGES)
    assert [frame for _, frame in taken] == [b"%d" % number for number in range(2 * framing.MAX_MESSAGES)]
    assert len({routing for routing, _ in taken}) == 1
    bench.broker.sendall(encode([taken[0][0], b"answer"]))
    assert bench.client.recv() == b"answer"


def test_messages_of_several_frames_are_dropped(bench: Bench) -> None:
    bench.client.send_multipart([b"", b"request"])
    bench.client.send_multipart([b"x"] * 1000)
    bench.client.send(b"whole")
    assert [frame for _, frame in bench.requests(1)] == [b"whole"]


def test_an_answer_for_nobody_is_dropped(bench: Bench) -> None:
    bench.client.send(b"request")
    ((routing, _),) = bench.requests(1)
    bench.broker.sendall(encode([b"nobody", b"lost", routing, b"found"]))
    assert bench.client.recv() == b"found"


def test_answers_are_read_into_room_that_is_there_already(bench: Bench) -> None:
    bench.client.send(b"request")
    ((routing, _),) = bench.requests(1)
    answer = bytes(10_000)
    batch = encode([routing, answer])
    with traced() as taken:
        for _ in range(2 * framing.FULL // len(answer)):
            bench.broker.sendall(batch)
            assert bench.client.recv() == answer
        assert taken()[1] < framing.READ // 2


def test_a_decoder_keeps_no_room_for_the_largest_batch_that_came() -> None:
    batch = memoryview(encode([b"routing", bytes(15 << 20)]))
    with traced() as taken:
        decoder = BatchDecoder()
        for start in range(0, len(batch), framing.READ):
            decoder.feed(batch[start : start + framing.READ])
        assert taken()[0] < 1 << 20


def test_answers_that_a_client_does_not_read_are_dropped_past_a_bound(bench: Bench) -> None:
    bench.client.send(b"request")
    ((routing, _),) = bench.requests(1)
    answer, count = bytes(10_000), 4 * HIGH_WATER
    for _ in range(count):
        bench.broker.sendall(encode([routing, answer]))
    other = bench.connect()
    other.send(b"another")
    ((neighbour, _),) = bench.requests(1)
    bench.broker.sendall(encode([neighbour, b"served"]))
    assert other.recv() == b"served"
    other.close()
    assert HIGH_WATER <= bench.waiting(routing).count(len(answer)) < count
    bench.client.send(b"alive")
    assert [frame for _, frame in bench.requests(1)] == [b"alive"]


def test_large_answers_count_for_their_bytes(bench: Bench) -> None:
    bench.client.send(b"request")
    ((routing, _),) = bench.requests(1)
    answer, count = bytes(16 * WEIGHT), 300
    for _ in range(count):
        bench.broker.sendall(encode([routing, answer]))
    assert HIGH_WATER // 17 <= bench.waiting(routing).count(len(answer)) < count // 2
    bench.broker.sendall(encode([routing, answer, routing, b"next"]))
    assert [len(bench.client.recv()) for _ in range(18)] == [len(answer), *[0] * 16, len(b"next")]


def test_requests_wait_with_their_clients_while_the_broker_takes_none(bench: Bench) -> None:
    bench.client.send(b"first")
    ((routing, _),) = bench.requests(1)
    count, frame = 1000, bytes(LARGE)  # as large as those may be that are not set aside
    for _ in range(count):
        bench.client.send(frame)
    eventually(lambda: bench.broker.recv(1, socket.MSG_PEEK), "requests to arrive")
    bench.broker.sendall(encode([routing, b"answers still pass"]))
    assert bench.client.recv() == b"answers still pass"
    assert [taken for _, taken in bench.requests(count)] == [frame] * count


@pytest.mark.parametrize("unread", [False, True])
def test_a_gateway_ends_with_its_broker_whatever_is_under_way(bench: Bench, unread: bool) -> None:
    if unread:
        for _ in range(200):
            bench.client.send(bytes(100_000))
        eventually(lambda: bench.broker.recv(1, socket.MSG_PEEK), "requests to arrive")
    bench.end()
