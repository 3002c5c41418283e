"""Layouts: which tensors a pool has, of which element types, and where each of them lies.

The writer makes a layout once, and it travels as bytes: the broker checks it at the create and hands the same bytes to
every reader, so an attach encodes nothing.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Collection, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import zip_longest
from operator import index
from typing import Annotated, Any, NamedTuple, Self, SupportsIndex, TypeVar

import msgspec

from cubroker.protocol.encoding import encode
from cubroker.protocol.errors import Invalid

ALIGNMENT = 256  #: Bytes. Every tensor starts at a multiple of this, which cuBLAS and vector loads need for full speed.

MAX_TENSORS = 100_000
MAX_ALLOCATIONS = 4096
MAX_NAME = 512
MAX_RANK = 32
MAX_EXTENT = 1 << 48
"""Bytes: no dimension, tensor or layout is larger; device addresses have 48 bits."""

MAX_ENCODED = 12 << 20  #: Bytes of an encoded layout; one of 100,000 tensors with names of 80 characters has 10 MiB.
STEP = 64  #: Tensors that :func:`outline` checks at once: about 0.1 ms.

Group = TypeVar("Group", bound=Hashable)
T = TypeVar("T")

Shape = Iterable[SupportsIndex]  #: Dimensions as callers pass them: a tuple, a list, a ``torch.Size``, a numpy array.

Tensors = Iterable[tuple[str, object, Shape]] | Mapping[str, tuple[object, Shape]]
"""Tensors as callers pass them: triples of name, dtype and shape, or a mapping of name to dtype and shape."""


class TensorSpec(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One tensor of a layout."""

    name: Annotated[str, msgspec.Meta(max_length=MAX_NAME)]
    #: As safetensors names it: a key of :data:`BITS`.
    dtype: Annotated[str, msgspec.Meta(max_length=16)]
    shape: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_RANK)]
    #: Index of the allocation where it lies.
    allocation: int
    #: Bytes from the allocation's start.
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes that the elements take."""
        return _nbytes(self.name, self.dtype, self.shape)


class Layout(msgspec.Struct, frozen=True, array_like=True, dict=True):
    """The tensors of a pool and the allocations that hold them. Build one with :meth:`pack`.

    Tensors are stored apart, except that one may have several names: tensors of the same dtype, shape and place.
    """

    #: In the order of the writer.
    tensors: Annotated[tuple[TensorSpec, ...], msgspec.Meta(max_length=MAX_TENSORS)]
    #: The size in bytes of each allocation.
    allocations: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_ALLOCATIONS)]

    @property
    def nbytes(self) -> int:
        """Bytes of all allocations together, padding included."""
        return sum(self.allocations)

    @classmethod
    def pack(
        cls,
        tensors: Tensors,
        *,
        slab: int | None = None,
        groups: Mapping[str, Hashable] | None = None,
        tied: Mapping[str, str] | None = None,
    ) -> Self:
        """Lay tensors out one after the other, each aligned to 256 bytes.

        Args:
            tensors: ``(name, dtype, shape)`` triples, or a mapping of name to ``(dtype, shape)``. A dtype is one of
                :data:`BITS`, or as torch or numpy name it (:func:`dtype_named`): ``"BF16"``,
                ``torch.bfloat16``, ``"bfloat16"``, ``ml_dtypes.bfloat16``.
            slab: the most bytes of one allocation. By default all tensors share one. A tensor larger
                than ``slab`` gets an allocation of its own, since a tensor is never split.
            groups: the group of each tensor by name, such as the device of a plan. Tensors of different groups share
                no allocation.
            tied: the first name of each tensor that is given a second one, by the second: it is stored once.

        Raises:
            Invalid: a name occurs twice, a dtype is unknown, a dimension is negative, a limit is exceeded, a tensor has
                no group, or a tensor is tied to one that does not precede it or has another dtype, shape or group.
        """
        if slab is not None and slab < ALIGNMENT:
            raise Invalid(
                f"a slab of {slab} bytes is less than the alignment of a tensor, {ALIGNMENT}; use larger ones"
            )
        placed: list[TensorSpec] = []
        names: set[str] = set()
        sizes: list[int] = []
        last: dict[Hashable, int] = {}  # the allocation that each group fills now
        ties = tied or {}
        firsts: dict[str, tuple[TensorSpec, Hashable]] = {}
        for name, given, dimensions in triples(tensors):
            _add_name(names, name)
            dtype, shape = form(name, given, dimensions)
            size = round_up(_nbytes(name, dtype, shape), ALIGNMENT)
            group = None if groups is None else _group(groups, name)
            if name in ties:
                placed.append(_tie(name, ties[name], (dtype, shape, group), firsts.get(ties[name])))
                continue
            here = last.get(group)
            if here is None or (slab is not None and sizes[here] and sizes[here] + size > slab):
                here = last[group] = len(sizes)
                sizes.append(0)
            placed.append(TensorSpec(name, dtype, shape, here, sizes[here]))
            if ties:
                firsts[name] = placed[-1], group
            sizes[here] += size
        if strangers := ties.keys() - names:
            raise Invalid(f"the layout has no tensor {min(strangers)!r} to be tied")
        # Tensors without elements still need an address; an allocation is never empty.
        layout = cls(tuple(placed), tuple(max(size, ALIGNMENT) for size in sizes))
        _check_extent(layout.allocations, len(placed))
        vars(layout)["_checked"] = True  # the tensors lie apart and whole, since they were placed one after the other
        return layout

    def spread(self, groups: Mapping[str, Group]) -> tuple[Group, ...]:
        """Return the group of each allocation.

        Args:
            groups: the group of each tensor by name.

        Raises:
            Invalid: an allocation has tensors of two groups, or none; a tensor has no group, or a group no tensor.
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
        """What decides how much memory the layout takes."""
        return Outline(self.allocations, len(self.tensors))

    def check(self) -> None:
        """Raise ``Invalid`` unless every tensor lies whole, aligned and apart in an allocation of this layout."""
        _ = self._checked

    @cached_property
    def _checked(self) -> bool:
        """Whether the layout passed the check, which takes milliseconds for a large model and is made once."""
        check = _Check(self.allocations, len(self.tensors), self.tensors.__getitem__)
        for tensor in self.tensors:
            check.add(tensor)
        return True

    def difference(self, other: Layout) -> str:
        """Return the first difference from another layout, in words that follow the name of this layout's version."""
        for tensor, there in zip(self.tensors, other.tensors, strict=False):
            if tensor != there:
                return f"its tensor {_described(tensor)} is {_described(there)} here"
        if len(self.tensors) != len(other.tensors):
            return f"it has {len(self.tensors)} tensors, and not {len(other.tensors)}"
        pairs = zip_longest(self.allocations, other.allocations, fillvalue=0)
        number, one, two = next((number, *pair) for number, pair in enumerate(pairs) if pair[0] != pair[1])
        return f"its allocation {number} has {one} bytes, and not {two}"

    def encode(self) -> bytes:
        """Return the layout as it travels; raises ``Invalid`` if it is too large, or a field cannot be sent."""
        try:
            data = encode(self)
        except (TypeError, UnicodeEncodeError, OverflowError) as error:
            raise Invalid(f"a Layout that cannot be sent: {error}") from None
        if len(data) > MAX_ENCODED:
            raise Invalid(
                f"a layout of {len(self.tensors)} tensors takes {len(data)} bytes to describe; the most is"
                f" {MAX_ENCODED}. Use shorter names, or several pools"
            )
        return data

    @staticmethod
    def decode(data: bytes) -> Layout:
        """Read and check a layout that came from outside; raises ``Invalid``."""
        layout = _decode(data, _LAYOUT)
        layout.check()
        return layout


