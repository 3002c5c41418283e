"""Arrays of any library: as sources of tensors, with their type, shape and place; and DLPack capsules, in both ways.

Libraries do not agree on one protocol. Buffers and DLPack as numpy reads it have no type for bfloat16 and float8, and
torch exports float8 over DLPack only in its newer versions. So numpy's arrays and torch's tensors are read through
their own libraries; every other source is read by the first protocol that it has. Torch is imported only if an array is
torch's, and numpy only if an array is numpy's, has gaps, or can be read by numpy alone.
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from pickle import PickleBuffer
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec

from cubroker.driver import Context
from cubroker.driver.buffers import address
from cubroker.protocol.errors import Invalid, needing
from cubroker.protocol.layout import BITS, BOOL, COMPLEX, DTYPES_BY_NAME, ELEMENTS, FLOAT, INT, UINT, carrier, nbytes

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray
    from typing_extensions import CapsuleType

T = TypeVar("T")

MAX_COPIES = 256 << 20
"""The most bytes of contiguous copies, of arrays with gaps, that are kept at a time; the last copy may exceed it."""

DLPACK_CPU = 1  #: DLPack's type of the host's devices.
DLPACK_CUDA = 2  #: And that of GPUs.

_ON_HOST = {DLPACK_CPU, 3}
"""Types of devices whose memory the host reads: its own, and that which CUDA has pinned."""

_ON_GPU = {DLPACK_CUDA, 13}
"""Types of devices whose memory a GPU reads: its own, and CUDA's managed memory."""

_READ_ONLY = 1  #: A flag of a capsule.

_DTYPES_BY_CODE = {(element.code, element.bits): dtype for dtype, element in ELEMENTS.items()}
"""The element type of each code and number of bits."""

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


Array = HostArray | DeviceArray

Arrays = Mapping[str, Array]
"""Arrays by name."""


def source_of(array: Any, context_of: ContextOf) -> Array:
    """Describe an array. Work that makes its elements may still run: in this thread's current stream, or before that.

    Raises:
        Invalid: the array has no dtype, lies in another memory, or its library refuses to export it.
        Unsupported: only numpy can read the array, and is not installed.
    """
    try:
        if _is_of(array, "torch", "Tensor"):
            return _from_torch(array, context_of)
        if _is_dlpack_alone(array) or _is_on_gpu(array):
            return _from_dlpack(array, context_of)
        return _from_buffer(array) or _of_numpy(_as_numpy(array))
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise _refusal(array, error) from error


def _is_of(array: object, module: str, kind: str) -> bool:
    """Whether an array is of a type of a library; nothing is if the library is not imported."""
    return isinstance(array, getattr(sys.modules.get(module), kind, ()))


def _is_numpy(array: object) -> bool:
    return _is_of(array, "numpy", "ndarray") or _is_of(array, "numpy", "generic")


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


def _from_torch(tensor: torch.Tensor, context_of: ContextOf) -> Array:
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
    both = hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__")
    return both and not any(hasattr(array, each) for each in others)


def _is_on_gpu(array: Any) -> bool:
    return hasattr(array, "__dlpack_device__") and array.__dlpack_device__()[0] in _ON_GPU


def _from_dlpack(array: Any, context_of: ContextOf) -> Array:
    """Describe an array of a library that has DLPack.

    The library has a stream of ours wait for the work that makes the elements, as the array API's ``__dlpack__`` says.
    """
    kind, ordinal = map(int, array.__dlpack_device__())
    context = context_of(ordinal) if kind in _ON_GPU else None
    if context is None and kind not in _ON_HOST:
        raise BufferError(f"DLPack says that it is on a device of type {kind}")
    found = _borrow(array, context.copies().handle if context else None)
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
    found = _borrow(made, context.copies().handle)
    return found.pointer, (found, made)


