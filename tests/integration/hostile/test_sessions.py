"""Peers that attack the session socket, and sessions that misuse what they were given."""

from __future__ import annotations

import os
import random
import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from cubroker.protocol import wire
from cubroker.protocol.messages import (
    Cancel,
    Close,
    Done,
    Envelope,
    Failed,
    ListDevices,
    ListPools,
    PoolChanged,
    Pools,
    Refused,
    Request,
    Retire,
    Retirement,
    Seal,
    Sealed,
    Watch,
    Welcome,
)
from cubroker.server.takeover import SO_PASSRIGHTS
from cubroker.server.transport.admission import MAX_PENDING
from tests.brokers import BrokerProcess, eventually
from tests.integration.hostile.hostile_peers import HOSTILITY, MIB, Witness, acknowledge, pour, push
from tests.stores import storing
from tests.unit.server.clients import HELLO, HELLO_OF_3, RawClient, connect, greet, hear, session
from tests.unit.server.processes import descriptors, gateway_of, resident

GUESSES = 4000 if HOSTILITY == 1 else 100_000 * HOSTILITY


def test_junk_on_the_session_socket(broker: BrokerProcess, witness: Witness) -> None:
    before, sent, junk = resident(broker.pid), 0, os.urandom(128 << 10)
    while sent < 64 * MIB * HOSTILITY:
        with connect(broker.directory) as connection:
            sent += pour(connection, junk, MIB)
    assert resident(broker.pid) - before < 32 * MIB


def test_many_connections_that_never_greet(broker: BrokerProcess, witness: Witness) -> None:
    before = descriptors(broker.pid)
    with ExitStack() as opened:
        for number in range(3 * MAX_PENDING * HOSTILITY):
            opened.enter_context(connect(broker.directory))
            if number % 100 == 0:
                witness.check()
        assert descriptors(broker.pid) <= before + 2 * MAX_PENDING + 10


def test_sessions_without_end_do_not_fill_the_log(broker: BrokerProcess, witness: Witness) -> None:
    with session(broker.directory) as client:
        known, before = len(client.clients()), broker.log().count("\n")
        for number in range(200 * HOSTILITY):
            with connect(broker.directory) as connection:
                greet(connection)
                if number % 2:
                    connection.send(HELLO)  # nothing is to be said there any more
        eventually(lambda: len(client.clients()) == known, "the sessions to end")
        assert broker.log().count("\n") - before < 100


def test_descriptors_pushed_without_end(broker: BrokerProcess, witness: Witness) -> None:
    reading, writing = os.pipe()
    before = descriptors(broker.pid)
    for number in range(200 * HOSTILITY):
        with connect(broker.directory) as connection:
            if number % 2:
                connection.send(HELLO)
            push(connection, HELLO, [writing] * 253)
    os.close(writing)
    eventually(lambda: descriptors(broker.pid) <= before, "the connections to be closed")
    assert os.read(reading, 1) == b"", "somebody keeps a descriptor"
    os.close(reading)


def test_the_system_keeps_descriptors_out_where_it_can(broker: BrokerProcess) -> None:
    with connect(broker.directory) as connection:
        try:
            takes = connection.getsockopt(socket.SOL_SOCKET, SO_PASSRIGHTS)
        except OSError:
            pytest.skip("this system has no SO_PASSRIGHTS")
        assert takes, "what the broker sends may bring descriptors"
        assert not push(connection, HELLO, [0])
        connection.send(HELLO)
        assert connection.recv(1 << 16)


@pytest.mark.slow
def test_sessions_that_never_read_their_notices(broker: BrokerProcess, witness: Witness) -> None:
    before, names = resident(broker.pid), [f"pool-{number}" for number in range(10)]
    with ExitStack() as opened, session(broker.directory) as writer:
        deaf = [opened.enter_context(session(broker.directory)) for _ in range(20)]
        for client in deaf:
            for name in names:
                client.ask(Watch(name, True), Done)
        for number in range(40 * HOSTILITY):
            for name in names:
                writer.publish(name)
                writer.ask(Retire(name, 0), Retirement)
            if number % 10 == 0:
                acknowledge(writer)
                witness.check()
        assert resident(broker.pid) - before < 64 * MIB
        # Each of them still gets the last word on every pool, once it reads.
        told: set[str] = set()
        while told != set(names):
            notice = deaf[0].notice()
            assert isinstance(notice, PoolChanged)
            told.add(notice.name)


