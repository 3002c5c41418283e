"""Publishing from arrays: what is stored, where, by which way, and what is left when it fails."""

from __future__ import annotations

import ctypes
import json
import re
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import nn

from cubroker.client import Broker, Draft, SharedTensor
from cubroker.client import publish as publishing
from cubroker.client.arrays import MAX_COPIES, export_capsule, versioned_struct
from cubroker.client.devices import context as context_on
from cubroker.client.loading import copy as copying
from cubroker.client.publish import Sources
from cubroker.driver import Context, DriverError, Stream
from cubroker.protocol import Layout, messages
from cubroker.protocol.errors import DeviceFailure, Exists, Invalid, NotFound, Unsupported
from tests.brokers import PATIENCE, BrokerProcess, eventually
from tests.forkserver import TORCH
from tests.unit.client.conftest import LAYOUT, begun, content, leases, publish
from tests.unit.client.scripts import run

VALUES = np.arange(24, dtype=np.float32).reshape(4, 6)


class Model(nn.Module):
    """Tied weights, a transposed parameter, buffers that are saved and not, and a type that numpy lacks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight
        self.turned = nn.Parameter(torch.arange(12.0).reshape(3, 4).t())
        self.scale = nn.Parameter(torch.arange(5, dtype=torch.bfloat16))
        self.register_buffer("steps", torch.tensor(7))
        self.register_buffer("none", torch.zeros(0, 3))
        self.register_buffer("scratch", torch.ones(3), persistent=False)


def versions(broker: Broker, name: str) -> list[tuple[int, str]]:
    return [(info.version, info.state) for info in broker.pools() if info.name == name]


def bits(array: torch.Tensor) -> bytes:
    return bytes(array.detach().contiguous().reshape(-1).view(torch.uint8).numpy()) if array.numel() else b""


@pytest.mark.slow
@pytest.mark.usefixtures("share")
def test_a_model_is_published_in_one_call_and_another_process_reads_equal_values(
    lender: BrokerProcess, client: Broker, name: str
) -> None:
    model = Model()
    assert client.publish(name, model) == 1
    expected = {key: bits(value).hex() for key, value in model.state_dict().items()}
    program = """
        import json
        from cubroker.integrations.torch import state_dict
        with Broker(directory) as broker, broker.attach(sys.argv[2]) as pool:
            state = state_dict(pool)
            found = {key: [str(each.dtype), list(each.shape), pool[key].tobytes().hex()] for key, each in state.items()}
            tied = state["head.weight"].data_ptr() == state["embed.weight"].data_ptr()
            del state
            print(json.dumps([found, tied]))
    """
    result = run(lender, program, name, measured=False, preload=TORCH)
    assert result.returncode == 0, result.stderr
    found, tied = json.loads(result.stdout)
    assert tied
    assert list(found) == list(model.state_dict())
    for key, value in model.state_dict().items():
        assert found[key] == [str(value.dtype), list(value.shape), expected[key]]
    assert "scratch" not in found


def test_what_is_published_is_the_pool_s_next_version(client: Broker, name: str) -> None:
    assert [client.publish(name, {"x": np.full(3, step)}) for step in range(3)] == [1, 2, 3]
    with client.attach(name) as pool:
        assert (pool.version, pool["x"].numpy().tolist()) == (3, [2, 2, 2])


def test_names_of_a_subclass_of_text_are_published_and_spoil_no_later_publication(client: Broker, name: str) -> None:
    named = np.array(["former", "latter"])
    assert client.publish(name, dict.fromkeys(named, VALUES)) == 1
    assert client.publish(name, dict.fromkeys(named.tolist(), VALUES)) == 2
    assert client.publish(name, {named[1]: VALUES + 1, named[0]: VALUES}, base=name) == 3
    with client.attach(name) as pool:
        assert list(pool) == ["former", "latter"]
        assert pool["latter"].numpy().tolist() == (VALUES + 1).tolist()
    with client.create(name, [(named[0], "F32", (2,))]) as draft:
        assert [type(each) for each in draft] == [str]
        assert draft.seal() == 4


class Exports:
    """An array of a library that has DLPack and nothing else."""

    def __init__(self, capsule: Callable[..., Any], device: tuple[int, int] = (1, 0)) -> None:
        self._capsule = capsule
        self._device = device

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device

    def __dlpack__(self, **asked: object) -> object:
        return self._capsule(**asked)


class Former(Exports):
    """One that knows no DLPack 1.0."""

    def __dlpack__(self, *, stream: None = None) -> object:  # type: ignore[override]
        return self._capsule()


def exported(tensor: torch.Tensor) -> Exports:
    return Exports(lambda max_version: tensor.__dlpack__(max_version=max_version))


def altered(change: Callable[[Any], None], shape: tuple[int, ...] = (4, 6)) -> Exports:
    """An array whose capsule, of DLPack 1.0, was changed."""

    def capsule(max_version: tuple[int, int]) -> object:
        made = np.zeros(shape, np.float32).__dlpack__(max_version=max_version)
        change(versioned_struct(made))
        return made

    return Exports(capsule)


def of_version_2(struct: Any) -> None:
    struct.major = 2


def on_a_gpu(struct: Any) -> None:
    struct.tensor.device.type = 2


def without_memory(struct: Any) -> None:
    struct.tensor.data = None


@pytest.mark.parametrize(
    ("array", "dtype", "shape", "expected"),
    [
        pytest.param(VALUES, "F32", (4, 6), VALUES, id="numpy"),
        pytest.param(VALUES.T, "F32", (6, 4), VALUES.T, id="numpy, transposed"),
        pytest.param(VALUES[::-1, ::2], "F32", (4, 3), VALUES[::-1, ::2], id="numpy, backwards with gaps"),
        pytest.param(np.float64(1.5), "F64", (), np.float64(1.5), id="a scalar"),
        pytest.param(
            VALUES.astype(ml_dtypes.bfloat16), "BF16", (4, 6), VALUES.astype(ml_dtypes.bfloat16), id="ml_dtypes"
        ),
        pytest.param(memoryview(VALUES), "F32", (4, 6), VALUES, id="a buffer"),
        pytest.param(torch.from_numpy(VALUES).t(), "F32", (6, 4), VALUES.T, id="torch, transposed"),
        pytest.param(
            torch.from_numpy(VALUES).expand(2, 4, 6), "F32", (2, 4, 6), np.stack([VALUES] * 2), id="torch, expanded"
        ),
        pytest.param(torch.from_numpy(VALUES).requires_grad_(), "F32", (4, 6), VALUES, id="torch, with a gradient"),
        pytest.param(exported(torch.from_numpy(VALUES)), "F32", (4, 6), VALUES, id="DLPack"),
        pytest.param(exported(torch.from_numpy(VALUES).t()), "F32", (6, 4), VALUES.T, id="DLPack, transposed"),
        pytest.param(
            Former(lambda: torch.from_numpy(VALUES).__dlpack__()), "F32", (4, 6), VALUES, id="DLPack before 1.0"
        ),
        pytest.param(
            exported(torch.from_numpy(VALUES).bfloat16()),
            "BF16",
            (4, 6),
            VALUES.astype(ml_dtypes.bfloat16),
            id="DLPack, bf16",
        ),
        pytest.param(exported(torch.tensor(5)), "I64", (), np.int64(5), id="DLPack, a scalar"),
        pytest.param(
            altered(without_memory, (0, 3)), "F32", (0, 3), np.zeros((0, 3), np.float32), id="DLPack, no elements"
        ),
    ],
)
def test_an_array_of_any_library_and_strides_is_published(
    client: Broker, name: str, array: object, dtype: str, shape: tuple[int, ...], expected: Any
) -> None:
    client.publish(name, {"x": array})
    with client.attach(name) as pool:
        assert (pool["x"].dtype, pool["x"].shape) == (dtype, shape)
        assert pool["x"].tobytes() == expected.tobytes()


def test_pairs_of_four_bits_are_published_as_the_elements_that_they_are(client: Broker, name: str) -> None:
    pairs = torch.arange(12, dtype=torch.uint8).reshape(3, 4).view(torch.float4_e2m1fn_x2)
    tensors = {"torch": pairs}
    client.publish(name, tensors)
    with client.attach(name) as pool:
        assert (pool["torch"].dtype, pool["torch"].shape) == ("F4", (3, 8))
        assert pool["torch"].tobytes() == bytes(range(12))
        again = Exports(lambda max_version: pool["torch"].__dlpack__(max_version=max_version))
        assert client.publish(name, {"dlpack": again}) == 2
        del again
    with client.attach(name) as pool:
        assert (pool["dlpack"].dtype, pool["dlpack"].shape, pool["dlpack"].tobytes()) == (
            "F4",
            (3, 8),
            bytes(range(12)),
        )


def test_names_of_one_tensor_are_stored_once_and_others_apart(client: Broker, name: str) -> None:
    base, square = torch.arange(24.0), torch.ones(8, 8)
    arrays = {
        "first": base,
        "second": base.view(24),
        "head": base[:12],
        "shape": base.view(4, 6),
        "type": base.view(torch.int32),
        "square": square,
        "turned": square.t(),
        "conjugate": torch.zeros(3, dtype=torch.complex64),
        "empty": base[:0],
        "also empty": base[:0],
        "numpy": base.numpy(),
    }
    client.publish(name, arrays)
    with client.attach(name) as pool:
        places: dict[int, list[str]] = {}
        for spec in pool.layout.tensors:
            if spec.nbytes:
                places.setdefault(spec.offset, []).append(spec.name)
        assert [names for names in places.values() if len(names) > 1] == [["first", "second", "numpy"]]
        for key in arrays.keys() - {"numpy"}:
            assert pool[key].tobytes() == bits(torch.as_tensor(arrays[key]))


def test_an_older_broker_gets_each_name_with_bytes_of_its_own(
    client: Broker, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "TIES", 99)
    client.publish(name, Model())
    with client.attach(name) as pool:
        assert pool["head.weight"].pointer != pool["embed.weight"].pointer
        assert pool["head.weight"].tobytes() == pool["embed.weight"].tobytes()


# -- where it goes -------------------------------------------------------------------------------------


def test_every_device_gets_a_copy(client: Broker, name: str) -> None:
    client.publish(name, {"x": VALUES, "y": torch.ones(3)}, devices=[1, 0])
    for device in (0, 1):
        with client.attach(name, device=device) as pool:
            assert pool["x"].tobytes() == VALUES.tobytes()
            assert pool["y"].tobytes() == np.ones(3, np.float32).tobytes()


def test_a_plan_places_each_tensor_and_ties_only_those_on_one_device(client: Broker, name: str) -> None:
    model = Model()
    client.publish(name, model, plan={"head.*": 1, "*": 0})
    with client.attach(name) as pool:
        assert {key: pool[key].device.index for key in pool if key.endswith("weight")} == {
            "embed.weight": 0,
            "head.weight": 1,
        }
        assert all(pool[key].tobytes() == bits(value) for key, value in model.state_dict().items())
    with pytest.raises(Invalid, match="no device for tensor 'turned'"):
        client.publish(name, model, plan={"*.weight": 0})


def test_a_plan_that_names_one_device_in_two_ways_stores_a_tensor_by_two_names_once(client: Broker, name: str) -> None:
    tied = torch.ones(1 << 18)
    first, second = client.driver.devices
    plan = {"a": 0, "b": "cuda:0", "c": torch.device("cuda", 0), "d": first.uuid, "e": second.uuid[:13], "f": 1}
    client.publish(name, dict.fromkeys(plan, tied), plan=plan)
    with client.attach(name) as pool:
        assert [pool[key].device.index for key in plan] == [0, 0, 0, 0, 1, 1]
        assert pool.layout.allocations == (tied.nbytes, tied.nbytes)


def test_a_pattern_comes_never_too_late_for_the_same_device_by_another_name(client: Broker, name: str) -> None:
    plan = {"*": 0, "b*": "cuda:0"}
    assert client.publish(name, {"a": np.ones(3), "b": np.ones(3)}, plan=plan) == 1
    with pytest.raises(Invalid, match=r"the plan's 'b\*' comes after"):
        client.publish(name, {"a": np.ones(3), "b": np.ones(3)}, plan=plan | {"b*": "cuda:1"})


@pytest.mark.parametrize("devices", [(0,), (1,), (1, 0)])
@pytest.mark.usefixtures("share")
def test_a_pool_is_published_again_on_its_own_device_without_the_host(
    client: Broker, name: str, devices: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(client, f"{name}-old", devices=devices)

    def refuse(*_: object) -> None:
        pytest.fail("bytes went through host memory")

    with client.attach(f"{name}-old", device=devices[0]) as pool:
        for method in ("copy_in", "copy_out"):
            monkeypatch.setattr(Stream, method, refuse)
        assert client.publish(name, pool) == 1
        monkeypatch.undo()
    with client.attach(name) as pool:
        assert pool.device.index == devices[0]
        assert {key: tensor.tobytes() for key, tensor in pool.items()} == {
            spec.name: content(spec.name, spec.nbytes) for spec in LAYOUT.tensors
        }


@pytest.mark.usefixtures("share")
def test_a_tensor_of_one_device_is_published_on_another_and_on_both(client: Broker, name: str) -> None:
    publish(client, f"{name}-old", devices=(1,))
    for devices in ((0,), (0, 1), (1, 0)):
        with client.attach(f"{name}-old") as pool:
            client.publish(name, pool, devices=devices)
        for device in devices:
            with client.attach(name, device=device) as pool:
                assert all(tensor.tobytes() == content(key, tensor.nbytes) for key, tensor in pool.items())


def test_tensors_of_several_devices_stay_on_them(client: Broker, name: str) -> None:
    old = f"{name}-old"
    publish_sharded(client, old)
    with client.attach(old) as pool:
        client.publish(name, {**pool, "host": VALUES})
    with client.attach(name) as pool:
        assert {key: tensor.device.index for key, tensor in pool.items()} == {"a": 1, "b": 0, "host": 1}
        assert (pool["a"].tobytes(), pool["b"].tobytes()) == (content("a", 9), content("b", 9))


def publish_sharded(broker: Broker, name: str) -> None:
    with broker.create(name, {"a": ("U8", (9,)), "b": (np.uint8, (9,))}, plan={"a": 1, "b": 0}) as draft:
        for tensor in draft.values():
            tensor.copy_from_bytes(content(tensor.name, 9))
        draft.seal()


def test_a_tensor_is_filled_from_another_of_its_device_without_the_host(
    client: Broker, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(client, name)
    with client.attach(name) as pool, client.create(name, LAYOUT) as draft:
        monkeypatch.setattr(Context, "read", lambda *_: pytest.fail("bytes went through host memory"))
        for key, tensor in pool.items():
            draft[key].copy_from(tensor)
        monkeypatch.undo()
        assert draft["weight"].tobytes() == content("weight", 128)
    with client.attach(name) as pool, client.create(name, LAYOUT, devices=[1]) as draft:
        draft["weight"].copy_from(pool["weight"])
        assert draft["weight"].tobytes() == content("weight", 128)


# -- arrays on a GPU, which a host device stands for ---------------------------------------------------


class OnGpu:
    """An array of a library that works on GPUs, in memory of a host device; it notes what it is asked for."""

    def __init__(self, context: Context, values: np.ndarray[Any, Any], strides: tuple[int, ...] | None = None) -> None:
        self.context = context
        self.values = values
        self.streams: list[object] = []
        self.pointer = context.allocate(max(values.nbytes, 1))
        context.write(self.pointer, np.ascontiguousarray(values))
        self.strides = strides

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self.context.device.index

    def __dlpack__(self, *, stream: object, max_version: tuple[int, int] | None = None) -> object:
        self.streams.append(stream)
        view = np.ndarray(self.values.shape, "<u4", (ctypes.c_byte * self.values.nbytes).from_address(self.pointer))
        if self.strides:
            view = np.lib.stride_tricks.as_strided(view, view.shape[::-1], self.strides)
        return export_capsule(
            view, "F32", (2, self.context.device.index), readonly=False, versioned=max_version is not None
        )


class Contiguous(OnGpu):
    """One that torch's method makes contiguous."""

    def contiguous(self) -> OnGpu:
        return OnGpu(self.context, np.ascontiguousarray(self.values.T))


