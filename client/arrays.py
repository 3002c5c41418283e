"""Arrays of any library as sources of tensors: their type, their shape, and where their elements are.

Libraries do not agree on one protocol. Buffers and DLPack as numpy reads it have no type for bfloat16 and float8, and
torch exports float8 over DLPack only in its newer versions. So numpy's arrays and torch's tensors are read through
their own libraries; every other source is read by the first protocol that it has. Torch is imported only if an array is
torch's, and numpy only if an array is numpy's, has gaps, or can be read by numpy alone.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator
from functools import cache, partial
from pickle import PickleBuffer
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from cubroker.client import dlpack
from cubroker.driver import Context
from cubroker.driver.buffers import address
from cubroker.protocol.errors import Invalid, needing
from cubroker.protocol.layout import BOOL, COMPLEX, DTYPES_BY_NAME, FLOAT, INT, UINT, carrier, nbytes

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

T = TypeVar("T")

MAX_COPIES = 256 << 20
"""The most bytes of contiguous copies, of arrays with gaps, that are kept at a time; the last copy may exceed it."""

ContextOf = Callable[[int], Context]
"""Returns this process's context on the GPU with an ordinal; raises ``Invalid`` or ``NotFound`` if it has none."""


# Structs, since a model has many arrays: a dataclass takes three times as long.


class HostArray(msgspec.Struct, frozen=True):
    """An array in host memory."""

    #: its element type, by its safetensors name; for a type that pools do not have, its library's name
    dtype: str
    #: its dimensions, in elements
    shape: tuple[int, ...]
    #: identifies the elements: equal for two names of one tensor; includes the steps in bytes if ``pointer`` is None
    place: Hashable
    #: where the elements begin; None if they have gaps, or another order than C's
    pointer: int | None
    #: returns the elements without gaps and in the order of C; a copy if ``pointer`` is None
    contiguous: Callable[[], memoryview]


class DeviceArray(msgspec.Struct, frozen=True):
    """An array in the memory of a device."""

    #: its element type, as that of a :class:`HostArray`
    dtype: str
    #: its dimensions, in elements
    shape: tuple[int, ...]
    #: this process's context on the device that has made it
    context: Context
    #: identifies the elements: equal for two names of one tensor
    place: Hashable
    #: returns the address of the elements, without gaps and in the order of C, and the object that keeps them
    contiguous: Callable[[], tuple[int, object]]
    #: whether ``contiguous`` makes a copy, which is work of the device
    copies: bool = False
    #: whether the broker lends the memory, which is then mapped for the context's device alone
    lent: bool = False

    @property
    def pointer(self) -> int | None:
        """Where the elements begin; None if they have gaps, or another order than C's."""
        return None if self.copies else self.contiguous()[0]


def source_of(array: Any, context_of: ContextOf) -> HostArray | DeviceArray:
    """Describe an array. Work that makes its elements may still run: in this thread's current stream, or before that.

    Raises:
        Invalid: the array has no dtype, lies in another memory, or its library refuses to export it.
        Unsupported: only numpy can read the array, and is not installed.
    """
    try:
        if _is_torch(array):
            return _from_torch(array, context_of)
        if _is_dlpack_alone(array) or _is_on_gpu(array):
            return _from_dlpack(array, context_of)
        return _from_buffer(array) or _of_numpy(_as_numpy(array))
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise _refusal(array, error) from error


def batches(items: Iterable[T], copied: Callable[[T], int]) -> Iterator[list[T]]:
    """Cut items into runs, each of which ends once more than ``MAX_COPIES`` bytes of it are ``copied``."""
    batch: list[T] = []
    total = 0
    for item in items:
        batch.append(item)
        total += copied(item)
        if total > MAX_COPIES:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch


# -- torch ---------------------------------------------------------------------------------------------


@cache
def torch_dtypes() -> dict[str, torch.dtype]:
    """Return the torch dtype of every dtype that the installed torch has."""
    import torch

    return {dtype: getattr(torch, name) for name, dtype in DTYPES_BY_NAME.items() if hasattr(torch, name)}


