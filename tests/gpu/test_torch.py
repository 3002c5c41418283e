"""Torch's views of GPU memory that the broker owns."""

from __future__ import annotations

import copy
import gc
import hashlib
import io
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import numpy as np
import pytest

from cubroker.client import Broker
from cubroker.client.loading.loader import load
from cubroker.protocol import Layout
from tests import checkpoints
from tests.brokers import BrokerProcess, eventually
from tests.gpu.sharing import gpu_broker, worker

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("this torch was built without CUDA", allow_module_level=True)

TENSORS = checkpoints.filled((*checkpoints.EVERY_DTYPE, *checkpoints.ODD_SHAPES))
DIGESTS = {name: hashlib.sha256(data).hexdigest() for name, (_, _, data) in TENSORS.items()}


@pytest.fixture(params=["ipc", "vmm"])
def gpu(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[BrokerProcess, Broker]]:
    with gpu_broker() as (process, broker):
        load(broker, "m", checkpoints.write(tmp_path / "m.safetensors", TENSORS), share=request.param)
        yield process, broker


def test_torch_reads_the_files_bytes_in_two_other_processes(gpu: tuple[BrokerProcess, Broker]) -> None:
    process, _ = gpu
    with worker(process, "torch", "m") as one, worker(process, "torch", "m") as two:
        assert one.answer() == two.answer() == DIGESTS


def test_views_are_the_shared_memory_itself(gpu: tuple[BrokerProcess, Broker]) -> None:
    from cubroker.integrations.torch import DTYPES, state_dict

    _, broker = gpu
    with broker.attach("m") as pool:
        state = state_dict(pool)
        for name, (dtype, shape, data) in TENSORS.items():
            assert state[name].device == torch.device("cuda", pool.device.index)
            assert state[name].data_ptr() == (pool[name].pointer if data else 0)
            if not dtype.startswith(("F4", "F6")):
                assert (state[name].dtype, tuple(state[name].shape)) == (DTYPES[dtype], shape)
        del state


def test_a_tensor_may_be_imported_by_itself(gpu: tuple[BrokerProcess, Broker]) -> None:
    _, broker = gpu
    with broker.attach("m") as pool:
        alone = torch.from_dlpack(pool["matrix"])
        assert alone.data_ptr() == pool["matrix"].pointer
        assert alone.cpu().numpy().tobytes() == TENSORS["matrix"][2]
        del alone


def test_tensors_outlive_the_pool_and_hold_the_lease(gpu: tuple[BrokerProcess, Broker]) -> None:
    from cubroker.integrations.torch import state_dict

    _, broker = gpu
    with broker.attach("m") as pool:
        last = state_dict(pool)["long"]
    broker.retire("m")
    gc.collect()
    assert (last + 0).cpu().numpy().tobytes() == TENSORS["long"][2]
    assert [info.leases for info in broker.pools()] == [1]
    del last
    eventually(lambda: not broker.pools(), "the memory to be freed")


def test_each_tensor_is_saved_and_copied_alone_and_stays_in_the_pool(gpu: tuple[BrokerProcess, Broker]) -> None:
    from cubroker.integrations.torch import state_dict

    _, broker = gpu
    with broker.attach("m") as pool:
        state = state_dict(pool)
        for name, tensor in state.items():
            assert tensor.untyped_storage().nbytes() == pool[name].nbytes
            file = io.BytesIO()
            torch.save(tensor, file)
            assert len(file.getvalue()) < tensor.nbytes + 4096
            if tensor.nbytes:
                with pytest.raises(TypeError, match=r"attach by name, or send tensor.clone\(\)"):
                    ForkingPickler.dumps(tensor)
            assert tensor.share_memory_().data_ptr() == (pool[name].pointer if tensor.nbytes else 0)
        torch.save(state, io.BytesIO())
        assert (copy.deepcopy(state["long"]) + 0).cpu().numpy().tobytes() == TENSORS["long"][2]
        del state, tensor


def test_a_draft_is_filled_from_tensors_of_the_host_and_of_the_gpu(
    gpu: tuple[BrokerProcess, Broker],
) -> None:
    values = torch.arange(8).to(torch.bfloat16).view(2, 4)
    _, broker = gpu
    with broker.create("filled", Layout.pack([(name, "BF16", (2, 4)) for name in "abcde"])) as draft:
        draft["a"].copy_from(values)
        draft["b"].copy_from(draft["a"])
        draft["c"].copy_from(values.cuda())
        draft["d"].copy_from(values.t().contiguous().cuda().t())
        torch.from_dlpack(draft["e"]).copy_(values.cuda())
        torch.cuda.synchronize()
        found = [draft[name].tobytes() for name in "abcde"]
        assert found == [values.view(torch.uint8).numpy().tobytes()] * 5


def test_numpy_and_torch_take_a_tensor_or_say_why_not(gpu: tuple[BrokerProcess, Broker]) -> None:
    _, broker = gpu
    with broker.attach("m") as pool:
        single, half = pool["of.F32"], pool["of.BF16"]
        for use in (np.asarray, np.array, np.sum):
            with pytest.raises(TypeError, match=r"numpy works in host memory; .*\.cpu\(\)"):
                use(single)
        for use in (torch.asarray, torch.as_tensor, torch.tensor):
            with pytest.raises(TypeError, match="read only"):
                use(single)
        for use in (torch.asarray, torch.as_tensor, torch.from_dlpack):
            assert use(half).data_ptr() == half.pointer
        assert torch.tensor(half).data_ptr() != half.pointer
