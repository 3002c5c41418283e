"""A stand-in for torch's caching allocator on a GPU, so that a MemPool can be made on devices in host memory."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from inspect import unwrap
from typing import Any

import numpy as np
import pytest
import torch

from cubroker.integrations import torch as bridge
from cubroker.integrations.torch import SEGMENT

TAKE = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
GIVE_BACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)

_in_use: list[Allocator] = []


class Allocator:
    """As much of torch's caching allocator as a pool needs, in host memory: a segment for every tensor, which keeps it.

    Segments are given back together, when nothing refers to this any more.
    """

    def __init__(self, calls: tuple[int, int]) -> None:
        self.take, self.give_back = TAKE(calls[0]), GIVE_BACK(calls[1])
        self.blocks: dict[int, int] = {}

    def make(self, *shape: int) -> torch.Tensor:
        """Return a tensor in a new segment."""
        nbytes = 4 * math.prod(shape)
        pointer = self.take(SEGMENT, 0, None)
        if pointer is None:
            raise torch.cuda.OutOfMemoryError
        self.blocks[pointer] = nbytes
        data = (ctypes.c_char * nbytes).from_address(pointer)
        data.keeper = self  # type: ignore[attr-defined]
        return torch.from_numpy(np.frombuffer(data, np.float32)).reshape(shape)

    def snapshot(self) -> list[dict[str, object]]:
        blocks = [(pointer, {"size": size, "state": "active_allocated"}) for pointer, size in self.blocks.items()]
        rest = {"size": SEGMENT, "state": "inactive"}
        return [{"address": pointer, "blocks": [block, rest]} for pointer, block in blocks]

    def __del__(self) -> None:
        for pointer in self.blocks:
            self.give_back(pointer, SEGMENT, 0, None)


def make(*shape: int) -> torch.Tensor:
    """Make a tensor as torch does within a pool's block."""
    return _in_use[-1].make(*shape)


def calls() -> tuple[Any, Any]:
    """What torch was told to call within a pool's block, for a segment and with one that is given back."""
    return _in_use[-1].take, _in_use[-1].give_back


@contextmanager
def _using(allocator: Allocator, _: object) -> Iterator[None]:
    _in_use.append(allocator)
    try:
        yield
    finally:
        _in_use.pop()


@contextmanager
def standing_in() -> Iterator[None]:
    """Have every MemPool of this process allocate that way within a ``with`` block.

    What torch is given is cached for the process, so that none of it may stay.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bridge, "_check_torch", lambda *_: None)
        patch.setattr(bridge, "_allocator", unwrap(vars(bridge)["_allocator"]))
        patch.setattr(bridge.MemPool, "_warm_up", lambda _: None)
        patch.setattr(torch._C, "_cuda_customAllocator", lambda *addresses: addresses, raising=False)
        patch.setattr(torch.cuda, "MemPool", Allocator)
        patch.setattr(torch.cuda, "use_mem_pool", _using)
        patch.setattr(torch.cuda, "device", lambda _: nullcontext())
        yield
