"""Digests of pools: what a seal publishes, what a check finds, and when there is nothing to check."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from cubroker.client import Broker, Draft, digests
from cubroker.client.loading.loader import load
from cubroker.driver import Context, DriverError, device_names
from cubroker.driver.kernels import ALGORITHM, digest
from cubroker.protocol import Layout
from cubroker.protocol.errors import Corrupted, DeviceFailure, Invalid, NotFound, Retired, Unsupported
from cubroker.protocol.messages import Digests, ListDigests
from tests import checkpoints
from tests.brokers import BrokerProcess, older
from tests.stores import storing
from tests.unit.client.conftest import LAYOUT, content, leases, publish
from tests.unit.client.scripts import start

BIG = Layout.pack([(f"t{number}", "U8", (100_000,)) for number in range(6)], slab=301_000)
"""Two allocations of three tensors each."""


def sealed(broker: Broker, name: str, layout: Layout = LAYOUT, devices: tuple[int, ...] = (0,), **terms: object) -> int:
    """Publish a version with digests; returns its number."""
    with broker.create(name, layout, devices=devices, **terms) as draft:  # type: ignore[arg-type]
        for replica in draft.replicas:
            for tensor in replica.values():
                tensor.copy_from_bytes(content(tensor.name, tensor.nbytes))
        return draft.seal(digest=True)


def slabs(layout: Layout) -> list[bytes]:
    """What the allocations of a published layout hold, padding included."""
    held = [bytearray(size) for size in layout.allocations]
    for tensor in layout.tensors:
        held[tensor.allocation][tensor.offset : tensor.offset + tensor.nbytes] = content(tensor.name, tensor.nbytes)
    return [bytes(each) for each in held]


@pytest.mark.usefixtures("share")
def test_what_was_sealed_is_found_unchanged_on_each_device(client: Broker, name: str) -> None:
    sealed(client, name, BIG, devices=(1, 0))
    expected = tuple(map(digest, slabs(BIG)))
    uuids = tuple(client.driver.devices[index].uuid for index in (1, 0))
    found = client.digests(name)
    assert (found.devices, found.digests) == (uuids, Digests(ALGORITHM, (expected, expected)))
    assert [info.digest for info in client.pools()] == [ALGORITHM]
    for device in (0, 1):
        with client.attach(name, device=device) as pool:
            pool.check()
    with client.attach(name, device=0) as pool:
        client.retire(name)
        pool.check()  # who holds a version may check it, whatever has become of it


def test_replicas_that_differ_are_each_compared_with_their_own(client: Broker, name: str) -> None:
    with client.create(name, LAYOUT, devices=(0, 1)) as draft:
        draft.replicas[1]["weight"].copy_from_bytes(b"\x01" * 128)
        draft.seal(digest=True)
    found = client.digests(name).digests
    assert found is not None
    assert found.replicas[0] != found.replicas[1]
    for device in (0, 1):
        with client.attach(name, device=device) as pool:
            pool.check()


def test_shards_have_digests_of_what_is_on_their_device(client: Broker, name: str) -> None:
    plan = {"a": 1, "b": 0, "c": 1}
    layout = Layout.pack([("a", "U8", (1000,)), ("b", "U8", (5,)), ("c", "F32", (7,))], groups=plan)
    sealed(client, name, layout, devices=(0, 1), plan=plan)
    rows = client.digests(name).digests
    assert rows is not None
    (first, second), whole = rows.replicas, tuple(map(digest, slabs(layout)))
    assert [a or b for a, b in zip(first, second, strict=True)] == [*whole]
    assert not any(a and b for a, b in zip(first, second, strict=True))
    for asked in ({}, {"device": 0}, {"device": 1}):
        with client.attach(name, **asked) as pool:
            pool.check()


def test_a_replica_that_is_reached_as_a_peers_is_checked_where_it_lies(client: Broker, name: str) -> None:
    sealed(client, name, devices=(1,))
    with client.attach(name, device=0, peer=True) as pool:
        assert (pool.device.index, pool.memory_device.index) == (0, 1)
        pool.check()


def test_what_was_broadcast_to_all_replicas_is_sealed_with_digests(client: Broker, name: str) -> None:
    with client.create(name, LAYOUT, devices=(0, 1), share="multicast") as draft:
        draft.broadcast(np.arange(32, dtype=np.float32).reshape(4, 8), "weight")
        draft.seal(digest=True)
    rows = client.digests(name).digests
    assert rows is not None
    assert rows.replicas[0] == rows.replicas[1]
    for device in (0, 1):
        with client.attach(name, device=device) as pool:
            pool.check()


def test_a_pool_that_has_slept_can_be_checked(client: Broker, name: str) -> None:
    sealed(client, name)
    with client.attach(name) as pool:
        pool.sleep()
        with pytest.raises(Invalid, match="asleep"):
            pool.check()
        pool.wake()
        pool.check()
    with pytest.raises(Invalid, match="closed"):
        pool.check()


# -- those who change bytes ----------------------------------------------------------------------------

KEEPS = """
import mmap
from cubroker.driver.vmm import Reservation
from tests.unit.client.test_digests import BIG, sealed