class TensorIndex:
    """A layout, and its tensors by name; with ``allocations`` only the tensors of these."""

    __slots__ = ("layout", "tensors")

    def __init__(self, layout: Layout, allocations: Collection[int] | None = None) -> None:
        self.layout = layout
        self.tensors: dict[str, TensorSpec] = {
            tensor.name: tensor for tensor in layout.tensors if allocations is None or tensor.allocation in allocations
        }

    @staticmethod
    @lru_cache(maxsize=8)
    def decode(data: bytes) -> TensorIndex:
        """Like :meth:`Layout.decode`; the last few are cached, since processes attach to the same pools again."""
        return TensorIndex(Layout.decode(data))


class Outline(NamedTuple):
    """What decides how much memory a layout takes: its allocations, in bytes, and the number of its tensors."""

    allocations: tuple[int, ...]
    tensors: int

    @property
    def nbytes(self) -> int:
        """Bytes of all allocations together, padding included."""
        return sum(self.allocations)


def round_up(nbytes: int, unit: int) -> int:
    """Return the smallest multiple of ``unit`` that is no less than ``nbytes``."""
    return -(-nbytes // unit) * unit


def _described(tensor: TensorSpec) -> str:
    place = f"at byte {tensor.offset} of allocation {tensor.allocation}"
    return f"{tensor.name!r} ({tensor.dtype} {tensor.shape}, {place})"


# -- layouts that come from outside --------------------------------------------------------------------


def outline(data: bytes) -> Generator[None, None, Outline]:
    """Check an encoded layout that came from outside, a few tensors between one ``yield`` and the next.

    The largest layout takes a third of a second and 40 MiB to decode and check whole; here no tensor outlives its step.
    Returns the layout's outline.

    Raises:
        Invalid: as :meth:`Layout.decode`.
    """
    encoded = _decode(data, _ENCODED)
    tensors = encoded.tensors

    def decoded(start: int, count: int) -> tuple[TensorSpec, ...]:
        return _decode(encode((tensors[start : start + count], ())), _LAYOUT).tensors

    check = _Check(encoded.allocations, len(tensors), lambda number: decoded(number, 1)[0])
    for start in range(0, len(tensors), STEP):
        yield
        for tensor in decoded(start, STEP):
            check.add(tensor)
    return Outline(encoded.allocations, len(tensors))


class _Encoded(msgspec.Struct, frozen=True, array_like=True):
    """A layout whose tensors are not decoded yet."""

    tensors: Annotated[tuple[msgspec.Raw, ...], msgspec.Meta(max_length=MAX_TENSORS)]
    allocations: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_ALLOCATIONS)]


