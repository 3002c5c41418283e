"""Digests on GPUs: as numpy computes them, whatever the size, beside the capture of a graph, and how fast."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from cubroker.client import Broker
from cubroker.driver import Context, Driver, load
from cubroker.driver.kernels import PIECE, add, digest, finish, sums
from cubroker.protocol import Layout
from cubroker.protocol.errors import Corrupted
from tests.gpu.sharing import SHARES, gpu_broker
from tests.unit.client.conftest import content

GIB = 1 << 30
BLOCK = 2 << 20

SIZES = (
    *(1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 255, 256, 257, 4095, 4096, 4097, 65_535, 65_536, 65_537, 1_000_003),
    *(BLOCK - 1, BLOCK, BLOCK + 16, 64 * BLOCK - 16, 64 * BLOCK, 64 * BLOCK + 5, 256 * BLOCK, 257 * BLOCK + 1),
)


@pytest.fixture(scope="module")
def driver() -> Iterator[Driver]:
    driver = load("cuda")
    yield driver
    driver.close()


@pytest.fixture
def context(driver: Driver) -> Context:
    return driver.context(driver.devices[0].index)


@pytest.fixture(scope="module")
def data() -> bytes:
    return np.random.default_rng(1).bytes(max(SIZES))


def test_the_kernel_agrees_with_numpy_at_every_size(context: Context, data: bytes) -> None:
    pointer = context.allocate(max(SIZES))
    try:
        context.write(pointer, data)
        found = context.digests([(pointer, nbytes) for nbytes in SIZES])
        view = memoryview(data)
        assert found == [digest(view[:nbytes]) for nbytes in SIZES]
    finally:
        context.free(pointer)


def test_bytes_beyond_four_gib_count_where_they_are(context: Context) -> None:
    """Zeros, but for words at both ends and around 4 GiB, each of which changes the digest as numpy says."""
    nbytes = 5 * GIB + 16
    if context.memory()[0] < nbytes + GIB:
        pytest.skip(f"the device has no {nbytes} bytes to spare")
    pointer = context.allocate(nbytes)
    try:
        context.clear(pointer, nbytes)
        zeros = bytes(64 << 20)
        total = add(*(sums(zeros[: nbytes - start], start // PIECE) for start in range(0, nbytes, len(zeros))))
        assert context.digests([(pointer, nbytes)]) == [finish(total, nbytes)]
        for place in (0, 4 * GIB - 8, 4 * GIB, 4 * GIB + 8, nbytes - 8):
            before = bytearray(context.read(pointer + place // PIECE * PIECE, PIECE))
            after = before[: place % PIECE] + b"\x01" + before[place % PIECE + 1 :]
            context.write(pointer + place, b"\x01")
            old, new = (sums(piece, place // PIECE) for piece in (before, after))
            total = (total[0] - old[0] + new[0]) % (1 << 64), (total[1] - old[1] + new[1]) % (1 << 64)
            assert context.digests([(pointer, nbytes)]) == [finish(total, nbytes)]
    finally:
        context.free(pointer)


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    with gpu_broker() as (_, broker):
        yield broker


LAYOUT = Layout.pack([("x", "U8", (3 * BLOCK,)), ("y", "F32", (5,)), ("z", "U8", (BLOCK,))], slab=3 * BLOCK)


def publish(broker: Broker, share: str) -> None:
    with broker.create("m", LAYOUT, share=share) as draft:
        for name, tensor in draft.items():
            tensor.copy_from_bytes((content(name, 251) * (tensor.nbytes // 251 + 1))[: tensor.nbytes])
        draft.seal(digest=True)


@SHARES
def test_what_is_sealed_is_found_unchanged_and_what_is_written_is_noticed(broker: Broker, share: str) -> None:
    publish(broker, share)
    with broker.attach("m") as pool:
        pool.check()
        if share == "ipc":  # by the handle that every reader has
            last = pool["z"].pointer + BLOCK - 1
            before = pool.context.read(last, 1)
            pool.context.write(last, bytes([before[0] ^ 0x80]))
            with pytest.raises(Corrupted, match=r"allocation 1 on device 0 \(.*\), with 'y', 'z', has"):
                pool.check()
            pool.context.write(last, before)
            pool.check()
    broker.retire("m")


@SHARES
def test_each_gpu_digests_its_replica_and_that_of_a_gpu_that_it_reaches(broker: Broker, share: str) -> None:
    devices = [device.index for device in broker.driver.devices]
    if len(devices) < 2 or not broker.driver.peers.can_access(*devices[:2]):
        pytest.skip("no two GPUs here, of which the first reaches the second")
    with broker.create("m", LAYOUT, devices=devices[:2], share=share) as draft:
        for replica in draft.replicas:
            replica["x"].copy_from_bytes(bytes([replica.device.index + 1]) * replica["x"].nbytes)
        draft.seal(digest=True)
    for device in devices[:2]:
        with broker.attach("m", device=device) as pool:
            pool.check()
    broker.retire("m")
    with broker.create("m", LAYOUT, devices=devices[1:2], share=share) as draft:
        draft.seal(digest=True)
    with broker.attach("m", device=devices[0], peer=True) as pool:
        assert pool.memory_device.index == devices[1]
        pool.check()
    broker.retire("m")


@SHARES
@pytest.mark.parametrize("mode", ["global", "thread_local"])
def test_a_graph_is_captured_beside_checks(broker: Broker, share: str, mode: str) -> None:
    torch = pytest.importorskip("torch")
    publish(broker, share)
    x = torch.ones(1024, 1024, device="cuda")
    y = torch.zeros_like(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    pool = broker.attach("m")
    with torch.cuda.graph(graph, capture_error_mode=mode):
        for _ in range(5):
            y.add_(x)
            pool.check()
    pool.close()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.all(y == 5)
    broker.retire("m")
