"""How numpy and DLPack name the element types of protocol/dtypes.py.

DLPack's codes are those of its version 1.1 (``DLDataTypeCode`` in dlpack.h).
"""

from __future__ import annotations

from typing import NamedTuple

from cubroker.protocol.dtypes import BITS


class Element(NamedTuple):
    """One element type.

    Attributes:
        typestr: numpy's name of it in ``__array_interface__``; None if numpy itself has no such type.
        extension: the name of the type in the package ml_dtypes, if it is there.
        code: DLPack's type code.
    """

    typestr: str | None
    extension: str | None
    code: int


INT, UINT, FLOAT, BFLOAT, COMPLEX, BOOL = 0, 1, 2, 4, 5, 6

ELEMENTS: dict[str, Element] = {
    "BOOL": Element("|b1", None, BOOL),
    "F4": Element(None, None, 17),
    "F6_E2M3": Element(None, None, 15),
    "F6_E3M2": Element(None, None, 16),
    "U8": Element("|u1", None, UINT),
    "I8": Element("|i1", None, INT),
    "F8_E5M2": Element(None, "float8_e5m2", 12),
    "F8_E4M3": Element(None, "float8_e4m3fn", 10),
    "F8_E8M0": Element(None, "float8_e8m0fnu", 14),
    "F8_E4M3FNUZ": Element(None, "float8_e4m3fnuz", 11),
    "F8_E5M2FNUZ": Element(None, "float8_e5m2fnuz", 13),
    "I16": Element("<i2", None, INT),
    "U16": Element("<u2", None, UINT),
    "F16": Element("<f2", None, FLOAT),
    "BF16": Element(None, "bfloat16", BFLOAT),
    "I32": Element("<i4", None, INT),
    "U32": Element("<u4", None, UINT),
    "F32": Element("<f4", None, FLOAT),
    "C64": Element("<c8", None, COMPLEX),
    "F64": Element("<f8", None, FLOAT),
    "I64": Element("<i8", None, INT),
    "U64": Element("<u8", None, UINT),
}


def carrier(dtype: str) -> str:
    """Return the typestr of unsigned integers as wide as ``dtype``; bytes for types that are packed."""
    return f"<u{max(BITS[dtype] // 8, 1)}"