class _Check:
    """Takes the tensors of a layout one by one, and raises ``Invalid`` at the first that does not fit in.

    It keeps the taken bytes as runs, in one sorted list of starts and ends. A layout without gaps is one run per
    allocation, since each tensor takes whole multiples of the alignment. Each allocation has a range of numbers of its
    own, so that runs of different allocations never touch.

    Args:
        allocations: their sizes.
        tensors: how many there are.
        spec: returns an added tensor by its number; called when another tensor begins at the same place.
    """

    def __init__(self, allocations: Sequence[int], tensors: int, spec: Callable[[int], TensorSpec]) -> None:
        self._allocations = allocations
        self._spec = spec
        self._names: set[str] = set()
        self._numbers: dict[int, int] = {}  # of the first tensor with elements at each start
        self._edges: list[int] = []
        _check_extent(allocations, tensors)

    def add(self, tensor: TensorSpec) -> None:
        """Add one more tensor."""
        number = len(self._names)
        _add_name(self._names, tensor.name)
        size = self._size(tensor)
        start = tensor.allocation * 2 * MAX_EXTENT + tensor.offset
        if size and self._take(start, start + round_up(size, ALIGNMENT)):
            self._numbers[start] = number
        elif size and not self._tied(tensor, start):
            first, second = self._overlapping(tensor.name, start, size)
            raise Invalid(f"tensors {first!r} and {second!r} overlap in allocation {tensor.allocation}")

    def _size(self, tensor: TensorSpec) -> int:
        """Return the bytes of a tensor, which lies whole and aligned in its allocation."""
        name, offset, size = tensor.name, tensor.offset, tensor.nbytes
        if not 0 <= tensor.allocation < len(self._allocations):
            raise Invalid(f"tensor {name!r} lies in allocation {tensor.allocation} of {len(self._allocations)}")
        if offset < 0 or offset % ALIGNMENT:
            raise Invalid(f"tensor {name!r} starts at byte {offset}, no multiple of {ALIGNMENT}")
        if offset + size > (room := self._allocations[tensor.allocation]):
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

    def _tied(self, tensor: TensorSpec, start: int) -> bool:
        """Whether the tensor that begins at ``start`` is this one by another name."""
        number = self._numbers.get(start)
        if number is None:
            return False
        other = self._spec(number)
        return (other.dtype, other.shape) == (tensor.dtype, tensor.shape)

    def _overlapping(self, name: str, start: int, size: int) -> tuple[str, str]:
        """Return ``name`` and the tensor that it overlaps, in order of their start."""
        at = max(at for at in self._numbers if at < start + size)
        other = self._spec(self._numbers[at]).name
        return (other, name) if at <= start else (name, other)


