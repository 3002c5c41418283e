"""The tensors of a version on one device, or on those that share it, by name."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import zip_longest

from cubroker.client.fork_guard import NotPicklable
from cubroker.client.memory.mapping import DeviceMapping, LeasedMemory
from cubroker.client.tensor import SharedTensor
from cubroker.driver import Context, Device
from cubroker.protocol.errors import Invalid
from cubroker.protocol.layout import Layout, TensorSpec


class TensorIndex:
    """A layout, and its tensors by name; with ``allocations`` only the tensors of these."""

    __slots__ = ("layout", "tensors")

    def __init__(self, layout: Layout, allocations: Collection[int] | None = None) -> None:
        self.layout = layout
        self.tensors: dict[str, TensorSpec] = {
            tensor.name: tensor for tensor in layout.tensors if allocations is None or tensor.allocation in allocations
        }


@lru_cache(maxsize=8)
def decode(layout: bytes) -> TensorIndex:
    """Decode a layout of a message; the last few are cached, since processes attach to the same pools again."""
    return TensorIndex(Layout.decode(layout))


def difference(layout: Layout, other: Layout) -> str:
    """Return the first thing in which a layout differs from another, to follow the name of its version."""
    for tensor, here in zip(layout.tensors, other.tensors, strict=False):
        if tensor != here:
            return f"its tensor {_described(tensor)} is {_described(here)} here"
    if len(layout.tensors) != len(other.tensors):
        return f"it has {len(layout.tensors)} tensors, and not {len(other.tensors)}"
    pairs = zip_longest(layout.allocations, other.allocations, fillvalue=0)
    number, one, two = next((number, *pair) for number, pair in enumerate(pairs) if pair[0] != pair[1])
    return f"its allocation {number} has {one} bytes, and not {two}"


def _described(tensor: TensorSpec) -> str:
    place = f"at byte {tensor.offset} of allocation {tensor.allocation}"
    return f"{tensor.name!r} ({tensor.dtype} {tensor.shape}, {place})"


@dataclass(frozen=True, slots=True)
class AllocationHandle:
    """One allocation of a pool, for a library or server that opens CUDA memory itself; see :meth:`Pool.handles`."""

    #: Its number in the layout: the ``allocation`` of its tensors, which begin there at their ``offset``.
    allocation: int
    #: How it is shared: ``ipc``, ``vmm`` or ``multicast``.
    share: str
    #: The device in whose memory it lies.
    device: Device
    #: Its bytes, as in the layout; the device may have allocated more.
    nbytes: int
    #: Of ``ipc``, 64 bytes: what ``cudaIpcOpenMemHandle`` takes, which returns the address of the allocation's first
    #: byte. Who knows them can open the memory. None for other kinds: their descriptors are closed once mapped, and no
    #: importer can export them again.
    handle: bytes | None = field(repr=False)


class Replica(NotPicklable, Mapping[str, SharedTensor]):
    """The tensors of one version on one device, or a sharded version's on all of them.

    Tensors are made when they are asked for; indexing is cheap and gives a new object every time.

    Attributes:
        allocations: the indexes of those allocations of the layout that are mapped here.
    """

    __eq__ = object.__eq__  # each belongs to one lease, even where two hold the same tensors
    __hash__ = object.__hash__

    def __init__(self, mapped: LeasedMemory, places: Sequence[DeviceMapping], index: TensorIndex) -> None:
        self._mapped: LeasedMemory | None = mapped
        self._last_label = mapped.label
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
        self._index = index if whole else TensorIndex(index.layout, self._place)

    @property
    def layout(self) -> Layout:
        """The layout of the whole version, on this and other devices; can be passed to ``Broker.create``."""
        return self._index.layout

    @property
    def devices(self) -> tuple[Device, ...]:
        """The devices that use these tensors: several for a sharded version."""
        return tuple(place.context.device for place in self._places)

    @property
    def device(self) -> Device:
        """The device that uses these tensors.

        Raises:
            Invalid: there are several; each tensor has its own.
        """
        return self.context.device

    @property
    def memory_device(self) -> Device:
        """The device in whose memory these tensors are: not ``device`` if that reaches them over peer access.

        Raises:
            Invalid: there are several; each tensor has its own.
        """
        return self._alone().memory

    @property
    def upstream(self) -> tuple[int, ...] | None:
        """Where ``device`` reads the allocations of a draft's replica before this one; None if it cannot."""
        return self._alone().upstream

    @property
    def context(self) -> Context:
        """This process's context on ``device``; raises ``Invalid`` as that does."""
        return self._alone().context

    @property
    def allocation_views(self) -> tuple[SharedTensor, ...]:
        """Each of ``allocations`` as one flat tensor of bytes (U8), in that order.

        Raises:
            Invalid: the memory was given back.
        """
        return tuple(
            self._tensor(f"allocation {number}", "U8", (self.layout.allocations[number],), number, 0)
            for number in self.allocations
        )

    def handles(self) -> tuple[AllocationHandle, ...]:
        """Return what opens each of :attr:`allocations` in another process of this host, in that order.

        It is for code that opens CUDA IPC handles itself, such as an inference server or a transfer library; a process
        that can use cubroker attaches instead. What a handle opens is valid while this pool's lease is held, and is
        writable, as all ``ipc`` memory is. The broker does not know who has opened it: have it closed there before the
        lease ends, or the version is retired, since CUDA leaves undefined what a handle opens once its memory is freed.

        Raises:
            Invalid: the memory was given back, or is asleep.
        """
        share = self._memory().share
        return tuple(
            AllocationHandle(
                number,
                share,
                self._place[number].memory,
                self.layout.allocations[number],
                self._place[number].handles[number],
            )
            for number in self.allocations
        )

    @property
    def slabs(self) -> tuple[SharedTensor, ...]:
        """The older name of :attr:`allocation_views`."""
        return self.allocation_views

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

    @property
    def _label(self) -> str:
        """A name for messages, also once the memory was given back."""
        mapped = self._mapped
        return mapped.label if mapped else self._last_label

    def _alone(self) -> DeviceMapping:
        place, *others = self._places
        if others:
            devices = ", ".join(str(device.index) for device in self.devices)
            raise Invalid(f"{self._label} is spread over devices {devices}; ask each of its tensors, or see `devices`")
        return place

    def _drop(self) -> None:
        self._last_label = self._label
        self._mapped = None

    def _memory(self) -> LeasedMemory:
        mapped = self._mapped
        if mapped is None:
            raise Invalid(f"{self._label} is closed in this process; get another from a Broker")
        mapped.check()
        return mapped