class Copies(OnGpu):
    """One that is copied as cupy does it."""

    def copy(self, order: str) -> OnGpu:
        assert order == "C"
        return OnGpu(self.context, np.ascontiguousarray(self.values.T))


@pytest.fixture
def gpus(client: Broker, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Context]]:
    """The contexts of the host devices, which stand for GPUs; their memory is freed."""
    monkeypatch.setattr("cubroker.client.draft._context", context_on)
    contexts = [context_on(client.driver, index) for index in (0, 1)]
    made: list[tuple[Context, int]] = []
    allocate = Context.allocate

    def noted(self: Context, nbytes: int) -> int:
        made.append((self, allocate(self, nbytes)))
        return made[-1][1]

    monkeypatch.setattr(Context, "allocate", noted)
    yield contexts
    for context, pointer in made:
        context.free(pointer)


def test_an_array_on_a_gpu_stays_there_after_the_work_that_makes_it(
    client: Broker, name: str, gpus: list[Context], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, int]] = []
    synchronize, copy_batch = Context.synchronize, Context.copy_batch
    monkeypatch.setattr(
        Context, "synchronize", lambda self: (calls.append(("wait", self.device.index)), synchronize(self))[1]
    )
    monkeypatch.setattr(
        Context,
        "copy_batch",
        lambda self, *args: (calls.append(("copy", self.device.index)), copy_batch(self, *args))[1],
    )
    arrays = {"a": OnGpu(gpus[1], VALUES), "b": OnGpu(gpus[1], VALUES + 1)}
    client.publish(name, arrays)
    assert calls[:2] == [("wait", 1), ("copy", 1)]
    assert [array.streams for array in arrays.values()] == [[gpus[1].copies().handle]] * 2
    with client.attach(name) as pool:
        assert pool.device.index == 1
        assert (pool["a"].tobytes(), pool["b"].tobytes()) == (VALUES.tobytes(), (VALUES + 1).tobytes())


