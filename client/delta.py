"""Updates: which arrays differ from an earlier version, and the layout of a version that shares memory with it.

Versions share whole allocations, so the layout of the next version decides how much they share:

- An allocation without a change is shared.
- If at least half of its live bytes change in place, it is replaced: a new allocation gets its number, with every
  tensor at its offset. So a version that changes the same tensors as the version before has the same layout, and
  ``Pool.switch`` works.
- Otherwise the tensors that change move to a new allocation at the end, and their old bytes stay behind in the shared
  one. If less than half of the allocation is live then, its tensors are copied to a new one without holes.

A tensor of another type or shape moves in any case. An allocation without tensors is dropped.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import lru_cache
from typing import NamedTuple

import msgspec

from cubroker.client.arrays import Array, Arrays, DeviceArray, HostArray, batches
from cubroker.client.tensor import SharedTensor
from cubroker.driver import Context
from cubroker.driver.buffers import address, differ
from cubroker.driver.kernels import Segment
from cubroker.protocol.layout import ALIGNMENT, Layout, TensorSpec, round_up

PIECE = 16
"""The address of bytes that a device digests must be a multiple of this."""

CHUNK = 16 << 20
"""Bytes of a device's memory that are read at a time, to be compared with an array in host memory."""

# -- layouts -------------------------------------------------------------------------------------------


class Change(NamedTuple):
    """A tensor that differs from the base's, or that the base lacks."""

    dtype: str
    shape: tuple[int, ...]
    #: Equal for all names of one tensor.
    key: Hashable
    #: The group of the allocation that it is put into if the base lacks it.
    group: Hashable = None


class Updated(NamedTuple):
    """The layout of an update, and where its allocations come from."""

    layout: Layout
    #: For each allocation the number of the base's allocation that it shares; None if it is new.
    kept: tuple[int | None, ...]
    #: The group of each allocation.
    groups: tuple[Hashable, ...]


class _Place:
    """The bytes of one tensor of the base, and what the update does with them."""

    def __init__(self, spec: TensorSpec) -> None:
        self.size = round_up(spec.nbytes, ALIGNMENT)
        self.offset = spec.offset
        self.names: list[str] = []
        #: Whether all its names change to one array of the same type and shape.
        self.rewritten = False
        #: Names whose tensors move to a new allocation.
        self.leaving: set[str] = set()

    @property
    def empty(self) -> bool:
        return len(self.leaving) == len(self.names)

    def take(self, specs: Mapping[str, TensorSpec], changes: Mapping[str, Change]) -> None:
        """Decide whether the changes rewrite the bytes in place, or move tensors to a new allocation."""
        given = {name: changes[name] for name in self.names if name in changes}
        alike = all((each.dtype, each.shape) == (specs[n].dtype, specs[n].shape) for n, each in given.items())
        one = len({each.key for each in given.values()}) == 1
        self.rewritten = alike and one and len(given) == len(self.names)
        self.leaving = set() if self.rewritten else set(given)

    def move(self) -> None:
        """Move the tensors to a new allocation if they would be rewritten in place."""
        if self.rewritten:
            self.rewritten, self.leaving = False, set(self.names)


def updated(base: Layout, groups: Sequence[Hashable], changes: Mapping[str, Change]) -> Updated:
    """Lay an update out.

    Args:
        base: the layout of the version that is updated.
        groups: the group of each of the base's allocations; tensors of different groups share no allocation.
        changes: the tensors that differ from the base's, by name. Tensors that are left out stay.

    Raises:
        Invalid: a limit is exceeded.
    """
    numbers: dict[Hashable, int] = {}
    alike = [change._replace(key=numbers.setdefault(change.key, len(numbers))) for change in changes.values()]
    return _updated(base, tuple(groups), tuple(zip(changes, alike, strict=True)))


