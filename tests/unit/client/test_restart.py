"""The broker is killed under its clients and started again, with what was stored; they notice nothing, or are told."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from cubroker.client import Broker, Draft
from cubroker.client.publish import Sources
from cubroker.protocol import Layout
from cubroker.protocol.errors import Invalid, NotFound, Unavailable
from tests.brokers import eventually
from tests.stores import StoredBroker
from tests.unit.client.conftest import content, given_back, leases, publish
from tests.unit.client.scripts import start

LAYOUT = Layout.pack([("weight", "U8", (300,)), ("bias", "F32", (4,))], slab=512)


@pytest.fixture
def client(kept: StoredBroker) -> Iterator[Broker]:
    with Broker(kept.directory) as broker:
        yield broker
    given_back(kept.directory)


def test_readers_and_their_memory_outlive_the_broker(client: Broker, kept: StoredBroker, name: str) -> None:
    publish(client, name, LAYOUT, share="vmm", durable=True)
    with client.attach(name) as pool:
        kept.restart()
        assert pool["weight"].tobytes() == content("weight", 300)
        assert [(each.pid, each.session) for each in client.clients()] == [(os.getpid(), client.session)]
        with Broker(kept.directory) as other, other.attach(name) as again:
            assert all(again[each].tobytes() == content(each, again[each].nbytes) for each in again)
            assert leases(client, name) == 2
        eventually(lambda: leases(client, name) == 1, "the end of the second lease")
    eventually(lambda: leases(client, name) == 0, "the end of the first lease")


def test_a_draft_outlives_the_broker_and_is_published_by_the_next_one(
    client: Broker, kept: StoredBroker, name: str
) -> None:
    with client.create(name, LAYOUT, share="vmm", durable=True) as draft:
        draft["weight"].copy_from_bytes(content("weight", 300))
        kept.restart()
        draft["bias"].copy_from_bytes(content("bias", 16))
        assert draft.seal() == 1
    kept.restart()
    with client.attach(name) as pool:
        assert all(pool[each].tobytes() == content(each, pool[each].nbytes) for each in pool)


def test_a_version_that_was_sealed_in_place_outlives_the_broker(client: Broker, kept: StoredBroker, name: str) -> None:
    with client.create(name, LAYOUT, share="vmm", durable=True) as draft:
        draft["weight"].copy_from_bytes(content("weight", 300))
        other = Layout(LAYOUT.tensors[:1], LAYOUT.allocations)
        with pytest.raises(Invalid, match="held: weight"), draft["weight"].hold():
            draft.seal(layout=other, in_place=True)
        kept.restart()  # a draft with another layout
        draft.seal(in_place=True)
        kept.restart()
        assert draft["weight"].tobytes() == content("weight", 300)
        assert leases(client, name) == 1
        with client.attach(name) as pool:
            assert list(pool) == ["weight"]
            assert pool["weight"].tobytes() == content("weight", 300)
        client.retire(name)
        assert leases(client, name) == 1
    eventually(lambda: not client.pools(), "its end with its last lease")


def test_whoever_waits_waits_on_and_is_served_by_the_next_broker(client: Broker, kept: StoredBroker, name: str) -> None:
    came: list[bytes] = []

    def wait() -> None:
        with Broker(kept.directory) as broker, broker.attach(name, wait=600) as pool:
            came.append(pool["weight"].tobytes())

    thread = threading.Thread(target=wait)
    thread.start()
    eventually(lambda: len(client.clients()) == 2, "the one who waits")
    kept.restart()
    publish(client, name, LAYOUT, share="vmm", durable=True)
    thread.join()
    assert came == [content("weight", 300)]


def test_a_worker_that_died_while_no_broker_ran_is_found_and_its_lease_falls(
    client: Broker, kept: StoredBroker, name: str
) -> None:
    publish(client, name, LAYOUT, share="vmm", durable=True)
    worker = start(kept, "pool = Broker(directory).attach(sys.argv[2]); print(flush=True); sys.stdin.read()", name)
    with worker:
        assert worker.stdout is not None
        worker.stdout.readline()
        assert leases(client, name) == 1
        kept.kill()
        worker.kill()
    kept.start()
    eventually(lambda: leases(client, name) == 0, "the end of its lease")


def test_memory_that_was_not_durable_is_lost_and_its_holders_are_told(
    client: Broker, kept: StoredBroker, name: str
) -> None:
    publish(client, name, durable=False)
    with client.attach(name) as pool:
        kept.restart()
        (info,) = [info for info in client.pools() if info.name == name]
        assert (info.state, info.leases) == ("lost", 1)
        with pytest.raises(NotFound, match="lost"):
            client.attach(name)
        eventually(lambda: pool.lost, "the notice")
        assert "ipc" in pool.lost or "durable" in pool.lost
    eventually(lambda: not client.pools(), "the end of what is lost")
    publish(client, name)
    with client.attach(name) as pool:
        assert pool.version == 2
        assert not pool.lost


def test_a_draft_that_was_lost_is_given_back_when_its_seal_is_refused(
    client: Broker, kept: StoredBroker, name: str
) -> None:
    with client.create(name, LAYOUT, durable=False) as draft:
        kept.restart()
        with pytest.raises(Unavailable, match="lost before it was sealed"):
            draft.seal()
    eventually(lambda: not client.pools(), "the end of what is lost")


def test_a_missing_descriptor_costs_the_pool_that_it_belonged_to(client: Broker, kept: StoredBroker, name: str) -> None:
    for each in (name, f"{name}-other"):
        publish(client, each, LAYOUT, share="vmm", durable=True)
    kept.kill()
    mine = [each for each in kept.fdstore.stored if each.startswith("m")]
    assert len(mine) == 4
    mine.sort(key=lambda each: [int(number) for number in each[1:].split(".")])
    kept.fdstore.forget(mine[0])
    kept.start()
    states = {info.name: info.state for info in client.pools()}
    assert states == {f"{name}-other": "current"}
    assert f"{name}@1" in kept.log()
    with client.attach(f"{name}-other") as pool:
        assert pool["weight"].tobytes() == content("weight", 300)


def test_versions_that_share_memory_outlive_the_broker_and_what_one_alone_had_is_freed_with_it(
    client: Broker, kept: StoredBroker, name: str
) -> None:
    layout = Layout.pack([(each, "U8", (1 << 20,)) for each in "abcd"], slab=1 << 20)
    publish(client, name, layout, share="vmm", durable=True)
    changed = {"b": np.full(1 << 20, 7, np.uint8)}
    with client.attach(name) as old:
        assert client.publish(name, changed, base=old) == 2
        kept.restart()
        with client.attach(name) as new:
            assert set(new["b"].tobytes()) == {7}
            for pool, tensors in ((old, "abcd"), (new, "acd")):
                assert all(pool[each].tobytes() == content(each, 1 << 20) for each in tensors)
        assert sum(device.allocated for device in client.devices()) == 10 << 20

    def stored() -> int:
        kept.settled()
        return sum(each.startswith("m") for each in kept.fdstore.stored)

    eventually(lambda: stored() == 4, "what version 1 alone had to leave the store")
    # The device's thread removes a descriptor from the store, and then reports that the bytes are free.
    eventually(lambda: sum(device.allocated for device in client.devices()) == 8 << 20, "its bytes to be free")
    kept.restart()
    assert [(info.version, info.memory, info.shared) for info in client.pools()] == [(2, 8 << 20, 0)]
    with client.attach(name) as new:
        assert [new[each].tobytes()[:1] for each in "ab"] == [content("a", 1), b"\7"]


def test_an_update_goes_on_when_the_broker_is_killed_in_the_middle(
    client: Broker, kept: StoredBroker, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = Layout.pack([(each, "U8", (1 << 20,)) for each in "abcd"])
    publish(client, name, layout, share="vmm", durable=True)
    fill = Sources.fill

    def killed(sources: Sources, draft: Draft) -> None:
        fill(sources, draft)
        kept.restart()

    monkeypatch.setattr(Sources, "fill", killed)
    assert client.publish(name, {"b": np.full(1 << 20, 7, np.uint8)}, base=name) == 2
    with client.attach(name) as new:
        assert [new[each].tobytes()[:1] for each in "ab"] == [content("a", 1), b"\7"]
    assert [(info.version, info.memory, info.shared) for info in client.pools()] == [(2, 6 << 20, 0)]


def test_nothing_stays_stored_of_what_is_over(client: Broker, kept: StoredBroker, name: str) -> None:
    ours = {"ledger": 1, "own-door": 1, "own-requests": 1, f"s{client.session}": 2}
    publish(client, name, LAYOUT, share="vmm", durable=True)
    with Broker(kept.directory) as other, other.attach(name):
        kept.restart()
        assert {each: len(stored) for each, stored in kept.fdstore.stored.items()} == {
            **ours,
            f"s{other.session}": 2,
            **{each: 1 for each in kept.fdstore.stored if each.startswith("m")},
        }
    client.retire(name)
    eventually(lambda: not client.pools(), "its end")

    def stored() -> dict[str, int]:
        kept.settled()
        return {each: len(descriptors) for each, descriptors in kept.fdstore.stored.items()}

    eventually(lambda: stored() == ours, f"{ours}, not {stored()}")


def test_a_watch_goes_on_without_telling_anything_twice(client: Broker, kept: StoredBroker, name: str) -> None:
    with client.watch(name) as watch:
        assert next(watch) is None
        publish(client, name, LAYOUT, share="vmm", durable=True)
        assert next(watch) == 1
        kept.restart()
        publish(client, name, LAYOUT, share="vmm", durable=True)
        assert next(watch) == 2
