"""Peers that attack the gateway. It may die of them; the broker and its memory do not, and serve on."""

from __future__ import annotations

import itertools
import os
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import zmq

from cubroker.protocol.layout import Layout
from cubroker.protocol.messages import Describe, Description, ListPools
from cubroker.protocol.paths import REQUEST_SOCKET
from cubroker.server.transport.gateway_process import INTERVAL, UNANSWERED
from tests.brokers import BrokerProcess, eventually
from tests.integration.hostile.hostile_peers import (
    GREETING,
    HOSTILITY,
    MIB,
    Witness,
    acknowledge,
    dial,
    frame,
    pour,
    ready,
)
from tests.unit.server.clients import session
from tests.unit.server.processes import alive, descriptors, gateway_of, resident


def leave_descriptors(pid: int, count: int) -> None:
    """Let a process open no more than ``count`` further files."""
    hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)[1]
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (descriptors(pid) + count, hard))


def leave_memory(pid: int, nbytes: int) -> None:
    """Let a process take no more than ``nbytes`` further bytes of memory."""
    status = Path(f"/proc/{pid}/status").read_text()
    used = int(status.partition("VmData:")[2].split()[0]) << 10
    hard = resource.prlimit(pid, resource.RLIMIT_DATA)[1]
    resource.prlimit(pid, resource.RLIMIT_DATA, (used + nbytes, hard))


def flood(broker: BrokerProcess, connections: int, words: bytes) -> ExitStack:
    """Open connections, say ``words`` on each, and keep them."""
    opened = ExitStack()
    for _ in range(connections):
        connection = opened.enter_context(socket.socket(socket.AF_UNIX))
        connection.setblocking(False)
        try:
            connection.connect(str(broker.directory / REQUEST_SOCKET))
            connection.send(words)
        except OSError:  # the backlog is full, or the gateway gone already
            continue
    return opened


@pytest.mark.parametrize(
    "words",
    [b"", GREETING[:20], GREETING + ready()],
    ids=["no handshake", "half a greeting", "a handshake"],
)
def test_a_flood_of_connections_until_descriptors_end(broker: BrokerProcess, witness: Witness, words: bytes) -> None:
    for _ in range(HOSTILITY):
        gateway = gateway_of(broker.pid)
        leave_descriptors(gateway, 20)
        with flood(broker, 100, words):
            witness.attach(witness.client)
        witness.check()


def test_an_endless_multipart_message(broker: BrokerProcess, witness: Witness) -> None:
    for more in (frame(bytes(65_536), more=True), frame(b"", more=True) * 6000):
        for _ in range(HOSTILITY):
            gateway = gateway_of(broker.pid)
            leave_memory(gateway, 64 * MIB)
            with dial(broker) as connection:
                connection.sendall(GREETING + ready())
                sent = pour(connection, more, 512 * MIB)
            assert sent < 512 * MIB, "the gateway takes everything"
            witness.check()


@pytest.mark.slow
def test_junk_on_the_request_socket(broker: BrokerProcess, witness: Witness) -> None:
    gateway = gateway_of(broker.pid)
    before, sent, junk = resident(gateway), 0, os.urandom(1 << 16)
    starts = (b"", b"\xff" + bytes(8) + b"\x7f", GREETING, GREETING + ready(), GREETING + b"\x04\xff")
    for number in range(2000):
        with dial(broker) as connection:
            # Sizes that promise much are part of it.
            part = starts[number % len(starts)] + junk[number * 16 :] + junk
            sent += pour(connection, part, MIB)
        if sent > 64 * MIB * HOSTILITY:
            break
        witness.attach(witness.client)
    assert resident(gateway_of(broker.pid)) - before < 128 * MIB


def test_squatted_and_repeated_routing_ids(broker: BrokerProcess, witness: Witness) -> None:
    ids = (b"mine", b"\x00" + bytes(4), b"\x00\x00\x00\x00\x01", bytes([0x80]) + bytes(4), b"x" * 255, b"")
    for number in range(60 * HOSTILITY):
        with ExitStack() as squatters:
            for _ in range(3):
                connection = squatters.enter_context(dial(broker))
                pour(connection, GREETING + ready(ids[number % len(ids)]) + frame(b"hello"), 1)
            if number % 10 == 0:
                witness.check()


