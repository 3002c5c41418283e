"""Device memory as one process sees it: what it owns, what it has open, and what an address belongs to.

Nothing here is thread-safe: the driver holds its lock around every call.
"""

from __future__ import annotations

import secrets
from bisect import bisect_right, insort
from dataclasses import dataclass, field

from cubroker.driver.host import descriptors, memory
from cubroker.driver.host.memory import BLOCK
from cubroker.driver.sizes import round_up

SMALL = 1 << 20
"""Bytes: allocations up to this size share blocks."""

ALIGNMENT = 512
"""Bytes: where an allocation within a block may start."""

SECRET_BYTES = 16


@dataclass(eq=False)
class Region:
    """Mapped memory in one piece, in the context of one device."""

    device: int
    pointer: int
    nbytes: int

    @property
    def end(self) -> int:
        """The first address behind it."""
        return self.pointer + self.nbytes

    @property
    def whole(self) -> object:
        """What it is a part of: bytes in regions side by side can be copied together if this is the same."""
        return self

    def allows(self, device: int, *, writing: bool) -> bool:
        """Whether the work of a device may read, or write, here."""
        return True


@dataclass(eq=False)
class Opened(Region):
    """A region that another process owns, on the device ``owner``.

    ``opened`` is the pointer that was given out, ``count`` times.
    """

    handle: bytes = field(repr=False)
    opened: int
    owner: int
    count: int = 1


@dataclass(eq=False)
class Allocation:
    """A part of a block, as it was asked for; whoever shows ``secret`` gets the block."""

    pointer: int
    nbytes: int
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(SECRET_BYTES), repr=False)


@dataclass(eq=False)
class Block(Region):
    """A region that this process owns, by descriptor too, and the allocations in it by pointer."""

    fd: int
    allocations: dict[int, Allocation] = field(default_factory=dict)

    def holding(self, pointer: int) -> Allocation | None:
        """Return the allocation that an address lies in."""
        for allocation in self.allocations.values():
            if 0 <= pointer - allocation.pointer < allocation.nbytes:
                return allocation
        return None

    def gap(self, nbytes: int) -> int | None:
        """Return the first address at which ``nbytes`` more fit."""
        start = self.pointer
        for pointer, allocation in sorted(self.allocations.items()):
            if pointer - start >= nbytes:
                return start
            start = round_up(pointer + allocation.nbytes, ALIGNMENT)
        return start if self.pointer + self.nbytes - start >= nbytes else None


class AddressMap:
    """The regions of all devices, found by any address in them."""

    def __init__(self) -> None:
        self._regions: dict[int, Region] = {}
        self._starts: list[int] = []

    def add(self, region: Region) -> None:
        """Enter a region that was just mapped."""
        self._regions[region.pointer] = region
        insort(self._starts, region.pointer)

    def remove(self, region: Region) -> None:
        """Take a region out and unmap it; its address may be somebody else's at once."""
        self.forget(region)
        memory.unmap(region.pointer, region.nbytes)

    def forget(self, region: Region) -> None:
        """Take a region out."""
        del self._regions[region.pointer]
        self._starts.remove(region.pointer)

    def find(self, pointer: int, nbytes: int = 1) -> Region | None:
        """Return the region in which all of the bytes lie."""
        place = bisect_right(self._starts, pointer)
        region = self._regions[self._starts[place - 1]] if place else None
        return region if region and pointer + nbytes <= region.end else None

    def allows(self, device: int, pointer: int, nbytes: int, *, writing: bool) -> bool:
        """Whether the work of a device may read, or write, all of the bytes."""
        region = self.find(pointer, 0)
        while region and region.allows(device, writing=writing):
            if pointer + nbytes <= region.end:
                return True
            following = self._regions.get(region.end)
            region = following if following and following.whole is region.whole else None
        return False


class Heap:
    """The memory that this process has allocated on one device, counted against the device's size."""

    def __init__(self, device: int, total: int, addresses: AddressMap) -> None:
        self.total = total
        self.used = 0
        self._device = device
        self._addresses = addresses
        self._blocks: dict[int, Block] = {}

    def allocate(self, nbytes: int) -> int:
        """Return a new allocation's pointer; raises MemoryError if the device is full, OSError if the system is."""
        block, pointer = self._place(nbytes)
        block.allocations[pointer] = Allocation(pointer, nbytes)
        return pointer

    def free(self, block: Block, pointer: int) -> None:
        """Free an allocation of this device, and its block with the last one in it.

        Processes that have the block open keep its bytes until they close it.
        """
        del block.allocations[pointer]
        if not block.allocations:
            del self._blocks[block.pointer]
            self.used -= block.nbytes
            self._addresses.remove(block)
            descriptors.close(block.fd)

    def require(self, nbytes: int) -> None:
        """Raise MemoryError if the device has not so much left."""
        if self.used + nbytes > self.total:
            raise MemoryError

    def blocks(self) -> list[Block]:
        """Return every block."""
        return list(self._blocks.values())

    def _place(self, nbytes: int) -> tuple[Block, int]:
        if nbytes <= SMALL:
            for block in self._blocks.values():
                if block.nbytes == BLOCK and (pointer := block.gap(nbytes)) is not None:
                    return block, pointer
        block = self._grow(round_up(nbytes, BLOCK))
        return block, block.pointer

    def _grow(self, nbytes: int) -> Block:
        self.require(nbytes)
        fd = memory.create(nbytes)
        try:
            block = Block(self._device, memory.map_shared(fd, nbytes), nbytes, fd)
        except OSError:
            descriptors.close(fd)
            raise
        self._addresses.add(block)
        self._blocks[block.pointer] = block
        self.used += nbytes
        return block