def test_a_tensor_is_filled_from_an_array_on_its_own_gpu(
    client: Broker, name: str, gpus: list[Context], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SharedTensor, "_own_context", lambda self, index: gpus[index])
    with client.create(name, {"x": ("F32", (4, 6)), "none": ("F32", (0, 6))}, devices=[1]) as draft:
        draft["x"].copy_from(OnGpu(gpus[1], VALUES))
        draft["none"].copy_from(OnGpu(gpus[1], VALUES[:0]))
        assert draft["x"].tobytes() == VALUES.tobytes()
        with pytest.raises(Invalid, match=r"is F32 \(4, 6\), and the Contiguous .* is F32 \(6, 4\)"):
            draft["x"].copy_from(Contiguous(gpus[1], VALUES, (4, 24)))
        monkeypatch.setattr(Stream, "copy", refused)
        with pytest.raises(DeviceFailure, match=r"filling tensor 'x': .*ILLEGAL_ADDRESS"):
            draft["x"].copy_from(OnGpu(gpus[1], VALUES))


def refused(self: Stream | Context, *_: object) -> None:
    raise DriverError("cuMemcpyDtoDAsync", 700, "CUDA_ERROR_ILLEGAL_ADDRESS")


@pytest.mark.parametrize("kind", [Contiguous, Copies])
@pytest.mark.parametrize("most", [MAX_COPIES, 1])
def test_an_array_with_gaps_is_made_contiguous_by_its_own_library(
    client: Broker, name: str, gpus: list[Context], monkeypatch: pytest.MonkeyPatch, kind: type[OnGpu], most: int
) -> None:
    monkeypatch.setattr("cubroker.client.arrays.MAX_COPIES", most)
    arrays = {key: kind(gpus[0], VALUES + step, (4, 24)) for step, key in enumerate("abc")}
    client.publish(name, arrays, devices=[0, 1])
    for device in (0, 1):
        with client.attach(name, device=device) as pool:
            for step, key in enumerate("abc"):
                assert (pool[key].shape, pool[key].tobytes()) == ((6, 4), (VALUES + step).T.tobytes())