class _Borrowed(NamedTuple):
    """An array of another library, whose memory stays valid while this object lives."""

    #: its element type, by its safetensors name
    dtype: str
    #: its dimensions, in elements; elements of four bits count in pairs
    extent: tuple[int, ...]
    #: the distance to the next element in each dimension, counted in the same way
    strides: tuple[int, ...]
    pointer: int
    #: releases the array when it dies
    capsule: CapsuleType

    @property
    def shape(self) -> tuple[int, ...]:
        """Its dimensions, in elements."""
        together = lanes(self.dtype)
        return (*self.extent[:-1], self.extent[-1] * together) if self.extent else ()

    @property
    def contiguous(self) -> bool:
        """Whether its elements are in the order of C, without gaps."""
        apart = [math.prod(self.extent[place + 1 :]) for place in range(len(self.extent))]
        pairs = zip(self.extent, self.strides, apart, strict=True)
        return 0 in self.extent or all(size == 1 or stride == step for size, stride, step in pairs)

    @property
    def __array_interface__(self) -> dict[str, object]:
        """Its elements as integers, for numpy, if they are in the host's memory; the array keeps this object alive."""
        width = max(BITS[self.dtype] // 8, 1)
        return {
            "version": 3,
            "shape": self.extent,
            "typestr": carrier(self.dtype),
            "data": (self.pointer, True),
            "strides": tuple(stride * width for stride in self.strides),
        }


def _borrow(array: Any, stream: int | None = None) -> _Borrowed:
    """Return a description of another library's array, by its ``__dlpack__``.

    The capsule is not consumed: a capsule that is never consumed releases its array when it dies.

    Args:
        array: the other library's array.
        stream: for an array on a GPU, the handle of a stream of that GPU, which then waits for the array's elements.

    Raises:
        BufferError: pools have no such element type; or the capsule cannot be read, or has no memory.
    """
    asked: dict[str, object] = {} if stream is None else {"stream": stream}
    try:
        capsule = array.__dlpack__(max_version=(1, 0), **asked)
    except TypeError:  # of a library that knows no DLPack 1.0
        capsule = array.__dlpack__(**asked)
    if _is_valid(capsule, b"dltensor_versioned"):
        managed = versioned_struct(capsule)
        if managed.major != 1:
            raise BufferError(f"its capsule is of version {managed.major} of DLPack, and only version 1 can be read")
        tensor = managed.tensor
    else:
        tensor = _Tensor.from_address(_pointer(capsule, b"dltensor"))
    kind, rank, device = tensor.dtype, tensor.ndim, tensor.device.type
    if device not in (_ON_HOST if stream is None else _ON_GPU):
        raise BufferError(f"its capsule is on a device of type {device}, and its __dlpack_device__() is another")
    dtype = _DTYPES_BY_CODE.get((kind.code, kind.bits))
    if dtype is None or kind.lanes != lanes(dtype) or (BITS[dtype] % 8 and lanes(dtype) == 1):
        raise BufferError(f"its elements are {kind.lanes} of {kind.bits} bits of DLPack's type {kind.code}")
    extent = tuple((ctypes.c_int64 * rank).from_address(tensor.shape)) if rank else ()
    if tensor.strides and rank:
        strides = tuple((ctypes.c_int64 * rank).from_address(tensor.strides))
    else:
        strides = tuple(math.prod(extent[place + 1 :]) for place in range(rank))
    if tensor.data is None and 0 not in extent:
        raise BufferError("its capsule has no memory")
    return _Borrowed(dtype, extent, strides, (tensor.data or 0) + tensor.byte_offset, capsule)


def lanes(dtype: str) -> int:
    """Return how many elements DLPack counts as one: frameworks import elements of 4 bits in pairs."""
    return 2 if BITS[dtype] == 4 else 1


# -- buffers and numpy ---------------------------------------------------------------------------------

_LETTERS = {
    **dict.fromkeys("bhilqn", INT),
    **dict.fromkeys("BHILQN", UINT),
    **dict.fromkeys("efd", FLOAT),
    **dict.fromkeys(("Zf", "F"), COMPLEX),
    "?": BOOL,
}
"""DLPack's type code of a buffer's format (``struct``, and PEP 3118 for complex numbers)."""


def _from_buffer(array: Any) -> HostArray | None:
    """Describe a buffer without gaps, of a type that pools have; None for a numpy array, or anything else."""
    view = None if _is_numpy(array) else _buffer(array)
    if view is None or not view.c_contiguous:
        return None
    letter = view.format.lstrip("@=<>!")
    swapped = view.format.startswith((">", "!")) and view.itemsize > 1
    dtype = None if swapped else _DTYPES_BY_CODE.get((_LETTERS.get(letter, -1), 8 * view.itemsize))
    if dtype is None:
        return None
    with address(view) as (pointer, _):
        return HostArray(dtype, tuple(view.shape or ()), pointer, pointer, PickleBuffer(view).raw)


def _buffer(array: Any) -> memoryview | None:
    try:
        return memoryview(array)
    except TypeError:
        return None


def _as_numpy(array: Any) -> NDArray[Any]:
    if _is_of(array, "numpy.ma", "MaskedArray"):
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


# -- capsules of DLPack --------------------------------------------------------------------------------
#
# A capsule needs two functions in native code: its destructor and its tensor's deleter. Callbacks of ctypes do not
# work. They may run while an exception propagates, the callback then loses the exception, and the interpreter crashes
# (``[tensor.__dlpack__(), 1 / 0]`` was enough, Python 3.11).
#
# Solution: numpy makes the capsule, from an array of unsigned integers that owns nothing and keeps our memory alive.
# Numpy's deleter is correct in any thread, at any time, even after the interpreter's end. The device, the type and the
# flags, which numpy cannot know, are then written into the struct. If numpy is not installed, torch does the same: it
# is the one library with DLPack that does not require numpy.
#
# Source of the layouts: dlpack.h of DLPack 1.1.


def export_capsule(
    carrier: NDArray[Any] | torch.Tensor, dtype: str, device: tuple[int, int], *, readonly: bool, versioned: bool
) -> CapsuleType:
    """Return a capsule for the memory under ``carrier``.

    Args:
        carrier: an array of integers of the element's width, writable to its library. Its memory is not touched.
        dtype: the element type, by its safetensors name. Elements of 4 bits are exported in pairs, two lanes each; the
            carrier's last dimension must count pairs.
        device: DLPack's device type and ordinal.
        readonly: whether to tell the consumer that it may not write; only a versioned capsule can.
        versioned: whether the consumer knows DLPack 1.0 and later. Such a consumer accepts an older capsule, too, which
            is made if torch makes it: only newer releases of torch know 1.0.
    """
    if versioned and hasattr(carrier, "__array_interface__"):
        capsule = carrier.__dlpack__(max_version=(1, 0))
        managed = versioned_struct(capsule)
        managed.flags |= _READ_ONLY if readonly else 0
        tensor = managed.tensor
    else:
        capsule = carrier.__dlpack__()
        tensor = _Tensor.from_address(_pointer(capsule, b"dltensor"))
    tensor.device = _Device(*device)
    tensor.dtype = _DataType(ELEMENTS[dtype].code, BITS[dtype], lanes(dtype))
    return capsule


def torch_carrier(pointer: int, shape: Sequence[int], dtype: str, keeper: object) -> torch.Tensor | None:
    """Return a torch tensor of integers as wide as ``dtype``, on memory that is not touched; None without torch.

    Args:
        pointer: where the memory begins, on any device.
        shape: dimensions, in elements; elements of four bits count in pairs.
        dtype: the element type, by its safetensors name.
        keeper: an object that the tensor keeps alive.
    """
    library = sys.modules.get("torch")
    if library is None:
        return None
    width = max(BITS[dtype] // 8, 1)
    element = {1: library.uint8, 2: library.int16, 4: library.int32, 8: library.int64}[width]
    found: torch.Tensor
    if nbytes := math.prod(shape) * width:
        block = (ctypes.c_ubyte * nbytes).from_address(pointer)
        block.keeper = keeper  # type: ignore[attr-defined]
        found = library.frombuffer(block, dtype=element).reshape(tuple(shape))
    else:
        found = library.empty(tuple(shape), dtype=element)
    return found


def versioned_struct(capsule: object) -> _Versioned:
    """Return the struct in a versioned capsule, in place: it is valid while the capsule lives."""
    return _Versioned.from_address(_pointer(capsule, b"dltensor_versioned"))


_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype = ctypes.c_void_p
_pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)

_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.restype = ctypes.c_int
_is_valid.argtypes = (ctypes.py_object, ctypes.c_char_p)


class _Device(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("id", ctypes.c_int32))


class _DataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    )


class _Versioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )
