"""Element types as numpy, DLPack and torch have them.

DLPack's codes are those of its version 1.1 (``DLDataTypeCode`` in dlpack.h). Torch is imported on first use.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from cubroker.protocol.dtypes import BITS, NAMES

if TYPE_CHECKING:
    import torch


class Element(NamedTuple):
    """One element type."""

    #: numpy's name of it in ``__array_interface__``; None if numpy itself has no such type
    typestr: str | None
    #: DLPack's type code
    code: int


INT, UINT, FLOAT, BFLOAT, COMPLEX, BOOL = 0, 1, 2, 4, 5, 6

ELEMENTS: dict[str, Element] = {
    "BOOL": Element("|b1", BOOL),
    "F4": Element(None, 17),
    "F6_E2M3": Element(None, 15),
    "F6_E3M2": Element(None, 16),
    "U8": Element("|u1", UINT),
    "I8": Element("|i1", INT),
    "F8_E5M2": Element(None, 12),
    "F8_E4M3": Element(None, 10),
    "F8_E8M0": Element(None, 14),
    "F8_E4M3FNUZ": Element(None, 11),
    "F8_E5M2FNUZ": Element(None, 13),
    "I16": Element("<i2", INT),
    "U16": Element("<u2", UINT),
    "F16": Element("<f2", FLOAT),
    "BF16": Element(None, BFLOAT),
    "I32": Element("<i4", INT),
    "U32": Element("<u4", UINT),
    "F32": Element("<f4", FLOAT),
    "C64": Element("<c8", COMPLEX),
    "F64": Element("<f8", FLOAT),
    "I64": Element("<i8", INT),
    "U64": Element("<u8", UINT),
}
"""Every dtype of ``protocol/dtypes.py``, by its safetensors name."""


def carrier(dtype: str) -> str:
    """Return the typestr of unsigned integers as wide as ``dtype``; bytes for types that are packed."""
    return f"<u{max(BITS[dtype] // 8, 1)}"


@cache
def torch_dtypes() -> dict[str, torch.dtype]:
    """Return the torch dtype of every dtype that the installed torch has."""
    import torch

    return {dtype: getattr(torch, name) for name, dtype in NAMES.items() if hasattr(torch, name)}


@cache
def torch_names() -> dict[torch.dtype, str]:
    """Return the same the other way round."""
    return {known: dtype for dtype, known in torch_dtypes().items()}
