from __future__ import annotations

import copy
import gc
import io
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from cubroker.client import Broker
from cubroker.client.loading.loader import load
from cubroker.integrations import torch as bridge
from cubroker.integrations.torch import state_dict
from cubroker.protocol import Layout, TensorSpec
from cubroker.protocol.errors import Invalid
from tests import checkpoints
from tests.brokers import eventually, serving
from tests.unit.client.conftest import content, publish

PACKED = {"F4", "F6_E2M3", "F6_E3M2"}
TENSORS = checkpoints.filled((*checkpoints.EVERY_DTYPE, *checkpoints.ODD_SHAPES, ("odd.rows", "F4", (4, 3))))


@pytest.fixture(scope="module")
def client() -> Iterator[Broker]:
    """A Broker with pool ``m``, which has all of TENSORS in several allocations."""
    with serving() as process, Broker(process.directory) as broker, TemporaryDirectory() as folder:
        load(broker, "m", checkpoints.write(Path(folder) / "m.safetensors", TENSORS), slab=1 << 16)
        yield broker


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy()) if tensor.numel() else b""


def test_every_tensor_has_its_dtype_shape_and_bytes(client: Broker) -> None:
    with client.attach("m") as pool:
        state = state_dict(pool)
        assert list(state) == list(pool)
        assert {name: raw(tensor) for name, tensor in state.items()} == {n: data for n, (_, _, data) in TENSORS.items()}
        for name, (dtype, shape, data) in TENSORS.items():
            if dtype not in PACKED:
                assert (state[name].dtype, tuple(state[name].shape)) == (bridge.DTYPES[dtype], shape)
            assert state[name].data_ptr() == (pool[name].pointer if data else 0)
            assert state[name].is_contiguous()
        del state


@pytest.mark.parametrize("device", [torch.device("cuda", 0), torch.device("cuda:0"), torch.device("cuda")])
def test_torch_devices_name_devices(client: Broker, device: torch.device) -> None:
    with client.create("on-a-device", Layout.pack([("x", "U8", (5,))]), devices=[device]) as draft:
        assert draft.device == client.driver.devices[0]


def test_packed_elements_are_counted_in_bytes(client: Broker) -> None:
    with client.attach("m") as pool:
        state = state_dict(pool)
    found = {name: (state[name].dtype, tuple(state[name].shape)) for name in ("of.F4", "odd.rows", "of.F6_E2M3")}
    assert found == {
        "of.F4": (torch.float4_e2m1fn_x2, (3, 4, 1)),
        "odd.rows": (torch.uint8, (6,)),
        "of.F6_E2M3": (torch.uint8, (18,)),
    }


