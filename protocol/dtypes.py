"""Element types, by the names that safetensors gives them: one table, with their sizes and what libraries call them.

Source: the ``Dtype`` enumeration of the safetensors format, version 0.8 and later, with types of less than one byte.
Their elements are packed, so a tensor of them must fill whole bytes.

Callers may also name a type as torch, numpy and ml_dtypes do, by the object or its name. Neither library is imported:
their objects say their own names.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import index
from typing import NamedTuple

from cubroker.protocol.errors import Invalid


class Element(NamedTuple):
    """One element type."""

    #: Its size.
    bits: int
    #: What torch, numpy or ml_dtypes call it, if one lays out its elements as pools do.
    library: str | None
    #: numpy's name of it in ``__array_interface__``; None if numpy itself has no such type.
    typestr: str | None
    #: DLPack's type code (``DLDataTypeCode`` in dlpack.h of DLPack 1.1).
    code: int


INT, UINT, FLOAT, BFLOAT, COMPLEX, BOOL = 0, 1, 2, 4, 5, 6  #: Type codes of DLPack.
PAIRS = "float4_e2m1fn_x2"  #: Torch's type of two F4 elements, which its shapes count as one.

ELEMENTS: dict[str, Element] = {
    "BOOL": Element(8, "bool", "|b1", BOOL),
    "F4": Element(4, PAIRS, None, 17),
    "F6_E2M3": Element(6, None, None, 15),
    "F6_E3M2": Element(6, None, None, 16),
    "U8": Element(8, "uint8", "|u1", UINT),
    "I8": Element(8, "int8", "|i1", INT),
    "F8_E5M2": Element(8, "float8_e5m2", None, 12),
    "F8_E4M3": Element(8, "float8_e4m3fn", None, 10),
    "F8_E8M0": Element(8, "float8_e8m0fnu", None, 14),
    "F8_E4M3FNUZ": Element(8, "float8_e4m3fnuz", None, 11),
    "F8_E5M2FNUZ": Element(8, "float8_e5m2fnuz", None, 13),
    "I16": Element(16, "int16", "<i2", INT),
    "U16": Element(16, "uint16", "<u2", UINT),
    "F16": Element(16, "float16", "<f2", FLOAT),
    "BF16": Element(16, "bfloat16", None, BFLOAT),
    "I32": Element(32, "int32", "<i4", INT),
    "U32": Element(32, "uint32", "<u4", UINT),
    "F32": Element(32, "float32", "<f4", FLOAT),
    "C64": Element(64, "complex64", "<c8", COMPLEX),
    "F64": Element(64, "float64", "<f8", FLOAT),
    "I64": Element(64, "int64", "<i8", INT),
    "U64": Element(64, "uint64", "<u8", UINT),
}
"""Every dtype."""

BITS = {dtype: element.bits for dtype, element in ELEMENTS.items()}  #: Bits per element of every dtype.

LIBRARY_NAMES = {dtype: element.library for dtype, element in ELEMENTS.items() if element.library}
"""The name that libraries have for a dtype."""

NAMES = {name: dtype for dtype, name in LIBRARY_NAMES.items()}  #: The dtype of each such name.


def carrier(dtype: str) -> str:
    """Return the typestr of unsigned integers as wide as ``dtype``; bytes for types that are packed."""
    return f"<u{max(BITS[dtype] // 8, 1)}"


def named(dtype: object) -> tuple[str, int]:
    """Return the dtype that a caller has named, and how many of its elements the caller's shapes count as one.

    Args:
        dtype: a key of :data:`BITS` or of :data:`NAMES`; a ``torch.dtype``; a ``numpy.dtype`` or numpy's type of a
            scalar, also of ml_dtypes and jax.

    Raises:
        Invalid: it is none of these, or elements of the other byte order.
    """
    if isinstance(dtype, str) and dtype in BITS:
        return dtype, 1
    name = _library_name(dtype)
    if name not in NAMES:
        raise Invalid(
            f"unknown dtype {dtype!r}; known are {', '.join(BITS)}, and most of these as torch, numpy and ml_dtypes"
            f" name them"
        )
    if getattr(dtype, "byteorder", "") == ">":
        raise Invalid(f"the dtype {dtype!r} has the other byte order; convert it to that of this machine")
    return NAMES[name], 2 if name == PAIRS else 1


def _library_name(dtype: object) -> str:
    """Return what a library calls a type: ``bfloat16`` for ``torch.bfloat16`` and for the type of ml_dtypes."""
    if isinstance(dtype, type):
        return dtype.__name__.removesuffix("_")  # numpy.bool was numpy.bool_
    name = getattr(dtype, "name", None)  # numpy's; torch has none
    return name if isinstance(name, str) else str(dtype).removeprefix("torch.")


def nbytes(dtype: str, shape: Sequence[int]) -> int:
    """Return the bytes of a tensor: elements times bits, which must fill whole bytes.

    Raises:
        Invalid: the dtype is unknown, a dimension is negative, or a packed tensor ends inside a byte.
    """
    bits = BITS.get(dtype)
    if bits is None:
        raise Invalid(f"unknown dtype {dtype!r}; known are {', '.join(BITS)}")
    if shape and min(shape) < 0:
        raise Invalid(f"shape {tuple(shape)} has a negative dimension")
    total = bits * math.prod(map(index, shape))  # numpy's integers may overflow, and cannot be sent
    if total % 8:
        raise Invalid(
            f"a {dtype} tensor of shape {tuple(shape)} takes {total} bits, which is no whole number of bytes;"
            f" pad its last dimension"
        )
    return total // 8