def test_a_session_that_floods_and_never_reads(broker: BrokerProcess, witness: Witness) -> None:
    before = resident(broker.pid)
    with session(broker.directory) as client:
        for number in range(1, 20_000 * HOSTILITY + 1):
            client.send(ListPools())
            if number % 5000 == 0:
                witness.attach(witness.client)
        assert resident(broker.pid) - before < 128 * MIB


@pytest.mark.slow
def test_gateways_that_die_while_sessions_wait_to_be_welcomed() -> None:
    with storing() as broker, session(broker.directory) as there:
        for _ in range(HOSTILITY):
            known = len(there.clients())
            with ExitStack() as waiting:
                with broker.fdstore.deaf():
                    newcomers = [waiting.enter_context(connect(broker.directory)) for _ in range(20)]
                    for each in newcomers:
                        each.send(HELLO)
                    eventually(lambda: len(there.clients()) == known + 20, "the sessions to be known")  # noqa: B023
                    os.kill(gateway_of(broker.pid), signal.SIGKILL)
                    there.redial()
                for each in newcomers:
                    assert isinstance(hear(each), Welcome | Refused)  # refused if this took longer than it may
            eventually(lambda: len(there.clients()) == known, "the sessions to end")  # noqa: B023


# -- guessing ------------------------------------------------------------------------------------------


class Guesser:
    """Sends requests under secrets of its own choice, and reads all answers."""

    def __init__(self, client: RawClient) -> None:
        self.client = client
        self.codes: dict[str, int] = {}
        self._last = 0

    def guess(self, requests: Iterator[tuple[bytes, Request]]) -> None:
        waiting = 0
        for secret, body in requests:
            self._last += 1
            self.client.dealer.send(wire.pack(Envelope(secret, self._last, self._last, body)))
            waiting += 1
            if waiting == 250:
                self._hear(waiting)
                waiting = 0
        self._hear(waiting)

    def _hear(self, count: int) -> None:
        for _ in range(count):
            body = self.client.receive().body
            code = body.code if isinstance(body, Failed) else type(body).__name__
            self.codes[code] = self.codes.get(code, 0) + 1


def test_guessing_a_secret_gets_nothing(broker: BrokerProcess, witness: Witness) -> None:
    chance = random.Random(1)
    with (
        session(broker.directory, HELLO_OF_3) as victim,
        session(broker.directory) as newer,
        session(broker.directory, HELLO_OF_3) as client,
    ):
        lease, secret = victim.create("draft").lease, victim.welcome.secret
        near = [
            secret[:place] + bytes([secret[place] ^ 1 << bit]) + secret[place + 1 :]
            for place in range(16)
            for bit in range(8)
        ]
        fixed = [
            *near,
            bytes(16),
            b"\xff" * 16,
            secret[::-1],
            secret[:15] + bytes([secret[15] ^ 0xFF]),
            client.welcome.secret[::-1],
            newer.welcome.secret,  # by which nobody knows that one
        ]
        secrets = (*fixed, *(chance.randbytes(16) for _ in range(GUESSES - len(fixed))))
        guesser = Guesser(client)
        guesser.guess(
            (guess, (Seal(lease), Close(lease), ListDevices())[number % 3]) for number, guess in enumerate(secrets)
        )
        assert guesser.codes == {"denied": GUESSES}
        assert {info.name: info.state for info in victim.ask(ListPools(), Pools).pools}["draft"] == "draft"


def test_guessing_a_lease_gets_nothing(broker: BrokerProcess, witness: Witness) -> None:
    with session(broker.directory) as victim, session(broker.directory, HELLO_OF_3) as client:
        victim.publish("pool")
        for _ in range(20):
            victim.attach("pool")
        draft = victim.create("pool").lease
        waiting = victim.send(Watch("pool", True))
        held = [len(known.leases) for known in victim.clients()]
        kinds = (Close, Seal)
        ids = [*range(1, GUESSES - 500), *((1 << 63) - 1 - number for number in range(500)), draft]
        guesser = Guesser(client)
        guesser.guess((client.welcome.secret, kinds[number % 2](lease)) for number, lease in enumerate(ids))
        guesser.guess((client.welcome.secret, Cancel(number)) for number in (1, waiting, 1 << 40))
        assert guesser.codes.pop("not_found") == len(ids)
        assert [len(known.leases) for known in victim.clients()] == held
        victim.ask(Seal(draft), Sealed)