def _check_extent(allocations: Sequence[int], tensors: int) -> None:
    """Raise ``Invalid`` if a layout has too many tensors or allocations, an empty allocation, or too many bytes."""
    if tensors > MAX_TENSORS:
        raise Invalid(f"a layout of {tensors} tensors; the most is {MAX_TENSORS}")
    if len(allocations) > MAX_ALLOCATIONS:
        raise Invalid(f"a layout of {len(allocations)} allocations; the most is {MAX_ALLOCATIONS}")
    for size in allocations:
        if size <= 0:
            raise Invalid(f"an allocation of {size} bytes; it must have at least 1")
    if sum(allocations) > MAX_EXTENT:
        raise Invalid(f"a layout of {sum(allocations)} bytes; the most is {MAX_EXTENT}")


def _add_name(names: set[str], name: str) -> None:
    """Add the name of one more tensor to those of a layout."""
    if name in names:
        raise Invalid(f"tensor {name!r} appears twice; names are unique within a pool")
    if not 0 < len(name) <= MAX_NAME:
        raise Invalid(f"a tensor name of {len(name)} characters, {name[:60]!r}; it must have 1 to {MAX_NAME}")
    names.add(name)


def _decode(data: bytes, decoder: msgspec.msgpack.Decoder[T]) -> T:
    """Return what the data encodes; raises ``Invalid`` for the same reasons as :func:`~.wire.unpack`."""
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Invalid(f"a message that cannot be read as {decoder.type.__name__}: {str(error)[:200]}") from None


# -- tensors as callers pass them ----------------------------------------------------------------------


def triples(tensors: Tensors) -> Iterator[tuple[str, object, Shape]]:
    """Yield the name, the dtype and the shape of each tensor; raises ``Invalid`` where one has another form.

    Names are plain texts: a subclass of ``str``, such as numpy's, cannot be sent.
    """
    if isinstance(tensors, Mapping):
        given: Iterable[Sequence[Any]] = ((name, *_elements(form)) for name, form in tensors.items())
    else:
        given = (_elements(each) for each in (tensors if isinstance(tensors, Iterable) else (tensors,)))
    for number, each in enumerate(given):
        if len(each) != 3 or not isinstance(each[0], str):
            what = f"{each[0]!r}" if isinstance(each[0], str) else f"number {number}"
            raise Invalid(
                f"tensor {what} of the layout has no name, dtype and shape: pass (name, dtype, shape), or a mapping of"
                f" names to (dtype, shape); publish() takes tensors as they are, with their elements"
            )
        yield str.__str__(each[0]), each[1], each[2]


def _elements(given: object) -> Sequence[Any]:
    """Return a sequence as it is, and anything else, such as an array, as the only element of one."""
    if type(given) is tuple and given:
        return given
    return given if isinstance(given, Sequence) and given and not isinstance(given, str | bytes) else (given,)


def form(name: str, dtype: object, dimensions: Shape) -> tuple[str, tuple[int, ...]]:
    """Return the key of a dtype, and a shape of any integers, such as numpy's, as plain ints in single elements.

    Raises:
        Invalid: the dtype is unknown, or of the other byte order, or the shape is none; the text names the tensor.
    """
    try:
        known, together = dtype_named(dtype)
    except Invalid as error:
        raise Invalid(f"tensor {name!r}: {error.message}") from None
    try:
        shape = tuple(map(int, map(index, dimensions)))
    except TypeError:
        raise Invalid(f"tensor {name!r} has the shape {dimensions!r}, which is no sequence of integers") from None
    return known, (*shape[:-1], shape[-1] * together) if shape and together != 1 else shape


