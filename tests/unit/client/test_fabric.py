"""Pools of ``vmm`` memory that fabric handles open, for processes on the broker's channel and for others."""

from __future__ import annotations

import itertools
import json
import os
import signal
from collections.abc import Callable, Iterator

import pytest

from cubroker.client import Broker
from cubroker.driver import DriverError, Reservation
from cubroker.driver.host.virtual_memory import CHANNEL
from cubroker.protocol import Layout
from cubroker.protocol.errors import DeviceFailure, Invalid, TimedOut
from cubroker.protocol.messages import Describe, Description, Done, SendDescriptors
from tests.brokers import BrokerProcess, eventually, serving
from tests.stores import storing
from tests.unit.client import shares
from tests.unit.client.conftest import LAYOUT, content, impatient, leases, publish, session_of
from tests.unit.client.memory.test_vmm import MANY
from tests.unit.client.scripts import run
from tests.unit.client.test_faults import SCARCE, regions
from tests.unit.driver.conformance_vmm import GRANULE
from tests.unit.server.processes import all_closed, files

NOWHERE, ELSEWHERE = "", "2"
"""Channels that do not lead to the broker's."""


@pytest.fixture(scope="module")
def lender() -> Iterator[BrokerProcess]:
    """A broker on channel 1."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv(CHANNEL, "1")
        with serving() as process:
            yield process


@pytest.fixture(autouse=True)
def channel(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """This process is on the broker's channel, unless a test says otherwise."""
    monkeypatch.setenv(CHANNEL, "1")
    shares.by_default("vmm")
    yield monkeypatch
    shares.by_default(shares.DEFAULT)


@pytest.fixture
def mapped(monkeypatch: pytest.MonkeyPatch) -> list[int | bytes]:
    """Collects what every mapping of this process is made from."""
    sources: list[int | bytes] = []

    def note(reservation: Reservation, source: int | bytes, *, readonly: bool) -> None:
        original(reservation, source, readonly=readonly)
        sources.append(source)

    original = Reservation.map
    monkeypatch.setattr(Reservation, "map", note)
    return sources


def check(broker: Broker, name: str, device: int = 0) -> None:
    """The bytes are there, and read-only."""
    with broker.attach(name, device=device) as pool:
        assert all(tensor.tobytes() == content(each, tensor.nbytes) for each, tensor in pool.items())
        with pytest.raises(DriverError, match="INVALID_VALUE"):
            pool.context.write(pool.allocation_views[0].pointer, b"X")


def opened_by(broker: Broker, name: str) -> str:
    return broker.describe(name)[0].opened_by


@pytest.mark.slow
def test_writers_and_readers_on_the_channel_map_by_fabric_handle_and_get_no_descriptor(
    client: Broker, name: str, mapped: list[int | bytes]
) -> None:
    client.pools()  # so that the connection for requests is there
    before = files(os.getpid())
    publish(client, name, MANY, devices=(1, 0))
    assert opened_by(client, name) == "fabric handle"
    for device in (0, 1):
        check(client, name, device)
    assert len(mapped) >= 4 * len(MANY.allocations)
    assert all(isinstance(source, bytes) for source in mapped)
    all_closed(os.getpid(), before)


@pytest.mark.parametrize("theirs", [NOWHERE, ELSEWHERE])
def test_whoever_is_not_on_the_channel_gets_descriptors_of_the_same_memory(
    client: Broker, name: str, mapped: list[int | bytes], channel: pytest.MonkeyPatch, theirs: str
) -> None:
    with client.create(name, LAYOUT) as draft:
        channel.setenv(CHANNEL, theirs)
        before = files(os.getpid()), regions()
        with client.create(f"{name}-own", LAYOUT) as own:
            own["weight"].copy_from_bytes(content("weight", 128))
            own.seal()
        with client.attach(f"{name}-own") as pool:
            assert pool["weight"].tobytes() == content("weight", 128)
        assert opened_by(client, f"{name}-own") == "fabric handle"
        del own, pool
        eventually(lambda: regions() <= before[1], "what was mapped meanwhile to be unmapped")
        all_closed(os.getpid(), before[0])
        assert [type(source) for source in mapped] == [bytes, int, int]
        draft.seal()