@cache
def torch_names() -> dict[torch.dtype, str]:
    """Return the dtype of every torch dtype: the inverse of :func:`torch_dtypes`."""
    return {known: dtype for dtype, known in torch_dtypes().items()}


def _is_torch(array: object) -> bool:
    torch = sys.modules.get("torch")  # else nothing is torch's
    return isinstance(array, getattr(torch, "Tensor", ()))


def _from_torch(tensor: torch.Tensor, context_of: ContextOf) -> HostArray | DeviceArray:
    """Describe a torch tensor; raises ``BufferError`` unless it is dense and has memory."""
    import torch

    if tensor.is_nested:
        raise BufferError("it is nested")
    if tensor.is_quantized:
        raise BufferError("it is quantized")
    if tensor.layout is not torch.strided:
        raise BufferError(f"it is sparse ({tensor.layout})")
    if not (on_gpu := tensor.is_cuda) and not tensor.is_cpu:  # to ask `device.type` takes ten times as long
        raise BufferError(f"it is on {tensor.device}")
    dtype = torch_names().get(tensor.dtype) or str(tensor.dtype)
    shape = tuple(tensor.shape)
    if dtype == "F4" and shape:
        shape = (*shape[:-1], shape[-1] * 2)
    pointer = tensor.data_ptr()
    if not pointer and tensor.numel():
        raise BufferError("it has no memory of its own; pass the tensors that it is made of")
    if not on_gpu:
        plain = tensor.detach().resolve_conj().resolve_neg()
        pointer = plain.data_ptr()
        if plain.is_contiguous():
            return HostArray(dtype, shape, pointer, pointer, partial(_bytes_of, plain))
        steps = tuple(step * plain.element_size() for step in plain.stride())
        return HostArray(dtype, shape, (pointer, steps), None, partial(_bytes_of, plain))
    lazy = tensor.is_conj(), tensor.is_neg()
    context = context_of(tensor.get_device())
    if tensor.is_contiguous() and not any(lazy):
        return DeviceArray(dtype, shape, context, pointer, lambda: (pointer, tensor))

    def contiguous() -> tuple[int, object]:
        made = tensor.detach().resolve_conj().resolve_neg().contiguous()
        return made.data_ptr(), made

    return DeviceArray(dtype, shape, context, (pointer, tensor.stride(), lazy), contiguous, copies=True)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor in host memory; the tensor's own method for that needs numpy."""
    made = tensor.contiguous()
    return _memory(made.data_ptr(), made.nbytes, made)


def _memory(pointer: int, nbytes: int, keeper: object) -> memoryview:
    """Return memory at an address as bytes, which keep the ``keeper`` alive."""
    block = (ctypes.c_ubyte * nbytes).from_address(pointer)
    block.keeper = keeper  # type: ignore[attr-defined]
    return PickleBuffer(block).raw()  # a memoryview of the block itself has no native format


# -- DLPack --------------------------------------------------------------------------------------------


def _is_dlpack_alone(array: Any) -> bool:
    """Whether DLPack is the only protocol of an array; numpy lacks types that DLPack has."""
    others = ("__array__", "__array_interface__", "__buffer__")
    return hasattr(array, "__dlpack__") and not any(hasattr(array, each) for each in others)


def _is_on_gpu(array: Any) -> bool:
    return hasattr(array, "__dlpack_device__") and array.__dlpack_device__()[0] in dlpack.ON_GPU


def _from_dlpack(array: Any, context_of: ContextOf) -> HostArray | DeviceArray:
    """Describe an array of a library that has DLPack.

    The library has a stream of ours wait for the work that makes the elements, as the array API's ``__dlpack__`` says.
    """
    kind, ordinal = map(int, array.__dlpack_device__())
    context = context_of(ordinal) if kind in dlpack.ON_GPU else None
    if context is None and kind not in dlpack.ON_HOST:
        raise BufferError(f"DLPack says that it is on a device of type {kind}")
    found = dlpack.borrow(array, context.copies().handle if context else None)
    if context is None and not found.contiguous:
        return _of_numpy(_numpy_for(array).asarray(found), found.dtype, found.shape)
    if context is None:
        memory = partial(_memory, found.pointer, nbytes(found.dtype, found.shape), found)
        return HostArray(found.dtype, found.shape, found.pointer, found.pointer, memory)
    place = found.pointer, found.strides
    if found.contiguous:
        return DeviceArray(found.dtype, found.shape, context, place, lambda: (found.pointer, found))
    contiguous = partial(_packed, array, context, found)
    return DeviceArray(found.dtype, found.shape, context, place, contiguous, copies=True)


