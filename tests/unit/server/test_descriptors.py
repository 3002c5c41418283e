"""Memory that descriptors open, lent by a broker process: who gets them, who does not read, and what is left behind."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import pytest

from cubroker.driver import Context, DriverError, load
from cubroker.protocol.fields import MAX_DESCRIPTORS
from cubroker.protocol.layout import Layout
from cubroker.protocol.messages import (
    DESCRIPTOR,
    Attach,
    Attached,
    Cancel,
    Close,
    Create,
    Created,
    Done,
    Failed,
    ListPools,
    Pools,
    ReplicaHandles,
    Retire,
    Retirement,
    Seal,
    Sealed,
)
from tests.brokers import BrokerProcess, eventually
from tests.faults import faulty
from tests.unit.server.clients import RawClient, holder, session
from tests.unit.server.processes import files

SIZE = 2 << 20
MANY = Layout.pack([(str(number), "U8", (SIZE,)) for number in range(20)], slab=SIZE)
"""20 allocations: 40 MiB, and two packets of descriptors."""

THREE = Layout.pack([(str(number), "U8", (SIZE,)) for number in range(3)], slab=SIZE)
CONTEXTS = ("cuDevicePrimaryCtxRetain", "cuCtxPushCurrent", "cuCtxSetCurrent")
DEAF = 200
"""Leases of a client that does not read; on their way they would be 4000 descriptors."""


@contextmanager
def mapped(client: RawClient, opened: Sequence[int], *, readonly: bool) -> Iterator[tuple[Context, list[int]]]:
    """Map what descriptors open, for the first device."""
    with ExitStack() as undo:
        driver = load(client.welcome.driver)
        undo.callback(driver.close)
        context, pointers = driver.context(0), []
        for descriptor in opened:
            reservation = undo.enter_context(context.reserve(SIZE))
            reservation.map(descriptor, readonly=readonly)
            pointers.append(reservation.pointer)
        yield context, pointers


def write(client: RawClient, opened: Sequence[int], first: int = 1) -> None:
    """Fill the allocations with ``first`` and the numbers after it."""
    with mapped(client, opened, readonly=False) as (context, pointers):
        for number, pointer in enumerate(pointers, first):
            assert context.read(pointer, SIZE) == bytes(SIZE)
            context.write(pointer, bytes([number]) * SIZE)


def read(client: RawClient, opened: Sequence[int]) -> list[set[int]]:
    """Return which bytes there are in each allocation."""
    with mapped(client, opened, readonly=True) as (context, pointers):
        return [set(context.read(pointer, SIZE)) for pointer in pointers]


def publish(client: RawClient, name: str, layout: Layout) -> None:
    created = client.create(name, layout, "vmm")
    write(client, client.descriptors(created.lease, len(layout.allocations)))
    client.ask(Seal(created.lease), Sealed)


def retire(client: RawClient, name: str) -> None:
    client.ask(Retire(name, 0), Retirement)


def allocated(client: RawClient) -> list[int]:
    return [device.allocated + device.promised for device in client.devices()]


@pytest.mark.slow
def test_readers_map_what_the_writer_wrote_and_cannot_write_it(broker: BrokerProcess, client: RawClient) -> None:
    publish(client, "pool", MANY)
    with session(broker.directory) as reader:
        attached = reader.attach("pool")
        assert attached.share == "vmm"
        assert attached.replicas == (ReplicaHandles(client.devices()[0].uuid, (DESCRIPTOR,) * 20),)
        opened = reader.descriptors(attached.lease, 20)
        assert read(reader, opened) == [{number} for number in range(1, 21)]
        with mapped(reader, opened[:1], readonly=True) as (context, (pointer,)), pytest.raises(DriverError):
            context.write(pointer, b"mine")
    assert [pool.share for pool in client.ask(ListPools(), Pools).pools] == ["vmm"]


def test_descriptors_and_memory_are_back_after_the_last_lease(broker: BrokerProcess, client: RawClient) -> None:
    publish(client, "first", THREE)
    retire(client, "first")
    eventually(lambda: allocated(client) == [0, 0], "the first memory to be back")
    before = files(broker.pid)
    publish(client, "pool", MANY)
    publish(client, "other", THREE)
    lease = client.attach("pool").lease
    client.descriptors(lease, 20)
    assert (files(broker.pid) - before).total() > 20
    for name in ("pool", "other"):
        retire(client, name)
    assert allocated(client)[0] >= 20 * SIZE
    client.ask(Close(lease), Done)
    eventually(lambda: allocated(client) == [0, 0], "the memory to be back")
    assert files(broker.pid) <= before
    client.create(
        "again", Layout.pack([("x", "U8", (56 << 20,))]), "vmm"
    )  # nearly the whole budget: it is really there


def test_a_request_that_is_sent_again_is_answered_again_and_handed_over_once(client: RawClient) -> None:
    publish(client, "pool", THREE)
    number = client.send(Attach("pool", 0, None, 0.0))
    client.send(Attach("pool", 0, None, 0.0), number)
    first, again = client.receive().body, client.receive().body
    assert isinstance(first, Attached)
    assert again == first
    client.descriptors(first.lease, 3)
    client.descriptors(client.attach("pool").lease, 3)  # the next that comes is of the next lease


def test_a_sharded_pool_is_handed_over_in_the_order_of_its_replicas(client: RawClient) -> None:
    devices = tuple(device.uuid for device in client.devices())
    created = client.ask(Create("pool", THREE.encode(), devices, "vmm", 0.0, None, None, (1, 0, 1)), Created)
    assert [[bool(handle) for handle in replica.handles] for replica in created.replicas] == [
        [False, True, False],
        [True, False, True],
    ]
    assert allocated(client) == [SIZE, 2 * SIZE]
    write(client, client.descriptors(created.lease, 3))
    client.ask(Seal(created.lease), Sealed)
    everything = client.attach("pool")
    assert everything.replicas == created.replicas
    assert read(client, client.descriptors(everything.lease, 3)) == [{1}, {2}, {3}]
    shard = client.ask(Attach("pool", 0, devices[1], 0.0), Attached)
    assert read(client, client.descriptors(shard.lease, 2)) == [{2}, {3}]


@pytest.mark.slow
def test_no_context_is_made_for_memory_that_descriptors_open() -> None:
    with faulty("host:2@64MiB") as broker, session(broker.directory) as client:
        broker.arm(CONTEXTS, 1 << 30, 1)  # counts them all, fails none
        publish(client, "pool", THREE)
        client.descriptors(client.attach("pool").lease, 3)
        assert broker.disarm() == 0
        broker.arm(CONTEXTS, 1 << 30, 1)
        client.publish("mapped", THREE)
        assert broker.disarm() > 0


# -- those who do not read ---------------------------------------------------------------------------


@pytest.mark.slow
def test_a_client_that_does_not_read_costs_few_descriptors_and_loses_none(
    broker: BrokerProcess, client: RawClient
) -> None:
    publish(client, "pool", MANY)
    with session(broker.directory) as deaf:
        before = files(broker.pid)
        leases = [deaf.attach("pool").lease for _ in range(DEAF)]
        assert files(broker.pid) <= before
        os.kill(broker.pid, signal.SIGSTOP)  # what can be read now was on its way
        try:
            on_their_way = sum(map(len, waiting(deaf)))
        finally:
            os.kill(broker.pid, signal.SIGCONT)
        assert on_their_way == 20  # the packets of 16 and 4 of the first lease, and nothing else
        lease = client.attach("pool").lease  # nobody else notices
        assert read(client, client.descriptors(lease, 20))[19] == {20}
        for lease in leases[1:]:
            deaf.descriptors(lease, 20)


def waiting(client: RawClient) -> Iterator[list[int]]:
    """The descriptors of every packet that can be read now, closed."""
    client.connection.setblocking(False)
    try:
        while True:
            _, opened, *_ = socket.recv_fds(client.connection, 1 << 16, MAX_DESCRIPTORS)
            for descriptor in opened:
                os.close(descriptor)
            yield opened
    except BlockingIOError:
        client.connection.setblocking(True)


@pytest.mark.slow
def test_leases_that_are_given_back_unread_are_not_handed_over_any_more(
    broker: BrokerProcess, client: RawClient
) -> None:
    publish(client, "pool", MANY)
    with session(broker.directory) as deaf:
        for _ in range(DEAF):
            deaf.ask(Close(deaf.attach("pool").lease), Done)
        last = deaf.attach("pool").lease
        assert sum(map(len, waiting(deaf))) <= 3 * MAX_DESCRIPTORS
        deaf.ask(Close(last), Done)
        retire(client, "pool")
        eventually(lambda: allocated(client) == [0, 0], "the memory to be back")


@pytest.mark.slow
def test_a_stopped_client_finds_all_its_descriptors(broker: BrokerProcess, client: RawClient) -> None:
    publish(client, "pool", THREE)
    with holder(broker.directory, "pool") as process:
        process.send_signal(signal.SIGSTOP)
        for name in ("a", "b"):
            publish(client, name, THREE)
            retire(client, name)
        process.send_signal(signal.SIGCONT)
        assert process.stdin
        assert process.stdout
        process.stdin.write("count\n")
        process.stdin.flush()
        assert process.stdout.readline() == "3\n"


@pytest.mark.slow
def test_a_death_with_descriptors_on_their_way_and_waiting_leaves_nothing(
    broker: BrokerProcess, client: RawClient
) -> None:
    before = files(broker.pid)
    publish(client, "pool", MANY)
    with holder(broker.directory, "pool", "20") as process:
        eventually(lambda: sum(len(other.leases) for other in client.clients()) == 20, "its leases")
        retire(client, "pool")
        process.kill()
    eventually(lambda: allocated(client) == [0, 0], "the memory to be back")
    assert files(broker.pid) <= before
    client.publish("pool")


def test_memory_that_is_given_up_while_it_is_made_leaves_nothing(broker: BrokerProcess, client: RawClient) -> None:
    """It is to be freed before anybody but its device knows that it is there."""
    body = Create("pool", MANY.encode(), (client.devices()[0].uuid,), "vmm", 60.0, None)
    before = files(broker.pid)

    def given_up() -> bool:
        number = client.send(body)
        client.ask(Cancel(number), Done)
        answered = client.answer(number)
        if isinstance(answered, Created):
            client.descriptors(answered.lease, 20)
            client.ask(Close(answered.lease), Done)
        return isinstance(answered, Failed)

    outcomes = [given_up() for _ in range(20)]
    eventually(lambda: any(outcomes) or given_up(), "a cancel that comes before the memory is there")
    eventually(lambda: allocated(client) == [0, 0], "the memory to be back")
    assert files(broker.pid) <= before
