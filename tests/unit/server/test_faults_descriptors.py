"""A broker that runs out of descriptors: who asks for one is refused or waits, and nothing is lost or left."""

from __future__ import annotations

import errno
import os
import resource
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from cubroker.client import Broker
from cubroker.protocol.layout import Layout
from cubroker.protocol.messages import Close, Create, Created, Done, Failed, Refused, Seal, Sealed, Welcome
from tests.brokers import BrokerProcess, eventually
from tests.faults import faulty
from tests.unit.server.clients import HELLO, RawClient, connect, hear, session
from tests.unit.server.processes import all_closed, descriptors, files, gateway_of, gateways, open_files
from tests.unit.server.test_descriptors import MANY

pytestmark = pytest.mark.usefixtures("looking_at_nobody")

MIB = 1 << 20
THREE = Layout.pack([(name, "U8", (2 * MIB,)) for name in "abc"], slab=2 * MIB)
ENOUGH = 64


@contextmanager
def short_of(pid: int, free: int) -> Iterator[None]:
    """Leave a process ``free`` descriptors more than it has, for the length of a block."""
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    numbers = {int(entry.name) for entry in open_files(pid)}
    unused = (number for number in range(limits[0]) if number not in numbers)
    limit = [next(unused) for _ in range(free + 1)][-1]
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, limits[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)


def create(client: RawClient) -> Created | Failed:
    device = client.devices()[0].uuid
    reply = client.answer(client.send(Create("pool", THREE.encode(), (device,), "ipc", 0.0, None)))
    assert isinstance(reply, Created | Failed)
    return reply


def test_a_draft_that_finds_no_descriptor_is_refused_and_leaves_none(broker: BrokerProcess, client: RawClient) -> None:
    devices = client.devices()
    before = files(broker.pid)
    for free in range(ENOUGH):
        with short_of(broker.pid, free):
            reply = create(client)
        if isinstance(reply, Created):
            break
        assert reply.code == "device", reply
        assert client.devices() == devices
        all_closed(broker.pid, before)
    assert isinstance(reply, Created)
    assert free == 4  # three allocations, and the socket over which all host memory is handed out
    client.ask(Close(reply.lease), Done)
    eventually(lambda: client.devices() == devices, "the memory to come back")
    all_closed(broker.pid, before)


def greeted(connection: socket.socket) -> Welcome | Refused:
    with connection:
        connection.send(HELLO)
        return hear(connection)


@pytest.mark.slow
def test_who_connects_without_a_descriptor_to_spare_is_refused_or_waits(
    broker: BrokerProcess, client: RawClient
) -> None:
    before = files(broker.pid)
    for free in range(3):
        with short_of(broker.pid, free):
            connection = connect(broker.directory)
            if free == 0:
                eventually(lambda: "no new sessions for now" in broker.log(), "the door to be shut")
                client.devices()  # those who are in notice nothing
            if free == 1:
                with connection:
                    refused = hear(connection)
                assert isinstance(refused, Refused)
                assert "cannot identify the process" in refused.message
            if free == 2:
                assert isinstance(greeted(connection), Welcome)
        if free == 0:
            assert isinstance(greeted(connection), Welcome)
        all_closed(broker.pid, before)
        with session(broker.directory) as other:
            other.devices()
        all_closed(broker.pid, before)


def after_the_death_of_its_gateway(broker: BrokerProcess, free: int) -> str:
    """Kill a broker's gateway when it has ``free`` descriptors left, and say how it goes on."""
    gateway, failures = gateway_of(broker.pid), broker.log().count("cannot be started")

    def outcome() -> str:
        if broker.log().count("cannot be started") > failures:
            return "there is none"
        return "there is another" if set(gateways(broker.pid)) - {gateway} else ""

    with short_of(broker.pid, free):
        os.kill(gateway, signal.SIGKILL)
        eventually(outcome, "another gateway, or none")
        return outcome()


@pytest.mark.slow
def test_a_gateway_that_cannot_be_started_is_started_when_there_are_descriptors_again(broker: BrokerProcess) -> None:
    def counts() -> tuple[int, int]:
        return descriptors(broker.pid), descriptors(gateway_of(broker.pid))

    with Broker(broker.directory) as client:  # it asks again, where a request went with the gateway
        devices, before = client.devices(), counts()
        for free, outcome in ((0, "there is none"), (2, "there is none"), (ENOUGH, "there is another")):
            assert after_the_death_of_its_gateway(broker, free) == outcome
            assert client.devices() == devices
            eventually(lambda: counts() == before, f"{before} descriptors")


@pytest.mark.parametrize("error", [errno.ETOOMANYREFS, errno.ENOMEM])
def test_memory_is_handed_over_whole_whichever_packet_the_system_had_no_room_for(error: int) -> None:
    with faulty("host:2@64MiB") as broker, session(broker.directory) as client:

        def files(lease: int) -> list[int]:
            return [os.fstat(descriptor).st_ino for descriptor in client.descriptors(lease, 20)]

        draft = client.create("pool", MANY, "vmm").lease
        memory = files(draft)
        client.ask(Seal(draft), Sealed)
        for number in (1, 2, 3):
            broker.arm(("send_fds",), number, error)
            lease = client.attach("pool").lease
            assert files(lease) == memory
            assert broker.disarm() == (3 if number < 3 else 2)
            client.ask(Close(lease), Done)
