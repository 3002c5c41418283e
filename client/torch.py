"""A pool's tensors as torch tensors, all of them at the price of one import per allocation.

Each tensor has a storage of its own, a slice of its allocation's, since torch saves, pickles, copies and sends whole
storages. Slicing a storage and setting a tensor on the slice are two calls into C; importing every tensor by DLPack
costs several times as much.
"""

from __future__ import annotations

from typing import NoReturn

from cubroker.client.pool import Pool
from cubroker.client.sources import Source, refuse
from cubroker.protocol import dtypes

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


def _refuse(*_: object) -> NoReturn:
    raise TypeError(
        "a tensor of a pool cannot be moved to memory that torch shares, nor be sent to another process; open a Broker"
        " there, and attach by name, or send tensor.clone()"
    )


_REFUSED = {"_share_fd_cpu_": _refuse, "_share_filename_cpu_": _refuse, "_share_cuda_": _refuse}
"""What torch calls on a storage to share it with another process.

On the CPU it copies the storage to memory that it can share and puts that in its place: the tensor, and every parameter
on it, would leave the pool unnoticed. Torch keeps a storage's Python object, and with it these attributes, for as long
as the storage lives.
"""


def state_dict(pool: Pool) -> dict[str, torch.Tensor]:
    """Return every tensor of ``pool`` as a view of the shared memory, in the pool's order.

    A dtype of four bits has two elements in one of torch's, so the last dimension is half as long. What torch
    has no dtype for comes as ``uint8``: in its own shape if an element is a byte, else flat.

    The tensors keep the memory mapped, and the lease with it, until the last of them is gone, whatever becomes
    of ``pool``. Do not write to them: everybody sees the same bytes. Each has a storage of its own, of exactly its
    bytes: it can be saved, pickled and copied, and refuses to be moved to another process (``TypeError``).

    Raises:
        Invalid: the pool is closed.
    """
    slabs = {number: from_dlpack(slab) for number, slab in zip(pool.allocations, pool.slabs, strict=True)}
    storages = {number: slab.untyped_storage() for number, slab in slabs.items()}
    forms: dict[tuple[str, tuple[int, ...]], tuple[torch.dtype, tuple[int, ...], int]] = {}
    state: dict[str, torch.Tensor] = {}
    for spec in pool.layout.tensors:
        number = spec.allocation
        if number not in slabs:  # the shard of another device
            continue
        form = forms.get((spec.dtype, spec.shape))
        if form is None:
            form = forms[spec.dtype, spec.shape] = _form(spec.dtype, spec.shape)
        dtype, shape, nbytes = form
        tensor = slabs[number].new_empty(0 if nbytes else shape, dtype=dtype)
        if nbytes:  # else there is nothing to share, and torch.save must not find it at its neighbour's address
            storage = storages[number][spec.offset : spec.offset + nbytes]
            storage.__dict__.update(_REFUSED)
            tensor.set_(storage, 0, shape)  # type: ignore[call-overload]  # the strides may be left out
        state[spec.name] = tensor
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


def _form(dtype: str, shape: tuple[int, ...]) -> tuple[torch.dtype, tuple[int, ...], int]:
    """Return the dtype and the shape that a tensor has in torch, and its bytes."""
    nbytes = dtypes.nbytes(dtype, shape)
    if dtype == _PAIRS and dtype in DTYPES and shape and shape[-1] % 2 == 0:
        return DTYPES[dtype], (*shape[:-1], shape[-1] // 2), nbytes
    if dtypes.BITS[dtype] % 8:
        return torch.uint8, (nbytes,), nbytes
    return DTYPES.get(dtype, torch.uint8), shape, nbytes