def test_an_array_that_its_library_cannot_make_contiguous_is_an_error_that_leaves_nothing(
    client: Broker, name: str, gpus: list[Context]
) -> None:
    with pytest.raises(AttributeError, match="copy"):
        client.publish(name, {"a": OnGpu(gpus[0], VALUES, (4, 24))})
    assert versions(client, name) == []


@pytest.mark.parametrize("access", [True, False])
def test_an_array_on_another_gpu_is_copied_directly_where_that_is_possible(
    client: Broker, name: str, gpus: list[Context], monkeypatch: pytest.MonkeyPatch, access: bool
) -> None:
    copied: list[int] = []
    copy = Stream.copy
    monkeypatch.setattr(Stream, "copy", lambda self, *args: (copied.append(args[2]), copy(self, *args))[1])
    monkeypatch.setattr(client.driver.peers, "can_access", lambda device, peer: access)
    client.publish(name, {"a": OnGpu(gpus[1], VALUES)}, devices=[0])
    assert copied == ([VALUES.nbytes] if access else [])
    with client.attach(name) as pool:
        assert (pool.device.index, pool["a"].tobytes()) == (0, VALUES.tobytes())


def test_a_device_that_can_have_no_more_peers_copies_all_the_same(
    client: Broker, name: str, gpus: list[Context], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(context: Context, peer: int) -> None:
        raise DriverError("cuCtxEnablePeerAccess", 711, "CUDA_ERROR_TOO_MANY_PEERS")

    monkeypatch.setattr(client.driver.peers, "enable", refuse)
    client.publish(name, {"a": OnGpu(gpus[1], VALUES)}, devices=[0])
    with client.attach(name) as pool:
        assert pool["a"].tobytes() == VALUES.tobytes()


class GpuTensor(torch.Tensor):
    """A tensor of torch that says that it is on a GPU."""

    on: Context

    is_cuda = True  # type: ignore[assignment]

    def get_device(self) -> int:  # type: ignore[override]
        return self.on.device.index

    def detach(self) -> GpuTensor:
        return self

    def resolve_conj(self) -> GpuTensor:
        return self

    def resolve_neg(self) -> GpuTensor:
        return self

    def contiguous(self) -> GpuTensor:  # type: ignore[override]
        return self if self.is_contiguous() else gpu_tensor(self.on, self.as_subclass(torch.Tensor).numpy().copy("C"))


def gpu_tensor(context: Context, values: np.ndarray[Any, Any]) -> GpuTensor:
    pointer = context.allocate(values.nbytes)
    context.write(pointer, values)
    buffer = (ctypes.c_byte * values.nbytes).from_address(pointer)
    tensor = torch.frombuffer(buffer, dtype=torch.float32).view(values.shape).as_subclass(GpuTensor)
    tensor.on = context
    return tensor


def test_a_tensor_of_torch_on_a_gpu_is_copied_there(client: Broker, name: str, gpus: list[Context]) -> None:
    whole = gpu_tensor(gpus[1], VALUES)
    turned = whole.as_subclass(torch.Tensor).t().as_subclass(GpuTensor)
    turned.on = gpus[1]
    client.publish(name, {"whole": whole, "tied": whole, "turned": turned})
    with client.attach(name) as pool:
        assert pool.device.index == 1
        assert pool["tied"].pointer == pool["whole"].pointer
        assert pool["whole"].tobytes() == VALUES.tobytes()
        assert pool["turned"].tobytes() == VALUES.T.tobytes()


def test_a_host_device_takes_no_array_of_a_gpu(client: Broker, name: str) -> None:
    array = Exports(lambda **_: pytest.fail("it was asked for"), (2, 0))
    with pytest.raises(Invalid, match=r"cannot publish 'x': .*it is on GPU 0, and the broker's devices are emulated"):
        client.publish(name, {"x": array})
    with client.create(name, LAYOUT) as draft, pytest.raises(Invalid, match=r"'weight' .* array .* is on GPU 0; copy"):
        draft["weight"].copy_from(array)


# -- what is refused -----------------------------------------------------------------------------------


class Wrapper(torch.Tensor):
    """A tensor that is made of others."""

    @staticmethod
    def __new__(cls) -> Wrapper:
        made: Wrapper = torch.Tensor._make_wrapper_subclass(cls, (3,))  # type: ignore[attr-defined]
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError


def strange(code: int, width: int, lanes: int) -> Exports:
    """An array whose DLPack type pools do not have."""

    def capsule(max_version: tuple[int, int]) -> object:
        made = np.zeros(8, np.uint8).__dlpack__(max_version=max_version)
        dtype = versioned_struct(made).tensor.dtype
        dtype.code, dtype.bits, dtype.lanes = code, width, lanes
        return made

    return Exports(capsule)


class Undevised:
    """An object that has half of DLPack."""

    def __dlpack__(self, **_: object) -> object:
        return VALUES.__dlpack__()


@pytest.mark.parametrize(
    ("array", "why"),
    [
        (3, "this int: it has no dtype"),
        (Undevised(), "this Undevised: it has no dtype"),
        (Exports(lambda **_: None), "this Exports: .*PyCapsule"),
        (altered(of_version_2), "this Exports: its capsule is of version 2 of DLPack, and only version 1 can be read"),
        (altered(on_a_gpu), r"its capsule is on a device of type 2, and its __dlpack_device__\(\) is another"),
        (altered(without_memory), "this Exports: its capsule has no memory"),
        ({}, "this dict: it has no dtype"),
        (None, "this NoneType: it has no dtype"),
        ("text", "this str: it has no dtype"),
        (
            np.ma.masked_equal(np.arange(3), 1),
            r"this MaskedArray: it is masked, .* its \.data and its \.filled\(\) are",
        ),
        (torch.zeros(3).to_sparse(), r"this Tensor: it is sparse \(torch.sparse_coo\)"),
        (torch.zeros(3, device="meta"), "this Tensor: it is on meta"),
        (Wrapper(), "this Wrapper: .*(memory of its own|storage)"),
        (Exports(lambda **_: None, (7, 0)), "this Exports: DLPack says that it is on a device of type 7"),
        (strange(2, 128, 1), "this Exports: its elements are 1 of 128 bits of DLPack's type 2"),
        (strange(2, 32, 4), "this Exports: its elements are 4 of 32 bits"),
        (strange(15, 6, 1), "this Exports: its elements are 1 of 6 bits"),
    ],
)
def test_what_is_no_array_of_memory_is_refused_by_its_name(client: Broker, name: str, array: object, why: str) -> None:
    with pytest.raises(Invalid, match=f"cannot publish 'layer.x': .* {why}"):
        client.publish(name, {"fine": VALUES, "layer.x": array})
    assert versions(client, name) == []


@pytest.mark.slow
def test_a_nested_tensor_is_refused_by_its_name(client: Broker, name: str) -> None:
    # Made here and not among the cases above: torch imports for seconds when it makes one.
    nested = torch.nested.nested_tensor([torch.zeros(2)], layout=torch.jagged)
    with pytest.raises(Invalid, match=r"cannot publish 'x': .* this NestedTensor: it is nested"):
        client.publish(name, {"fine": VALUES, "x": nested})
    assert versions(client, name) == []


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_a_quantized_tensor_is_refused_by_its_name(client: Broker, name: str) -> None:
    quantized = torch.quantize_per_tensor(torch.zeros(3), 1.0, 0, torch.qint8)
    with pytest.raises(Invalid, match=r"cannot publish 'x': .* it is quantized"):
        client.publish(name, {"x": quantized})


@pytest.mark.parametrize("array", [np.zeros(2, complex), np.array([None]), torch.zeros(2).cdouble()])
def test_a_type_that_pools_lack_is_refused_by_the_tensor_s_name(client: Broker, name: str, array: object) -> None:
    with pytest.raises(Invalid, match=r"tensor 'x': unknown dtype '(torch\.)?(complex128|object)'; known are"):
        client.publish(name, {"x": array})


@pytest.mark.parametrize("array", [np.zeros(2, ">f4"), memoryview(np.zeros(2, ">i8"))], ids=["numpy", "buffer"])
def test_a_big_endian_array_is_refused_with_how_to_convert_it(client: Broker, name: str, array: object) -> None:
    with pytest.raises(Invalid, match=r"tensor 'x': the dtype '>..' is big-endian, .* with a\.astype\("):
        client.publish(name, {"x": array})


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ({}, "nothing to publish: the mapping, or the state_dict, has no tensor"),
        (nn.ReLU(), "nothing to publish"),
        (VALUES, "this ndarray cannot be published: pass a mapping of names to arrays"),
        ([("x", VALUES)], "this list cannot be published"),
        ({1: VALUES}, "the name of a tensor has to be a str, and 1 is none"),
        ({"": VALUES}, "a tensor name of 0 characters"),
    ],
)
def test_what_has_no_tensors_by_name_is_refused(client: Broker, name: str, source: object, why: str) -> None:
    with pytest.raises(Invalid, match=why):
        client.publish(name, source)
    assert versions(client, name) == []


