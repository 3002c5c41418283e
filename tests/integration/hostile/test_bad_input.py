"""Every message in every way that it can be wrong, at the broker's own mouth: session socket and gateway."""

from __future__ import annotations

import itertools
import os
import select
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from cubroker.protocol import wire
from cubroker.protocol.errors import ERRORS
from cubroker.protocol.messages import (
    VERSIONS,
    Answer,
    Done,
    Drain,
    Failed,
    Greeting,
    Hello,
    Locked,
    Pong,
    Refused,
    Unlock,
    Welcome,
)
from cubroker.protocol.paths import REQUEST_SOCKET
from cubroker.server.transport import admission
from tests.brokers import BrokerProcess, eventually
from tests.integration.hostile.hostile_peers import MIB, Witness, push
from tests.unit.protocol.samples import REQUESTS, SAMPLES, SECRET
from tests.unit.protocol.test_messages import HOSTILE, OF_EACH_TYPE, places, put
from tests.unit.server.clients import HELLO, RawClient, connect, session
from tests.unit.server.processes import descriptors, gateway_of, resident

BATCH = 200
"""Frames between two of which the answers are read, so that none has to be dropped."""

FIRST = 1 << 40
"""Requests are numbered from here, so that every number takes as many bytes."""


@pytest.fixture
def broker(witness: Witness) -> Iterator[BrokerProcess]:
    """That broker. After each test it has the descriptors that it had before the first."""
    yield witness.process
    witness.check_descriptors()


def flips(data: bytes) -> Iterator[bytes]:
    for place, bit in itertools.product(range(len(data)), range(8)):
        yield data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :]


def cuts(data: bytes) -> Iterator[bytes]:
    return (data[:length] for length in range(len(data)))


def swaps(data: bytes) -> Iterator[bytes]:
    """Every field replaced by a value of each type, and left out."""
    plain = msgspec.msgpack.decode(data)
    for (path, _), wrong in itertools.product(places(plain), OF_EACH_TYPE):
        yield msgspec.msgpack.encode(put(plain, path, wrong))
    if isinstance(plain, list):
        yield from (msgspec.msgpack.encode(plain[:length]) for length in range(len(plain)))


WAYS: tuple[Callable[[bytes], Iterator[bytes]], ...] = (flips, cuts, swaps)
ways = pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)


# -- the session socket ------------------------------------------------------------------------------


def said(directory: Path, hello: bytes) -> Greeting | None:
    """What a broker says to ``hello``; None if it hangs up."""
    with connect(directory) as connection:
        connection.send(hello)
        data = connection.recv(1 << 16)
        if not data:
            return None
        answer: Greeting = wire.unpack(data, Greeting)
        if isinstance(answer, Refused):
            assert connection.recv(1) == b"", "refused, and not hung up on"
            assert answer.code in ERRORS
            assert len(answer.message) < 400
    return answer


@ways
def test_a_greeting_that_is_wrong_is_refused(broker: BrokerProcess, way: Callable[[bytes], Iterator[bytes]]) -> None:
    heard = {data: said(broker.directory, data) for data in way(HELLO)}
    for data, answer in heard.items():
        try:
            hello = wire.unpack(data, Hello)
        except Exception:  # noqa: BLE001  whatever is wrong with it
            hello = None
        agreed = hello is not None and not set(VERSIONS).isdisjoint(hello.versions)
        pings = hello is not None and hello.ping
        assert isinstance(answer, Welcome | Pong) == agreed
        assert isinstance(answer, Pong) == (agreed and pings)
    assert any(isinstance(answer, Refused) for answer in heard.values())


def test_other_words_are_no_greeting(broker: BrokerProcess) -> None:
    others = [wire.pack(value) for value, _ in SAMPLES if not isinstance(value, Hello)]
    hostile = [data for data, _ in HOSTILE.values() if data]
    for data in (*others, *(data[: 1 << 17] for data in hostile), HELLO.ljust(admission.MAX_HELLO + 1)):
        assert isinstance(said(broker.directory, data), Refused)


# -- the request socket ------------------------------------------------------------------------------


class Sender:
    """Sends frames in bulk, and reads the answers to them as it goes."""

    def __init__(self, client: RawClient) -> None:
        self.client = client
        self.sent = 0
        self.answers: list[Answer] = []

    def send(self, data: bytes) -> None:
        self.client.dealer.send(self.client.sign(data))
        self.sent += 1
        if self.sent % BATCH == 0:
            self.settle()

    def settle(self) -> None:
        """Return when everything that was sent has been read: what is no request is answered too, in its turn."""
        number = FIRST + (1 << 30) + self.sent
        self.client.dealer.send(self.client.sign(wire.pack([self.client.secret, number, 1, "no request"])))
        while True:
            answer = self.client.receive()
            if answer.id == number:
                return
            if isinstance(answer.body, Failed):
                assert answer.body.code in ERRORS
                assert len(answer.body.message) < 1000
            self.answers.append(answer)

    def unlock(self) -> None:
        """Release every name that was locked: a process that lives keeps its locks when its connection ends.

        Each may be waited for by another request, which has the lock then.
        """
        released = 0
        while held := [answer.body.lock for answer in self.answers if isinstance(answer.body, Locked)][released:]:
            for lock in held:
                released += 1
                number = FIRST + (1 << 29) + released
                self.send(head(self.client.secret, number) + wire.pack(Unlock(lock)))
            self.settle()


