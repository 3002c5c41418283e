"""The tensors of a pool as torch tensors, with one DLPack import per allocation.

Each tensor has a storage of its own, a slice of its allocation's storage, since torch saves, pickles, copies and sends
whole storages. The names of one tensor share a storage, as those of tied parameters do. Slicing a storage and setting a
tensor on the slice are two calls into C; a DLPack import per tensor costs several times as much.
"""

from __future__ import annotations

from typing import NoReturn

from cubroker.client.arrays import torch_dtypes
from cubroker.client.pool import Pool
from cubroker.protocol import dtypes

try:
    import torch
    from torch.utils.dlpack import from_dlpack

    DTYPES = torch_dtypes()
except ImportError as error:
    raise ImportError(f"cubroker.integrations.torch needs PyTorch ({error}): pip install 'cubroker[torch]'") from error

from cubroker.integrations.torch_mempool import MemPool, OutOfRoom

__all__ = ["MemPool", "OutOfRoom", "state_dict"]


def _refuse(*_: object) -> NoReturn:
    raise TypeError(
        "a tensor of a pool cannot be moved to memory that torch shares, nor be sent to another process; open a Broker"
        " there, and attach by name, or send tensor.clone()"
    )


_REFUSED = {"_share_fd_cpu_": _refuse, "_share_filename_cpu_": _refuse, "_share_cuda_": _refuse}
"""The methods that torch calls on a storage to share it with another process.

On the CPU torch copies the storage to memory that it can share and replaces it with the copy: the tensor, and every
parameter on it, would leave the pool unnoticed. Torch keeps a storage's Python object, and with it these attributes,
while the storage lives.
"""


def state_dict(pool: Pool) -> dict[str, torch.Tensor]:
    """Return every tensor of ``pool`` as a view of the shared memory, in the pool's order.

    Torch packs two elements of a four-bit dtype into one, so the last dimension is half as long. Dtypes that torch
    lacks come as ``uint8``: in their own shape if an element is a byte, else flat.

    The tensors keep the memory mapped, and the lease with it, until the last of them is gone, even if ``pool`` is
    closed. Do not write to them: all processes see the same bytes. Each has a storage of exactly its bytes: it can be
    saved, pickled and copied, and refuses to be moved to another process (``TypeError``). Names that are tied in the
    pool have tensors on the same storage.

    Raises:
        Invalid: the pool is closed.
    """
    views = {number: from_dlpack(view) for number, view in zip(pool.allocations, pool.allocation_views, strict=True)}
    slabs = {number: view.untyped_storage() for number, view in views.items()}
    storages: dict[tuple[int, int], torch.UntypedStorage] = {}
    forms: dict[tuple[str, tuple[int, ...]], tuple[torch.dtype, tuple[int, ...], int]] = {}
    state: dict[str, torch.Tensor] = {}
    for spec in pool.layout.tensors:
        number = spec.allocation
        if number not in views:  # the shard of another device
            continue
        form = forms.get((spec.dtype, spec.shape))
        if form is None:
            form = forms[spec.dtype, spec.shape] = _form(spec.dtype, spec.shape)
        dtype, shape, nbytes = form
        tensor = views[number].new_empty(0 if nbytes else shape, dtype=dtype)
        if nbytes:  # an empty tensor shares nothing, and torch.save must not find it at its neighbour's address
            storage = storages.get((number, spec.offset))
            if storage is None:
                storage = storages[number, spec.offset] = slabs[number][spec.offset : spec.offset + nbytes]
                storage.__dict__.update(_REFUSED)
            tensor.set_(storage, 0, shape)  # type: ignore[call-overload]  # the strides may be left out
        state[spec.name] = tensor
    return state


def _form(dtype: str, shape: tuple[int, ...]) -> tuple[torch.dtype, tuple[int, ...], int]:
    """Return a tensor's dtype and shape in torch, and its bytes."""
    nbytes = dtypes.nbytes(dtype, shape)
    if dtype == "F4" and dtype in DTYPES and shape and shape[-1] % 2 == 0:
        return DTYPES[dtype], (*shape[:-1], shape[-1] // 2), nbytes
    if dtypes.BITS[dtype] % 8:
        return torch.uint8, (nbytes,), nbytes
    return DTYPES.get(dtype, torch.uint8), shape, nbytes
