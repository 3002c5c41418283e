"""Physical memory that has no address, ranges of addresses that have no memory, and mappings of the one in the other.

Nothing here is thread-safe: the driver holds its lock around every call.
"""

from __future__ import annotations

import errno
import os
import re
from dataclasses import dataclass, field
from typing import Protocol

from cubroker.driver.host import descriptors, memory
from cubroker.driver.host.heap import AddressMap, Heap, Region

READ = 1
WRITE = 2
"""Bits of ``CUmemAccess_flags``, and of ``mprotect``."""

_NAME = "cubroker-device-{}"
"""What the memory of a device is called, by which an importer knows where it is."""

_NAMES = re.compile(_NAME.format(r"(\d{1,4})"))

_OWNERS = 0o600
"""The mode of memory that is lent for reading. A memfd begins with 0o777, and so do those of earlier brokers."""


class Mappable(Protocol):
    """What a handle stands for; ``kinds`` are those of the handles that others can import, as bits, 0 if none is."""

    kinds: int
    nbytes: int

    def export(self) -> int:
        """Return a descriptor of it."""

    def release(self) -> None:
        """Let go of it."""

    def mapped_at(self, pointer: int, reserved: Range) -> Mapping:
        """Map it at vacant addresses of a range."""


@dataclass(eq=False)
class Physical:
    """Memory of a device, by descriptor, until it is released. Mappings of it stay.

    ``heap`` is where it counts meanwhile; what was imported counts nowhere.
    """

    device: int
    nbytes: int
    fd: int
    kinds: int
    heap: Heap | None

    def release(self) -> None:
        """Let go of it."""
        descriptors.close(self.fd)
        if self.heap:
            self.heap.used -= self.nbytes

    def export(self) -> int:
        """Return another descriptor of it, which whoever receives it can import."""
        return descriptors.duplicate(self.fd)

    def mapped_at(self, pointer: int, reserved: Range) -> Mapping:
        """Map it at vacant addresses; no device has access yet."""
        memory.map_at(pointer, self.fd, self.nbytes)
        return Mapping(self.device, pointer, self.nbytes, reserved, self.identity, writable=self.writable)

    @property
    def identity(self) -> object:
        """What all handles and mappings of the same memory have in common."""
        return memory.identity(self.fd)

    @property
    def writable(self) -> bool:
        """Whether it was not lent for reading; see :func:`reopened`."""
        return memory.writable(self.fd)

    @property
    def shareable(self) -> bool:
        """Whether it was made for several processes; what was imported was."""
        return bool(self.kinds) or self.heap is None


@dataclass(eq=False)
class Mapping(Region):
    """All of some memory, at an address. ``access`` has the bits that were set, by device.

    ``identity`` is the same in every mapping of the same memory. What is not ``writable`` was lent for reading.
    """

    range: Range
    identity: object = None
    writable: bool = True
    access: dict[int, int] = field(default_factory=dict)

    @property
    def whole(self) -> object:
        """The range: work goes across the mappings in it."""
        return self.range

    def allows(self, device: int, *, writing: bool) -> bool:
        """Whether access was set for the device."""
        return bool(self.access.get(device, 0) & (WRITE if writing else READ))

    def set_access(self, access: dict[int, int]) -> None:
        """Set the access of some devices; this process's own is all that any of them has."""
        merged = self.access | access
        bits = 0
        for flags in merged.values():
            bits |= flags
        memory.protect(self.pointer, self.nbytes, bits)
        self.access = merged

    def remove(self) -> None:
        """Undo it; the addresses are reserved again."""
        memory.unmap_at(self.pointer, self.nbytes)


@dataclass(eq=False)
class Range:
    """Reserved addresses, and what is mapped there, by its first address."""

    pointer: int
    nbytes: int
    mappings: dict[int, Mapping] = field(default_factory=dict)

    def has(self, pointer: int, nbytes: int) -> bool:
        """Whether all of the addresses are of this range."""
        return self.pointer <= pointer and pointer + nbytes <= self.pointer + self.nbytes

    def vacant(self, pointer: int, nbytes: int) -> bool:
        """Whether nothing is mapped at any of the addresses."""
        return all(m.end <= pointer or pointer + nbytes <= m.pointer for m in self.mappings.values())

    def exactly(self, pointer: int, nbytes: int) -> list[Mapping]:
        """Return the mappings that fill these addresses, each of them whole; none if they do not."""
        found, end = [], pointer + nbytes
        while pointer < end and (mapping := self.mappings.get(pointer)):
            found.append(mapping)
            pointer = mapping.end
        return found if pointer == end else []

    def map(self, mappable: Mappable, pointer: int, addresses: AddressMap) -> None:
        """Map it at vacant addresses; no device has access yet."""
        mapping = self.mappings[pointer] = mappable.mapped_at(pointer, self)
        addresses.add(mapping)

    def unmap(self, mapping: Mapping, addresses: AddressMap) -> None:
        """Undo ``map``."""
        mapping.remove()
        addresses.forget(mapping)
        del self.mappings[mapping.pointer]


def create(device: int, nbytes: int, heap: Heap, *, kinds: int) -> Physical:
    """Return new memory, all zero; raises MemoryError if the device is full, OSError if the system is."""
    heap.require(nbytes)
    fd = memory.create(nbytes, _NAME.format(device))
    heap.used += nbytes
    return Physical(device, nbytes, fd, kinds, heap)


def reopened(descriptor: int) -> int:
    """Return another descriptor of the same memory, which only reads; the caller closes it.

    It is an open file of its own, so nothing that is done with it can make it write. Other users cannot open it again
    for writing either: the memory is its owner's alone from now on. The owner's processes can, and those of root.

    Raises:
        PermissionError: another user owns the memory.
        OSError: the system is short of something.
    """
    os.fchmod(descriptor, _OWNERS)
    return os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC)


def adopt(descriptor: int, devices: int) -> Physical:
    """Return the memory that a descriptor stands for, whoever created it; the descriptor stays the caller's.

    Raises:
        LookupError: it stands for no memory of any of so many devices.
        OSError: the system is short of something.
    """
    try:
        with descriptors.books() as ours:
            ours.add(fd := descriptors.duplicate(descriptor))
    except OSError as error:
        if error.errno == errno.EBADF:
            raise LookupError(f"descriptor {descriptor} is not open") from None
        raise
    try:
        match = _NAMES.fullmatch(memory.name_of(fd))
        if match is None or int(match[1]) >= devices or not memory.sealed(fd):
            raise LookupError(f"descriptor {descriptor} is not the memory of a device")
        return Physical(int(match[1]), os.fstat(fd).st_size, fd, kinds=0, heap=None)
    except (LookupError, OSError):
        descriptors.close(fd)
        raise
