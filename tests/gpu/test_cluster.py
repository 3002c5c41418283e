"""Pools from one broker to another over NIXL, with the memory on GPUs."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from cubroker import driver
from cubroker.client import Broker
from cubroker.protocol import Layout
from tests import checkpoints
from tests.brokers import serving
from tests.cluster import exporting, fetch, make_certificates, need_engine
from tests.gpu.sharing import SHARES

need_engine()

TENSORS = checkpoints.filled((*checkpoints.EVERY_DTYPE, *checkpoints.ODD_SHAPES))
DIGESTS = {name: hashlib.sha256(data).hexdigest() for name, (_, _, data) in TENSORS.items()}


def publish(broker: Broker, share: str) -> None:
    layout = Layout.pack(((n, dtype, shape) for n, (dtype, shape, _) in TENSORS.items()), slab=1 << 16)
    with broker.create("m", layout, share=share) as draft:
        for tensor, (_, _, data) in TENSORS.items():
            draft[tensor].copy_from_bytes(data)
        draft.seal()


@SHARES
def test_a_pool_of_one_gpu_comes_to_the_broker_of_another(tmp_path: Path, share: str) -> None:
    """Two brokers that know of one GPU each; of the same, where there is but one."""
    last = len(driver.load("cuda").devices) - 1
    here, there = make_certificates(tmp_path, "here", "there")
    with serving("cuda:0") as first, serving(f"cuda:{last}") as second:
        with Broker(first.directory) as broker:
            publish(broker, share)
            with exporting(first.directory, there) as exporter:
                done = fetch(second.directory, here, "m", "--from", exporter.address, "--share", share)
                assert isinstance(done, dict), (done, exporter.log())
                assert done["fetched"]
            assert [info.leases for info in broker.pools()] == [0]
        with Broker(second.directory) as broker, broker.attach("m") as pool:
            pool.check()
            assert {name: hashlib.sha256(pool[name].tobytes()).hexdigest() for name in pool} == DIGESTS


def test_a_version_that_is_spread_over_gpus_comes_whole(tmp_path: Path) -> None:
    if len(driver.load("cuda").devices) < 2:
        pytest.skip("needs two GPUs")
    here, there = make_certificates(tmp_path, "here", "there")
    with serving("cuda:0,1") as first, serving("cuda:0,1") as second:
        with Broker(first.directory) as broker:
            places = {name: number % 2 for number, name in enumerate(TENSORS)}
            tensors = {name: (dtype, shape) for name, (dtype, shape, _) in TENSORS.items()}
            with broker.create("m", tensors, plan=places) as draft:
                for tensor, (_, _, data) in TENSORS.items():
                    draft[tensor].copy_from_bytes(data)
                draft.seal()
            with exporting(first.directory, there) as exporter:
                done = fetch(second.directory, here, "m", "--from", exporter.address, "--device", "0,1")
                assert isinstance(done, dict), (done, exporter.log())
        with Broker(second.directory) as broker:
            for device in (0, 1):
                with broker.attach("m", device=device) as pool:
                    pool.check()
                    assert {name: hashlib.sha256(pool[name].tobytes()).hexdigest() for name in pool} == DIGESTS


def test_memory_can_be_registered_with_network_adapters_where_the_device_says_so() -> None:
    """``gpuDirectRDMACapable`` of physical memory; a property that is refused would fail every creation."""
    gpus = driver.load("cuda")
    physical, calls = gpus.create(0, 2 << 20), gpus.context(0).calls
    try:
        module = calls.module
        attribute = module.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED
        supported = calls.cuDeviceGetAttribute(attribute, 0)
        error, properties = module.cuMemGetAllocationPropertiesFromHandle(physical.handle)
        assert int(error) == 0
        assert properties.allocFlags.gpuDirectRDMACapable == supported
    finally:
        physical.release()
