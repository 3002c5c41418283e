"""Which requests the gateway forwards first: a ROUTER of libzmq, with the test in the gateway's place."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import zmq

from cubroker.server.transport import framing, gateway
from cubroker.server.transport.gateway import LARGE, Intake
from cubroker.server.transport.gateway_process import RequestDecoder
from tests.brokers import PATIENCE


class Bench:
    """An intake, and clients that are connected to its socket."""

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._clients: list[zmq.Socket[bytes]] = []
        self._router = self._context.socket(zmq.ROUTER)
        self._router.bind("inproc://requests")
        self.intake = Intake(self._router)
        self._reader = RequestDecoder()

    def client(self) -> zmq.Socket[bytes]:
        client = self._context.socket(zmq.DEALER)
        client.setsockopt(zmq.LINGER, 0)
        client.connect("inproc://requests")
        self._clients.append(client)
        return client

    def receive(self) -> None:
        """Receive all that was sent, or as much as there is room for."""
        assert self._router.poll(int(PATIENCE * 1000))
        while not self.intake.full and self._router.poll(0):
            self.intake.receive()

    def batches(self) -> list[list[bytes]]:
        """Return what is to be forwarded, batch by batch, the first four bytes of each frame."""
        whole: list[list[bytes]] = []
        while self.intake:
            whole += self._reader.feed(framing.encode(self.intake.batch()))
        return [[frame[:4] for _, frame in framing.pairs(batch)] for batch in whole]

    def close(self) -> None:
        for each in (*self._clients, self._router):
            each.close()
        self._context.term()


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.close()


def large(name: bytes, nbytes: int = LARGE) -> bytes:
    return name + bytes(nbytes)


def test_small_requests_are_forwarded_together_in_order(bench: Bench) -> None:
    client = bench.client()
    for number in range(10):
        client.send(b"%04d" % number)
    bench.receive()
    assert bench.batches() == [[b"%04d" % number for number in range(10)]]
    assert bench.intake.batch() == []


def test_a_small_request_is_forwarded_before_large_ones_that_came_earlier(bench: Bench) -> None:
    flood, client = bench.client(), bench.client()
    for number in range(3):
        flood.send(large(b"lar%d" % number))
    bench.receive()
    client.send(b"one")
    bench.receive()
    assert bench.intake.batch()[1] == b"one"
    client.send(b"two")
    client.send(b"three")
    bench.receive()
    assert bench.batches() == [[b"lar0"], [b"two", b"thre"], [b"lar1"], [b"lar2"]]


def test_small_requests_get_in_between_the_pieces_of_a_large_one(bench: Bench) -> None:
    flood, client = bench.client(), bench.client()
    flood.send(large(b"lar0", 3 * framing.PIECE))
    flood.send(large(b"lar1"))
    bench.receive()
    kinds: list[object] = []
    for number in range(5):
        client.send(b"%04d" % number)
        bench.receive()
        kinds += [batch[1] if len(batch) == 2 else batch[2] for batch in (bench.intake.batch(), bench.intake.batch())]
    pieces = [framing.MORE, framing.MORE, framing.MORE, framing.LAST, framing.LAST]
    assert [kind for kind in kinds if kind in pieces] == pieces
    assert kinds[::2] == pieces or kinds[1::2] == pieces
    assert not bench.intake


def test_clients_take_turns_with_their_large_requests(bench: Bench) -> None:
    first, second = bench.client(), bench.client()
    for number in range(4):
        first.send(large(b"one%d" % number))
    bench.receive()
    second.send(large(b"two0"))
    second.send(large(b"two1"))
    bench.receive()
    assert bench.batches() == [[each] for each in (b"one0", b"two0", b"one1", b"two1", b"one2", b"one3")]


def test_large_requests_past_the_bounds_are_dropped_for_their_client_to_send_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway, "MAX_ASIDE", 3 * LARGE)
    monkeypatch.setattr(gateway, "MAX_ALL_ASIDE", 5 * LARGE)
    clients = [bench.client() for _ in range(3)]
    for number, client in enumerate(clients):
        for _ in range(4):
            client.send(large(b"one%d" % number))
        bench.receive()
    assert bench.batches() == [[each] for each in (b"one0", b"one1", b"one0", b"one1")]
    clients[2].send(large(b"next"))
    bench.receive()
    assert bench.batches() == [[b"next"]]


def test_no_more_is_received_than_fills_a_batch(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(framing, "MAX_MESSAGES", 5)
    client = bench.client()
    for number in range(12):
        client.send(b"%04d" % number)
    for start in (0, 5, 10):
        bench.receive()
        assert bench.intake.full is (start < 10)
        assert bench.batches() == [[b"%04d" % number for number in range(start, min(start + 5, 12))]]
