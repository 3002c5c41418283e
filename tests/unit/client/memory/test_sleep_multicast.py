"""Multicast pools that are unmapped for a while: their own replica and the way to all replicas come back together."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cubroker.client import Broker
from cubroker.driver import DriverError, MulticastOff, Window
from cubroker.protocol import Layout
from cubroker.protocol.errors import DeviceFailure, Invalid, NotFound, OutOfMemory, Retired, Unavailable, Unsupported
from tests.brokers import eventually, serving
from tests.unit.client.conftest import leases
from tests.unit.client.memory.test_broadcast import OPTIONS, TENSORS, client, heard, make, place, text
from tests.unit.client.test_faults import regions

__all__ = ["client", "place"]


@pytest.fixture
def near() -> Iterator[Broker]:
    """A Broker whose three devices are bound together."""
    with serving("host:3@16MiB") as process, Broker(process.directory) as broker:
        yield broker


@pytest.mark.slow
def test_a_pool_comes_back_where_it_was_and_stores_to_all_replicas_as_before(client: Broker) -> None:
    make(client)
    others = regions()
    for device in (0, 1, 2):
        with client.attach("x", device=device) as pool:
            pool.broadcast(text("odd", device), "odd")
            multicast = pool.how == "multicast"
            where = {name: (pool[name].pointer, multicast and pool.multicast_pointer(name)) for name in pool}
            mapped = regions() - others
            event = pool.event("ready")
            pool.sleep()
            assert (pool.asleep, pool.lease, leases(client, "x"), event.closed) == (True, 0, 0, True)
            assert mapped
            assert not regions() - others
            for use in (lambda: pool.broadcast(text("odd"), "odd"), lambda: pool.multicast_pointer("odd")):
                with pytest.raises(Invalid, match="is asleep"):
                    use()
            assert heard(client, "odd") == [text("odd", device)] * 3
            pool.wake()
            assert (pool.asleep, leases(client, "x"), regions() - others) == (False, 1, mapped)
            assert {name: (pool[name].pointer, multicast and pool.multicast_pointer(name)) for name in pool} == where
            for name in pool:
                pool.broadcast(text(name, device + 7), name)
                assert heard(client, name) == [text(name, device + 7)] * 3
            with pool.event("ready") as again:
                assert again.record() == 1


def test_a_store_to_the_multicast_address_goes_to_all_replicas(near: Broker) -> None:
    make(near)
    with near.attach("x", device=1) as pool, pool.context.stream() as stream:
        with pytest.raises(KeyError, match="has no tensor 'odt'; did you mean 'odd'"):
            pool.multicast_pointer("odt")
        pool["odd"].copy_from(text("odd", 3))
        stream.copy(pool.multicast_pointer("odd"), pool["odd"].pointer, 1001)
        stream.synchronize()
        assert heard(near, "odd") == [text("odd", 3)] * 3
        with pytest.raises(KeyError):
            pool.multicast_pointer("no such tensor")


def test_who_has_no_way_to_all_replicas_sleeps_and_wakes_without_one(client: Broker) -> None:
    make(client, writable=False)
    with client.attach("x", device=1) as pool:
        where = pool["odd"].pointer
        pool.sleep()
        pool.wake()
        assert (pool["odd"].pointer, pool["odd"].tobytes()) == (where, text("odd"))
        with pytest.raises(Invalid, match="create it with writable=True"):
            pool.multicast_pointer("odd")
    with client.create("y", TENSORS, devices=(0, 1), share="multicast", writable=True) as draft:
        with pytest.raises(Invalid, match=r"cannot sleep; seal it first"):
            draft.sleep()
        draft.broadcast(text("odd"), "odd")
        draft.seal()
    if client.driver.peers.can_access(2, 0):
        with client.attach("y", device=2, peer=True) as pool:
            pool.sleep()
            pool.wake()
            assert pool["odd"].tobytes() == text("odd")
            with pytest.raises(Invalid, match="has no replica on device 2"):
                pool.broadcast(text("odd"), "odd")


def test_where_a_version_is_by_copies_there_is_no_multicast_address(client: Broker) -> None:
    refusal = pytest.raises(Unsupported, match=r"written by copies: it is on one device.*use broadcast")
    with client.create("x", TENSORS, share="multicast", writable=True) as draft, refusal:
        draft.multicast_pointer("odd")


def test_a_version_that_was_retired_does_not_wake(client: Broker) -> None:
    make(client)
    with client.attach("x", device=1) as pool:
        pool.sleep()
        client.retire("x")
        with pytest.raises((Retired, NotFound), match=r"cannot wake: .*switch\(\) the pool to another version"):
            pool.wake()
        assert pool.asleep


def test_what_was_refused_while_attaching_does_not_keep_a_pool_from_waking(
    near: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(near)
    off = MulticastOff("cuMemMap", 800, "CUDA_ERROR_NOT_PERMITTED", "NCCL_NVLS_ENABLE=0 says no")
    with monkeypatch.context() as patch:
        patch.setattr(Window, "map", _failing(off))
        before = regions()
        pool = near.attach("x", device=0)
        assert (regions() - before).total() == 1
    with pool:
        pool.sleep()
        pool.wake()
        assert pool["odd"].tobytes() == text("odd")
        with pytest.raises(Unsupported, match="NCCL_NVLS_ENABLE=0 says no"):
            pool.multicast_pointer("odd")


def test_a_window_that_cannot_be_mapped_again_leaves_the_pool_asleep(
    near: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(near)
    with near.attach("x", device=0) as pool:
        where = pool.multicast_pointer("odd")
        pool.sleep()
        before = regions()
        with monkeypatch.context() as patch:
            patch.setattr(Window, "map", _failing(DriverError("cuMemMap", 802, "CUDA_ERROR_SYSTEM_NOT_READY")))
            with pytest.raises(DeviceFailure, match=r"waking pool 'x' version 1: .*NOT_READY"):
                pool.wake()
        assert pool.asleep
        assert regions() <= before
        eventually(lambda: leases(near, "x") == 0, "the lease to go back")
        pool.wake()
        assert pool.multicast_pointer("odd") == where
        pool.broadcast(text("odd", 5), "odd")
        assert heard(near, "odd") == [text("odd", 5)] * 3


def test_a_window_for_which_there_is_no_memory_leaves_nothing_mapped(
    near: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = Layout.pack([("a", "U8", (4096,)), ("b", "U8", (4096,))], slab=4096)
    with near.create("x", layout, devices=(0, 1), share="multicast", writable=True) as draft:
        draft.seal()
    with near.attach("x", device=0) as pool:
        where, plain, mapped = pool.multicast_pointer("b"), Window.map, list[Window]()
        pool.sleep()
        before = regions()

        def fail(window: Window, source: int, *, readonly: bool = False) -> None:
            if mapped:
                raise MemoryError
            plain(window, source, readonly=readonly)
            mapped.append(window)

        with monkeypatch.context() as patch:
            patch.setattr(Window, "map", fail)
            with pytest.raises(OutOfMemory):
                pool.wake()
        assert mapped
        assert pool.asleep
        assert regions() <= before
        pool.wake()
        assert pool.multicast_pointer("b") == where


def test_objects_that_were_made_anew_are_mapped_where_the_old_ones_were(near: Broker) -> None:
    """Another pool of the same layout stands for the version as its broker would have made it again."""
    make(near)
    with near.attach("x", device=1) as pool:
        where = pool["odd"].pointer, pool.multicast_pointer("odd")
        pool.sleep()
        with near.create("again", TENSORS, devices=(0, 1, 2), share="multicast", writable=True) as draft:
            draft.seal()
        pool.name = "again"
        pool.wake()
        assert (pool["odd"].pointer, pool.multicast_pointer("odd")) == where
        assert pool["odd"].tobytes() == bytes(1001)
        pool.broadcast(text("odd", 5), "odd")
        assert heard(near, "odd") == [text("odd")] * 3
        with near.attach("again", device=2) as other:
            assert other["odd"].tobytes() == text("odd", 5)


@pytest.mark.parametrize(
    ("how", "name", "other"), [("multicast", "a", "b"), ("copies", "b", "a"), ("copies", "b", "c")]
)
def test_a_pool_whose_way_to_all_replicas_is_another_now_stays_asleep(
    how: str, name: str, other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(OPTIONS, "slots=1")
    with serving("host:3@16MiB") as process, Broker(process.directory) as near:
        for each, share in (("a", "multicast"), ("b", "multicast"), ("c", "vmm")):
            with near.create(each, TENSORS, devices=(0, 1), share=share, writable=True) as draft:
                draft.seal()
        with near.attach(name, device=1) as pool:
            assert pool.how == how
            pool.sleep()
            before = regions()
            pool.name = other
            with pytest.raises(Unavailable, match=r"made in another way than when it fell asleep.*attach again"):
                pool.wake()
            assert pool.asleep
            assert regions() <= before
            eventually(lambda: leases(near, other) == 0, "the lease to go back")
            pool.name = name
            pool.wake()
            pool.broadcast(text("odd", 2), "odd")
            assert pool["odd"].tobytes() == text("odd", 2)


def _failing(error: DriverError) -> object:
    def fail(window: Window, source: object, *, readonly: bool = False) -> None:
        raise error

    return fail
