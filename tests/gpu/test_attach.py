"""Handles of a broker's GPU memory, opened in other processes; leases and memory when these end."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import pytest

from cubroker.client import Broker
from cubroker.protocol import Layout
from tests import checkpoints
from tests.brokers import BrokerProcess, eventually
from tests.gpu.sharing import SHARES, gpu_broker, worker

TENSORS = checkpoints.filled((*checkpoints.EVERY_DTYPE, *checkpoints.ODD_SHAPES))
DIGESTS = {name: hashlib.sha256(data).hexdigest() for name, (_, _, data) in TENSORS.items()}
GIB = 1 << 30
SLACK = 64 << 20
"""Bytes by which a device's free memory moves without anything of ours."""


@pytest.fixture(scope="module")
def gpu() -> Iterator[tuple[BrokerProcess, Broker]]:
    with gpu_broker() as both:
        yield both


def publish(broker: Broker, name: str, slab: int | None = None, share: str = "ipc") -> int:
    layout = Layout.pack(((n, dtype, shape) for n, (dtype, shape, _) in TENSORS.items()), slab=slab)
    with broker.create(name, layout, share=share) as draft:
        for tensor, (_, _, data) in TENSORS.items():
            draft[tensor].copy_from_bytes(data)
        return draft.seal()


@SHARES
@pytest.mark.parametrize("slab", [None, 1 << 16])
def test_what_one_process_wrote_two_others_read(
    gpu: tuple[BrokerProcess, Broker], slab: int | None, share: str
) -> None:
    process, broker = gpu
    publish(broker, "m", slab, share)
    with worker(process, "digest", "m") as one, worker(process, "digest", "m") as two:
        assert one.answer() == two.answer() == DIGESTS
        assert [info.leases for info in broker.pools() if info.state == "current"] == [2]
    broker.retire("m")
    eventually(lambda: not broker.pools(), "the retired pool to go")


@SHARES
def test_a_killed_workers_lease_falls_and_the_others_stays(gpu: tuple[BrokerProcess, Broker], share: str) -> None:
    process, broker = gpu
    publish(broker, "m", share=share)
    with worker(process, "digest", "m") as one, worker(process, "digest", "m") as two:
        assert one.answer() == two.answer() == DIGESTS
        one.kill()
        eventually(lambda: [info.leases for info in broker.pools()] == [1], "the killed worker's lease to fall")
        assert one.process.pid not in {client.pid for client in broker.clients()}
        assert two.process.poll() is None
        broker.retire("m")
        assert [(info.state, info.leases) for info in broker.pools()] == [("retired", 1)]
        two.kill()
        eventually(lambda: not broker.pools(), "the memory to be freed")


@SHARES
def test_freed_memory_is_back_on_the_device(gpu: tuple[BrokerProcess, Broker], share: str) -> None:
    _, broker = gpu
    context = broker.driver.context(0)
    before, _ = context.memory()
    with broker.create("large", Layout.pack([("x", "U8", (4 * GIB,))]), share=share) as draft:
        draft.seal()
    with broker.attach("large"):
        held, _ = context.memory()
        assert abs(before - held - 4 * GIB) < SLACK
    broker.retire("large")
    eventually(lambda: context.memory()[0] > before - SLACK, "the device to have its memory back")


@SHARES
def test_attaching_again_costs_no_device_memory(gpu: tuple[BrokerProcess, Broker], share: str) -> None:
    _, broker = gpu
    with broker.create("large", Layout.pack([("x", "U8", (GIB,))]), share=share) as draft:
        draft.seal()
    with broker.attach("large") as one:
        before, _ = one.context.memory()
        with broker.attach("large") as two:
            assert (one["x"].pointer == two["x"].pointer) is (share == "ipc")
            assert abs(before - two.context.memory()[0]) < SLACK
    broker.retire("large")


@SHARES
def test_new_memory_is_zero_whoever_had_it_before(gpu: tuple[BrokerProcess, Broker], share: str) -> None:
    _, broker = gpu
    layout = Layout.pack([("x", "U8", (64 << 20,))])
    for _ in range(3):
        with broker.create("m", layout, share=share) as draft:
            assert not any(draft["x"].tobytes())
            draft["x"].copy_from(b"\xff" * (64 << 20))


def test_a_pool_that_names_no_share_kind_is_vmm_and_protected(gpu: tuple[BrokerProcess, Broker]) -> None:
    _, broker = gpu
    with broker.create("usual", Layout.pack([("x", "U8", (1,))])) as draft:
        assert draft.share == "vmm"
        draft.seal()
    with broker.attach("usual") as pool:
        assert (pool.share, pool.protected, pool["x"].protected) == ("vmm", True, True)
        assert [info.protected for info in broker.pools()] == [True]
    broker.retire("usual")
    eventually(lambda: not broker.pools(), "the retired pool to go")


def test_only_ipc_pools_cost_a_context_of_the_brokers() -> None:
    with gpu_broker() as (_, broker):
        context = broker.driver.context(0)
        before, _ = context.memory()
        with broker.create("large", Layout.pack([("x", "U8", (GIB,))]), share="vmm") as draft:
            draft.seal()
        with broker.attach("large"):
            after, _ = context.memory()
            assert abs(before - after - GIB) < SLACK
            with broker.create("small", Layout.pack([("x", "U8", (1,))]), share="ipc") as draft:
                assert after - context.memory()[0] > 2 * SLACK
