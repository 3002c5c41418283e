"""Other processes attach to a draft: they read what its writer has written, whatever becomes of the writer."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from cubroker import aio
from cubroker.client import Broker, Draft
from cubroker.client.publish import Sources
from cubroker.client.transport.requests import run
from cubroker.protocol import Layout
from cubroker.protocol.errors import Invalid, NotFound, Retired, TimedOut, Unsupported
from cubroker.protocol.messages import Done, Seal, SetLayout
from tests.brokers import BrokerProcess, eventually
from tests.stores import StoredBroker
from tests.unit.client.conftest import LAYOUT, begun, content, leases, publish, session_of
from tests.unit.client.scripts import start

READER = """
with Broker(directory) as broker, broker.attach(sys.argv[2], version=int(sys.argv[3]), unsealed=True) as pool:
    print(flush=True)
    for line in sys.stdin:
        print(pool[line.strip()].tobytes().hex(), flush=True)
"""
"""Attaches to a draft, and tells what its tensors hold."""

WRITER = """
broker = Broker(directory)
draft = broker.create(sys.argv[2], Layout.pack([("weight", "U8", (300,))]), durable=sys.argv[3] == "durable")
draft["weight"].copy_from_bytes(b"x" * 300)
print(flush=True)
for line in sys.stdin:
    pass
"""


class Reader:
    """A process that has attached to a draft."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        assert process.stdin
        assert process.stdout
        self._ask, self._told = process.stdin, process.stdout
        assert self._told.readline() == "\n", process.stderr and process.stderr.read()

    def reads(self, tensor: str) -> bytes:
        self._ask.write(f"{tensor}\n")
        self._ask.flush()
        return bytes.fromhex(self._told.readline())

    def leave(self) -> None:
        self._ask.close()
        assert self.process.wait() == 0, self.process.stderr and self.process.stderr.read()


@contextmanager
def reading(broker: BrokerProcess, name: str, version: int) -> Iterator[Reader]:
    with start(broker, READER, name, str(version)) as process:
        try:
            yield Reader(process)
        finally:
            process.kill()


@contextmanager
def writing(broker: BrokerProcess, name: str, *, durable: bool = False) -> Iterator[subprocess.Popen[str]]:
    with start(broker, WRITER, name, "durable" if durable else "") as process:
        try:
            assert process.stdout
            assert process.stdout.readline() == "\n"
            yield process
        finally:
            process.kill()


def states(broker: Broker, name: str) -> list[tuple[int, str, int]]:
    return [(info.version, info.state, info.leases) for info in broker.pools() if info.name == name]


# -- while it is written -------------------------------------------------------------------------------


@pytest.mark.usefixtures("share")
def test_readers_see_what_the_writer_writes_and_go_on_after_the_seal(
    client: Broker, lender: BrokerProcess, name: str
) -> None:
    with client.create(name, LAYOUT) as draft, reading(lender, name, 1) as first, reading(lender, name, 1) as second:
        draft["weight"].copy_from_bytes(content("weight", 128))
        assert first.reads("weight") == second.reads("weight") == content("weight", 128)
        draft["weight"].copy_from_bytes(content("other", 128))
        assert first.reads("weight") == content("other", 128)
        assert states(client, name) == [(1, "draft", 3)]
        holders = {
            each.pid for each in client.clients() if (name, 1) in [(held.pool, held.version) for held in each.leases]
        }
        assert holders == {os.getpid(), first.process.pid, second.process.pid}
        second.leave()
        eventually(lambda: leases(client, name) == 2, "the end of the second reader's lease")
        assert draft.seal() == 1
        assert states(client, name) == [(1, "current", 1)]
        assert first.reads("weight") == content("other", 128)
        with client.attach(name) as pool, client.attach(name, version=1, unsealed=True) as same:
            assert pool["weight"].tobytes() == same["weight"].tobytes() == content("other", 128)
        client.retire(name)
        assert states(client, name) == [(1, "retired", 1)]
        assert first.reads("weight") == content("other", 128)
        first.leave()
    eventually(lambda: not states(client, name), "its end with its last reader")