def test_a_handle_is_tried_once_in_a_session(client: Broker, name: str, channel: pytest.MonkeyPatch) -> None:
    publish(client, name)
    channel.setenv(CHANNEL, NOWHERE)
    refused: list[bytes] = []

    def count(reservation: Reservation, source: int | bytes, *, readonly: bool) -> None:
        refused.extend([source] if isinstance(source, bytes) else [])
        original(reservation, source, readonly=readonly)

    original = Reservation.map
    channel.setattr(Reservation, "map", count)
    for _ in range(3):
        check(client, name)
    assert len(refused) == 1


def test_a_shard_or_all_of_them_come_either_way(client: Broker, name: str, channel: pytest.MonkeyPatch) -> None:
    plan = {"a": 1, "b": 0, "c": 1}
    layout = Layout.pack([(each, "U8", (300,)) for each in plan], groups=plan)
    with client.create(name, layout, devices=(0, 1), plan=plan) as draft:
        for each, tensor in draft.items():
            tensor.copy_from_bytes(content(each, 300))
        draft.seal()
    for ours in ("1", NOWHERE):
        channel.setenv(CHANNEL, ours)
        with client.attach(name) as pool, client.attach(name, device=1) as shard:
            assert sorted(shard) == ["a", "c"]
            for each, tensor in (*pool.items(), *shard.items()):
                assert tensor.tobytes() == content(each, 300)


def test_a_pool_that_sleeps_wakes_by_fabric_handle_or_by_descriptor(
    client: Broker, name: str, mapped: list[int | bytes], channel: pytest.MonkeyPatch
) -> None:
    publish(client, name)
    with client.attach(name) as pool:
        pointer = pool["weight"].pointer
        del mapped[:]
        for ours in ("1", NOWHERE, NOWHERE):
            pool.sleep()
            channel.setenv(CHANNEL, ours)
            pool.wake()
            assert pool["weight"].pointer == pointer
            assert pool["weight"].tobytes() == content("weight", 128)
        assert [type(source) for source in mapped] == [bytes, int, int]
        assert leases(client, name) == 1


def test_a_mapping_outlives_the_broker_and_the_handle_does_not(name: str, mapped: list[int | bytes]) -> None:
    with serving() as process, Broker(process.directory) as broker:
        publish(broker, name)
        with broker.attach(name) as pool:
            process.kill()
            assert pool["weight"].tobytes() == content("weight", 128)
            with (
                pool.context.reserve(GRANULE) as reservation,
                pytest.raises(DriverError, match="cuMemImportFromShareableHandle failed with CUDA_ERROR_INVALID_VALUE"),
            ):
                reservation.map(mapped[-1], readonly=True)


@pytest.mark.slow
def test_a_durable_pool_is_opened_by_what_outlives_the_broker(name: str) -> None:
    with storing() as kept, Broker(kept.directory) as broker:
        with broker.create(name, LAYOUT, durable=True) as draft:
            for each, tensor in draft.items():
                tensor.copy_from_bytes(content(each, tensor.nbytes))
            draft.seal()
        for _ in range(2):
            assert opened_by(broker, name) == "descriptor"
            check(broker, name)
            assert session_of(broker).fabric, "no handle was tried in vain"
            kept.restart()


