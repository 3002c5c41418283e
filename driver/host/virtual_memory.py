"""Virtual memory management on host devices: physical memory without addresses, address ranges, and mappings.

Physical memory is a memfd, whose name tells its device. It is shared by descriptor, or by fabric handle: 64 bytes that
open it in every process that is on the same channel. A GPU's driver exports and imports fabric handles only in a
process that may use an IMEX channel, a device file, and imports only those of the same channel. Here the channel of a
process is a number in its environment, read with every call. As on GPUs, the bytes alone give access to the memory.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import struct
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import reduce
from operator import or_
from typing import Any, Protocol

from cuda.bindings import driver as cuda

from cubroker.driver.buffers import HANDLE_BYTES, handle_of
from cubroker.driver.host import shared_memory
from cubroker.driver.host.devices import DeviceFunctions, Refusal, Result, answers, check
from cubroker.driver.host.shared_memory import BLOCK, Heap, Region, SharedFd

CHANNEL = "CUBROKER_HOST_CHANNEL"  #: For tests: the environment variable with this process's channel; unset: none.

READ = 1
WRITE = 2
"""Bits of ``CUmemAccess_flags``, and of ``mprotect``."""

_NAME = "cubroker-device-{}"  #: The name of a device's memory, by which an importer knows the device.

_NAMES = re.compile(_NAME.format(r"(\d{1,4})"))

_OWNERS = 0o600  #: The mode of memory that is lent for reading; a memfd begins with 0o777, also of earlier brokers.

_DESCRIPTOR = int(cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
_FABRIC = int(cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC)
_KINDS_AT = 4
"""Bytes: the offset of the int ``requestedHandleTypes`` in ``CUmemAllocationProp``."""

_CHANNEL = struct.Struct("=I")
_CHANNEL_AT = 32
"""Bytes: the offset of the channel in a fabric handle, behind the server's address and the secret."""

_GRANULARITIES = frozenset(map(int, cuda.CUmemAllocationGranularity_flags))
_DEVICE = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
_PINNED = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
_ACCESS = frozenset(map(int, cuda.CUmemAccess_flags)) - {int(cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_MAX)}

_LENT_FOR_READING = Result.CUDA_ERROR_NOT_PERMITTED
"""The result of a ``cuMemSetAccess`` that would make memory writable which was lent for reading. A GPU's memory cannot
be lent so, and no GPU's driver returns this from that call; drivers do for a handle that a process may not use."""

# -- what handles stand for ----------------------------------------------------------------------------


class Mappable(Protocol):
    """What a handle stands for."""

    #: The kinds of handles that others can import, as bits; 0 if none.
    kinds: int
    nbytes: int

    def export(self) -> int:
        """Return another descriptor of it, which every process that receives it can import."""

    def release(self) -> None:
        """Release the handle; mappings stay, and so do other processes' handles."""

    def mapped_at(self, pointer: int, reserved: AddressRange) -> MappedRegion:
        """Map it at vacant addresses of a range, without access."""


