"""A pool's tensors as torch tensors, all of them at the price of one import per allocation.

Each tensor has a storage of its own, a slice of its allocation's, since torch saves, pickles, copies and sends whole
storages. Slicing a storage and setting a tensor on the slice are two calls into C; importing every tensor by DLPack
costs several times as much.
"""

from __future__ import annotations

from typing import NoReturn

from cubroker.client.pool import Pool
from cubroker.protocol import dtypes

try:
    import torch
    from torch.utils.dlpack import from_dlpack

    from cubroker.client.torch_dtypes import DTYPES, PAIRS
except ImportError as error:
    raise ImportError(f"cubroker.client.torch needs PyTorch ({error}): pip install 'cubroker[torch]'") from error


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


def _form(dtype: str, shape: tuple[int, ...]) -> tuple[torch.dtype, tuple[int, ...], int]:
    """Return the dtype and the shape that a tensor has in torch, and its bytes."""
    nbytes = dtypes.nbytes(dtype, shape)
    if dtype == PAIRS and dtype in DTYPES and shape and shape[-1] % 2 == 0:
        return DTYPES[dtype], (*shape[:-1], shape[-1] // 2), nbytes
    if dtypes.BITS[dtype] % 8:
        return torch.uint8, (nbytes,), nbytes
    return DTYPES.get(dtype, torch.uint8), shape, nbytes
