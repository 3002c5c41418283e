"""The tensors of a version on one device, by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache

from cubroker.client.mapping import Mapped
from cubroker.client.processes import Unsendable
from cubroker.client.tensor import SharedTensor
from cubroker.driver import Context, Device
from cubroker.protocol.errors import Invalid
from cubroker.protocol.layout import Layout, TensorSpec


class Index:
    """A layout, and its tensors by name."""

    __slots__ = ("layout", "tensors")

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.tensors: dict[str, TensorSpec] = {tensor.name: tensor for tensor in layout.tensors}


@lru_cache(maxsize=8)
def decode(layout: bytes) -> Index:
    """Read a layout as it travels; the last few are kept, since processes attach to the same pools again."""
    return Index(Layout.decode(layout))


class Replica(Unsendable, Mapping[str, SharedTensor]):
    """The tensors of one version on one device.

    Tensors are made when they are asked for; indexing is cheap and gives a new object every time.
    """

    __eq__ = object.__eq__  # each is one lease's, whatever it holds
    __hash__ = object.__hash__

    def __init__(self, mapped: Mapped, number: int, index: Index) -> None:
        self._mapped: Mapped | None = mapped
        self._label = mapped.label
        self._place = mapped.places[number]
        self._index = index

    @property
    def layout(self) -> Layout:
        """Where each tensor lies; can be passed to ``Broker.create``."""
        return self._index.layout

    @property
    def device(self) -> Device:
        """The device that holds these tensors."""
        return self._place.context.device

    @property
    def context(self) -> Context:
        """This process's context on that device."""
        return self._place.context

    @property
    def slabs(self) -> tuple[SharedTensor, ...]:
        """Each allocation as one flat tensor of bytes (U8), in the layout's order.

        Raises:
            Invalid: the memory was given back.
        """
        mapped = self._memory()
        return tuple(
            SharedTensor(mapped, self._place, f"slab {number}", "U8", (size,), self._place.pointers[number])
            for number, size in enumerate(self.layout.allocations)
        )

    def __getitem__(self, name: str) -> SharedTensor:
        try:
            spec = self._index.tensors[name]
        except KeyError:
            raise KeyError(name) from None
        address = self._place.pointers[spec.allocation] + spec.offset
        return SharedTensor(self._memory(), self._place, name, spec.dtype, spec.shape, address)

    def __iter__(self) -> Iterator[str]:
        return iter(self._index.tensors)

    def __len__(self) -> int:
        return len(self._index.tensors)

    def __contains__(self, name: object) -> bool:
        return name in self._index.tensors

    def _drop(self) -> None:
        self._mapped = None

    def _memory(self) -> Mapped:
        mapped = self._mapped
        if mapped is None:
            raise Invalid(f"{self._label} is closed in this process; get another from a Broker")
        mapped.check()
        return mapped
