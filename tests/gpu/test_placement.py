"""Pools on GPUs that sleep, that are on another GPU than the worker's, and that are spread over several."""

from __future__ import annotations

import functools
import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from cubroker.client import Broker
from cubroker.client.loading.loader import load
from cubroker.driver import DriverError
from cubroker.protocol import Layout
from cubroker.protocol.errors import Retired
from tests import checkpoints
from tests.brokers import BrokerProcess, eventually
from tests.gpu.sharing import SHARES, gpu_broker, worker

Both = tuple[BrokerProcess, Broker]

LAYOUT = Layout.pack([("a", "U8", (3 << 20,)), ("b", "F32", (1000,))], slab=2 << 20)
BOTH_WAYS = pytest.mark.parametrize("way", [1, -1], ids=["there", "back"])

UNSEEN = """
import sys
from cubroker.client import Broker
from cubroker.protocol import CubrokerError
with Broker(sys.argv[1]) as broker:
    try:
        broker.attach("hidden", device=0, peer=True)
    except CubrokerError as error:
        print(f"{type(error).__name__}: {error}")
"""


def content(name: str, nbytes: int) -> bytes:
    return bytes((ord(name[0]) + index) % 251 for index in range(nbytes))


def digest(name: str) -> str:
    return hashlib.sha256(content(name, sizes[name])).hexdigest()


sizes = {spec.name: spec.nbytes for spec in LAYOUT.tensors}


@functools.cache
def digests() -> dict[str, str]:
    """Return the digest of every tensor; computed once it is asked for, since most machines skip these tests."""
    return {name: digest(name) for name in sizes}


def needs_torch() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this torch was built without CUDA")


def leases(broker: Broker, name: str) -> int:
    """How many there are on the pool's current version."""
    return sum(info.leases for info in broker.pools() if (info.name, info.state) == (name, "current"))


@pytest.fixture(scope="module")
def gpu() -> Iterator[Both]:
    with gpu_broker() as both:
        yield both


@pytest.fixture
def pair(gpu: Both) -> tuple[int, int]:
    """Two GPUs that reach each other."""
    links = {(link.device, link.peer) for link in gpu[1].driver.peers.matrix() if link.access}
    if not (pairs := sorted(link for link in links if link[::-1] in links)):
        pytest.skip("no two GPUs here that reach each other")
    return pairs[0]


def publish(broker: Broker, name: str, share: str, devices: Sequence[int] = (0,)) -> None:
    with broker.create(name, LAYOUT, devices=devices, share=share) as draft:
        for tensor in draft.values():
            tensor.copy_from_bytes(content(tensor.name, tensor.nbytes))
        draft.seal()


def test_readers_of_vmm_pools_cannot_write(gpu: Both) -> None:
    _, broker = gpu
    publish(broker, "readonly", "vmm")
    with broker.attach("readonly") as pool:
        with pytest.raises(DriverError, match="INVALID_VALUE"):
            pool.context.write(pool["b"].pointer, bytes(4000))
        assert pool["b"].tobytes() == content("b", 4000)


def test_memory_that_sleeps_is_free_for_others_and_comes_back_at_its_address(gpu: Both) -> None:
    _, broker = gpu
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


def test_a_captured_graph_is_replayed_after_sleep_and_wake(gpu: Both) -> None:
    needs_torch()
    process, broker = gpu
    publish(broker, "graph", "vmm")
    with worker(process, "capture", "graph", "a", device=0) as one:
        assert one.answer() == "CUDAGraph"
        for _ in range(3):
            assert one.ask("sleep") is True
            assert leases(broker, "graph") == 0
            assert one.ask("wake") is False
            assert leases(broker, "graph") == 1
            assert one.ask("replay") == digest("a")
        assert one.ask("sleep") is True
        broker.retire("graph")
        assert "Retired: pool 'graph' version 1 cannot wake" in one.ask("wake")["error"]


def test_a_kernel_of_torch_that_writes_to_a_readers_tensor_ends_that_process_alone(gpu: Both) -> None:
    needs_torch()
    process, broker = gpu
    publish(broker, "guarded", "vmm")
    with worker(process, "torch", "guarded") as one, worker(process, "torch", "guarded") as two:
        assert one.answer() == two.answer() == digests()
        assert "illegal memory access" in one.ask("scribble", "a")["error"]
        assert two.ask("torch") == two.ask("computed") == digests()
        with worker(process, "torch", "guarded") as three:
            assert three.answer() == digests()
        one.kill()
        eventually(lambda: leases(broker, "guarded") == 1, "the offender's lease to fall")
        assert two.ask("computed") == digests()


# -- on two GPUs -----------------------------------------------------------------------------------


