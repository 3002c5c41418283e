"""Virtual memory management on host devices: physical memory by descriptor, mapped into reserved addresses."""

# ruff: noqa: D102  (the functions are NVIDIA's, and described in the reference of the CUDA driver API)

from __future__ import annotations

import itertools
from typing import Any

from cuda.bindings import driver as cuda

from cubroker.driver.host import memory, ranges, teams
from cubroker.driver.host.answers import Refusal, Result, answers
from cubroker.driver.host.memory import BLOCK
from cubroker.driver.host.ranges import Mappable, Mapping, Range
from cubroker.driver.host.state import State

_Kind = cuda.CUmemAllocationHandleType
_DEVICE = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
_PINNED = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
_ACCESS = frozenset(map(int, cuda.CUmemAccess_flags)) - {int(cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_MAX)}


class Vmm(State):
    """The functions, none of which needs a context. Handles and ranges belong to the process."""

    def __init__(self, count: int, size: int, island: int | None = None) -> None:
        super().__init__(count, size, island)
        self._new_handles = itertools.count(1)
        self._handles: dict[int, Mappable] = {}
        self._ranges: dict[int, Range] = {}

    def forked(self) -> None:
        """In a forked child: close the parent's descriptors too, which would keep released memory."""
        super().forked()
        for held in self.in_use():
            held.forked()

    @answers(1)
    def cuMemGetAllocationGranularity(self, prop: Any, option: Any) -> int:
        self._located(prop)
        return BLOCK

    @answers(1)
    def cuMemCreate(self, size: int, prop: Any, flags: int) -> Any:
        device = self._located(prop)
        kind = prop.requestedHandleTypes
        check_blocks(size)
        check(not flags and size <= self.heaps[device].total)  # more than there ever is: another status than too much
        if kind == _Kind.CU_MEM_HANDLE_TYPE_FABRIC:  # as where there is no IMEX channel
            raise Refusal(Result.CUDA_ERROR_NOT_PERMITTED)
        check(kind in (_Kind.CU_MEM_HANDLE_TYPE_NONE, _Kind.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR))
        with self.lock:
            exportable = kind != _Kind.CU_MEM_HANDLE_TYPE_NONE
            return self.handle(ranges.create(device, size, self.heaps[device], exportable=exportable))

    @answers(0)
    def cuMemRelease(self, handle: Any) -> None:
        with self.lock:
            self.held(handle).release()
            del self._handles[int(handle)]

    @answers(1)
    def cuMemExportToShareableHandle(self, handle: Any, handleType: Any, flags: int) -> int:
        with self.lock:
            held = self.held(handle)
            check(held.exportable and not flags and handleType == _Kind.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
            return held.export()

    @answers(1)
    def cuMemImportFromShareableHandle(self, osHandle: int, shHandleType: Any) -> Any:
        check(shHandleType == _Kind.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        adopt = teams.adopt if teams.is_team(osHandle) else ranges.adopt
        try:
            imported = adopt(osHandle, len(self.heaps))
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
            for mapping in mappings:
                mapping.set_access(access)

    def settle(self, handle: Any) -> None:
        """Return once what a handle stands for can be mapped; of memory that is so at once."""

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

    def in_use(self) -> set[Mappable]:
        """Return what holds descriptors: here what handles stand for, since mappings hold none."""
        return set(self.handles())

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


def check_blocks(nbytes: int) -> None:
    """Refuse a size that is no multiple of the granularity, or none."""
    check(nbytes > 0 and nbytes % BLOCK == 0)


def check(valid: bool) -> None:
    """Refuse what is not valid."""
    if not valid:
        raise Refusal(Result.CUDA_ERROR_INVALID_VALUE)