kept, map_ = [], Reservation.map

def keep(self, source, *, readonly):
    kept.append(os.dup(source))
    return map_(self, source, readonly=readonly)

Reservation.map = keep
with Broker(directory) as broker:
    sealed(broker, sys.argv[2], BIG, devices=(0, 1))
    there = [each for each in kept if "cubroker-device-1" in os.readlink(f"/proc/self/fd/{each}")]
    print("sealed", flush=True)
    for line in sys.stdin:
        piece, place = map(int, line.split())
        with mmap.mmap(there[piece], 0) as memory:
            memory[place] ^= 1
        print("written", flush=True)
"""
"""The writer of a version, which keeps the descriptors of its memory on device 1, allocation by allocation."""

WRITES = """
with Broker(directory) as broker, broker.attach(sys.argv[2]) as pool:
    for line in sys.stdin:
        slab, place = map(int, line.split())
        pointer = pool.allocation_views[slab].pointer + place
        before = pool.context.read(pointer, 1)
        pool.context.write(pointer, bytes([before[0] ^ 1]))
        print("written", flush=True)
"""
"""A reader of an ``ipc`` pool: a legacy handle has no read-only mapping."""


class Writer:
    """Another process, which flips bits of published memory."""

    def __init__(self, lender: BrokerProcess, program: str, name: str) -> None:
        self.process = start(lender, program, name)

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        _, err = self.process.communicate(timeout=60)
        assert self.process.returncode == 0, err

    def hear(self, what: str) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == f"{what}\n"

    def flip(self, piece: int, place: int) -> None:
        """Flip the lowest bit of a byte of one of its pieces of memory."""
        assert self.process.stdin is not None
        print(piece, place, file=self.process.stdin, flush=True)
        self.hear("written")


def test_a_writer_that_kept_a_descriptor_is_noticed_on_its_device_alone(
    client: Broker, lender: BrokerProcess, name: str
) -> None:
    with Writer(lender, KEEPS, name) as writer:
        writer.hear("sealed")
        first, second = (client.attach(name, device=device) for device in (0, 1))
        with first, second:
            first.check()
            writer.flip(1, 299_999)
            first.check()
            with pytest.raises(Corrupted) as caught:
                second.check()
            text = caught.value.message
            assert text.startswith(f"pool {name!r} version 1 does not hold what was sealed: allocation 1 on ")
            assert device_names.label(second.device) in text
            assert device_names.label(first.device) not in text
            assert "with 't3', 't4', 't5', has the digest" in text
            assert "allocation 0" not in text
            writer.flip(1, 299_999)
            second.check()


def test_a_reader_that_writes_by_a_legacy_handle_is_noticed(client: Broker, lender: BrokerProcess, name: str) -> None:
    layout = Layout.pack([(f"t{number}", "U8", (100,)) for number in range(6)])
    sealed(client, name, layout, share="ipc")
    with client.attach(name) as pool, Writer(lender, WRITES, name) as writer:
        for place in (0, 99, 100, layout.nbytes - 1):  # padding counts, too
            writer.flip(0, place)
            with pytest.raises(Corrupted, match="with 't0', 't1', 't2', 't3' and 2 more, has"):
                pool.check()
            writer.flip(0, place)
            pool.check()


# -- what has no digest --------------------------------------------------------------------------------


def test_a_version_without_digests_says_how_to_have_some(client: Broker, name: str) -> None:
    publish(client, name)
    assert client.digests(name).digests is None
    with client.attach(name) as pool, pytest.raises(Unsupported, match=r"without a digest.*seal\(digest=True\)"):
        pool.check()


def test_a_draft_cannot_be_checked(client: Broker, name: str) -> None:
    with client.create(name, LAYOUT) as draft, pytest.raises(Invalid, match="not published"):
        draft.check()


def test_a_draft_whose_readers_may_write_it_is_not_sealed_with_digests_and_stays(client: Broker, name: str) -> None:
    with client.create(name, LAYOUT, writable=True) as draft:
        with pytest.raises(Unsupported, match="writable by its readers"):
            draft.seal(digest=True)
        assert draft.seal() == 1
    made = client.attach_or_create(f"{name}.next", LAYOUT, writable=True)
    assert isinstance(made, Draft)
    with made, pytest.raises(Unsupported, match="writable by its readers"):
        made.seal(digest=True)


def test_a_draft_that_is_in_use_is_not_sealed_and_what_is_written_then_counts(client: Broker, name: str) -> None:
    with client.create(name, LAYOUT) as draft:
        array = draft["weight"].numpy()
        with pytest.raises(Invalid, match="still in use: weight"):
            draft.seal(digest=True)
        array[:] = 7
        del array
        draft.seal(digest=True)
    with client.attach(name) as pool:
        assert pool["weight"].numpy()[0, 0] == 7
        pool.check()


def test_a_draft_stays_open_if_its_digest_cannot_be_computed(
    client: Broker, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Context, ranges: object) -> list[bytes]:
        raise DriverError("cuLaunchKernel", 719, "CUDA_ERROR_LAUNCH_FAILED", "")

    with client.create(name, LAYOUT) as draft:
        with monkeypatch.context() as patch:
            patch.setattr(Context, "digests", refuse)
            with pytest.raises(DeviceFailure, match="computing the digest of draft of pool"):
                draft.seal(digest=True)
        draft["weight"].copy_from_bytes(content("weight", 128))
        draft.seal(digest=True)
    with client.attach(name) as pool:
        with monkeypatch.context() as patch:
            patch.setattr(Context, "digests", refuse)
            with pytest.raises(DeviceFailure, match=f"computing the digest of pool {name!r} version 1"):
                pool.check()
        pool.check()


def test_a_digest_that_this_build_cannot_compute_is_not_taken_for_a_difference(
    client: Broker, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(digests, "ALGORITHM", "cubroker-256-9")
        sealed(client, name)
    with client.attach(name) as pool, pytest.raises(Unsupported, match=r"cubroker-256-9, and this build computes"):
        pool.check()


def test_a_version_that_is_gone_has_none(client: Broker, name: str) -> None:
    sealed(client, name)
    client.retire(name)
    with pytest.raises(Retired):
        client.digests(name, 1)


# -- loads, old brokers, restarts ----------------------------------------------------------------------


def test_a_load_publishes_digests_if_it_is_told_to(client: Broker, name: str, tmp_path: os.PathLike[str]) -> None:
    tensors = {each.name: (each.dtype, each.shape, content(each.name, each.nbytes)) for each in LAYOUT.tensors}
    path = checkpoints.write(tmp_path / "weights.safetensors", tensors)  # type: ignore[operator]
    load(client, name, [path], devices=(0, 1), digest=True)
    assert client.digests(name).digests == Digests(ALGORITHM, (tuple(map(digest, slabs(LAYOUT))),) * 2)
    load(client, name, [path])
    assert client.digests(name).digests is None


def publishing_is_refused(broker: Broker, name: str, path: os.PathLike[str], expected: str) -> None:
    """Nothing is copied for a digest that there cannot be, nor is there a draft, unless a version may be there."""
    copied = list[int]()
    asks: list[Callable[[], object]] = [
        lambda: load(broker, name, [path], digest=True),
        lambda: broker.publish(name, {"a": b"abc"}, digest=True),
        lambda: load(broker, name, [path], digest=True, if_absent=True, progress=lambda done, _: copied.append(done)),
    ]
    for ask in asks:
        with pytest.raises(NotFound):
            broker.story(name)
        with pytest.raises(Unsupported, match=expected):
            ask()
    assert not any(copied)
    assert name not in [info.name for info in broker.pools()]


def test_without_numpy_digests_on_host_devices_are_refused_before_anything_is_copied(
    client: Broker, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoints.write(tmp_path / "weights.safetensors", {"a": ("U8", (3,), b"abc")})
    monkeypatch.setitem(sys.modules, "numpy", None)
    expected = f"a digest on a host device, of pool '{name}', needs numpy, which is not installed: pip install"
    publishing_is_refused(client, name, path, expected)
    load(client, name, [path])
    assert not load(client, name, [path], digest=True, if_absent=True).loaded  # another process has computed them


@pytest.fixture(scope="module")
def old() -> Iterator[Broker]:
    """A Broker on a broker that speaks no later version of the protocol than the third."""
    with older(3) as process, Broker(process.directory) as broker:
        yield broker


def test_a_broker_that_is_too_old_for_digests_is_asked_nothing_about_them(
    old: Broker, name: str, tmp_path: Path
) -> None:
    path = checkpoints.write(tmp_path / "weights.safetensors", {"a": ("U8", (3,), b"abc")})
    publishing_is_refused(old, name, path, f"pool '{name}': the broker is too old to keep a digest; upgrade it")
    with old.create(name, LAYOUT) as draft:
        with pytest.raises(Unsupported, match="too old to keep a digest"):
            draft.seal(digest=True)
        draft.seal()
    with old.attach(name) as pool, pytest.raises(Unsupported, match="too old to keep digests"):
        pool.check()
    with pytest.raises(Unsupported, match="too old to keep any"):
        old.digests(name)
    assert [info.digest for info in old.pools()] == [""]


def test_a_broker_that_was_killed_and_started_again_knows_the_digests(name: str) -> None:
    with storing() as process, Broker(process.directory) as broker:
        sealed(broker, name, BIG, devices=(0, 1), durable=True)
        before = broker.digests(name)
        with broker.attach(name, device=1) as pool:
            process.kill()
            process.start()
            assert broker.requests.submit(ListDigests(name, 1)).result(60) == before
            pool.check()
            with broker.attach(name, device=0) as other:
                other.check()
        assert leases(broker, name) == 0