def _packed(array: Any, context: Context, borrowed: object) -> tuple[int, object]:
    """Have a library make a copy without gaps, on its own device. ``borrowed`` is kept until then."""
    make = getattr(array, "contiguous", None)
    made = make() if make else array.copy(order="C")
    found = dlpack.borrow(made, context.copies().handle)
    return found.pointer, (found, made)


# -- buffers and numpy ---------------------------------------------------------------------------------

_LETTERS = {
    **dict.fromkeys("bhilqn", INT),
    **dict.fromkeys("BHILQN", UINT),
    **dict.fromkeys("efd", FLOAT),
    **dict.fromkeys(("Zf", "F"), COMPLEX),
    "?": BOOL,
}
"""DLPack's type code of a buffer's format (``struct``, and PEP 3118 for complex numbers)."""


def _is_numpy(array: object) -> bool:
    numpy = sys.modules.get("numpy")  # else nothing is numpy's
    return numpy is not None and isinstance(array, numpy.ndarray | numpy.generic)


def _from_buffer(array: Any) -> HostArray | None:
    """Describe a buffer without gaps, of a type that pools have; None for a numpy array, or anything else."""
    view = None if _is_numpy(array) else _buffer(array)
    if view is None or not view.c_contiguous:
        return None
    letter = view.format.lstrip("@=<>!")
    swapped = view.format.startswith((">", "!")) and view.itemsize > 1
    dtype = None if swapped else dlpack.DTYPES.get((_LETTERS.get(letter, -1), 8 * view.itemsize))
    if dtype is None:
        return None
    with address(view) as (pointer, _):
        return HostArray(dtype, tuple(view.shape or ()), pointer, pointer, PickleBuffer(view).raw)


def _buffer(array: Any) -> memoryview | None:
    try:
        return memoryview(array)
    except TypeError:
        return None


def _is_masked(array: object) -> bool:
    masked = sys.modules.get("numpy.ma")
    return masked is not None and isinstance(array, masked.MaskedArray)


def _as_numpy(array: Any) -> NDArray[Any]:
    if _is_masked(array):
        raise BufferError("it is masked, and a tensor has no mask: its .data and its .filled() are plain arrays")
    source = array if _is_numpy(array) else _buffer(array)
    if source is None:
        if not (hasattr(array, "__array__") or hasattr(array, "__array_interface__")):
            raise TypeError("it has no dtype")
        source = array
    found: NDArray[Any] = _numpy_for(array).asarray(source)
    return found


def _numpy_for(array: object) -> ModuleType:
    with needing(f"filling a tensor from this {type(array).__name__}", "cubroker[numpy]"):
        import numpy as np
    return np


def _of_numpy(found: NDArray[Any], dtype: str = "", shape: tuple[int, ...] | None = None) -> HostArray:
    """Describe a numpy array; ``dtype`` and ``shape`` are given if it has the bits of another library's array."""
    import numpy as np

    name = found.dtype.name
    if not dtype and name in DTYPES_BY_NAME and found.dtype.byteorder != ">":
        dtype = DTYPES_BY_NAME[name]
        found = found.view(carrier(dtype))
    pointer: int = found.__array_interface__["data"][0]
    whole = found.flags.c_contiguous
    return HostArray(
        dtype or str(found.dtype),
        found.shape if shape is None else shape,
        pointer if whole else (pointer, found.strides),
        pointer if whole else None,
        lambda: np.ascontiguousarray(found).data,
    )


def _refusal(source: object, why: object) -> Invalid:
    return Invalid(
        f"a tensor cannot be filled from this {type(source).__name__}: {why}; pass an array in host memory, or in that"
        f" of a device of this broker"
    )
