"""Layouts: which tensors a pool has, and where each of them lies.

A layout is made once, by the writer, and travels as bytes: the broker checks it when it is
created and hands the same bytes to every reader, so an attach costs no re-encoding.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Self

import msgspec

from cubroker.protocol import dtypes, wire
from cubroker.protocol.errors import Invalid

ALIGNMENT = 256
"""Bytes. Every tensor starts at a multiple of this, as cuBLAS and vector loads like it."""

MAX_TENSORS = 100_000
MAX_NAME = 512
MAX_RANK = 32
MAX_EXTENT = 1 << 48
"""Bytes: no allocation, dimension or tensor is larger; device addresses have 48 bits."""


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """One tensor: its name, dtype (safetensors' name), shape, and its place (allocation index, byte offset)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    allocation: int
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes that the elements take."""
        return dtypes.nbytes(self.dtype, self.shape)


class Layout(msgspec.Struct, frozen=True, array_like=True):
    """The tensors of a pool, in order, and the size in bytes of each allocation that holds them.

    Build one with :meth:`pack`; ``check`` is called wherever one comes from outside.
    """

    tensors: tuple[TensorSpec, ...]
    allocations: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all allocations together, padding included."""
        return sum(self.allocations)

    @classmethod
    def pack(
        cls,
        tensors: Iterable[tuple[str, str, Sequence[int]]] | Mapping[str, tuple[str, Sequence[int]]],
        *,
        slab: int | None = None,
    ) -> Self:
        """Lay tensors out one after the other, each aligned to 256 bytes.

        Args:
            tensors: ``(name, dtype, shape)`` triples, or a mapping of name to ``(dtype, shape)``.
            slab: the most bytes of one allocation. By default all tensors share one. A tensor larger
                than ``slab`` gets an allocation of its own, since a tensor is never split.

        Raises:
            Invalid: a name twice, an unknown dtype, a negative dimension, a limit exceeded.
        """
        if slab is not None and slab < ALIGNMENT:
            raise Invalid(f"a slab of {slab} bytes is less than the alignment of one tensor, {ALIGNMENT}")
        if isinstance(tensors, Mapping):
            tensors = ((name, dtype, shape) for name, (dtype, shape) in tensors.items())
        placed: list[TensorSpec] = []
        sizes: list[int] = []
        for name, dtype, shape in tensors:
            size = _aligned(dtypes.nbytes(dtype, shape))
            if not sizes or (slab is not None and sizes[-1] and sizes[-1] + size > slab):
                sizes.append(0)
            placed.append(TensorSpec(name, dtype, tuple(shape), len(sizes) - 1, sizes[-1]))
            sizes[-1] += size
        # Tensors without elements still need an address; an allocation is never empty.
        layout = cls(tuple(placed), tuple(max(size, ALIGNMENT) for size in sizes))
        layout.check()
        return layout

    def check(self) -> None:
        """Raise ``Invalid`` unless every tensor lies whole, aligned and alone in an allocation of this layout."""
        if len(self.tensors) > MAX_TENSORS:
            raise Invalid(f"a layout of {len(self.tensors)} tensors; the most is {MAX_TENSORS}")
        for size in self.allocations:
            if not 0 < size <= MAX_EXTENT:
                raise Invalid(f"an allocation of {size} bytes; it must have between 1 and {MAX_EXTENT}")
        seen: set[str] = set()
        spans: list[tuple[int, int, int, str]] = []
        for tensor in self.tensors:
            if tensor.name in seen:
                raise Invalid(f"tensor {tensor.name!r} appears twice; names are unique within a pool")
            seen.add(tensor.name)
            self._check_tensor(tensor)
            if tensor.nbytes:
                spans.append((tensor.allocation, tensor.offset, tensor.offset + tensor.nbytes, tensor.name))
        spans.sort()
        for (index, _, end, name), (other, start, _, next_name) in pairwise(spans):
            if index == other and start < end:
                raise Invalid(f"tensors {name!r} and {next_name!r} overlap in allocation {index}")

    def _check_tensor(self, tensor: TensorSpec) -> None:
        if not 0 < len(tensor.name) <= MAX_NAME:
            raise Invalid(f"a tensor name of {len(tensor.name)} characters; it must have 1 to {MAX_NAME}")
        if len(tensor.shape) > MAX_RANK or any(not 0 <= size <= MAX_EXTENT for size in tensor.shape):
            raise Invalid(f"tensor {tensor.name!r} has an impossible shape of rank {len(tensor.shape)}")
        if not 0 <= tensor.allocation < len(self.allocations):
            raise Invalid(f"tensor {tensor.name!r} lies in allocation {tensor.allocation} of {len(self.allocations)}")
        if tensor.offset < 0 or tensor.offset % ALIGNMENT:
            raise Invalid(f"tensor {tensor.name!r} starts at byte {tensor.offset}, no multiple of {ALIGNMENT}")
        room = self.allocations[tensor.allocation]
        if tensor.offset + tensor.nbytes > room:
            raise Invalid(
                f"tensor {tensor.name!r} ends at byte {tensor.offset + tensor.nbytes} of an allocation of {room}"
            )

    def encode(self) -> bytes:
        """Return the layout as it travels."""
        return wire.pack(self)

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Read and check a layout that came from outside; raises ``Invalid``."""
        layout = wire.unpack(data, cls)
        layout.check()
        return layout


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