@lru_cache(maxsize=8)
def _updated(base: Layout, groups: tuple[Hashable, ...], changed: tuple[tuple[str, Change], ...]) -> Updated:
    """Do as :func:`updated`; cache the last few results, since the same tensors change again and again."""
    changes = dict(changed)
    specs = {spec.name: spec for spec in base.tensors}
    places: list[dict[int, _Place]] = [{} for _ in base.allocations]
    for spec in base.tensors:
        if spec.nbytes:
            places[spec.allocation].setdefault(spec.offset, _Place(spec)).names.append(spec.name)
    made = _Made()
    moves: dict[str, Hashable] = {}
    for number, (size, group) in enumerate(zip(base.allocations, groups, strict=True)):
        here = sorted(places[number].values(), key=lambda place: place.offset)
        for place in here:
            place.take(specs, changes)
        made.settle(number, size, group, here)
        moves.update({name: group for place in here for name in place.leaving})
    for name, change in changes.items():
        if name not in specs:
            moves[name] = change.group
        elif not specs[name].nbytes:
            moves[name] = groups[specs[name].allocation]
    made.add({name: changes[name] for name in changes if name in moves}, moves)
    tensors = [made.spec(spec) for spec in base.tensors]
    tensors += [made.moved[name] for name in changes if name not in specs]
    layout = Layout(tuple(tensors), tuple(made.sizes))
    layout.check()
    return Updated(layout, tuple(made.kept), tuple(made.groups))


class _Made:
    """The allocations of an update."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.kept: list[int | None] = []
        self.groups: list[Hashable] = []
        #: The tensors that move to new allocations, by name.
        self.moved: dict[str, TensorSpec] = {}
        #: Where the base's other tensors are now, by allocation and offset in the base.
        self._places: dict[tuple[int, int], tuple[int, int]] = {}
        #: For each number of the base, the allocation that keeps or replaces it, and whether offsets differ there.
        self._numbers: dict[int, tuple[int, bool]] = {}
        #: The groups of the base's allocations that were dropped, by number.
        self._dropped: dict[int, Hashable] = {}

    def settle(self, number: int, size: int, group: Hashable, places: Sequence[_Place]) -> None:
        """Keep an allocation of the base, replace it, or drop it."""
        stays = sum(place.size for place in places if not (place.rewritten or place.empty))
        changes = sum(place.size for place in places if place.rewritten)
        goes = sum(place.size for place in places if place.empty)
        if not changes + goes:
            return self._put(number, size, group, places, kept=number)
        if 2 * (changes + goes) < stays + changes + goes:
            for place in places:
                place.move()
            if 2 * stays >= size:
                return self._put(number, size, group, places, kept=number)
            return self._put(number, size, group, places, packed=True)
        if all(place.empty for place in places):
            self._dropped[number] = group
            return None
        return self._put(number, size, group, places, packed=bool(goes) or 2 * (stays + changes) < size)

    def _put(
        self,
        number: int,
        size: int,
        group: Hashable,
        places: Sequence[_Place],
        *,
        kept: int | None = None,
        packed: bool = False,
    ) -> None:
        self._numbers[number] = len(self.sizes), packed
        end = 0
        for place in places:
            if not place.empty:
                self._places[number, place.offset] = len(self.sizes), end if packed else place.offset
                end += place.size
        self._add(max(end, ALIGNMENT) if packed else size, group, kept)

    def _add(self, size: int, group: Hashable, kept: int | None = None) -> None:
        self.sizes.append(size)
        self.kept.append(kept)
        self.groups.append(group)

    def add(self, changes: Mapping[str, Change], groups: Mapping[str, Hashable]) -> None:
        """Put tensors into new allocations, one for each group; those of one key share their bytes."""
        numbers: dict[Hashable, int] = {}
        firsts: dict[Hashable, TensorSpec] = {}
        for name, (dtype, shape, key, _) in changes.items():
            group = groups[name]
            if group not in numbers:
                numbers[group] = len(self.sizes)
                self._add(0, group)
            number = numbers[group]
            placed = TensorSpec(name, dtype, shape, number, self.sizes[number])
            nbytes = placed.nbytes
            first = firsts.setdefault((group, dtype, shape, key) if nbytes else name, placed)
            self.moved[name] = msgspec.structs.replace(first, name=name)
            if first.name == name:
                self.sizes[number] += round_up(nbytes, ALIGNMENT)
        for number in numbers.values():
            self.sizes[number] = max(self.sizes[number], ALIGNMENT)
        # Their tensors are in a new allocation of the group; tensors without elements move there as well.
        self._numbers.update({number: (numbers[group], True) for number, group in self._dropped.items()})

    def spec(self, spec: TensorSpec) -> TensorSpec:
        """Return where a tensor of the base is now."""
        if spec.name in self.moved:
            return self.moved[spec.name]
        if not spec.nbytes:
            number, packed = self._numbers[spec.allocation]
            return msgspec.structs.replace(spec, allocation=number, offset=0 if packed else spec.offset)
        allocation, offset = self._places[spec.allocation, spec.offset]
        return msgspec.structs.replace(spec, allocation=allocation, offset=offset)


# -- comparing -----------------------------------------------------------------------------------------


def differing(arrays: Arrays, base: Mapping[str, SharedTensor]) -> dict[str, Array]:
    """Return the arrays that differ from the base's tensors of the same names, or that the base lacks.

    An array at the address of the base's tensor is that tensor. Other arrays on its device are compared by the device,
    those on another device by digest, each where it lies, and those in host memory byte by byte. An array on another
    device whose address is no multiple of 16 counts as changed. This waits for work that was submitted to a device
    before.

    Raises:
        DriverError: the driver refused.
        Invalid: the base, or a source, was given back during the call.
    """
    found: dict[str, Array] = {}
    near: dict[str, tuple[DeviceArray, SharedTensor]] = {}
    for name, array in arrays.items():
        tensor = base.get(name)
        if tensor is None or (tensor.dtype, tensor.shape) != (array.dtype, array.shape):
            found[name] = array
        elif not tensor.nbytes or _is_at(array, tensor):
            continue
        elif isinstance(array, DeviceArray):
            near[name] = array, tensor
        elif not _holds(array, tensor):
            found[name] = array
    for context in {array.context for array, _ in near.values()}:
        context.synchronize()
    found.update({name: near[name][0] for name in _unlike(near)})
    return {name: arrays[name] for name in arrays if name in found}


def _is_at(array: Array, tensor: SharedTensor) -> bool:
    """Whether an array is a tensor of the base itself, by its address."""
    return array.pointer == tensor.pointer and (isinstance(array, DeviceArray) or tensor.context.host)


def _holds(array: HostArray, tensor: SharedTensor) -> bool:
    """Whether a tensor has the bytes of an array in host memory."""
    with tensor.hold() as start, address(array.contiguous()) as (source, nbytes):
        if tensor.context.host:
            return not differ(source, start, nbytes)
        buffer = bytearray(min(CHUNK, nbytes))
        for offset in range(0, nbytes, CHUNK):
            with memoryview(buffer)[: nbytes - offset] as part:
                tensor.context.read_into(start + offset, part)
                with address(part) as (there, size):
                    if differ(source + offset, there, size):
                        return False
    return True


def _unlike(pairs: Mapping[str, tuple[DeviceArray, SharedTensor]]) -> Iterator[str]:
    """Yield the names of arrays whose bytes differ from their tensors'."""
    for batch in batches(pairs.items(), lambda item: item[1][1].nbytes * item[1][0].copies):
        yield from _unlike_batch(dict(batch))