@dataclass(eq=False)
class PhysicalMemory:
    """Memory of a device, by descriptor, until it is released. Mappings of it stay."""

    device: int
    nbytes: int
    fd: int
    kinds: int
    #: The heap in which it counts until it is released; None for imported memory, which does not count.
    heap: Heap | None

    @classmethod
    def create(cls, device: int, nbytes: int, heap: Heap, *, kinds: int) -> PhysicalMemory:
        """Return new memory, all zero; raises MemoryError if the device is full, OSError if the system is."""
        heap.require(nbytes)
        fd = shared_memory.create(nbytes, _NAME.format(device))
        heap.used += nbytes
        return cls(device, nbytes, fd, kinds, heap)

    @classmethod
    def adopt(cls, descriptor: int, devices: int) -> PhysicalMemory:
        """Return the memory of a descriptor, which any process may have created; the descriptor stays the caller's.

        Raises:
            LookupError: it is no memory of a device below ``devices``.
            OSError: the system is short of something.
        """
        try:
            with shared_memory.fork_lock() as ours:
                ours.add(fd := shared_memory.duplicate(descriptor))
        except OSError as error:
            if error.errno == errno.EBADF:
                raise LookupError(f"descriptor {descriptor} is not open") from None
            raise
        try:
            match = _NAMES.fullmatch(shared_memory.name_of(fd))
            if match is None or int(match[1]) >= devices or not shared_memory.sealed(fd):
                raise LookupError(f"descriptor {descriptor} is not the memory of a device")
            return cls(int(match[1]), os.fstat(fd).st_size, fd, kinds=0, heap=None)
        except (LookupError, OSError):
            shared_memory.close(fd)
            raise

    def release(self) -> None:
        shared_memory.close(self.fd)
        if self.heap:
            self.heap.used -= self.nbytes

    def export(self) -> int:
        return shared_memory.duplicate(self.fd)

    def mapped_at(self, pointer: int, reserved: AddressRange) -> MappedRegion:
        shared_memory.map_at(pointer, self.fd, self.nbytes)
        return MappedRegion(self.device, pointer, self.nbytes, reserved, writable=self.writable)

    @property
    def writable(self) -> bool:
        """Whether it was not lent for reading; see :func:`for_reading`."""
        return shared_memory.writable(self.fd)

    @property
    def shareable(self) -> bool:
        """Whether it was made for several processes; imported memory was."""
        return bool(self.kinds) or self.heap is None


@contextmanager
def for_reading(descriptors: Sequence[int]) -> Iterator[Sequence[int]]:
    """Yield other descriptors of the same memory, which permit only reading; they are closed after the block.

    Each is an open file of its own, so no operation on it can make it write. The memory becomes its owner's alone, so
    that other users cannot reopen it for writing. Processes of the owner and of root still can.

    Raises:
        PermissionError: another user owns the memory.
        OSError: the system is short of something.
    """
    with ExitStack() as undo:
        lent: list[int] = []
        for descriptor in descriptors:
            os.fchmod(descriptor, _OWNERS)
            lent.append(os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_CLOEXEC))
            undo.callback(os.close, lent[-1])
        yield lent


@dataclass(eq=False)
class MappedRegion(Region):
    """All of some memory, mapped at an address."""

    range: AddressRange
    #: Whether the memory was not lent for reading.
    writable: bool = True
    #: The access that was set, as bits, by device.
    access: dict[int, int] = field(default_factory=dict)

    @property
    def whole(self) -> object:
        """The range: work goes across the mappings in it."""
        return self.range

    def allows(self, device: int, *, writing: bool) -> bool:
        return bool(self.access.get(device, 0) & (WRITE if writing else READ))

    def set_access(self, access: dict[int, int]) -> None:
        """Set the access of some devices; the process has the access of all of them together."""
        merged = self.access | access
        shared_memory.protect(self.pointer, self.nbytes, reduce(or_, merged.values(), 0))
        self.access = merged

    def remove(self) -> None:
        """Undo the mapping; the addresses are reserved again."""
        shared_memory.unmap_at(self.pointer, self.nbytes)

    def retained(self) -> Mappable:
        """Return an object by which the memory can be mapped again, once it is unmapped here."""
        return RetainedMemory(self, shared_memory.map_again(self.pointer, self.nbytes), self.nbytes)


@dataclass(eq=False)
class RetainedMemory:
    """Memory that is, or was, mapped, until it is released. Another mapping keeps it, and no descriptor."""

    region: MappedRegion
    #: Where the other mapping is, which no work can use.
    pointer: int
    nbytes: int
    kinds: int = 0

    def export(self) -> int:
        raise Refusal(Result.CUDA_ERROR_INVALID_VALUE)

    def release(self) -> None:
        shared_memory.unmap(self.pointer, self.nbytes)

    def mapped_at(self, pointer: int, reserved: AddressRange) -> MappedRegion:
        shared_memory.map_again(self.pointer, self.nbytes, pointer)
        return replace(self.region, pointer=pointer, range=reserved, access={})


@dataclass(eq=False)
class AddressRange:
    """Reserved addresses, and the mappings there by their first address. Its user holds the driver's lock."""

    pointer: int
    end: int
    mappings: dict[int, MappedRegion] = field(default_factory=dict)


# -- fabric handles ------------------------------------------------------------------------------------


