"""DLPack capsules of tensors: they keep memory while they live, and say what it is."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest
import torch

from cubroker.client import Broker, SharedTensor
from cubroker.client.arrays import versioned_struct
from cubroker.protocol import Layout
from cubroker.protocol.errors import Invalid
from tests.brokers import BrokerProcess, eventually
from tests.unit.client.conftest import content, leases, publish
from tests.unit.client.test_tensor import EVERY, on_gpu

TORCH = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "C64": torch.complex64,
    "F64": torch.float64,
    "I64": torch.int64,
    "U64": torch.uint64,
}


def imported(tensor: SharedTensor) -> torch.Tensor:
    return torch.utils.dlpack.from_dlpack(tensor)


def bits(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())


@pytest.mark.usefixtures("share")
def test_torch_takes_every_dtype_without_a_copy(client: Broker, name: str) -> None:
    publish(client, name, EVERY)
    with client.attach(name) as pool:
        for dtype, expected in TORCH.items():
            tensor = imported(pool[dtype])
            assert (tensor.dtype, tuple(tensor.shape)) == (expected, (3, 8))
            assert tensor.data_ptr() == pool[dtype].pointer
            assert bits(tensor) == content(dtype, tensor.nbytes)
            del tensor


def test_elements_of_four_bits_come_in_pairs(client: Broker, name: str) -> None:
    publish(client, name, Layout.pack([("even", "F4", (3, 8)), ("odd", "F4", (8, 3)), ("alone", "F4", (2,))]))
    with client.attach(name) as pool:
        tensor = imported(pool["even"])
        assert (tensor.dtype, tuple(tensor.shape)) == (torch.float4_e2m1fn_x2, (3, 4))
        with pytest.raises(BufferError, match="odd number of 4-bit elements"):
            pool["odd"].__dlpack__(max_version=(1, 0))
        del tensor


def test_scalars_and_tensors_without_elements_are_exported(client: Broker, name: str) -> None:
    publish(client, name)
    with client.attach(name) as pool:
        scale, none = imported(pool["scale"]), imported(pool["none"])
        assert (tuple(scale.shape), tuple(none.shape)) == ((), (0, 3))
        del scale, none


def test_numpy_sees_that_a_published_tensor_is_read_only(client: Broker, name: str) -> None:
    publish(client, name)
    with client.attach(name) as pool:
        array = np.from_dlpack(pool["weight"])
        assert not array.flags.writeable
        assert array.tobytes() == content("weight", 128)
        del array
    with client.create(name, Layout.pack([("a", "F32", (2,))])) as draft:
        array = np.from_dlpack(draft["a"])
        assert array.flags.writeable
        del array


@pytest.mark.parametrize("max_version", [(1, 0), (1, 3)])
def test_a_consumer_of_dlpack_1_gets_a_versioned_capsule(
    client: Broker, name: str, max_version: tuple[int, int]
) -> None:
    publish(client, name)
    with client.attach(name) as pool:
        capsule = pool["weight"].__dlpack__(max_version=max_version)
        assert "dltensor_versioned" in repr(capsule)
        assert versioned_struct(capsule).flags & 1  # DLPACK_FLAG_BITMASK_READ_ONLY
        assert versioned_struct(capsule).major == 1
        del capsule


@pytest.mark.parametrize("max_version", [None, (0, 8)])
def test_an_older_consumer_gets_the_old_capsule(client: Broker, name: str, max_version: tuple[int, int] | None) -> None:
    publish(client, name)
    with client.attach(name) as pool:
        capsule = pool["weight"].__dlpack__(max_version=max_version)
        assert '"dltensor"' in repr(capsule)
        tensor = torch.utils.dlpack.from_dlpack(capsule)
        assert bits(tensor) == content("weight", 128)
        del tensor, capsule


def test_a_gpu_tensor_is_exported_for_its_device_and_its_memory_left_alone() -> None:
    tensor, _ = on_gpu("BF16", (2, 3))
    for stream in (None, -1, 1, 2, 0x1234):
        found = versioned_struct(tensor.__dlpack__(stream=stream, max_version=(1, 0))).tensor
        assert (found.device.type, found.device.id) == (2, 3)
        assert (found.data, found.ndim) == (tensor.pointer, 2)
        assert (found.dtype.code, found.dtype.bits, found.dtype.lanes) == (4, 16, 1)


@pytest.mark.parametrize(
    ("asked", "complaint"),
    [
        ({"copy": True}, "shared, not copied"),
        ({"dl_device": (2, 0)}, r"cannot be exported to \(2, 0\)"),
        ({"stream": 1}, "no stream 1"),
    ],
)
def test_what_cannot_be_had_is_a_buffer_error(client: Broker, name: str, asked: dict[str, Any], complaint: str) -> None:
    publish(client, name)
    with client.attach(name) as pool, pytest.raises(BufferError, match=complaint):
        pool["weight"].__dlpack__(max_version=(1, 0), **asked)


def test_its_own_device_and_no_copy_can_be_asked_for(client: Broker, name: str) -> None:
    publish(client, name)
    with client.attach(name) as pool:
        tensor = torch.utils.dlpack.from_dlpack(pool["weight"], device="cpu", copy=False)
        assert tensor.data_ptr() == pool["weight"].pointer
        del tensor


@pytest.mark.parametrize("versioned", [True, False])
def test_a_capsule_that_nobody_consumes_gives_the_memory_back(client: Broker, name: str, versioned: bool) -> None:
    publish(client, name)
    pool = client.attach(name)
    capsule = pool["weight"].__dlpack__(max_version=(1, 0) if versioned else None)
    pool.close()
    assert leases(client, name) == 1
    del capsule
    eventually(lambda: leases(client, name) == 0, "the end of the lease")


@pytest.mark.usefixtures("share")
def test_a_tensor_that_is_dropped_by_another_thread_gives_the_memory_back(client: Broker, name: str) -> None:
    publish(client, name)
    pool = client.attach(name)
    tensors = [imported(tensor) for tensor in pool.values()]
    pool.close()
    assert leases(client, name) == 1
    thread = threading.Thread(target=tensors.clear)
    thread.start()
    thread.join()
    eventually(lambda: leases(client, name) == 0, "the end of the lease")


@pytest.mark.usefixtures("share")
def test_capsules_and_tensors_may_die_while_an_exception_propagates(client: Broker, name: str) -> None:
    publish(client, name)
    pool = client.attach(name)
    with pytest.raises(ZeroDivisionError):
        [pool["weight"].__dlpack__(max_version=(1, 0)), 1 / 0]
    with pytest.raises(ZeroDivisionError):
        [imported(pool["weight"]), 1 / 0]
    pool.close()
    gc.collect()
    eventually(lambda: leases(client, name) == 0, "the end of the lease")


def test_a_closed_pool_exports_nothing(client: Broker, name: str) -> None:
    with client.create(name, Layout.pack([("a", "F32", (2,))])) as draft:
        tensor = draft["a"]
    with pytest.raises(Invalid, match="given back"):
        tensor.__dlpack__(max_version=(1, 0))


WITHOUT_NUMPY = """
import gc, sys, warnings
sys.modules["numpy"] = None
warnings.filterwarnings("ignore", message="Failed to initialize NumPy")
import torch
from cubroker import Broker

