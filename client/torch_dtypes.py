"""The dtypes that pools and torch have in common, and torch's tensors by them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray

_NAMES = {
    "BOOL": "bool",
    "F4": "float4_e2m1fn_x2",
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "C64": "complex64",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
}

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, theirs) for name, theirs in _NAMES.items() if hasattr(torch, theirs)
}
"""The torch dtype of every dtype that this version of torch has one for."""

_SOURCES = {theirs: name for name, theirs in DTYPES.items()}

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

PAIRS = "F4"
"""The dtype whose elements torch counts in pairs."""


def elements(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], NDArray[Any]]:
    """Return a tensor in host memory as its dtype, its shape, in elements, and its elements as integers.

    A dtype that pools do not have has torch's name, and its elements are as they are.

    Raises:
        BufferError: it is on another device.
        RuntimeError, TypeError: torch does not hand out its memory: it is sparse, say, or quantized.
    """
    name = _SOURCES.get(tensor.dtype)
    if tensor.device.type != "cpu":
        raise BufferError(f"it is on {tensor.device}")
    plain = tensor.detach().resolve_conj().resolve_neg()
    bits = (plain.view(_INTEGERS[tensor.dtype.itemsize]) if name else plain).numpy()
    shape = tuple(tensor.shape)
    if name == PAIRS and shape:
        shape = (*shape[:-1], shape[-1] * 2)
    return name or str(tensor.dtype), shape, bits