def test_terms_are_those_of_a_draft_and_of_its_seal(client: Broker, name: str) -> None:
    assert client.publish(name, {"x": VALUES}, share="ipc", mode=0o640, digest=True) == 1
    (info,) = [info for info in client.pools() if info.name == name]
    assert (info.share, info.mode) == ("ipc", 0o640)
    with client.attach(name) as pool:
        pool.check()
    with pytest.raises(Unsupported):
        client.publish(name, {"x": VALUES}, share="ipc", durable=True)
    with pytest.raises(NotFound, match="sees no device 9"):
        client.publish(name, {"x": VALUES}, devices=[9])
    with pytest.raises(Invalid, match="pool"):
        client.publish("no/good name\n", {"x": VALUES})


# -- what is left --------------------------------------------------------------------------------------


def test_views_of_a_draft_that_is_filled_by_hand_keep_it_from_being_sealed_by_their_tensor_s_name(
    client: Broker, name: str
) -> None:
    with client.create(name, {"x": (torch.float32, (4, 6))}) as draft:
        view = torch.from_dlpack(draft["x"])
        view.copy_(torch.from_numpy(VALUES))
        with pytest.raises(Invalid, match="still in use: x; drop the arrays"):
            draft.seal()
        del view
        draft.seal()


def test_a_publication_that_waits_holds_no_pool(client: Broker, name: str) -> None:
    publish(client, f"{name}-old", share="vmm")
    with client.attach(f"{name}-old") as pool, client.create(name, LAYOUT) as draft:
        waiting = begun(lambda: client.publish(name, pool, wait=PATIENCE))
        eventually(lambda: name in [waiter.pool for waiter in client.look().waiters], "the wait for the other writer")
        pool.sleep()
        pool.wake()
        draft.seal()
        assert waiting.result(PATIENCE) == 2
        with client.attach(name) as copy:
            assert {key: copy[key].tobytes() for key in copy} == {key: pool[key].tobytes() for key in pool}


