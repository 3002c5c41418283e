"""Element types, by the names that safetensors gives them.

Source: the ``Dtype`` enumeration of the safetensors format, version 0.8 and later, which knows
types of less than one byte. Their elements are packed, so a tensor of them must fill whole bytes.
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


def nbytes(dtype: str, shape: Sequence[int]) -> int:
    """Return the bytes that a tensor takes: elements times bits, which must fill whole bytes.

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