def _tie(
    name: str, other: str, form: tuple[str, tuple[int, ...], Hashable], first: tuple[TensorSpec, Hashable] | None
) -> TensorSpec:
    """Return the spec of a tensor that is the ``first`` one by another name; ``form`` is its dtype, shape and group."""
    if first is None or (first[0].dtype, first[0].shape, first[1]) != form:
        raise Invalid(
            f"tensor {name!r} cannot be {other!r} by another name: that has to come before it, with the same dtype,"
            f" shape and device"
        )
    spec = first[0]
    return TensorSpec(name, spec.dtype, spec.shape, spec.allocation, spec.offset)


def _group(groups: Mapping[str, Group], name: str) -> Group:
    try:
        return groups[name]
    except KeyError:
        raise Invalid(f"nothing says where tensor {name!r} belongs; name the group of every tensor") from None


# -- element types -------------------------------------------------------------------------------------
#
# The names are those of safetensors: of the ``Dtype`` enumeration of its format, version 0.8 and later. It has types of
# less than one byte. Their elements are packed, so a tensor of them must fill whole bytes.
#
# Callers may also name a type as torch, numpy and ml_dtypes do, by the object or its name. Neither library is imported:
# their objects say their own names.


class Element(NamedTuple):
    """One element type."""

    #: Its size.
    bits: int
    #: What torch, numpy or ml_dtypes call it, if one lays out its elements as pools do.
    library: str | None
    #: numpy's name of it in ``__array_interface__``; None if numpy itself has no such type.
    typestr: str | None
    #: DLPack's type code (``DLDataTypeCode`` in dlpack.h of DLPack 1.1).
    code: int


INT, UINT, FLOAT, BFLOAT, COMPLEX, BOOL = 0, 1, 2, 4, 5, 6  #: Type codes of DLPack.
PAIRS = "float4_e2m1fn_x2"  #: Torch's type of two F4 elements, which its shapes count as one.

ELEMENTS: dict[str, Element] = {
    "BOOL": Element(8, "bool", "|b1", BOOL),
    "F4": Element(4, PAIRS, None, 17),
    "F6_E2M3": Element(6, None, None, 15),
    "F6_E3M2": Element(6, None, None, 16),
    "U8": Element(8, "uint8", "|u1", UINT),
    "I8": Element(8, "int8", "|i1", INT),
    "F8_E5M2": Element(8, "float8_e5m2", None, 12),
    "F8_E4M3": Element(8, "float8_e4m3fn", None, 10),
    "F8_E8M0": Element(8, "float8_e8m0fnu", None, 14),
    "F8_E4M3FNUZ": Element(8, "float8_e4m3fnuz", None, 11),
    "F8_E5M2FNUZ": Element(8, "float8_e5m2fnuz", None, 13),
    "I16": Element(16, "int16", "<i2", INT),
    "U16": Element(16, "uint16", "<u2", UINT),
    "F16": Element(16, "float16", "<f2", FLOAT),
    "BF16": Element(16, "bfloat16", None, BFLOAT),
    "I32": Element(32, "int32", "<i4", INT),
    "U32": Element(32, "uint32", "<u4", UINT),
    "F32": Element(32, "float32", "<f4", FLOAT),
    "C64": Element(64, "complex64", "<c8", COMPLEX),
    "F64": Element(64, "float64", "<f8", FLOAT),
    "I64": Element(64, "int64", "<i8", INT),
    "U64": Element(64, "uint64", "<u8", UINT),
}
"""Every dtype."""

BITS = {dtype: element.bits for dtype, element in ELEMENTS.items()}  #: Bits per element of every dtype.

LIBRARY_NAMES = {dtype: element.library for dtype, element in ELEMENTS.items() if element.library}
"""The name that libraries have for a dtype."""

DTYPES_BY_NAME = {name: dtype for dtype, name in LIBRARY_NAMES.items()}  #: The dtype of each such name.

