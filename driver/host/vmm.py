"""Virtual memory management on host devices: physical memory by descriptor or fabric handle, and its mappings."""

# ruff: noqa: D102  (the functions are NVIDIA's, and described in the reference of the CUDA driver API)

from __future__ import annotations

import ctypes
import itertools
from typing import Any

from cuda.bindings import driver as cuda

from cubroker.driver.host import fabric, memory, ranges, teams
from cubroker.driver.host.answers import Refusal, Result, answers
from cubroker.driver.host.memory import BLOCK
from cubroker.driver.host.ranges import WRITE, Mappable, Mapping, Physical, Range
from cubroker.driver.host.sharing import HANDLE_BYTES
from cubroker.driver.host.state import State

_DESCRIPTOR = int(cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
_FABRIC = int(cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC)
_KINDS_AT = 4
"""Bytes: where ``CUmemAllocationProp`` has its ``requestedHandleTypes``, an int."""

_GRANULARITIES = frozenset(map(int, cuda.CUmemAllocationGranularity_flags))
_DEVICE = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
_PINNED = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
_LENT_FOR_READING = Result.CUDA_ERROR_NOT_PERMITTED
"""What ``cuMemSetAccess`` answers where memory that was lent for reading is to be written. No GPU's memory can be lent
so, and none answers this to that call; drivers say it of a handle that a process has no right to use."""

_ACCESS = frozenset(map(int, cuda.CUmemAccess_flags)) - {int(cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_MAX)}


class Vmm(State):
    """The functions, none of which needs a context. Handles and ranges belong to the process."""

    def __init__(self, count: int, size: int, island: int | None = None) -> None:
        super().__init__(count, size, island)
        self._new_handles = itertools.count(1)
        self._handles: dict[int, Mappable] = {}
        self._ranges: dict[int, Range] = {}
        self._fabric = fabric.Exports()

    @answers(1)
    def cuMemGetAllocationGranularity(self, prop: Any, option: Any) -> int:
        self._located(prop)
        check(int(option) in _GRANULARITIES)
        return BLOCK

    @answers(1)
    def cuMemCreate(self, size: int, prop: Any, flags: int) -> Any:
        device = self._located(prop)
        kinds = _kinds(prop)
        check_blocks(size)
        check(not flags and size <= self.heaps[device].total)  # more than there ever is: another status than too much
        check(not kinds & ~(_DESCRIPTOR | _FABRIC))
        if kinds & _FABRIC:
            fabric.check_channel()
        with self.lock:
            return self.handle(ranges.create(device, size, self.heaps[device], kinds=kinds))

    @answers(0)
    def cuMemRelease(self, handle: Any) -> None:
        with self.lock:
            held = self.held(handle)
            if isinstance(held, Physical):
                self._fabric.withdraw(held)
            held.release()
            del self._handles[int(handle)]

    @answers(1)
    def cuMemExportToShareableHandle(self, handle: Any, handleType: Any, flags: int) -> Any:
        with self.lock:
            held = self.held(handle)
            check(not flags and bool(held.kinds & int(handleType)))
            if int(handleType) == _DESCRIPTOR:
                return held.export()
            assert isinstance(held, Physical)  # multicast objects have descriptors alone
            raw, exported = self._fabric.export(held), cuda.CUmemFabricHandle()
        ctypes.memmove(exported.getPtr(), raw, len(raw))
        return exported

    @answers(1)
    def cuMemImportFromShareableHandle(self, osHandle: int, shHandleType: Any) -> Any:
        check(int(shHandleType) in (_DESCRIPTOR, _FABRIC))
        try:
            imported = self._adopted(osHandle, by_fabric=int(shHandleType) == _FABRIC)
        except LookupError:
            raise Refusal(Result.CUDA_ERROR_INVALID_VALUE) from None
        with self.lock:
            return self.handle(imported)

    @answers(1)
    def cuMemAddressReserve(self, size: int, alignment: int, addr: Any, flags: int) -> Any:
        check_blocks(size)
        check(not flags and alignment >= 0 and not alignment & (alignment - 1))
        pointer = memory.reserve(size, max(alignment, BLOCK))
        with self.lock:
            self._ranges[pointer] = Range(pointer, size)
        return cuda.CUdeviceptr(pointer)

    @answers(0)
    def cuMemAddressFree(self, ptr: Any, size: int) -> None:
        with self.lock:
            reserved = self._ranges.get(int(ptr))
            if reserved is None or reserved.nbytes != size or reserved.mappings:
                raise Refusal(Result.CUDA_ERROR_INVALID_VALUE)
            memory.unmap(reserved.pointer, size)
            del self._ranges[reserved.pointer]

    @answers(0)
    def cuMemMap(self, ptr: Any, size: int, offset: int, handle: Any, flags: int) -> None:
        for number in (int(ptr), size, offset):
            check(number % BLOCK == 0)
        self.settle(handle)
        with self.lock:
            held, reserved = self.held(handle), self._range(int(ptr), size)
            check(not flags and size > 0 and offset + size <= held.nbytes and reserved.vacant(int(ptr), size))
            if size < held.nbytes:
                raise Refusal(Result.CUDA_ERROR_NOT_SUPPORTED)
            reserved.map(held, int(ptr), self.addresses)

    @answers(0)
    def cuMemUnmap(self, ptr: Any, size: int) -> None:
        with self.lock:
            for mapping in self._mappings(int(ptr), size):
                mapping.range.unmap(mapping, self.addresses)

    @answers(0)
    def cuMemSetAccess(self, ptr: Any, size: int, desc: Any, count: int) -> None:
        check(all(each.location.type == _DEVICE and int(each.flags) in _ACCESS for each in desc[:count]))
        access = {self.index(each.location.id): int(each.flags) for each in desc[:count]}
        with self.lock:
            mappings = self._mappings(int(ptr), size)
            if not all(self.reaches(device, mapping.device) for device in access for mapping in mappings):
                raise Refusal(Result.CUDA_ERROR_INVALID_DEVICE)
            if any(flags & WRITE for flags in access.values()) and not all(each.writable for each in mappings):
                raise Refusal(_LENT_FOR_READING)
            for mapping in mappings:
                mapping.set_access(access)

    def settle(self, handle: Any) -> None:
        """Return once what a handle stands for can be mapped; of memory that is so at once."""

    def _adopted(self, shared: int, *, by_fabric: bool) -> Mappable:
        """Return what a descriptor stands for, or the fabric handle at an address; raises LookupError for nothing."""
        if by_fabric:
            check(bool(shared))
            return fabric.adopt(ctypes.string_at(shared, HANDLE_BYTES), len(self.heaps))
        adopt = teams.adopt if teams.is_team(shared) else ranges.adopt
        return adopt(shared, len(self.heaps))

    def _located(self, prop: Any) -> int:
        """Return the device on which memory of such properties lies."""
        check(prop.type == _PINNED and prop.location.type == _DEVICE)
        return self.index(prop.location.id)

    def handle(self, held: Mappable) -> Any:
        """Return a new handle, which stands for this; the caller holds the lock."""
        number = next(self._new_handles)
        self._handles[number] = held
        return cuda.CUmemGenericAllocationHandle(number)

    def held(self, handle: Any) -> Mappable:
        """Return what a handle stands for."""
        held = self._handles.get(int(handle))
        if held is None:
            raise Refusal(Result.CUDA_ERROR_INVALID_VALUE)
        return held

    def handles(self) -> list[Mappable]:
        """Return what all handles stand for."""
        return list(self._handles.values())

    def _range(self, pointer: int, nbytes: int) -> Range:
        for reserved in self._ranges.values():
            if reserved.has(pointer, nbytes):
                return reserved
        raise Refusal(Result.CUDA_ERROR_INVALID_VALUE)

    def _mappings(self, pointer: int, nbytes: int) -> list[Mapping]:
        """Return what is mapped at exactly these addresses, in whole mappings."""
        first = self.addresses.find(pointer)
        found = first.range.exactly(pointer, nbytes) if isinstance(first, Mapping) else []
        check(bool(found))
        return found


def _kinds(prop: Any) -> int:
    """Return the handles that memory is asked for with, as bits; the bindings' own attribute reads one alone."""
    return ctypes.c_int.from_address(prop.getPtr() + _KINDS_AT).value


def check_blocks(nbytes: int) -> None:
    """Refuse a size that is no multiple of the granularity, or none."""
    check(nbytes > 0 and nbytes % BLOCK == 0)


def check(valid: bool) -> None:
    """Refuse what is not valid."""
    if not valid:
        raise Refusal(Result.CUDA_ERROR_INVALID_VALUE)