def test_messages_that_no_dealer_would_send(broker: BrokerProcess, witness: Witness) -> None:
    commands = (b"\x04\x00", b"\x04\x05\x04PING", b"\x04\x07\x09ERROR\x00", b"\x04\x0a\x09SUBSCRIBE", b"\x05\x00")
    odd = (*commands, b"\xf8\x00", b"\x02" + b"\xff" * 8, b"\x00\x00" * 5000, ready() * 3, GREETING * 2)
    for words in odd * HOSTILITY:
        with dial(broker) as connection:
            pour(connection, GREETING + ready() + words, 1)
            connection.shutdown(socket.SHUT_WR)
            witness.attach(witness.client)


@contextmanager
def silent_dealer(broker: BrokerProcess) -> Iterator[zmq.Socket[bytes]]:
    """A DEALER that takes one answer at most."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        for option, value in ((zmq.LINGER, 0), (zmq.RCVHWM, 1), (zmq.SNDTIMEO, 60_000), (zmq.RCVBUF, 4096)):
            dealer.setsockopt(option, value)
        dealer.connect(f"ipc://{broker.directory / REQUEST_SOCKET}")
        yield dealer


def test_a_reader_that_never_reads(broker: BrokerProcess, witness: Witness) -> None:
    with session(broker.directory) as client, silent_dealer(broker) as dealer:
        for number in range(1, 10_001 * HOSTILITY):
            dealer.send(client.frame(number, 1 if number % 2 else number, ListPools()))
            if number % 5000 == 0:
                witness.attach(witness.client)
        assert resident(gateway_of(broker.pid)) < 256 * MIB


@pytest.mark.slow
def test_the_largest_answers_asked_for_again_and_again_and_never_read(broker: BrokerProcess, witness: Witness) -> None:
    layout = Layout.pack([(f"{number:0500d}", "U8", (0,)) for number in range(15_000)] + [("x", "U8", (1,))])
    gateway, before = gateway_of(broker.pid), resident(broker.pid)
    leave_memory(gateway, 256 * MIB)
    with session(broker.directory) as client, silent_dealer(broker) as dealer:
        client.publish("large", layout)
        for number in range(1 << 40, (1 << 40) + 30 * HOSTILITY):
            # It says that it has all earlier answers, so the broker does not keep them.
            again = client.frame(number, number, Describe("large", 0))
            for _ in range(20):
                dealer.send(again)
            if number % 2:
                witness.check()
        eventually(lambda: not alive(gateway) or resident(gateway) > 48 * MIB, "the answers to gather")
        witness.check()
        assert gateway_of(broker.pid) == gateway, "one deaf peer brings down the gateway of all"
    assert resident(broker.pid) - before < 256 * MIB


@pytest.mark.slow
def test_large_answers_one_after_the_other_come_to_whom_reads_them(broker: BrokerProcess, witness: Witness) -> None:
    layout = Layout.pack([(f"{number:0500d}", "U8", (0,)) for number in range(15_000)] + [("x", "U8", (1,))])
    with session(broker.directory) as client:
        client.publish("large", layout)
        for _ in range(30 * HOSTILITY):
            assert client.ask(Describe("large", 0), Description).layout == layout.encode()
            acknowledge(client)


@pytest.mark.slow
def test_a_gateway_with_much_to_do_is_not_taken_for_one_that_hangs(broker: BrokerProcess, witness: Witness) -> None:
    gateway = gateway_of(broker.pid)
    deadline = time.monotonic() + 1.25 * UNANSWERED * INTERVAL * HOSTILITY  # how long it lasts
    with ExitStack() as opened:
        clients = [opened.enter_context(session(broker.directory)) for _ in range(4)]
        deaf = [(client, opened.enter_context(silent_dealer(broker))) for client in clients]
        for number in itertools.count(1):
            for client, dealer in deaf:
                for _ in range(100):
                    dealer.send(client.frame(number, number, ListPools()))
            flood(broker, 20, GREETING).close()
            if time.monotonic() > deadline:
                break
    witness.check()
    assert gateway_of(broker.pid) == gateway
