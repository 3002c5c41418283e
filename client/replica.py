"""The tensors of a version on one device, or on those that share it, by name."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import lru_cache

from cubroker.client.mapping import Mapped, Place
from cubroker.client.processes import Unsendable
from cubroker.client.tensor import SharedTensor
from cubroker.driver import Context, Device
from cubroker.protocol.errors import Invalid
from cubroker.protocol.layout import Layout, TensorSpec


class Index:
    """A layout, and its tensors by name."""

    __slots__ = ("layout", "tensors")

    def __init__(self, layout: Layout, allocations: Collection[int] | None = None) -> None:
        """Take the tensors of some ``allocations``; by default all."""
        self.layout = layout
        self.tensors: dict[str, TensorSpec] = {
            tensor.name: tensor for tensor in layout.tensors if allocations is None or tensor.allocation in allocations
        }


@lru_cache(maxsize=8)
def decode(layout: bytes) -> Index:
    """Read a layout as it travels; the last few are kept, since processes attach to the same pools again."""
    return Index(Layout.decode(layout))


class Replica(Unsendable, Mapping[str, SharedTensor]):
    """The tensors of one version on one device, or a sharded version's on all of them.

    Tensors are made when they are asked for; indexing is cheap and gives a new object every time.

    Attributes:
        allocations: the indexes of those allocations of the layout that are here.
    """

    __eq__ = object.__eq__  # each is one lease's, whatever it holds
    __hash__ = object.__hash__

    def __init__(self, mapped: Mapped, places: Sequence[Place], index: Index) -> None:
        self._mapped: Mapped | None = mapped
        self._label = mapped.label
        # The first place that has an allocation stands for it: those of a draft of a replicated version all have it.
        self._place = {
            number: place
            for place in reversed(places)
            for number, pointer in enumerate(place.pointers)
            if pointer is not None
        }
        self._places = tuple(place for place in places if place in self._place.values()) or tuple(places[:1])
        self.allocations = tuple(sorted(self._place))
        whole = len(self.allocations) == len(index.layout.allocations)
        self._index = index if whole else Index(index.layout, self._place)

    @property
    def layout(self) -> Layout:
        """Where each tensor of the version lies, here or on another device; can be passed to ``Broker.create``."""
        return self._index.layout

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices that use these tensors: more than one if they are a sharded version's."""
        return tuple(place.context.device for place in self._places)

    @property
    def device(self) -> Device:
        """The device that uses these tensors.

        Raises:
            Invalid: they are spread over several; each tensor has its own.
        """
        return self.context.device

    @property
    def memory_device(self) -> Device:
        """The device in whose memory these tensors are: another than ``device`` if they are reached as a peer's.

        Raises:
            Invalid: they are spread over several; each tensor has its own.
        """
        return self._alone().memory

    @property
    def upstream(self) -> tuple[int, ...] | None:
        """Where ``device`` reads the allocations of the replica before this one in a draft; None if it cannot."""
        return self._alone().upstream

    @property
    def context(self) -> Context:
        """This process's context on ``device``; raises as that does."""
        return self._alone().context

    @property
    def slabs(self) -> tuple[SharedTensor, ...]:
        """Each of ``allocations`` as one flat tensor of bytes (U8), in that order.

        Raises:
            Invalid: the memory was given back.
        """
        return tuple(
            self._tensor(f"slab {number}", "U8", (self.layout.allocations[number],), number, 0)
            for number in self.allocations
        )

    def __getitem__(self, name: str) -> SharedTensor:
        try:
            spec = self._index.tensors[name]
        except KeyError:
            raise KeyError(name) from None
        return self._tensor(name, spec.dtype, spec.shape, spec.allocation, spec.offset)

    def __iter__(self) -> Iterator[str]:
        return iter(self._index.tensors)

    def __len__(self) -> int:
        return len(self._index.tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._index.tensors

    def _tensor(self, name: str, dtype: str, shape: tuple[int, ...], allocation: int, offset: int) -> SharedTensor:
        place = self._place[allocation]
        pointer = place.pointers[allocation]
        assert pointer is not None
        return SharedTensor(self._memory(), place, name, dtype, shape, pointer + offset)

    def _alone(self) -> Place:
        place, *others = self._places
        if others:
            devices = ", ".join(str(device.index) for device in self.devices)
            raise Invalid(f"{self._label} is spread over devices {devices}; ask each of its tensors, or see `devices`")
        return place

    def _drop(self) -> None:
        self._mapped = None

    def _memory(self) -> Mapped:
        mapped = self._mapped
        if mapped is None:
            raise Invalid(f"{self._label} is closed in this process; get another from a Broker")
        mapped.check()
        return mapped