def test_a_torch_without_a_dtype_gets_the_bytes(client: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    for dtype in ("F4", "F8_E8M0"):
        monkeypatch.delitem(bridge.DTYPES, dtype)
    with client.attach("m") as pool:
        state = state_dict(pool)
    assert (state["of.F4"].dtype, tuple(state["of.F4"].shape)) == (torch.uint8, (12,))
    assert (state["of.F8_E8M0"].dtype, tuple(state["of.F8_E8M0"].shape)) == (torch.uint8, (3, 4, 2))
    assert {name: raw(state[name]) for name in state} == {name: data for name, (_, _, data) in TENSORS.items()}


def test_the_values_are_those_that_safetensors_itself_reads(client: Broker, tmp_path: Path) -> None:
    known = {n: tensor for n, tensor in TENSORS.items() if tensor[0] not in {*PACKED, "F8_E8M0"}}
    theirs = load_file(checkpoints.write(tmp_path / "known.safetensors", known))
    with client.attach("m") as pool:
        state = state_dict(pool)
    for name, tensor in theirs.items():
        assert state[name].dtype == tensor.dtype
        assert raw(state[name]) == raw(tensor)


def test_one_import_per_allocation_serves_all_tensors(client: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    imports: list[Any] = []
    from_dlpack = bridge.from_dlpack

    def counted(slab: Any) -> torch.Tensor:
        imports.append(slab)
        return from_dlpack(slab)

    monkeypatch.setattr(bridge, "from_dlpack", counted)
    with client.attach("m") as pool:
        state_dict(pool)
        assert 1 < len(imports) == len(pool.allocation_views) < len(pool)


def test_tensors_keep_the_memory_and_the_lease_until_the_last_is_gone(client: Broker) -> None:
    publish(client, "kept")
    with client.attach("kept") as pool:
        last = state_dict(pool)["weight"]
    client.retire("kept")
    gc.collect()
    assert raw(last) == content("weight", 128)
    assert [info.leases for info in client.pools() if info.name == "kept"] == [1]
    del last
    eventually(lambda: "kept" not in [info.name for info in client.pools()], "the memory to be freed")


def test_an_allocation_need_not_be_a_whole_number_of_elements(client: Broker) -> None:
    small = (TensorSpec("c", "C64", (), 0, 0), TensorSpec("f", "F32", (), 0, 256), TensorSpec("u", "U8", (3,), 0, 512))
    with client.create("odd", Layout((*small, TensorSpec("none", "F64", (0,), 1, 0)), (515, 1))) as draft:
        draft["f"].copy_from(torch.tensor(1.5))
        draft.seal()
    with client.attach("odd") as pool:
        state = state_dict(pool)
    assert [tuple(tensor.shape) for tensor in state.values()] == [(), (), (3,), (0,)]
    assert state["f"].item() == 1.5


def saved(thing: object) -> bytes:
    file = io.BytesIO()
    torch.save(thing, file)
    return file.getvalue()


def test_a_tensor_has_a_storage_of_exactly_its_bytes(client: Broker) -> None:
    with client.attach("m") as pool:
        for name, tensor in state_dict(pool).items():
            assert tensor.untyped_storage().nbytes() == pool[name].nbytes
            assert (tensor.storage_offset(), tensor._is_view()) == (0, False)
        del tensor


def test_names_that_are_tied_share_a_storage_and_stay_tied_in_files_and_copies(client: Broker) -> None:
    layout = Layout.pack(
        [
            ("embed", "F32", (8, 4)),
            ("norm", "F32", (4,)),
            ("head", "F32", (8, 4)),
            ("no", "F32", (0,)),
            ("none", "F32", (0,)),
        ],
        tied={"head": "embed", "none": "no"},
    )
    publish(client, "tied", layout)
    with client.attach("tied") as pool:
        state = state_dict(pool)
        for each in (state, copy.deepcopy(state), torch.load(io.BytesIO(saved(state)))):
            assert list(each) == ["embed", "norm", "head", "no", "none"]
            assert each["head"] is not each["embed"]
            assert each["head"].is_set_to(each["embed"])
            assert each["norm"].data_ptr() != each["embed"].data_ptr() == each["head"].data_ptr()
        assert raw(state["head"]) == content("head", 128)
        del state


def test_saving_a_tensor_or_all_of_them_writes_their_bytes_and_no_others(client: Broker) -> None:
    with client.attach("m") as pool:
        state = state_dict(pool)
        largest = max(state.values(), key=lambda tensor: tensor.nbytes)
        for tensor in state.values():
            assert len(saved(tensor)) < tensor.nbytes + 4096 < pool.nbytes
        read = torch.load(io.BytesIO(saved(state)))
    assert {name: raw(tensor) for name, tensor in read.items()} == {name: raw(state[name]) for name in state}
    assert len(saved([largest, largest.view(-1)[1:]])) < largest.nbytes + 4096  # both are of one storage


def test_pickles_and_copies_are_torch_s_own_and_may_be_moved(client: Broker) -> None:
    with client.attach("m") as pool:
        tensor = state_dict(pool)["matrix"]
        copies = [pickle.loads(pickle.dumps(tensor)), copy.deepcopy(tensor), tensor.clone()]
        copies.append(copy.deepcopy(torch.nn.Parameter(tensor, requires_grad=False)).data)
        for each in copies:
            assert raw(each) == raw(tensor)
            assert each.untyped_storage().nbytes() == tensor.nbytes
            assert each.share_memory_().is_shared()
        assert tensor.data_ptr() == pool["matrix"].pointer
        del tensor


@pytest.mark.parametrize("strategy", ["file_descriptor", "file_system"])
@pytest.mark.parametrize(
    "move",
    [
        pytest.param(ForkingPickler.dumps, id="queue"),
        pytest.param(lambda tensor: ForkingPickler.dumps(tensor[1:]), id="view"),
        pytest.param(lambda tensor: ForkingPickler.dumps(torch.nn.Parameter(tensor, requires_grad=False)), id="weight"),
        pytest.param(lambda tensor: ForkingPickler.dumps(tensor.untyped_storage()), id="storage"),
        pytest.param(lambda tensor: tensor.share_memory_(), id="share_memory_"),
        pytest.param(lambda tensor: tensor.detach().view(torch.uint8).share_memory_(), id="share_memory_ of a view"),
    ],
)
def test_torch_cannot_move_a_tensor_out_of_the_pool(
    client: Broker, monkeypatch: pytest.MonkeyPatch, strategy: str, move: Callable[[torch.Tensor], object]
) -> None:
    monkeypatch.setattr(torch.multiprocessing, "_sharing_strategy", strategy)
    with client.attach("m") as pool:
        tensor = state_dict(pool)["matrix"]
        gc.collect()  # torch has the only reference to its storage now
        with pytest.raises(TypeError, match=r"attach by name, or send tensor.clone\(\)"):
            move(tensor)
        assert tensor.data_ptr() == pool["matrix"].pointer
        assert not tensor.is_shared()
        del tensor


def test_a_tensor_cannot_grow_over_the_next_one(client: Broker) -> None:
    with client.attach("m") as pool:
        tensor = state_dict(pool)["matrix"].detach()
        with pytest.raises(RuntimeError, match="not resizable"):
            tensor.resize_(1000, 1000)
        del tensor


def test_tensors_of_torch_fill_tensors_of_their_dtype_and_shape(client: Broker) -> None:
    with client.attach("m") as pool, client.create("copy", pool.layout) as draft:
        for name, tensor in state_dict(pool).items():
            if bridge.DTYPES.get(pool[name].dtype) != tensor.dtype:
                with pytest.raises(Invalid, match=f"is {pool[name].dtype} .*, and the Tensor .* is U8"):
                    draft[name].copy_from(tensor)
                draft[name].copy_from(pool[name])
            else:
                draft[name].copy_from(tensor)
            assert draft[name].tobytes() == TENSORS[name][2]
        del tensor


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(torch.arange(8).to(torch.bfloat16).view(2, 4).t(), id="transposed"),
        pytest.param(torch.arange(8).to(torch.bfloat16).repeat_interleave(2)[::2].view(2, 4).t(), id="with gaps"),
        pytest.param(torch.nn.Parameter(torch.arange(8).to(torch.bfloat16).view(2, 4).t()), id="parameter"),
        pytest.param((1j * torch.arange(8).to(torch.complex64)).conj().imag.view(2, 4).t(), id="negated lazily"),
    ],
)
def test_a_tensor_of_torch_may_have_any_strides(client: Broker, source: torch.Tensor) -> None:
    dtype = "BF16" if source.dtype == torch.bfloat16 else "F32"
    with client.create("strides", Layout.pack([("a", dtype, (4, 2))])) as draft:
        draft["a"].copy_from(source)
        assert draft["a"].tobytes() == raw(source.detach().resolve_neg())


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        (torch.zeros(4, 2, dtype=torch.float16), r"is BF16 \(4, 2\), and the Tensor .* is F16 \(4, 2\)"),
        (torch.zeros(2, 4, dtype=torch.bfloat16), r"is BF16 \(4, 2\), and the Tensor .* is BF16 \(2, 4\)"),
        (torch.zeros(4, 2, dtype=torch.complex128), r"Tensor .* is torch.complex128 \(4, 2\)"),
        (
            torch.zeros(4, 2, dtype=torch.bfloat16, device="meta"),
            "this Tensor: it is on meta; pass an array in host memory, or in that of a device of this broker",
        ),
        (torch.zeros(4, 2, dtype=torch.bfloat16).to_sparse(), "filled from this Tensor: .*sparse"),
    ],
)
def test_a_tensor_of_torch_that_does_not_fit_is_refused(client: Broker, source: torch.Tensor, complaint: str) -> None:
    with client.create("refused", Layout.pack([("a", "BF16", (4, 2))])) as draft:
        with pytest.raises(Invalid, match=f"(?i){complaint}"):
            draft["a"].copy_from(source)
        assert not any(draft["a"].tobytes())


@pytest.mark.slow
def test_without_torch_the_import_says_which_extra_to_install() -> None:
    script = """
import sys
sys.modules["torch"] = None
for module in ("torch", "transformers", "runtime_pools", "engine_loader"):
    try:
        __import__(f"cubroker.integrations.{module}")
    except ImportError as error:
        print(error)
"""
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    modules = ("torch", "transformers", "runtime_pools", "engine_loader")
    for line, module in zip(found.stdout.splitlines(), modules, strict=True):
        assert line.startswith(f"cubroker.integrations.{module} needs PyTorch")
        assert line.endswith("pip install 'cubroker[torch]'")