@SHARES
@BOTH_WAYS
def test_a_worker_reaches_a_pool_on_another_gpu(gpu: Both, pair: tuple[int, int], share: str, way: int) -> None:
    _, broker = gpu
    near, far = pair[::way]
    publish(broker, "peer", share, (far,))
    with broker.attach("peer", device=near, peer=True) as pool:
        assert (pool.device.index, pool.memory_device.index) == (near, far)
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
@BOTH_WAYS
def test_kernels_read_a_pool_on_another_gpu(gpu: Both, pair: tuple[int, int], share: str, way: int) -> None:
    needs_torch()
    process, broker = gpu
    near, far = pair[::way]
    publish(broker, "peer", share, (far,))
    with (
        worker(process, "computed", "peer", device=near, peer=True) as one,
        worker(process, "computed", "peer", device=far) as other,
    ):
        assert one.answer() == other.answer() == digests()
        if share == "vmm":
            assert [one.ask("sleep"), one.ask("wake")] == [True, False]
            assert one.ask("computed") == digests()
            assert "illegal memory access" in one.ask("scribble", "a")["error"]
        one.kill()
        assert other.ask("computed") == digests()


@SHARES
def test_direct_access_comes_and_goes_beside_a_pool_on_another_gpu(
    gpu: Both, pair: tuple[int, int], share: str
) -> None:
    _, broker = gpu
    near, far = pair
    publish(broker, "peer", share, (far,))
    peers, context = broker.driver.peers, broker.driver.context(near)
    with broker.attach("peer", device=near, peer=True) as pool:
        peers.enable(context, far)
        peers.enable(context, far)
        for _ in range(2):
            peers.disable(context, far)
            assert pool["b"].tobytes() == content("b", 4000)
        with pytest.raises(DriverError, match=r"PEER_ACCESS_NOT_ENABLED \(705\): from device \d to device \d"):
            peers.disable(context, far)
        with pytest.raises(DriverError, match=r"PEER_ACCESS_UNSUPPORTED \(217\): from device \d to device \d"):
            peers.enable(context, near)
        with pytest.raises(DriverError, match=r"INVALID_DEVICE \(101\): from device \d to device \d"):
            peers.link(near, near)
        assert pool["b"].tobytes() == content("b", 4000)


@SHARES
def test_a_gpu_that_a_worker_does_not_see_is_not_reached(gpu: Both, pair: tuple[int, int], share: str) -> None:
    process, broker = gpu
    seen, hidden = pair
    publish(broker, "seen", share, (seen,))
    publish(broker, "hidden", share, (hidden,))
    alone = {"CUDA_VISIBLE_DEVICES": broker.driver.devices[seen].uuid}
    with worker(process, "digest", "seen", environment=alone, device=0) as one:
        assert one.answer() == digests()  # the same GPU, whatever its ordinal there
    command = [sys.executable, "-c", UNSEEN, str(process.directory)]
    done = subprocess.run(command, env=os.environ | alone, stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout.startswith("NotFound: ")


@SHARES
def test_replicas_are_the_same_byte_for_byte(gpu: Both, pair: tuple[int, int], share: str, tmp_path: Path) -> None:
    _, broker = gpu
    tensors = checkpoints.filled([(f"layer.{n}", "BF16", (1 << 10, 1000 + n)) for n in range(50)])
    load(broker, "replicated", checkpoints.write(tmp_path / "m.safetensors", tensors), devices=pair, share=share)
    with broker.attach("replicated", device=pair[0]) as one, broker.attach("replicated", device=pair[1]) as two:
        assert (one.memory_device.index, two.memory_device.index) == pair
        for ours, theirs in zip(one.allocation_views, two.allocation_views, strict=True):
            assert ours.tobytes() == theirs.tobytes()
        assert {name: two[name].tobytes() for name in tensors} == {name: data for name, (_, _, data) in tensors.items()}


@SHARES
def test_tensors_of_a_sharded_pool_are_on_their_own_gpus(gpu: Both, pair: tuple[int, int], share: str) -> None:
    _, broker = gpu
    plan = {"a": pair[0], "b": pair[1]}
    layout = Layout.pack([("a", "U8", (3 << 20,)), ("b", "F32", (1000,))], groups=plan)
    with broker.create("sharded", layout, devices=pair, plan=plan, share=share) as draft:
        for tensor in draft.values():
            tensor.copy_from_bytes(content(tensor.name, tensor.nbytes))
        draft.seal()
    with broker.attach("sharded") as pool:
        assert {name: tensor.device.index for name, tensor in pool.items()} == plan
        assert all(tensor.tobytes() == content(name, tensor.nbytes) for name, tensor in pool.items())
    with broker.attach("sharded", device=pair[1]) as pool:
        assert list(pool) == ["b"]
        assert pool["b"].tobytes() == content("b", 4000)
