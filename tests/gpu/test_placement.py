"""Pools on GPUs that sleep, that are on another GPU than the worker's, and that are spread over several."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cubroker.client import Broker
from cubroker.driver import DriverError
from cubroker.protocol import Layout
from cubroker.protocol.errors import Retired
from tests.brokers import eventually
from tests.gpu.sharing import gpu_broker

LAYOUT = Layout.pack([("a", "U8", (3 << 20,)), ("b", "F32", (1000,))], slab=2 << 20)
SHARES = pytest.mark.parametrize("share", ["ipc", "vmm"])


def content(name: str, nbytes: int) -> bytes:
    return bytes((ord(name[0]) + index) % 251 for index in range(nbytes))


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    with gpu_broker() as (_, broker):
        yield broker


@pytest.fixture
def pair(broker: Broker) -> tuple[int, int]:
    """Two GPUs, the first of which reaches the second."""
    links = [link for link in broker.driver.peers.matrix() if link.access]
    if not links:
        pytest.skip("no two GPUs here that reach each other")
    return links[0].device, links[0].peer


def publish(broker: Broker, name: str, share: str, device: int = 0) -> None:
    with broker.create(name, LAYOUT, devices=(device,), share=share) as draft:
        for tensor in draft.values():
            tensor.copy_from(content(tensor.name, tensor.nbytes))
        draft.seal()


def test_readers_of_vmm_pools_cannot_write(broker: Broker) -> None:
    publish(broker, "readonly", "vmm")
    with broker.attach("readonly") as pool:
        with pytest.raises(DriverError, match="INVALID_VALUE"):
            pool.context.write(pool["b"].pointer, bytes(4000))
        assert pool["b"].tobytes() == content("b", 4000)


def test_memory_that_sleeps_is_free_for_others_and_comes_back_at_its_address(broker: Broker) -> None:
    size = 4 << 30
    with broker.create("large", Layout.pack([("x", "U8", (size,))]), share="vmm") as draft:
        draft.seal()
    with broker.attach("large") as pool:
        where = pool["x"].pointer
        pool.sleep()
        assert [info.leases for info in broker.pools() if info.name == "large"] == [0]
        pool.wake()
        assert pool["x"].pointer == where
        pool.sleep()
        free, _ = pool.context.memory()
        broker.retire("large")
        eventually(lambda: pool.context.memory()[0] > free + size // 2, "the memory to return")
        with pytest.raises(Retired, match="cannot wake"):
            pool.wake()


def test_a_captured_graph_is_replayed_after_sleep_and_wake(broker: Broker) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this torch was built without CUDA")
    from cubroker.client.torch import state_dict

    publish(broker, "graph", "vmm")
    with broker.attach("graph", device=0) as pool:
        weights = state_dict(pool)["b"]
        expected, out = weights.clone(), torch.zeros_like(weights)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out.copy_(weights)
        for _ in range(3):
            pool.sleep()
            pool.wake()
            out.zero_()
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(out.view(torch.uint8), expected.view(torch.uint8))
        del weights, graph


@SHARES
def test_a_worker_reaches_a_pool_on_another_gpu(broker: Broker, pair: tuple[int, int], share: str) -> None:
    near, far = pair
    publish(broker, f"peer-{share}", share, far)
    with broker.attach(f"peer-{share}", device=near, peer=True) as pool:
        assert (pool.device.index, pool.memory_device.index) == pair
        for name, tensor in pool.items():
            assert tensor.tobytes() == content(name, tensor.nbytes)
        # A copy on the near device's own stream into memory of its own: the device itself reads the other's.
        context = broker.driver.context(near)
        mine = context.allocate(4000)
        with context.stream() as stream:
            stream.copy(mine, pool["b"].pointer, 4000)
            stream.synchronize()
        assert context.read(mine, 4000) == content("b", 4000)
        context.free(mine)


@SHARES
def test_tensors_of_a_sharded_pool_are_on_their_own_gpus(broker: Broker, pair: tuple[int, int], share: str) -> None:
    plan = {"a": pair[0], "b": pair[1]}
    layout = Layout.pack([("a", "U8", (3 << 20,)), ("b", "F32", (1000,))], groups=plan)
    with broker.create(f"sharded-{share}", layout, devices=pair, plan=plan, share=share) as draft:
        for tensor in draft.values():
            tensor.copy_from(content(tensor.name, tensor.nbytes))
        draft.seal()
    with broker.attach(f"sharded-{share}") as pool:
        assert {name: tensor.device.index for name, tensor in pool.items()} == plan
        assert all(tensor.tobytes() == content(name, tensor.nbytes) for name, tensor in pool.items())
    with broker.attach(f"sharded-{share}", device=pair[1]) as pool:
        assert list(pool) == ["b"]
        assert pool["b"].tobytes() == content("b", 4000)
