"""Layouts: which tensors a pool has, and where each of them lies.

A layout is made once, by the writer, and travels as bytes: the broker checks it when it is
created and hands the same bytes to every reader, so an attach costs no re-encoding.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import pairwise
from operator import index
from typing import Annotated, Self, SupportsIndex, TypeVar

import msgspec

from cubroker.protocol import dtypes, wire
from cubroker.protocol.errors import Invalid

ALIGNMENT = 256
"""Bytes. Every tensor starts at a multiple of this, as cuBLAS and vector loads like it."""

MAX_TENSORS = 100_000
MAX_ALLOCATIONS = 4096
MAX_NAME = 512
MAX_RANK = 32
MAX_EXTENT = 1 << 48
"""Bytes: no dimension, tensor or layout is larger; device addresses have 48 bits."""

MAX_ENCODED = 12 << 20
"""Bytes of an encoded layout; one of 100,000 tensors with names of 80 characters has 10 MiB."""

Group = TypeVar("Group", bound=Hashable)

Shape = Iterable[SupportsIndex]
"""Dimensions as callers have them: a tuple, a list, a ``torch.Size``, a numpy array."""


class TensorSpec(msgspec.Struct, frozen=True, array_like=True):
    """One tensor: its name, dtype (safetensors' name), shape, and its place (allocation index, byte offset)."""

    name: Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
    dtype: Annotated[str, msgspec.Meta(max_length=16)]
    shape: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_RANK)]
    allocation: int
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes that the elements take."""
        return _nbytes(self.name, self.dtype, self.shape)


class Layout(msgspec.Struct, frozen=True, array_like=True):
    """The tensors of a pool, in order, and the size in bytes of each allocation that holds them.

    Build one with :meth:`pack`; ``check`` is called wherever one comes from outside.
    """

    tensors: Annotated[tuple[TensorSpec, ...], msgspec.Meta(max_length=MAX_TENSORS)]
    allocations: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_ALLOCATIONS)]

    @property
    def nbytes(self) -> int:
        """Bytes of all allocations together, padding included."""
        return sum(self.allocations)

    @classmethod
    def pack(
        cls,
        tensors: Iterable[tuple[str, str, Shape]] | Mapping[str, tuple[str, Shape]],
        *,
        slab: int | None = None,
        groups: Mapping[str, Hashable] | None = None,
    ) -> Self:
        """Lay tensors out one after the other, each aligned to 256 bytes.

        Args:
            tensors: ``(name, dtype, shape)`` triples, or a mapping of name to ``(dtype, shape)``.
            slab: the most bytes of one allocation. By default all tensors share one. A tensor larger
                than ``slab`` gets an allocation of its own, since a tensor is never split.
            groups: for each tensor by name, what it belongs to, such as the device of a plan. Tensors of different
                groups share no allocation.

        Raises:
            Invalid: a name twice, an unknown dtype, a negative dimension, a limit exceeded, a tensor without a group.
        """
        if slab is not None and slab < ALIGNMENT:
            raise Invalid(
                f"a slab of {slab} bytes is less than the alignment of a tensor, {ALIGNMENT}; use larger ones"
            )
        if isinstance(tensors, Mapping):
            tensors = ((name, dtype, shape) for name, (dtype, shape) in tensors.items())
        placed: list[TensorSpec] = []
        sizes: list[int] = []
        last: dict[Hashable, int] = {}  # the allocation that each group fills now
        for name, dtype, dimensions in tensors:
            shape = _dimensions(name, dimensions)
            size = round_up(_nbytes(name, dtype, shape), ALIGNMENT)
            group = None if groups is None else _group(groups, name)
            here = last.get(group)
            if here is None or (slab is not None and sizes[here] and sizes[here] + size > slab):
                here = last[group] = len(sizes)
                sizes.append(0)
            placed.append(TensorSpec(name, dtype, shape, here, sizes[here]))
            sizes[here] += size
        # Tensors without elements still need an address; an allocation is never empty.
        layout = cls(tuple(placed), tuple(max(size, ALIGNMENT) for size in sizes))
        layout.check()
        return layout

    def spread(self, groups: Mapping[str, Group]) -> tuple[Group, ...]:
        """Return the group of each allocation, whose tensors are all of one group by name.

        Raises:
            Invalid: they are not, a tensor has no group, a group is of no tensor, or an allocation has no tensor.
        """
        found: dict[int, tuple[Group, str]] = {}
        for tensor in self.tensors:
            group = _group(groups, tensor.name)
            first, name = found.setdefault(tensor.allocation, (group, tensor.name))
            if first != group:
                raise Invalid(
                    f"tensors {name!r} ({first}) and {tensor.name!r} ({group}) share allocation {tensor.allocation};"
                    f" lay them out apart, with Layout.pack(..., groups=...)"
                )
        if strangers := groups.keys() - {tensor.name for tensor in self.tensors}:
            raise Invalid(f"the layout has no tensor {min(strangers)!r}")
        if empty := set(range(len(self.allocations))) - found.keys():
            raise Invalid(f"allocation {min(empty)} has no tensor, and so no group")
        return tuple(found[number][0] for number in range(len(self.allocations)))

    def check(self) -> None:
        """Raise ``Invalid`` unless every tensor lies whole, aligned and alone in an allocation of this layout."""
        self._check_extent()
        seen: set[str] = set()
        spans: list[tuple[int, int, int, str]] = []
        for tensor in self.tensors:
            if tensor.name in seen:
                raise Invalid(f"tensor {tensor.name!r} appears twice; names are unique within a pool")
            seen.add(tensor.name)
            if end := self._check_tensor(tensor):
                spans.append((tensor.allocation, tensor.offset, end, tensor.name))
        spans.sort()
        for (here, _, end, name), (there, start, _, next_name) in pairwise(spans):
            if here == there and start < end:
                raise Invalid(f"tensors {name!r} and {next_name!r} overlap in allocation {here}")

    def _check_extent(self) -> None:
        if len(self.tensors) > MAX_TENSORS:
            raise Invalid(f"a layout of {len(self.tensors)} tensors; the most is {MAX_TENSORS}")
        if len(self.allocations) > MAX_ALLOCATIONS:
            raise Invalid(f"a layout of {len(self.allocations)} allocations; the most is {MAX_ALLOCATIONS}")
        for size in self.allocations:
            if size <= 0:
                raise Invalid(f"an allocation of {size} bytes; it must have at least 1")
        if self.nbytes > MAX_EXTENT:
            raise Invalid(f"a layout of {self.nbytes} bytes; the most is {MAX_EXTENT}")

    def _check_tensor(self, tensor: TensorSpec) -> int:
        """Return the byte at which the tensor ends; 0 if it has no bytes and so cannot overlap."""
        if not 0 < len(tensor.name) <= MAX_NAME:
            raise Invalid(f"a tensor name of {len(tensor.name)} characters; it must have 1 to {MAX_NAME}")
        if len(tensor.shape) > MAX_RANK or any(size > MAX_EXTENT for size in tensor.shape):
            raise Invalid(
                f"tensor {tensor.name!r} has rank {len(tensor.shape)} and a largest dimension of {max(tensor.shape)};"
                f" the most are {MAX_RANK} and {MAX_EXTENT}"
            )
        if not 0 <= tensor.allocation < len(self.allocations):
            raise Invalid(f"tensor {tensor.name!r} lies in allocation {tensor.allocation} of {len(self.allocations)}")
        if tensor.offset < 0 or tensor.offset % ALIGNMENT:
            raise Invalid(f"tensor {tensor.name!r} starts at byte {tensor.offset}, no multiple of {ALIGNMENT}")
        size, room = tensor.nbytes, self.allocations[tensor.allocation]
        if tensor.offset + size > room:
            raise Invalid(f"tensor {tensor.name!r} ends at byte {tensor.offset + size} of an allocation of {room}")
        return tensor.offset + size if size else 0

    def encode(self) -> bytes:
        """Return the layout as it travels; raises ``Invalid`` if it is too large for that."""
        data = wire.pack(self)
        if len(data) > MAX_ENCODED:
            raise Invalid(
                f"a layout of {len(self.tensors)} tensors takes {len(data)} bytes to describe; the most is"
                f" {MAX_ENCODED}. Use shorter names, or several pools"
            )
        return data

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """Read and check a layout that came from outside; raises ``Invalid``."""
        layout = wire.unpack(data, cls)
        layout.check()
        return layout


def round_up(nbytes: int, unit: int) -> int:
    """Return the smallest multiple of ``unit`` that is no less than ``nbytes``."""
    return -(-nbytes // unit) * unit


def _group(groups: Mapping[str, Group], name: str) -> Group:
    try:
        return groups[name]
    except KeyError:
        raise Invalid(f"nothing says where tensor {name!r} belongs; name the group of every tensor") from None


def _dimensions(name: str, shape: Shape) -> tuple[int, ...]:
    """The shape in plain ints, whatever integers (of numpy, say) it came in."""
    try:
        return tuple(int(index(size)) for size in shape)
    except TypeError:
        raise Invalid(f"tensor {name!r} has the shape {shape!r}, which is no sequence of integers") from None


def _nbytes(name: str, dtype: str, shape: Sequence[int]) -> int:
    try:
        return dtypes.nbytes(dtype, shape)
    except Invalid as error:
        raise Invalid(f"tensor {name!r}: {error.message}") from None