def test_a_process_without_room_for_descriptors_is_told_so_unless_it_is_on_the_channel(
    client: Broker, lender: BrokerProcess, name: str, channel: pytest.MonkeyPatch
) -> None:
    publish(client, name, MANY)
    script = (
        SCARCE
        + """
with Broker(directory) as broker:
    broker.attach(sys.argv[2]).close()
    print(json.dumps(left(4, lambda: broker.attach(sys.argv[2]))))
"""
    )
    for ours, code in (("1", ""), (NOWHERE, DeviceFailure.code)):
        channel.setenv(CHANNEL, ours)
        done = run(lender, script, name)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)[0] == code
        eventually(lambda: leases(client, name) == 0, "the end of its leases")


def failing(monkeypatch: pytest.MonkeyPatch, call: str, at: int, before: Callable[[], None] = lambda: None) -> None:
    """Have a driver call fail while the mapping with that number is made."""
    made = itertools.count(1)

    def fail(reservation: Reservation, source: int | bytes, *, readonly: bool) -> None:
        if next(made) == at:
            before()
            raise DriverError(call, 800, "CUDA_ERROR_NOT_PERMITTED")
        original(reservation, source, readonly=readonly)

    original = Reservation.map
    monkeypatch.setattr(Reservation, "map", fail)


@pytest.mark.parametrize("at", [1, 7, len(MANY.allocations)])
def test_memory_of_which_some_is_refused_is_mapped_by_descriptor_once(
    client: Broker, name: str, channel: pytest.MonkeyPatch, at: int
) -> None:
    publish(client, name, MANY)
    open_before, mapped_before = files(os.getpid()), regions()
    failing(channel, "cuMemImportFromShareableHandle", at)
    check(client, name)
    eventually(lambda: regions() <= mapped_before, "all of it to be unmapped")
    all_closed(os.getpid(), open_before)
    assert leases(client, name) == 0


def test_memory_that_cannot_be_mapped_is_not_tried_by_descriptor(
    client: Broker, name: str, channel: pytest.MonkeyPatch, mapped: list[int | bytes]
) -> None:
    publish(client, name)
    del mapped[:]
    with channel.context() as broken:
        failing(broken, "cuMemMap", 1)
        with pytest.raises(DeviceFailure, match=r"opening pool .* cuMemMap failed"):
            client.attach(name)
    check(client, name)
    assert [type(source) for source in mapped] == [bytes]
    eventually(lambda: leases(client, name) == 0, "the end of the lease")


@pytest.mark.slow
def test_whoever_gives_up_while_descriptors_are_to_come_keeps_nothing(
    lender: BrokerProcess, client: Broker, name: str, channel: pytest.MonkeyPatch
) -> None:
    publish(client, name, MANY)
    with Broker(lender.directory) as broker:
        broker.pools()
        open_before, mapped_before = files(os.getpid()), regions()
        failing(channel, "cuMemImportFromShareableHandle", 1, lambda: os.kill(lender.pid, signal.SIGSTOP))
        try:
            with impatient(broker, 1.0), pytest.raises(TimedOut):
                broker.attach(name)
        finally:
            os.kill(lender.pid, signal.SIGCONT)
        eventually(lambda: leases(client, name) == 0, "the end of the lease")
        all_closed(os.getpid(), open_before)
        assert regions() <= mapped_before


def test_descriptors_are_sent_once_for_each_lease(client: Broker, name: str) -> None:
    publish(client, name)
    with client.attach(name) as pool:
        assert client.requests.submit(SendDescriptors(pool.lease)).result(60) == Done()
        with pytest.raises(Invalid, match="has no descriptors that were not sent"):
            client.requests.submit(SendDescriptors(pool.lease)).result(60)


def test_broadcast_pools_are_handed_over_by_descriptor(client: Broker, name: str) -> None:
    with client.create(name, LAYOUT, devices=(0, 1), share="multicast") as draft:
        draft["weight"].copy_from_bytes(content("weight", 128))
        draft.seal()
    reply = client.requests.submit(Describe(name, 0)).result(60)
    assert isinstance(reply, Description)
    assert reply.info.opened_by == "descriptor"
    with client.attach(name, device=0) as pool:
        assert pool["weight"].tobytes() == content("weight", 128)