def test_a_reader_cannot_write_and_has_the_views_of_any_pool(client: Broker, name: str) -> None:
    with client.create(name, LAYOUT, share="vmm") as draft, client.attach(name, version=1, unsealed=True) as pool:
        assert (pool.version, pool.share, pool.writable, pool.protected) == (1, "vmm", False, True)
        assert pool.layout == LAYOUT
        assert pool.memory_device == draft.memory_device
        assert [view.nbytes for view in pool.allocation_views] == list(LAYOUT.allocations)
        with pytest.raises(Invalid, match="create a new version instead"):
            pool["weight"].copy_from_bytes(bytes(128))


def test_a_reader_is_on_one_of_several_devices_or_on_all_shards(client: Broker, name: str) -> None:
    with client.create(name, LAYOUT, devices=(0, 1)) as draft:
        with pytest.raises(Invalid, match="on several of the broker's devices"):
            client.attach(name, version=1, unsealed=True)
        with client.attach(name, version=1, device=1, unsealed=True) as pool:
            draft.replicas[1]["bias"].copy_from_bytes(content("bias", 16))
            assert pool["bias"].tobytes() == content("bias", 16)
            assert pool.device.index == 1
    plan = {"weight": 0, "bias": 1}
    layout = Layout.pack([("weight", "U8", (300,)), ("bias", "U8", (16,))], groups=plan)
    with client.create(name, layout, plan=plan) as shards, client.attach(name, version=2, unsealed=True) as pool:
        shards["bias"].copy_from_bytes(content("bias", 16))
        assert (pool["bias"].tobytes(), len(pool.devices)) == (content("bias", 16), 2)


def test_a_reader_of_a_multicast_draft_has_one_replica_and_stores_to_none(client: Broker, name: str) -> None:
    ones = np.ones((4, 8), np.float32)
    with (
        client.create(name, LAYOUT, devices=(0, 1), share="multicast") as draft,
        client.attach(name, version=1, device=1, unsealed=True) as pool,
    ):
        draft.broadcast(ones, "weight")
        assert pool["weight"].tobytes() == ones.tobytes()
        with pytest.raises(Invalid, match="published"):
            pool.broadcast(ones, "weight")
        draft.seal()
        assert pool["weight"].tobytes() == ones.tobytes()


def test_an_event_loop_attaches_to_a_draft(client: Broker, name: str) -> None:
    async def read() -> bytes:
        async with (
            aio.Broker(client.directory) as broker,
            await broker.attach(name, version=1, unsealed=True) as pool,
        ):
            return pool["weight"].tobytes()

    with client.create(name, LAYOUT) as draft:
        draft["weight"].copy_from_bytes(content("weight", 128))
        assert asyncio.run(read()) == content("weight", 128)


