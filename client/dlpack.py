"""DLPack capsules for memory that numpy does not own, and that may not be the host's.

A capsule needs two functions in native code, its destructor and its tensor's deleter. Callbacks of
ctypes cannot serve: they may run while an exception propagates, and the callback then loses the
exception, upon which the interpreter crashes (``[tensor.__dlpack__(), 1 / 0]`` was enough, Python 3.11).
So numpy makes the capsule, from an array of unsigned integers that owns nothing and keeps our memory
alive; numpy's deleter is right in any thread, at any time, and after the interpreter's end too. What
numpy could not know is then written into the struct: the device, the type and the flags.

Source of the layouts: dlpack.h of DLPack 1.1.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

from cubroker.client.elements import ELEMENTS
from cubroker.protocol.dtypes import BITS

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from typing_extensions import CapsuleType

CPU = 1
CUDA = 2

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


def export(
    carrier: NDArray[np.unsignedinteger[Any]], dtype: str, device: tuple[int, int], *, readonly: bool, versioned: bool
) -> CapsuleType:
    """Return a capsule for the memory under ``carrier``.

    Args:
        carrier: an array of unsigned integers of the element's width, writable as far as numpy knows.
            Its memory is not touched.
        dtype: the element type, by its safetensors name. Elements of 4 bits go in pairs, two lanes each,
            and so must the carrier's last dimension.
        device: DLPack's device type and ordinal.
        readonly: whether to tell the consumer that it may not write; only a versioned capsule can.
        versioned: whether the consumer knows DLPack 1.0 and later.
    """
    if versioned:
        capsule = carrier.__dlpack__(max_version=(1, 0))
        managed = _Versioned.from_address(_pointer(capsule, b"dltensor_versioned"))
        managed.flags |= READ_ONLY if readonly else 0
        tensor = managed.tensor
    else:
        capsule = carrier.__dlpack__()
        tensor = _Tensor.from_address(_pointer(capsule, b"dltensor"))
    tensor.device = _Device(*device)
    tensor.dtype = _DataType(ELEMENTS[dtype].code, BITS[dtype], lanes(dtype))
    return capsule


def lanes(dtype: str) -> int:
    """Return how many elements travel as one: frameworks take elements of 4 bits in pairs."""
    return 2 if BITS[dtype] == 4 else 1