def test_a_publication_that_is_refused_holds_no_pool(client: Broker, name: str) -> None:
    publish(client, f"{name}-old", share="vmm")
    with client.attach(f"{name}-old") as pool, client.create(name, LAYOUT):
        try:
            client.publish(name, pool)
        except Exists:
            pool.sleep()
        assert pool.asleep


def test_a_copy_that_fails_leaves_nothing(client: Broker, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(client, f"{name}-old")
    with client.attach(f"{name}-old") as pool:
        monkeypatch.setattr(Context, "copy_batch", refused)
        try:
            client.publish(name, pool)
        except DeviceFailure as error:
            assert re.search(f"copying tensors into a draft of {name!r}: .*ILLEGAL_ADDRESS", str(error))  # noqa: PT017
            if pool.share != "ipc":
                pool.sleep()  # while the traceback lives
                pool.wake()
        else:
            pytest.fail("the copy was not refused")
        monkeypatch.undo()
        assert versions(client, name) == []
        assert leases(client, name) == 0
        if pool.share != "ipc":
            pool.sleep()  # nothing holds its tensors
    assert client.publish(name, {"x": VALUES}) == 1


def test_a_pool_that_is_closed_meanwhile_stays_until_it_is_copied(
    client: Broker, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(client, f"{name}-old")
    pool = client.attach(f"{name}-old")
    fill = publishing.Sources.fill

    def closed_first(self: publishing.Sources, draft: Draft) -> None:
        pool.close()
        assert leases(client, f"{name}-old") == 1
        fill(self, draft)

    monkeypatch.setattr(publishing.Sources, "fill", closed_first)
    client.publish(name, pool)
    with client.attach(name) as made:
        assert made["weight"].tobytes() == content("weight", 128)
    eventually(lambda: not leases(client, f"{name}-old"), "the end of its lease")


@pytest.mark.parametrize(("of", "work"), [(Sources, "prepare"), (copying.FileCopy, "_copy_chunks")])
def test_an_interrupt_discards_what_was_begun(
    client: Broker, name: str, monkeypatch: pytest.MonkeyPatch, of: Any, work: str
) -> None:
    """Once while the broker allocates, and once while the copies run."""
    begun = getattr(of, work)

    def interrupted(*args: Any) -> Any:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        return begun(*args)

    monkeypatch.setattr(of, work, interrupted)
    with pytest.raises(KeyboardInterrupt):
        client.publish(name, {"x": VALUES})
    monkeypatch.undo()
    eventually(lambda: versions(client, name) == [], "the end of what was begun")
    assert client.publish(name, {"x": VALUES}) > 0


def test_a_draft_takes_what_a_layout_is_packed_of(client: Broker, name: str) -> None:
    with client.create(name, [("x", torch.bfloat16, (3,)), ("y", "float32", ())]) as draft:
        assert draft.layout == Layout.pack([("x", "BF16", (3,)), ("y", "F32", ())])