every = {
    "floats": torch.arange(6.0).view(2, 3),
    "turned": torch.arange(6, dtype=torch.int16).view(2, 3).t(),
    "halves": torch.full((3,), 1.5, dtype=torch.bfloat16),
    "eights": torch.ones(2, 2).to(torch.float8_e4m3fn),
    "scalar": torch.tensor(7),
    "complex": torch.tensor([1 + 2j]).conj(),
    "empty": torch.empty(0, 4),
}
with Broker(sys.argv[1]) as broker:
    broker.publish("plain", every)
    pool = broker.attach("plain")
    found = {name: torch.from_dlpack(pool[name]) for name in pool}
    for name, tensor in found.items():
        assert (tensor.dtype, tensor.shape) == (every[name].dtype, every[name].shape), name
        assert tensor.tolist() == every[name].tolist() if name != "eights" else tensor.float().sum() == 4, name
        assert tensor.data_ptr() == pool[name].pointer or not tensor.numel()
    del tensor, found["floats"]
    pool.close()
    kept = broker.pools()[0].leases
    del found
    gc.collect()
    print(kept)
"""


@pytest.mark.slow
def test_torch_takes_and_publishes_tensors_without_numpy(broker: BrokerProcess) -> None:
    command = [sys.executable, "-c", WITHOUT_NUMPY, broker.directory]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
    with Broker(broker.directory) as observer:
        assert observer.pools()[0].leases == 0
