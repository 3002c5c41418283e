"""Element types, by the names that safetensors gives them.

Source: the ``Dtype`` enumeration of the safetensors format, version 0.8 and later, with types of less than one byte.
Their elements are packed, so a tensor of them must fill whole bytes.

Callers may also name a type as torch, numpy and ml_dtypes do, by the object or its name. Neither library is imported:
their objects say their own names.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from cubroker.protocol.errors import Invalid

BITS: dict[str, int] = {
    "BOOL": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}
"""Bits per element of every dtype."""

PAIRS = "float4_e2m1fn_x2"
"""Torch's type of two F4 elements, which its shapes count as one."""

NAMES: dict[str, str] = {
    "bool": "BOOL",
    PAIRS: "F4",
    "uint8": "U8",
    "int8": "I8",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "int16": "I16",
    "uint16": "U16",
    "float16": "F16",
    "bfloat16": "BF16",
    "int32": "I32",
    "uint32": "U32",
    "float32": "F32",
    "complex64": "C64",
    "float64": "F64",
    "int64": "I64",
    "uint64": "U64",
}
"""The dtype of every name that torch, numpy or ml_dtypes has for one whose elements it lays out as pools do."""

LIBRARY_NAMES = {dtype: name for name, dtype in NAMES.items()}
"""The same, the other way round."""


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
    total = bits * math.prod(shape)
    if total % 8:
        raise Invalid(
            f"a {dtype} tensor of shape {tuple(shape)} takes {total} bits, which is no whole number of bytes;"
            f" pad its last dimension"
        )
    return total // 8