def _unlike_batch(pairs: Mapping[str, tuple[DeviceArray, SharedTensor]]) -> Iterator[str]:
    near: dict[Context, list[tuple[str, Segment]]] = {}
    with ExitStack() as held:
        kept: list[object] = []
        held.callback(kept.clear)
        for name, (array, tensor) in pairs.items():
            if not kept:  # all tensors are of one version, whose memory stays mapped
                held.enter_context(tensor.hold())
            start, keeper = array.contiguous()
            kept.append(keeper)
            del keeper  # a traceback may keep this frame for long
            if array.copies:
                array.context.synchronize()
            if array.context is tensor.context:
                near.setdefault(tensor.context, []).append((name, (start, tensor.pointer, tensor.nbytes)))
            elif _other_digest(array.context, start, tensor):
                yield name
        for context, rows in near.items():
            differs = context.differing([segment for _, segment in rows])
            yield from (name for (name, _), found in zip(rows, differs, strict=True) if found)


def _other_digest(context: Context, start: int, tensor: SharedTensor) -> bool:
    """Whether bytes on another device have another digest than a tensor, or an address that a device cannot digest."""
    if start % PIECE:
        return True
    nbytes = tensor.nbytes
    return context.digests([(start, nbytes)]) != tensor.context.digests([(tensor.pointer, nbytes)])
