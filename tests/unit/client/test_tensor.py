from __future__ import annotations

import builtins
import copy
import ctypes
import pickle
import sys
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import cubroker.client
from cubroker.client import Broker, Draft, Pool
from cubroker.client.memory.mapping import DeviceMapping, LeasedMemory
from cubroker.client.tensor import SharedTensor
from cubroker.driver import Device, DriverError
from cubroker.protocol import Layout
from cubroker.protocol.errors import DeviceFailure, Invalid, OutOfMemory, Unsupported
from cubroker.protocol.layout import BITS, ELEMENTS, LIBRARY_NAMES
from tests.unit.client.conftest import LAYOUT, content, publish

EVERY = Layout.pack([(dtype, dtype, (3, 8)) for dtype in BITS])
PACKED = {"F4", "F6_E2M3", "F6_E3M2"}


def test_every_dtype_is_known_to_dlpack_and_to_numpy_or_ml_dtypes() -> None:
    assert set(ELEMENTS) == set(BITS)
    for dtype, element in ELEMENTS.items():
        known = element.typestr or hasattr(ml_dtypes, LIBRARY_NAMES.get(dtype, ""))
        assert bool(known) == (dtype not in PACKED)


def test_tensors_of_every_dtype_come_through_bit_for_bit(client: Broker, name: str) -> None:
    publish(client, name, EVERY)
    with client.attach(name) as pool:
        for dtype, tensor in pool.items():
            assert (tensor.name, tensor.dtype, tensor.shape) == (dtype, dtype, (3, 8))
            assert tensor.tobytes() == content(dtype, tensor.nbytes)
            if dtype not in PACKED:
                array = tensor.numpy()
                assert array.shape == (3, 8)
                assert array.dtype.itemsize * 8 == BITS[dtype]
                assert array.tobytes() == content(dtype, tensor.nbytes)
                assert array.ctypes.data == tensor.pointer
                del array


def test_types_that_numpy_lacks_come_from_ml_dtypes(client: Broker, name: str) -> None:
    publish(client, name, EVERY)
    with client.attach(name) as pool:
        assert pool["BF16"].numpy().dtype == ml_dtypes.bfloat16
        assert pool["F8_E4M3"].numpy().dtype == ml_dtypes.float8_e4m3fn
        assert pool["F8_E8M0"].numpy().dtype == ml_dtypes.float8_e8m0fnu


def test_packed_types_are_for_other_libraries(client: Broker, name: str) -> None:
    publish(client, name, EVERY)
    with client.attach(name) as pool, pytest.raises(Unsupported, match="packed elements; use tobytes"):
        pool["F4"].numpy()