def _channel() -> int:
    """Return this process's channel, or refuse."""
    channel = os.environ.get(CHANNEL, "")
    check(channel.isdecimal(), Result.CUDA_ERROR_NOT_PERMITTED)
    return int(channel)


def _import_fabric(handle: bytes, devices: int) -> PhysicalMemory:
    """Return the memory of a handle.

    Raises:
        LookupError: it is no memory of a device below ``devices``, or was released.
        TimeoutError: its owner does not reply.
    """
    channel = _channel()
    fd, _, _ = shared_memory.fetch(handle)
    try:
        check(_CHANNEL.unpack_from(handle, _CHANNEL_AT) == (channel,), Result.CUDA_ERROR_NOT_PERMITTED)
        return PhysicalMemory.adopt(fd, devices)
    finally:
        shared_memory.close(fd)


# -- the functions -------------------------------------------------------------------------------------


class VirtualMemoryFunctions(DeviceFunctions):
    """The functions, none of which needs a context. Handles and ranges belong to the process."""

    def __init__(self, count: int, size: int, island: int | None = None) -> None:
        super().__init__(count, size, island)
        #: What each handle stands for, by number.
        self.handles: dict[int, Mappable] = {}
        self._ranges: dict[int, AddressRange] = {}
        self._fabric_handles: dict[Mappable, bytes] = {}

    @answers(1)
    def cuMemGetAllocationGranularity(self, prop: Any, option: Any) -> int:
        self._located(prop)
        check(int(option) in _GRANULARITIES)
        return BLOCK

    @answers(1)
    def cuMemCreate(self, size: int, prop: Any, flags: int) -> Any:
        device = self._located(prop)
        # The bindings' own attribute reads one kind alone, not a combination.
        kinds = ctypes.c_int.from_address(prop.getPtr() + _KINDS_AT).value
        check_blocks(size)
        check(not flags and size <= self.heaps[device].total)  # a larger size gets another status than a full device
        check(not kinds & ~(_DESCRIPTOR | _FABRIC))
        if kinds & _FABRIC:
            _channel()
        with self.lock:
            return self.handle(PhysicalMemory.create(device, size, self.heaps[device], kinds=kinds))

    @answers(0)
    def cuMemRelease(self, handle: Any) -> None:
        with self.lock:
            held = self.held(handle)
            self.shared.withdraw(self._fabric_handles.pop(held, b""))
            held.release()
            del self.handles[int(handle)]

    @answers(1)
    def cuMemExportToShareableHandle(self, handle: Any, handleType: Any, flags: int) -> Any:
        with self.lock:
            held = self.held(handle)
            check(not flags and held.kinds & int(handleType))
            if int(handleType) == _DESCRIPTOR:
                return held.export()
            assert isinstance(held, PhysicalMemory)  # nothing else has fabric handles
            return handle_of(cuda.CUmemFabricHandle(), self._fabric_handle(held), "a handle")

    @answers(1)
    def cuMemImportFromShareableHandle(self, osHandle: int, shHandleType: Any) -> Any:
        check(int(shHandleType) in (_DESCRIPTOR, _FABRIC))
        try:
            if int(shHandleType) == _FABRIC:
                check(osHandle)
                imported: Mappable = _import_fabric(ctypes.string_at(osHandle, HANDLE_BYTES), len(self.heaps))
            else:
                imported = self.import_descriptor(osHandle)
        except LookupError:
            raise Refusal(Result.CUDA_ERROR_INVALID_VALUE) from None
        with self.lock:
            return self.handle(imported)

    @answers(1)
    def cuMemAddressReserve(self, size: int, alignment: int, addr: Any, flags: int) -> Any:
        check_blocks(size)
        check(not flags and alignment >= 0 and not alignment & (alignment - 1))
        pointer = shared_memory.reserve(size, max(alignment, BLOCK))
        with self.lock:
            self._ranges[pointer] = AddressRange(pointer, pointer + size)
        return cuda.CUdeviceptr(pointer)

    @answers(0)
    def cuMemAddressFree(self, ptr: Any, size: int) -> None:
        with self.lock:
            reserved = self._ranges.get(int(ptr))
            check(reserved and reserved.end == int(ptr) + size and not reserved.mappings)
            shared_memory.unmap(int(ptr), size)
            del self._ranges[int(ptr)]

    @answers(0)
    def cuMemMap(self, ptr: Any, size: int, offset: int, handle: Any, flags: int) -> None:
        start, end = int(ptr), int(ptr) + size
        check(all(number % BLOCK == 0 for number in (start, size, offset)))
        self.settle(handle)
        with self.lock:
            held = self.held(handle)
            around = [each for each in self._ranges.values() if each.pointer <= start and end <= each.end]
            check(around and not flags and size > 0 and offset + size <= held.nbytes)
            reserved = around[0]
            check(all(each.end <= start or end <= each.pointer for each in reserved.mappings.values()))
            check(size == held.nbytes, Result.CUDA_ERROR_NOT_SUPPORTED)
            mapping = reserved.mappings[start] = held.mapped_at(start, reserved)
            self.addresses.add(mapping)

    @answers(1)
    def cuMemRetainAllocationHandle(self, addr: Any) -> Any:
        with self.lock:
            region = self.addresses.find(int(addr))
            if not isinstance(region, MappedRegion):
                raise Refusal(Result.CUDA_ERROR_INVALID_VALUE)
            return self.handle(region.retained())

    @answers(0)
    def cuMemUnmap(self, ptr: Any, size: int) -> None:
        with self.lock:
            for mapping in self._mappings(int(ptr), size):
                mapping.remove()
                self.addresses.forget(mapping)
                del mapping.range.mappings[mapping.pointer]

    @answers(0)
    def cuMemSetAccess(self, ptr: Any, size: int, desc: Any, count: int) -> None:
        check(all(each.location.type == _DEVICE and int(each.flags) in _ACCESS for each in desc[:count]))
        access = {self.index(each.location.id): int(each.flags) for each in desc[:count]}
        with self.lock:
            mappings = self._mappings(int(ptr), size)
            reached = all(self.reaches(device, mapping.device) for device in access for mapping in mappings)
            check(reached, Result.CUDA_ERROR_INVALID_DEVICE)
            writing = any(flags & WRITE for flags in access.values())
            check(not writing or all(mapping.writable for mapping in mappings), _LENT_FOR_READING)
            for mapping in mappings:
                mapping.set_access(access)

    def import_descriptor(self, descriptor: int) -> Mappable:
        """Return what a descriptor stands for; raises LookupError for an unknown one."""
        return PhysicalMemory.adopt(descriptor, len(self.heaps))

    def settle(self, handle: Any) -> None:
        """Wait until what a handle stands for can be mapped; memory always can."""

    def handle(self, held: Mappable) -> Any:
        """Return a new handle; the caller holds the lock."""
        number = next(self.numbers)
        self.handles[number] = held
        return cuda.CUmemGenericAllocationHandle(number)

    def held(self, handle: Any) -> Mappable:
        check(int(handle) in self.handles)
        return self.handles[int(handle)]

    def _fabric_handle(self, physical: PhysicalMemory) -> bytes:
        """Return the fabric handle of some memory, the same each time; the caller holds the lock."""
        channel = _channel()
        if physical not in self._fabric_handles:
            handle = self.shared.share(SharedFd(physical.fd, physical.device))
            behind = _CHANNEL_AT + _CHANNEL.size
            self._fabric_handles[physical] = handle[:_CHANNEL_AT] + _CHANNEL.pack(channel) + handle[behind:]
        return self._fabric_handles[physical]

    def _located(self, prop: Any) -> int:
        check(prop.type == _PINNED and prop.location.type == _DEVICE)
        return self.index(prop.location.id)

    def _mappings(self, pointer: int, nbytes: int) -> list[MappedRegion]:
        """Return the mappings of one range that fill exactly these addresses."""
        first, found, end = self.addresses.find(pointer), [], pointer + nbytes
        mappings = first.range.mappings if isinstance(first, MappedRegion) else {}
        while pointer < end and (mapping := mappings.get(pointer)):
            found.append(mapping)
            pointer = mapping.end
        check(found and pointer == end)
        return found


def check_blocks(nbytes: int) -> None:
    """Refuse a size that is 0 or no multiple of the granularity."""
    check(nbytes > 0 and nbytes % BLOCK == 0)