_BIG_ENDIAN = {f">{each.typestr[1:]}" for each in ELEMENTS.values() if each.typestr and each.bits > 8}
"""numpy's names of the same types in the other byte order."""

TO_LITTLE_ENDIAN = 'a.astype(a.dtype.newbyteorder("="))'  #: How to convert an array of numpy's, in errors.


def carrier(dtype: str) -> str:
    """Return the typestr of unsigned integers as wide as ``dtype``; bytes for types that are packed."""
    return f"<u{max(BITS[dtype] // 8, 1)}"


def dtype_named(dtype: object) -> tuple[str, int]:
    """Return the dtype that a caller has named, and how many of its elements the caller's shapes count as one.

    Args:
        dtype: a key of :data:`BITS` or of :data:`DTYPES_BY_NAME`; a ``torch.dtype``; a ``numpy.dtype`` or numpy's type
            of a scalar, also of ml_dtypes and jax.

    Raises:
        Invalid: it is none of these, or elements of the other byte order.
    """
    if isinstance(dtype, str) and dtype in BITS:
        return dtype, 1
    name = _library_name(dtype)
    if name in _BIG_ENDIAN or (name in DTYPES_BY_NAME and getattr(dtype, "byteorder", "") == ">"):
        raise Invalid(
            f"the dtype {dtype!r} is big-endian, and elements of pools are little-endian; convert an array with"
            f" {TO_LITTLE_ENDIAN}"
        )
    if name not in DTYPES_BY_NAME:
        raise Invalid(
            f"unknown dtype {dtype!r}; known are {', '.join(BITS)}, and most of these as torch, numpy and ml_dtypes"
            f" name them"
        )
    return DTYPES_BY_NAME[name], 2 if name == PAIRS else 1


def _library_name(dtype: object) -> str:
    """Return what a library calls a type: ``bfloat16`` for ``torch.bfloat16`` and for the type of ml_dtypes."""
    if isinstance(dtype, type):
        return dtype.__name__.removesuffix("_")  # numpy.bool was numpy.bool_
    name = getattr(dtype, "name", None)  # numpy's; torch has none
    return name if isinstance(name, str) else str(dtype).removeprefix("torch.")


def nbytes(dtype: str, shape: Sequence[int]) -> int:
    """Return the bytes of a tensor: elements times bits, which must fill whole bytes.

    Raises:
        Invalid: the dtype is unknown, a dimension is negative, or a packed tensor ends inside a byte.
    """
    bits = BITS.get(dtype)
    if bits is None:
        raise Invalid(f"unknown dtype {dtype!r}; known are {', '.join(BITS)}")
    if shape and min(shape) < 0:
        raise Invalid(f"shape {tuple(shape)} has a negative dimension")
    total = bits * math.prod(map(index, shape))  # numpy's integers may overflow, and cannot be sent
    if total % 8:
        raise Invalid(
            f"a {dtype} tensor of shape {tuple(shape)} takes {total} bits, which is no whole number of bytes;"
            f" pad its last dimension"
        )
    return total // 8


def _nbytes(name: str, dtype: str, shape: Sequence[int]) -> int:
    try:
        return _size_within_limits(dtype, tuple(shape))  # callers may make a spec with a list
    except Invalid as error:
        raise Invalid(f"tensor {name!r}: {error.message}") from None


@lru_cache(maxsize=1024)  # the layers of a model have tensors of the same shapes, and each is asked for several times
def _size_within_limits(dtype: str, shape: tuple[int, ...]) -> int:
    if len(shape) > MAX_RANK or (shape and max(shape) > MAX_EXTENT):
        raise Invalid(
            f"a shape of rank {len(shape)} with a largest dimension of {max(shape)}; the most are {MAX_RANK} and"
            f" {MAX_EXTENT}"
        )
    return nbytes(dtype, shape)


# Built while this module is imported, for the reason that is given in cubroker.protocol.wire.prepare.
_LAYOUT = msgspec.msgpack.Decoder(Layout)
_ENCODED = msgspec.msgpack.Decoder(_Encoded)