def test_without_ml_dtypes_the_message_names_it(client: Broker, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(client, name)
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with client.attach(name) as pool:
        with pytest.raises(Unsupported, match="install ml_dtypes"):
            pool["bias"].numpy()
        assert pool["weight"].numpy().shape == (4, 8)


def test_an_ml_dtypes_that_is_broken_is_not_called_missing(
    client: Broker, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    publish(client, name)
    (tmp_path / "ml_dtypes.py").write_text("raise ImportError('built for another numpy')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "ml_dtypes")
    with client.attach(name) as pool, pytest.raises(Unsupported, match="built for another numpy"):
        pool["bias"].numpy()


def test_a_scalar_and_a_tensor_without_elements_are_tensors_too(client: Broker, name: str) -> None:
    publish(client, name)
    with client.attach(name) as pool:
        scale, none = pool["scale"].numpy(), pool["none"].numpy()
        assert (scale.shape, scale.size, none.shape, none.size) == ((), 1, (0, 3), 0)
        assert pool["none"].tobytes() == b""
        del scale, none


def test_what_was_published_cannot_be_written(client: Broker, name: str) -> None:
    publish(client, name)
    with client.attach(name) as pool:
        tensor = pool["weight"]
        assert tensor.readonly
        with pytest.raises(Invalid, match="create a new version"):
            tensor.copy_from(np.zeros((4, 8), np.float32))
        with pytest.raises(Invalid, match="create a new version"):
            tensor.copy_from_bytes(bytes(tensor.nbytes))
        array = tensor.numpy()
        with pytest.raises(ValueError, match="read-only"):
            array[:] = 0
        with pytest.raises(ValueError, match="WRITEABLE"):
            array.flags.writeable = True
        del array, tensor


@pytest.mark.parametrize("attribute", ["name", "dtype", "shape"])
def test_a_tensor_is_not_reshaped_by_its_attributes_as_an_array_is(client: Broker, name: str, attribute: str) -> None:
    publish(client, name)
    with client.attach(name) as pool, pytest.raises(AttributeError, match=attribute):
        setattr(next(iter(pool.values())), attribute, (1 << 30,))  # an array of this shape would reach beyond the pool


def test_a_draft_is_written_through_arrays_and_buffers(client: Broker, name: str) -> None:
    values = np.arange(32, dtype=np.float32).reshape(4, 8)
    with client.create(name, Layout.pack([("a", "F32", (4, 8)), ("b", "F32", (4, 8))])) as draft:
        assert not draft["a"].readonly
        draft["a"].numpy()[:] = values
        draft["b"].copy_from(values)
        draft.seal()
    with client.attach(name) as pool:
        assert pool["a"].tobytes() == pool["b"].tobytes() == values.tobytes()


class Offers:
    """An array of some library that numpy and torch know by one protocol alone."""

    def __init__(self, array: np.ndarray[Any, Any], protocol: str) -> None:
        self._array = array
        if protocol == "dlpack":
            self.__dlpack__ = array.__dlpack__
        elif protocol == "interface":
            self.__array_interface__ = array.__array_interface__

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


class Converts:
    """An array that numpy may ask for its elements."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self._array = array

    def __array__(self, dtype: object = None, copy: object = None) -> np.ndarray[Any, Any]:
        return self._array


VALUES = np.arange(32, dtype=np.float32).reshape(4, 8)


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(VALUES, id="numpy"),
        pytest.param(np.asfortranarray(VALUES), id="columns first"),
        pytest.param(np.repeat(VALUES, 3, axis=1)[:, ::3], id="with gaps"),
        pytest.param(VALUES[::-1, ::-1].copy()[::-1, ::-1], id="backwards"),
        pytest.param(memoryview(VALUES), id="memoryview"),
        pytest.param((ctypes.c_float * 8 * 4)(*map(tuple, VALUES.tolist())), id="ctypes"),
        pytest.param(Converts(VALUES), id="__array__"),
        pytest.param(Offers(VALUES, "interface"), id="__array_interface__"),
        pytest.param(Offers(VALUES, "dlpack"), id="__dlpack__"),
    ],
)
def test_an_array_of_the_same_dtype_and_shape_fills_a_tensor(client: Broker, name: str, source: Any) -> None:
    with client.create(name, Layout.pack([("a", "F32", (4, 8)), ("b", "F32", (4, 8))])) as draft:
        draft["a"].copy_from(source)
        draft["b"].copy_from(draft["a"])
        assert draft["a"].tobytes() == draft["b"].tobytes() == VALUES.tobytes()


def test_an_array_of_every_dtype_fills_a_tensor_of_it(client: Broker, name: str) -> None:
    publish(client, name, EVERY)
    with client.attach(name) as pool, client.create(name, EVERY) as draft:
        for dtype, tensor in pool.items():
            draft[dtype].copy_from(tensor if dtype in PACKED else tensor.numpy())
            assert draft[dtype].tobytes() == tensor.tobytes()
            with pytest.raises(Invalid, match=r"is \w+ \(3, 8\), and the ndarray .* is \w+ \(8, 3\)"):
                draft[dtype].copy_from(np.zeros((8, 3), np.float32))


def test_a_scalar_fills_a_scalar(client: Broker, name: str) -> None:
    with client.create(name, Layout.pack([("a", "F32", ()), ("none", "I64", (0, 3))])) as draft:
        draft["a"].copy_from(np.float32(1.5))
        draft["none"].copy_from(np.zeros((0, 3), np.int64))
        assert draft["a"].tobytes() == np.float32(1.5).tobytes()
        with pytest.raises(Invalid, match=r"is F32 \(\), and the ndarray .* is F32 \(1,\)"):
            draft["a"].copy_from(np.zeros(1, np.float32))


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        (np.zeros((4, 8), np.int32), r"is F32 \(4, 8\), and the ndarray .* is I32 \(4, 8\); convert or reshape"),
        (np.zeros((8, 4), np.float32), r"is F32 \(4, 8\), and the ndarray .* is F32 \(8, 4\)"),
        (
            np.zeros((4, 8), ">f4"),
            r'ndarray .* is >f4 \(4, 8\), big-endian; .*with a.astype\(a.dtype.newbyteorder\("="\)\)$',
        ),
        (np.zeros((4, 8), ml_dtypes.float8_e4m3b11fnuz), r"ndarray .* is float8_e4m3b11fnuz \(4, 8\)"),
        (bytes(128), r"bytes to fill it from is U8 \(128,\); .* copy_from_bytes"),
        (array("f", bytes(128)), r"array to fill it from is F32 \(32,\)"),
        ([[0.0] * 8] * 4, "filled from this list: it has no dtype; pass an array"),
        ("text", "filled from this str: it has no dtype"),
        (Offers(np.zeros(4, ">f4"), "dlpack"), "filled from this Offers: .*pass an array in host memory"),
    ],
)
def test_a_source_of_another_dtype_or_shape_is_refused(client: Broker, name: str, source: Any, complaint: str) -> None:
    with client.create(name, Layout.pack([("a", "F32", (4, 8))])) as draft:
        with pytest.raises(Invalid, match=complaint):
            draft["a"].copy_from(source)
        assert not any(draft["a"].tobytes())


def test_raw_bytes_of_any_type_are_stored_where_that_is_said(client: Broker, name: str) -> None:
    with client.create(name, Layout.pack([("a", "F32", (4, 8))])) as draft:
        for raw in (content("a", 128), np.arange(16), bytearray(b"x" * 128)):
            draft["a"].copy_from_bytes(raw)
            assert draft["a"].tobytes() == bytes(raw)


@pytest.mark.parametrize(
    ("buffer", "complaint"),
    [
        (bytes(127), "takes 128 contiguous bytes; these are 127"),
        (memoryview(bytes(256))[::2], "these are 128, with gaps"),
        ("text", "cannot take bytes of a str"),
        (np.zeros(64, ml_dtypes.bfloat16), r"array.view\(numpy.uint8\)"),
    ],
)
def test_bytes_that_do_not_fit_are_refused(client: Broker, name: str, buffer: Any, complaint: str) -> None:
    with client.create(name, Layout.pack([("a", "F32", (4, 8))])) as draft, pytest.raises(Invalid, match=complaint):
        draft["a"].copy_from_bytes(buffer)


def test_numpy_takes_a_published_tensor_as_a_view_that_cannot_be_written(client: Broker, name: str) -> None:
    publish(client, name)
    with client.attach(name) as pool:
        array = np.asarray(pool["weight"])
        assert (array.dtype, array.shape) == (np.float32, (4, 8))
        assert (array.ctypes.data, array.flags.writeable) == (pool["weight"].pointer, False)
        half = np.asarray(pool["bias"])
        assert (half.dtype, half.ctypes.data) == (ml_dtypes.bfloat16, pool["bias"].pointer)
        pool.close()
        assert array.tobytes() == content("weight", 128)  # it keeps the memory
        del array, half


def test_numpy_takes_a_tensor_that_may_be_written_as_an_array_that_may(client: Broker, name: str) -> None:
    with client.create(name, Layout.pack([("a", "F32", (2,))]), writable=True) as draft:
        np.asarray(draft["a"])[:] = 1
        draft.seal()
    with client.attach(name) as pool:
        np.asarray(pool["a"])[1] = 2
        assert pool["a"].numpy().tolist() == [1, 2]


def test_numpy_is_given_another_dtype_and_copies_as_it_asks(client: Broker, name: str) -> None:
    with client.create(name, Layout.pack([("a", "F32", (2, 2))])) as draft:
        tensor = draft["a"]
        tensor.copy_from(np.array([[1, 2], [3, 4]], np.float32))
        wide = np.asarray(tensor, dtype=np.float64)
        copied = np.array(tensor)
        assert (wide.dtype, wide.tolist(), wide.flags.writeable) == (np.float64, [[1, 2], [3, 4]], True)
        assert (copied.tolist(), copied.flags.writeable) == ([[1, 2], [3, 4]], True)
        assert np.array(tensor, copy=False).ctypes.data == tensor.pointer
        with pytest.raises(ValueError, match="Unable to avoid copy"):
            np.array(tensor, dtype=np.float64, copy=False)
        assert draft.seal() == 1  # copies keep nothing


def test_functions_of_numpy_and_torch_see_the_elements(client: Broker, name: str) -> None:
    values = np.array([[1, 2], [3, 4]], np.float32)
    with client.create(name, Layout.pack([("a", "F32", (2, 2))])) as draft:
        draft["a"].copy_from(values)
        draft.seal()
    with client.attach(name) as pool:
        tensor = pool["a"]
        found: list[Any] = [
            np.array([tensor, tensor])[0],
            np.stack([tensor, tensor])[1],
            np.concatenate([tensor, tensor])[:2],
            np.add(tensor, 0),
            np.zeros((2, 2), np.float32) + tensor,
            np.from_dlpack(tensor),
            torch.asarray(tensor),
            torch.as_tensor(tensor),
            torch.tensor(tensor),
            torch.from_dlpack(tensor),
        ]
        for each in found:
            assert str(each.dtype).endswith("float32")
            assert each.tolist() == values.tolist()
        assert (np.shape(tensor), np.ndim(tensor), np.size(tensor), np.sum(tensor)) == ((2, 2), 2, 4, 10)
        assert (values == tensor).all()
        assert [each.data_ptr() for each in (torch.asarray(tensor), torch.as_tensor(tensor))] == [tensor.pointer] * 2
        assert torch.tensor(tensor).data_ptr() != tensor.pointer
        del found, each


REFUSALS: dict[str, tuple[Callable[[Any], object], type[Exception]]] = {
    "bool": (bool, TypeError),
    "float": (float, TypeError),
    "int": (int, TypeError),
    "len": (len, TypeError),
    "iter": (iter, TypeError),
    "an element": (lambda tensor: tensor[0], TypeError),
    "an assignment": (lambda tensor: tensor.__setitem__(0, 1), AttributeError),
    "arithmetic": (lambda tensor: tensor + 1, TypeError),
    "bytes": (bytes, TypeError),
    "memoryview": (memoryview, TypeError),
    "np.frombuffer": (np.frombuffer, TypeError),
    "torch.frombuffer": (lambda tensor: torch.frombuffer(tensor, dtype=torch.float32), ValueError),
    "torch.from_numpy": (torch.from_numpy, TypeError),
    "torch.Tensor": (torch.Tensor, TypeError),
    "torch.stack": (lambda tensor: torch.stack([tensor, tensor]), TypeError),
    "torch.tensor of a list": (lambda tensor: torch.tensor([tensor]), RuntimeError),
    "Tensor.copy_": (lambda tensor: torch.zeros(4, 8).copy_(tensor), TypeError),
    "the interface of numpy": (lambda tensor: tensor.__array_interface__, AttributeError),
}


@pytest.mark.parametrize("protocol", REFUSALS)
def test_every_other_protocol_is_refused_and_not_guessed_at(client: Broker, name: str, protocol: str) -> None:
    use, error = REFUSALS[protocol]
    publish(client, name)
    with client.attach(name) as pool, pytest.raises(error):
        use(pool["weight"])


def test_what_numpy_has_no_type_for_is_no_array(client: Broker, name: str) -> None:
    publish(client, name, EVERY)
    with client.attach(name) as pool, pytest.raises(TypeError, match="packed elements; use tobytes"):
        np.asarray(pool["F4"])


def test_a_tensor_on_a_gpu_is_no_array_of_numpy_and_the_error_says_how() -> None:
    tensor, _ = on_gpu("F32", (2, 3))
    for use in (np.asarray, np.array, np.sum, lambda each: np.stack([each, each]), lambda each: np.add(each, 1)):
        with pytest.raises(TypeError, match=r"numpy works in host memory; take torch.from_dlpack\(tensor\).*\.cpu\(\)"):
            use(tensor)


@pytest.mark.parametrize("use", [torch.asarray, torch.as_tensor, torch.tensor])
def test_torch_refuses_the_cuda_array_interface_of_what_is_read_only(use: Callable[[Any], object]) -> None:
    with pytest.raises(TypeError, match="read only"):
        use(on_gpu("F32", (2, 3))[0])


PUBLIC: dict[str, Callable[[Broker, Pool, Draft], object]] = {
    "Broker": lambda broker, pool, draft: broker,
    "Draft": lambda broker, pool, draft: draft,
    "Follow": lambda broker, pool, draft: broker.follow(pool.name),
    "NameLock": lambda broker, pool, draft: broker.lock(pool.name, timeout=60),
    "Pool": lambda broker, pool, draft: pool,
    "Replica": lambda broker, pool, draft: draft.replicas[0],
    "SharedEvent": lambda broker, pool, draft: pool.event("done"),
    "SharedTensor": lambda broker, pool, draft: pool["weight"],
    "Watch": lambda broker, pool, draft: broker.watch(pool.name),
}


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_no_public_object_can_be_copied_or_sent(client: Broker, name: str, copied: Callable[[object], object]) -> None:
    assert PUBLIC.keys() == set(cubroker.client.__all__) - {"AllocationHandle"}  # a value, which may be sent
    with client.create(name, LAYOUT, writable=True) as draft:
        draft.seal()
    with client.attach(name) as pool, client.create(name, LAYOUT) as draft:
        things = {each: get(client, pool, draft) for each, get in PUBLIC.items()}
        for each, thing in {**things, "Requests": client.requests}.items():
            assert type(thing).__name__ == each
            with pytest.raises(TypeError, match=f"a {each} cannot be copied, nor be sent to another process"):
                copied(thing)


def test_a_tensor_describes_itself(client: Broker, name: str) -> None:
    publish(client, name)
    with client.attach(name) as pool:
        assert repr(pool["weight"]) == (
            f"<SharedTensor 'weight' F32 (4, 8) of pool {name!r} version 1 on device 0 (cubroker host device 0)>"
        )


class Gpu:
    """What a tensor needs of a context on a GPU, whose memory nobody touches here."""

    host = False
    device = Device(3, "GPU-0", "a GPU", 1 << 30)

    def __init__(self) -> None:
        self.failure = DriverError("cuMemcpy", 700, "CUDA_ERROR_ILLEGAL_ADDRESS")

    def read(self, pointer: int, nbytes: int) -> bytes:
        raise self.failure

    def write(self, pointer: int, data: object) -> None:
        raise self.failure


def on_gpu(dtype: str, shape: tuple[int, ...], *, readonly: bool = True) -> tuple[SharedTensor, Gpu]:
    tensor, _, gpu = leased_on_gpu(dtype, shape, readonly=readonly)
    return tensor, gpu


def leased_on_gpu(dtype: str, shape: tuple[int, ...], *, readonly: bool) -> tuple[SharedTensor, LeasedMemory, Gpu]:
    gpu: Any = Gpu()
    place = DeviceMapping(gpu, gpu.device, (0x7F0000000000,), (None,))
    mapped = LeasedMemory("pool 'p' version 1", (place,), "ipc", readonly=readonly, finish=lambda: None)
    return SharedTensor(mapped, place, "t", dtype, shape, 0x7F0000000100), mapped, gpu


def test_on_a_gpu_there_is_the_cuda_array_interface_and_no_numpy() -> None:
    tensor, _ = on_gpu("F16", (2, 3))
    assert tensor.__cuda_array_interface__ == {
        "version": 3,
        "shape": (2, 3),
        "typestr": "<f2",
        "data": (0x7F0000000100, True),
        "strides": None,
        "stream": None,
    }
    assert tensor.__dlpack_device__() == (2, 3)
    with pytest.raises(Unsupported, match=r"torch copies to the host with \.cpu\(\), or use tobytes"):
        tensor.numpy()


def test_the_cuda_array_interface_is_left_out_where_it_cannot_tell_the_truth(client: Broker, name: str) -> None:
    assert not hasattr(on_gpu("BF16", (2,))[0], "__cuda_array_interface__")
    publish(client, name)
    with client.attach(name) as pool:
        assert not hasattr(pool["weight"], "__cuda_array_interface__")
    empty, _ = on_gpu("F32", (0,))
    assert empty.__cuda_array_interface__["data"] == (0, True)


def test_whoever_uses_the_cuda_array_interface_of_a_draft_keeps_it_from_being_sealed() -> None:
    tensor, mapped, _ = leased_on_gpu("F32", (4,), readonly=False)
    assert tensor.__cuda_array_interface__ == tensor.__cuda_array_interface__
    assert mapped.end() == "t"
    del tensor
    assert mapped.end() == ""


def test_a_driver_that_fails_to_copy_is_quoted() -> None:
    tensor, gpu = on_gpu("F32", (4,), readonly=False)
    with pytest.raises(DeviceFailure, match=r"reading tensor 't': cuMemcpy failed with CUDA_ERROR_ILLEGAL_ADDRESS"):
        tensor.tobytes()
    gpu.failure = DriverError("cuMemcpy", 2, "CUDA_ERROR_OUT_OF_MEMORY")
    with pytest.raises(OutOfMemory, match="filling tensor 't'"):
        tensor.copy_from_bytes(bytes(16))


def test_numpy_is_imported_only_where_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor, _ = on_gpu("F32", (4,))
    original = builtins.__import__

    def no_numpy(name: str, *args: Any, **kwargs: Any) -> Any:
        assert name != "numpy"
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_numpy)
    assert tensor.nbytes == 16
    assert tensor.pointer == 0x7F0000000100
