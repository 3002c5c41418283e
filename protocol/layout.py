"""Layouts: which tensors a pool has, and where each of them lies.

A layout is made once, by the writer, and travels as bytes: the broker checks it when it is
created and hands the same bytes to every reader, so an attach costs no re-encoding.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Generator, Hashable, Iterable, Mapping, Sequence
from operator import index
from typing import Annotated, NamedTuple, Self, SupportsIndex, TypeVar

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

STEP = 64
"""Tensors that are checked at once by :func:`outline`: about 0.1 ms."""

NOWHERE = -1
"""Where a tensor without elements begins: it takes no bytes, and so overlaps none."""

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

    @property
    def outline(self) -> Outline:
        """What of it decides how much memory it takes."""
        return Outline(self.allocations, len(self.tensors))

    def check(self) -> None:
        """Raise ``Invalid`` unless every tensor lies whole, aligned and alone in an allocation of this layout."""
        check = _Check(self.allocations, len(self.tensors))
        for tensor in self.tensors:
            check.add(tensor)

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


class Outline(NamedTuple):
    """What of a layout decides how much memory it takes: its allocations, in bytes, and how many tensors it has."""

    allocations: tuple[int, ...]
    tensors: int

    @property
    def nbytes(self) -> int:
        """Bytes of all allocations together, padding included."""
        return sum(self.allocations)


def outline(data: bytes) -> Generator[None, None, Outline]:
    """Check an encoded layout that came from outside, a few tensors between one ``yield`` and the next.

    A whole layout takes a third of a second to decode and check, and 40 MiB; here no tensor outlives its step.
    Returns the layout's outline.

    Raises:
        Invalid: as :meth:`Layout.decode`.
    """
    encoded: _Encoded = wire.unpack(data, _Encoded)
    tensors = encoded.tensors
    check = _Check(encoded.allocations, len(tensors))
    for start in range(0, len(tensors), STEP):
        yield
        for tensor in wire.unpack(wire.pack((tensors[start : start + STEP], ())), Layout).tensors:
            check.add(tensor)
    return Outline(encoded.allocations, len(tensors))


class _Encoded(msgspec.Struct, frozen=True, array_like=True):
    """A layout whose tensors are not decoded yet."""

    tensors: Annotated[tuple[msgspec.Raw, ...], msgspec.Meta(max_length=MAX_TENSORS)]
    allocations: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_ALLOCATIONS)]


class _Check:
    """Takes the tensors of a layout one by one, and raises ``Invalid`` at the first that does not fit in.

    The bytes that are taken are kept as runs: a layout without gaps is one run however many tensors it has, since each
    tensor takes whole multiples of the alignment. Bytes of different allocations are told apart by where they begin,
    so that one sorted list has all runs: where each begins, and where it ends.
    """

    def __init__(self, allocations: Sequence[int], tensors: int) -> None:
        self._allocations = allocations
        self._starts: dict[str, int] = {}  # by name
        self._edges: list[int] = []
        if tensors > MAX_TENSORS:
            raise Invalid(f"a layout of {tensors} tensors; the most is {MAX_TENSORS}")
        if len(allocations) > MAX_ALLOCATIONS:
            raise Invalid(f"a layout of {len(allocations)} allocations; the most is {MAX_ALLOCATIONS}")
        for size in allocations:
            if size <= 0:
                raise Invalid(f"an allocation of {size} bytes; it must have at least 1")
        if sum(allocations) > MAX_EXTENT:
            raise Invalid(f"a layout of {sum(allocations)} bytes; the most is {MAX_EXTENT}")

    def add(self, tensor: TensorSpec) -> None:
        """Take one more tensor."""
        name = tensor.name
        if name in self._starts:
            raise Invalid(f"tensor {name!r} appears twice; names are unique within a pool")
        size = self._size(tensor)
        start = tensor.allocation * 2 * MAX_EXTENT + tensor.offset
        if size and not self._take(start, start + round_up(size, ALIGNMENT)):
            first, second = self._overlapping(name, start, size)
            raise Invalid(f"tensors {first!r} and {second!r} overlap in allocation {tensor.allocation}")
        self._starts[name] = start if size else NOWHERE

    def _size(self, tensor: TensorSpec) -> int:
        """Return the bytes of a tensor, which lies whole and aligned in its allocation."""
        name, shape, offset = tensor.name, tensor.shape, tensor.offset
        if not 0 < len(name) <= MAX_NAME:
            raise Invalid(f"a tensor name of {len(name)} characters; it must have 1 to {MAX_NAME}")
        if len(shape) > MAX_RANK or (shape and max(shape) > MAX_EXTENT):
            raise Invalid(
                f"tensor {name!r} has rank {len(shape)} and a largest dimension of {max(shape)};"
                f" the most are {MAX_RANK} and {MAX_EXTENT}"
            )
        if not 0 <= tensor.allocation < len(self._allocations):
            raise Invalid(f"tensor {name!r} lies in allocation {tensor.allocation} of {len(self._allocations)}")
        if offset < 0 or offset % ALIGNMENT:
            raise Invalid(f"tensor {name!r} starts at byte {offset}, no multiple of {ALIGNMENT}")
        size, room = tensor.nbytes, self._allocations[tensor.allocation]
        if offset + size > room:
            raise Invalid(f"tensor {name!r} ends at byte {offset + size} of an allocation of {room}")
        return size

    def _take(self, start: int, end: int) -> bool:
        """Add a run of bytes; False if some of them are taken."""
        edges = self._edges
        if not edges or start > edges[-1]:
            edges += (start, end)
        elif start == edges[-1]:  # as nearly always
            edges[-1] = end
        else:
            place = bisect_right(edges, start)
            if place % 2 or edges[place] < end:
                return False
            low = place - 1 if place and edges[place - 1] == start else place
            high = place + 1 if edges[place] == end else place
            edges[low:high] = [start] * (low == place) + [end] * (high == place)
        return True

    def _overlapping(self, name: str, start: int, size: int) -> tuple[str, str]:
        """Return a tensor and another that it overlaps, in order: the other begins last of those before our end."""
        at, other = max((at, other) for other, at in self._starts.items() if at < start + size)
        return (other, name) if at <= start else (name, other)


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


wire.prepare(Layout, _Encoded)
