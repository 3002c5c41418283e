"""A pool's tensors as torch tensors, all of them at the price of one import per allocation."""

from __future__ import annotations

from collections.abc import Sequence

from cubroker.client.pool import Pool
from cubroker.client.sources import Source, refuse
from cubroker.protocol import TensorSpec, dtypes

try:
    import torch
    from torch.utils.dlpack import from_dlpack
except ImportError as error:
    raise ImportError(f"cubroker.client.torch needs PyTorch ({error}): pip install 'cubroker[torch]'") from error

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

_PAIRS = "F4"
"""The dtype whose elements torch counts in pairs."""

_PACKED = frozenset(name for name, bits in dtypes.BITS.items() if bits % 8)


def state_dict(pool: Pool) -> dict[str, torch.Tensor]:
    """Return every tensor of ``pool`` as a view of the shared memory, in the pool's order.

    A dtype of four bits has two elements in one of torch's, so the last dimension is half as long. What torch
    has no dtype for comes as ``uint8``: in its own shape if an element is a byte, else flat.

    The tensors keep the memory mapped, and the lease with it, until the last of them is gone, whatever becomes
    of ``pool``. Do not write to them: everybody sees the same bytes.

    Raises:
        Invalid: the pool is closed.
    """
    flats = {number: from_dlpack(slab) for number, slab in zip(pool.allocations, pool.slabs, strict=True)}
    typed: dict[tuple[int, str], torch.Tensor] = {}
    strides: dict[tuple[int, ...], tuple[int, ...]] = {}
    state: dict[str, torch.Tensor] = {}
    for spec in pool.layout.tensors:
        if spec.allocation not in flats:  # the shard of another device
            continue
        dtype, shape = spec.dtype, spec.shape
        if dtype in _PACKED:
            dtype, shape = _in_bytes(spec)
        flat = typed.get((spec.allocation, dtype))
        if flat is None:
            flat = typed[spec.allocation, dtype] = _cast(flats[spec.allocation], DTYPES.get(dtype, torch.uint8))
        stride = strides.get(shape)
        if stride is None:
            stride = strides[shape] = _contiguous(shape)
        state[spec.name] = flat.as_strided(shape, stride, spec.offset // flat.itemsize)
    return state


def describe(tensor: torch.Tensor) -> Source:
    """Return a tensor in host memory as what a pool's is filled from.

    Raises:
        Invalid: it is on another device, or torch does not hand out its memory: it is sparse, say, or quantized.
    """
    name = _SOURCES.get(tensor.dtype)
    if tensor.device.type != "cpu":
        raise refuse(tensor, f"it is on {tensor.device}")
    try:
        plain = tensor.detach().resolve_conj().resolve_neg()
        bits = (plain.view(_INTEGERS[tensor.dtype.itemsize]) if name else plain).numpy()
    except (RuntimeError, TypeError) as error:
        raise refuse(tensor, error) from error
    shape = tuple(tensor.shape)
    if name == _PAIRS and shape:
        shape = (*shape[:-1], shape[-1] * 2)
    return Source(name or str(tensor.dtype), shape, bits)


def _cast(slab: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a slab's bytes as elements of ``dtype``, without those at the end that make no whole one."""
    return slab[: slab.numel() // dtype.itemsize * dtype.itemsize].view(dtype)


def _in_bytes(spec: TensorSpec) -> tuple[str, tuple[int, ...]]:
    """Return the dtype and the shape that a tensor of packed elements has in torch, which counts whole bytes."""
    if spec.dtype == "F4" and "F4" in DTYPES and spec.shape and spec.shape[-1] % 2 == 0:
        return "F4", (*spec.shape[:-1], spec.shape[-1] // 2)
    return "U8", (spec.nbytes,)


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a C-contiguous tensor, in elements."""
    strides = [1] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * max(shape[axis + 1], 1)
    return tuple(strides)