def bodies(way: Callable[[bytes], Iterator[bytes]], body: object) -> Iterator[bytes]:
    """Every wrong form of a request's body. What may wait waits, and ends with its session."""
    return way(wire.pack(body))


def head(secret: bytes, number: int) -> bytes:
    """An envelope up to its body; all requests before this one are acknowledged."""
    return b"\x94" + wire.pack(secret) + wire.pack(number) * 2


@pytest.mark.slow
@ways
def test_a_request_that_is_wrong_is_answered_with_what_is_wrong(
    broker: BrokerProcess, way: Callable[[bytes], Iterator[bytes]]
) -> None:
    gateway = gateway_of(broker.pid)
    before = resident(broker.pid), resident(gateway)
    with session(broker.directory) as client:
        sender = Sender(client)
        for number, data in enumerate(data for body in REQUESTS for data in bodies(way, body)):
            sender.send(head(client.secret, FIRST + number) + data)
        sender.settle()
        sender.unlock()
        failed = [answer.body for answer in sender.answers if isinstance(answer.body, Failed)]
        assert len(failed) > sender.sent / 4
        assert {body.code for body in failed} <= set(ERRORS)
    with session(broker.directory) as other:
        other.ask(Drain(False), Done)  # a drain with another value is one, too
        eventually(lambda: len(other.clients()) == 2, "the session to end with all that it asked for")
        eventually(lambda: not any(device.promised for device in other.devices()), "what it was promised")
    assert gateway_of(broker.pid) == gateway
    assert resident(broker.pid) - before[0] < 32 * MIB
    assert resident(gateway) - before[1] < 32 * MIB


def test_an_envelope_that_is_wrong_harms_its_own_session_at_most(broker: BrokerProcess) -> None:
    with session(broker.directory) as client:
        whole = head(client.secret, FIRST)
        for data in itertools.chain(flips(whole), cuts(whole)):
            client.dealer.send(client.sign(data + wire.pack(REQUESTS[-2])))
        Sender(client).settle()


def test_messages_of_other_kinds_are_no_requests(broker: BrokerProcess) -> None:
    with session(broker.directory) as client:
        sender = Sender(client)
        for number, (value, _) in enumerate(SAMPLES):
            sender.send(wire.pack(value))
            sender.send(head(client.secret, FIRST + number) + wire.pack(getattr(value, "body", value)))
        sender.settle()
        sender.unlock()
        others = sum(type(getattr(value, "body", value)) not in map(type, REQUESTS) for value, _ in SAMPLES)
        refusals = [answer for answer in sender.answers if isinstance(answer.body, Failed) and answer.id >= FIRST]
        assert len(refusals) >= others


@pytest.mark.parametrize("name", [name for name in HOSTILE if name != "too long"])
def test_a_message_too_long_or_too_deep_costs_a_small_multiple_of_its_bytes(broker: BrokerProcess, name: str) -> None:
    data: bytes = HOSTILE[name][0]
    with session(broker.directory) as client:
        before = resident(broker.pid)
        client.dealer.send(client.sign(data.replace(SECRET, client.welcome.secret)))
        Sender(client).settle()
        assert resident(broker.pid) - before < 32 * MIB + 8 * len(data)


# -- descriptors that nobody asked for -----------------------------------------------------------------


class Pipe:
    """A pipe whose writing end is given away: reading says whether anybody still has it."""

    def __init__(self) -> None:
        self.reading, self.writing = os.pipe()

    def give(self, connection: socket.socket, data: bytes) -> None:
        """Push the writing end at ``connection``, many times over, with ``data``."""
        if not push(connection, data, [self.writing] * 50) and data:
            connection.send(data)
        os.close(self.writing)

    def check_closed(self) -> None:
        assert select.select([self.reading], [], [], 60)[0], "somebody keeps the descriptor"
        assert os.read(self.reading, 1) == b""
        os.close(self.reading)


@pytest.mark.parametrize("moment", ["instead of a greeting", "with the greeting", "after it"])
def test_descriptors_pushed_at_the_session_socket_are_closed(broker: BrokerProcess, moment: str) -> None:
    pipe = Pipe()
    with connect(broker.directory) as connection:
        if moment == "with the greeting":
            pipe.give(connection, HELLO)
        elif moment == "after it":
            connection.send(HELLO)
            connection.recv(1 << 16)
            pipe.give(connection, b"x")
        else:
            pipe.give(connection, b"")
        if moment != "instead of a greeting":
            connection.recv(1 << 16)
        pipe.check_closed()


def test_descriptors_pushed_at_the_request_socket_are_closed(broker: BrokerProcess) -> None:
    gateway, pipe = gateway_of(broker.pid), Pipe()
    before = descriptors(gateway)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(broker.directory / REQUEST_SOCKET))
        pipe.give(connection, struct.pack(">Q", 1 << 60))
        pipe.check_closed()
    eventually(lambda: descriptors(gateway) <= before, "the connection to be closed")
    assert gateway_of(broker.pid) == gateway