def test_an_update_shows_its_readers_also_what_it_shares_with_its_base(
    client: Broker, lender: BrokerProcess, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = Layout.pack([(each, "U8", (300,)) for each in "ab"], slab=300)
    publish(client, name, layout)
    fill, seen = Sources.fill, list[bytes]()

    def watched(sources: Sources, draft: Draft) -> None:
        fill(sources, draft)
        with reading(lender, name, 2) as reader:
            seen.extend(map(reader.reads, "ab"))
            reader.leave()

    monkeypatch.setattr(Sources, "fill", watched)
    assert client.publish(name, {"b": np.full(300, 7, np.uint8)}, base=1) == 2
    assert seen == [content("a", 300), bytes([7]) * 300]


def test_only_a_named_draft_is_attached_to(client: Broker, name: str) -> None:
    with client.create(name, LAYOUT) as draft:
        with pytest.raises(Invalid, match="name the draft by its number with `version`"):
            client.attach(name, unsealed=True)
        with pytest.raises(NotFound, match="is being written by"):
            client.attach(name)
        with pytest.raises(NotFound, match="is being written by"):
            client.attach(name, version=1)
        with pytest.raises(TimedOut, match="has no version 2"):
            client.attach(name, version=2, unsealed=True, wait=0.01)
        assert leases(client, name) == 1
        waiting = begun(lambda: client.attach(name, version=1, wait=60))
        eventually(lambda: client.look().waiters, "the one who waits")
        client.attach(name, version=1, unsealed=True).close()
        assert client.look().waiters
        draft.seal()
        waiting.result().close()


def test_a_draft_that_is_still_to_come_is_waited_for(client: Broker, name: str) -> None:
    waiting = begun(lambda: client.attach(name, version=1, unsealed=True, wait=60))
    eventually(lambda: client.look().waiters, "the one who waits")
    with client.create(name, LAYOUT) as draft, waiting.result() as pool:
        draft["weight"].copy_from_bytes(content("weight", 128))
        assert pool["weight"].tobytes() == content("weight", 128)


def test_what_readers_will_write_is_not_read_before_its_seal(client: Broker, name: str) -> None:
    with client.create(name, LAYOUT, writable=True) as draft:
        with pytest.raises(Unsupported, match="it is writable by its readers"):
            client.attach(name, version=1, unsealed=True)
        draft.seal()
        client.attach(name, version=1, unsealed=True).close()


def test_a_reader_cannot_seal_the_draft_nor_change_its_layout(client: Broker, name: str) -> None:
    with client.create(name, LAYOUT) as draft, client.attach(name, version=1, unsealed=True) as pool:
        for body in (Seal(pool.lease), SetLayout(pool.lease, LAYOUT.encode())):
            with pytest.raises(Invalid, match="by its writer's lease alone"):
                run(session_of(client).ask(body, Done))  # type: ignore
        assert draft.seal(in_place=True) == 1
        assert leases(client, name) == 2


def test_a_reader_sleeps_and_wakes_before_the_seal_and_switches_after_it(client: Broker, name: str) -> None:
    with client.create(name, LAYOUT, share="vmm") as draft, client.attach(name, version=1, unsealed=True) as pool:
        pool.sleep()
        draft["weight"].copy_from_bytes(content("weight", 128))
        pool.wake()
        assert pool["weight"].tobytes() == content("weight", 128)
        with pytest.raises(NotFound, match="no current version"):
            pool.switch()
        draft.seal()
        publish(client, name, share="vmm")
        assert pool.switch() == 2


# -- when its writer gives it up -----------------------------------------------------------------------


@pytest.mark.usefixtures("share")
def test_a_draft_that_its_writer_discards_stays_until_its_readers_have_left(
    client: Broker, lender: BrokerProcess, name: str
) -> None:
    with reading_discarded(client, lender, name) as reader:
        assert states(client, name) == [(1, "retired", 1)]
        assert reader.reads("weight") == content("weight", 128)
        with pytest.raises(Retired):
            client.attach(name, version=1, unsealed=True)
        with pytest.raises(NotFound):
            client.attach(name)
        assert publish(client, name) == 2, "the number of the draft was given out again"
        assert reader.reads("weight") == content("weight", 128)
        reader.leave()
    eventually(lambda: states(client, name) == [(2, "current", 0)], "the end of version 1 with its last reader")


@contextmanager
def reading_discarded(client: Broker, lender: BrokerProcess, name: str) -> Iterator[Reader]:
    draft = client.create(name, LAYOUT)
    draft["weight"].copy_from_bytes(content("weight", 128))
    with reading(lender, name, 1) as reader:
        draft.close()
        yield reader


def test_a_reader_that_is_killed_gives_its_lease_back(client: Broker, lender: BrokerProcess, name: str) -> None:
    with client.create(name, LAYOUT) as draft, reading(lender, name, 1) as reader:
        reader.process.kill()
        eventually(lambda: states(client, name) == [(1, "draft", 1)], "the end of the reader's lease")
        assert draft.seal() == 1


def test_readers_go_on_when_the_writer_is_killed_and_the_last_one_frees(
    client: Broker, lender: BrokerProcess, name: str
) -> None:
    with writing(lender, name) as writer, reading(lender, name, 1) as first, reading(lender, name, 1) as second:
        writer.kill()
        eventually(lambda: states(client, name) == [(1, "retired", 2)], "the end of the writer")
        first.process.kill()
        eventually(lambda: states(client, name) == [(1, "retired", 1)], "the end of the first reader")
        assert second.reads("weight") == b"x" * 300
        assert sum(device.allocated for device in client.devices()) > 0
        second.leave()
        eventually(lambda: not states(client, name), "its end")
        eventually(lambda: not any(device.allocated for device in client.devices()), "its memory to be freed")
    assert publish(client, name) == 2


def test_a_number_that_a_reader_knew_is_not_given_out_again(client: Broker, name: str) -> None:
    with client.create(name, LAYOUT):
        client.attach(name, version=1, unsealed=True).close()
    eventually(lambda: not states(client, name), "the end of the draft")
    with pytest.raises(Retired):
        client.attach(name, version=1, unsealed=True)
    with client.create(name, LAYOUT) as draft:
        assert draft.version == 2
    eventually(lambda: not states(client, name), "the end of the draft, which no session read")
    assert publish(client, name) == 2


def test_who_waits_for_a_draft_that_is_given_up_is_told(client: Broker, name: str) -> None:
    draft = client.create(name, LAYOUT)
    with client.attach(name, version=1, unsealed=True) as pool:
        named = begun(lambda: client.attach(name, version=1, wait=60))
        current = begun(lambda: client.attach(name, wait=60))
        eventually(lambda: len(client.look().waiters) == 2, "those who wait")
        draft.close()
        with pytest.raises(Retired):
            named.result()
        with pytest.raises(Invalid, match="can be no base"):
            client.publish(name, {"weight": np.zeros((4, 8), np.float32)}, base=pool)
    publish(client, name)
    with current.result() as pool:
        assert pool.version == 2


# -- when the broker is killed -------------------------------------------------------------------------


@pytest.fixture
def observer(kept: StoredBroker) -> Iterator[Broker]:
    with Broker(kept.directory) as broker:
        yield broker
        eventually(lambda: not any(device.allocated for device in broker.devices()), "all memory to be freed")


@pytest.mark.parametrize("ends", ["sealed", "discarded", "writer killed", "writer killed meanwhile"])
def test_the_next_broker_knows_the_writer_and_the_readers_of_a_draft(
    observer: Broker, kept: StoredBroker, name: str, ends: str
) -> None:
    if ends.startswith("writer"):
        with writing(kept, name, durable=True) as writer, reading(kept, name, 1) as reader:
            if ends.endswith("meanwhile"):
                kept.kill()
                writer.kill()
                writer.wait()
                kept.start()
            else:
                kept.restart()
                assert states(observer, name) == [(1, "draft", 2)]
                writer.kill()
            eventually(lambda: states(observer, name) == [(1, "retired", 1)], "the end of the writer")
            kept.restart()
            assert reader.reads("weight") == b"x" * 300
            reader.leave()
        eventually(lambda: not states(observer, name), "its end with its last reader")
        return
    with observer.create(name, LAYOUT, share="vmm", durable=True) as draft, reading(kept, name, 1) as reader:
        kept.restart()
        draft["weight"].copy_from_bytes(content("weight", 128))
        assert reader.reads("weight") == content("weight", 128)
        with observer.attach(name, version=1, unsealed=True) as pool:
            assert pool["weight"].tobytes() == content("weight", 128)
            assert states(observer, name) == [(1, "draft", 3)]
        if ends == "sealed":
            assert draft.seal() == 1
            observer.retire(name)
        else:
            draft.close()
        eventually(lambda: states(observer, name) == [(1, "retired", 1)], "the end of the draft")
        kept.restart()
        assert reader.reads("weight") == content("weight", 128)
        reader.leave()
    eventually(lambda: not states(observer, name), "its end with its last reader")


def test_a_multicast_draft_is_bound_again_for_its_writer_alone(observer: Broker, kept: StoredBroker, name: str) -> None:
    ones = np.ones((4, 8), np.float32)
    with (
        observer.create(name, LAYOUT, devices=(0, 1), share="multicast", durable=True) as draft,
        observer.attach(name, version=1, device=1, unsealed=True) as pool,
    ):
        kept.restart()
        draft.broadcast(ones, "weight")
        assert pool["weight"].tobytes() == ones.tobytes()


def test_a_draft_that_is_lost_with_the_broker_stays_mapped_by_its_readers(
    observer: Broker, kept: StoredBroker, name: str
) -> None:
    with observer.create(name, LAYOUT, durable=False) as draft, reading(kept, name, 1) as reader:
        draft["weight"].copy_from_bytes(content("weight", 128))
        kept.restart()
        assert states(observer, name) == [(1, "lost", 2)]
        assert reader.reads("weight") == content("weight", 128)
        with pytest.raises(Retired, match="was lost"):
            observer.attach(name, version=1, unsealed=True)
        reader.leave()
    eventually(lambda: not states(observer, name), "its end with its last lease")
