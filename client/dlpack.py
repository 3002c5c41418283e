"""DLPack capsules for memory that numpy does not own, on the host or on a GPU.

A capsule needs two functions in native code: its destructor and its tensor's deleter. Callbacks of ctypes do not work.
They may run while an exception propagates, the callback then loses the exception, and the interpreter crashes
(``[tensor.__dlpack__(), 1 / 0]`` was enough, Python 3.11).

Solution: numpy makes the capsule, from an array of unsigned integers that owns nothing and keeps our memory alive.
Numpy's deleter is correct in any thread, at any time, even after the interpreter's end. The device, the type and the
flags, which numpy cannot know, are then written into the struct. If numpy is not installed, torch does the same: it is
the one library with DLPack that does not require numpy.

Source of the layouts: dlpack.h of DLPack 1.1.
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from cubroker.protocol.layout import BITS, ELEMENTS, carrier

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray
    from typing_extensions import CapsuleType

CPU = 1
CUDA = 2

ON_HOST = {CPU, 3}
"""Types of devices whose memory the host reads: its own, and that which CUDA has pinned."""

ON_GPU = {CUDA, 13}
"""Types of devices whose memory a GPU reads: its own, and CUDA's managed memory."""

READ_ONLY = 1


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


_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype = ctypes.c_void_p
_pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)


def versioned_struct(capsule: object) -> _Versioned:
    """Return the struct in a versioned capsule, in place: it is valid while the capsule lives."""
    return _Versioned.from_address(_pointer(capsule, b"dltensor_versioned"))


_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.restype = ctypes.c_int
_is_valid.argtypes = (ctypes.py_object, ctypes.c_char_p)

DTYPES = {(element.code, element.bits): dtype for dtype, element in ELEMENTS.items()}
"""The element type of each code and number of bits."""


class Borrowed(NamedTuple):
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


def borrow(array: Any, stream: int | None = None) -> Borrowed:
    """Return a description of another library's array, by its ``__dlpack__``.

    The capsule is not consumed: a capsule that is never consumed releases its array when it dies.

    Args:
        array: the other library's array.
        stream: for an array on a GPU, the handle of a stream of that GPU, which then waits for the array's elements.

    Raises:
        BufferError: pools have no such element type.
    """
    asked: dict[str, object] = {} if stream is None else {"stream": stream}
    try:
        capsule = array.__dlpack__(max_version=(1, 0), **asked)
    except TypeError:  # of a library that knows no DLPack 1.0
        capsule = array.__dlpack__(**asked)
    if _is_valid(capsule, b"dltensor_versioned"):
        tensor = versioned_struct(capsule).tensor
    else:
        tensor = _Tensor.from_address(_pointer(capsule, b"dltensor"))
    kind, rank = tensor.dtype, tensor.ndim
    dtype = DTYPES.get((kind.code, kind.bits))
    if dtype is None or kind.lanes != lanes(dtype) or (BITS[dtype] % 8 and lanes(dtype) == 1):
        raise BufferError(f"its elements are {kind.lanes} of {kind.bits} bits of DLPack's type {kind.code}")
    extent = tuple((ctypes.c_int64 * rank).from_address(tensor.shape)) if rank else ()
    if tensor.strides and rank:
        strides = tuple((ctypes.c_int64 * rank).from_address(tensor.strides))
    else:
        strides = tuple(math.prod(extent[place + 1 :]) for place in range(rank))
    return Borrowed(dtype, extent, strides, (tensor.data or 0) + tensor.byte_offset, capsule)


def without_numpy(pointer: int, shape: Sequence[int], dtype: str, keeper: object) -> torch.Tensor | None:
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


def export(
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
        managed.flags |= READ_ONLY if readonly else 0
        tensor = managed.tensor
    else:
        capsule = carrier.__dlpack__()
        tensor = _Tensor.from_address(_pointer(capsule, b"dltensor"))
    tensor.device = _Device(*device)
    tensor.dtype = _DataType(ELEMENTS[dtype].code, BITS[dtype], lanes(dtype))
    return capsule


def lanes(dtype: str) -> int:
    """Return how many elements DLPack counts as one: frameworks import elements of 4 bits in pairs."""
    return 2 if BITS[dtype] == 4 else 1
