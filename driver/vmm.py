"""Physical memory that is shared by descriptor or fabric handle, and ranges of addresses that it is mapped into.

Creating and exporting need no context. The memory lives while anybody on the host has a descriptor of it, or has it
mapped; whoever created it may be gone. What is mapped at an address can change, the address stays.

A fabric handle is 64 bytes, and needs an IMEX channel in both processes. Whether it can be had is found by trying: the
device's attribute says only what the hardware can.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from enum import IntFlag
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from cubroker.driver.calls import Calls, DriverError, explained
from cubroker.driver.errors import unmapped

if TYPE_CHECKING:
    from cubroker.driver.context import Context


FABRIC_BYTES = 64
"""The size of a fabric handle."""

_IMPORT = "cuMemImportFromShareableHandle"


class _Kinds(IntFlag):
    """Kinds of handles, as bits: the bindings' enum has no combinations, and takes these for its own."""

    DESCRIPTOR = 1
    FABRIC = 8


class Physical:
    """Memory of one device, which has no address; see :meth:`Driver.create` and :meth:`Driver.adopt`.

    Attributes:
        device: the ordinal of the device it is on.
        nbytes: its size.
        handle: the driver's own.
    """

    def __init__(
        self, calls: Calls, device: int, nbytes: int, *, fabric: bool = False, descriptor: int | None = None
    ) -> None:
        self.device = device
        self.nbytes = nbytes
        self._calls = calls
        self._fabric = fabric
        self.handle = self._created() if descriptor is None else self._imported(descriptor)

    def export(self) -> int:
        """Return a descriptor of it, which another process imports and which the caller closes; exec closes it too."""
        return export(self._calls, self.handle)

    def export_fabric(self) -> bytes | None:
        """Return the fabric handle, 64 bytes, with which other processes import it; None if it cannot have one.

        Until it is released, whoever knows the bytes and is on the same channel can read and write the memory.
        """
        if not self._fabric:
            return None
        try:
            handle = self._calls.cuMemExportToShareableHandle(self.handle, _fabric(self._calls.module), 0)
        except DriverError as error:
            if error.name in _NO_FABRIC:
                return None
            raise
        return ctypes.string_at(handle.getPtr(), FABRIC_BYTES)

    def release(self) -> None:
        """Give the handle up, once; the memory stays while there is a descriptor or a mapping."""
        self._calls.cuMemRelease(self.handle)

    def _imported(self, descriptor: int) -> Any:
        return getattr(self._calls, _IMPORT)(descriptor, _descriptor(self._calls.module))

    def _created(self) -> Any:
        """Create it for both kinds of handles if it may have a fabric handle, and for descriptors if that is refused.

        Each creation is a trial of its own, so a channel that comes or goes is noticed.
        """
        module = self._calls.module
        if self._fabric:
            kinds = _Kinds.DESCRIPTOR | _Kinds.FABRIC
            try:
                return self._calls.cuMemCreate(self.nbytes, _properties(module, self.device, kinds), 0)
            except DriverError as error:
                if error.name not in _NO_FABRIC:
                    raise
                self._fabric = False
        with explained(_NO_DESCRIPTORS):
            return self._calls.cuMemCreate(self.nbytes, _properties(module, self.device), 0)


class Reservation:
    """A range of addresses in which memory can be mapped, whole and one at a time; see :meth:`Context.reserve`.

    Attributes:
        pointer: its first address.
        nbytes: its size.
        mapped: whether something is mapped there now.
    """

    def __init__(self, context: Context, nbytes: int) -> None:
        self.nbytes = nbytes
        self.mapped = False
        self._context = context
        self._calls = context.calls
        with context.current():
            self.pointer: int = int(self._calls.cuMemAddressReserve(nbytes, 0, 0, 0))

    def map(self, source: int | bytes, *, readonly: bool) -> None:
        """Map the memory of a descriptor or a fabric handle, of ``nbytes`` bytes, which is not needed afterwards.

        The memory may be of another device, if this one can reach it. Where it is read-only, copies into it are
        refused, and a kernel that writes ends the context it runs in and no other.

        Raises:
            DriverError: what is mapped is to be unmapped first, the source is of something else or of memory of
                another size, or it cannot be reached. Nothing is mapped then. See also :func:`import_refused`.
        """
        with explained(self._refusals()), self._context.current(), ExitStack() as undo:
            with self._imported(source) as handle:
                self._calls.cuMemMap(self.pointer, self.nbytes, 0, handle, 0)
                undo.callback(self._calls.cuMemUnmap, self.pointer, self.nbytes)
            self._calls.cuMemSetAccess(self.pointer, self.nbytes, [self._access(readonly)], 1)
            undo.pop_all()
            self.mapped = True

    def unmap(self) -> None:
        """Unmap the memory once all work submitted in the context is done. The addresses stay reserved."""
        with self._context.current():
            self._context.synchronize()  # cuMemUnmap waits for nothing: running work would fault
            self._calls.cuMemUnmap(self.pointer, self.nbytes)
            self.mapped = False

    def close(self) -> None:
        """Unmap what is mapped and give the addresses back; to be called once."""
        if self.mapped:
            self.unmap()
        with self._context.current():
            self._calls.cuMemAddressFree(self.pointer, self.nbytes)

    def _refusals(self) -> dict[str, str]:
        """What a driver says of memory on a device out of reach, which of the two is not documented; and of an open.

        Users of other projects met the refusals of an open here, where NVIDIA's pages do not list them.
        """
        device = self._context.device.index
        unreachable = f"the memory is on a device that device {device} does not reach"
        return unmapped(device, host=self._context.host) | {
            "CUDA_ERROR_INVALID_DEVICE": unreachable,
            "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED": unreachable,
        }

    @contextmanager
    def _imported(self, source: int | bytes) -> Iterator[Any]:
        handle = _import(self._calls, source)
        try:
            yield handle
        finally:
            self._calls.cuMemRelease(handle)  # a mapping keeps the memory

    def _access(self, readonly: bool) -> Any:
        module = self._calls.module
        flags = module.CUmemAccess_flags
        access = module.CUmemAccessDesc()
        access.location.type = module.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = self._context.device.index
        access.flags = flags.CU_MEM_ACCESS_FLAGS_PROT_READ if readonly else flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        return access

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def export(calls: Calls, handle: Any) -> int:
    """Return a descriptor of what a handle stands for, which the caller closes; exec closes it too."""
    descriptor = int(calls.cuMemExportToShareableHandle(handle, _descriptor(calls.module), 0))
    os.set_inheritable(descriptor, False)
    return descriptor


def granularity(calls: Calls, device: int) -> int:
    """Return what the sizes of physical memory and of reservations are multiples of, in bytes."""
    minimum = calls.module.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    return int(calls.cuMemGetAllocationGranularity(_properties(calls.module, device), minimum))


def obstacle(calls: Calls, device: int) -> str | None:
    """Return why memory of a device cannot be shared by descriptor here, or None; no context is made to find out.

    It is found by a trial, the least memory that can be created and exported. A device that is full has none to try
    with: it is taken for one that can.
    """
    try:
        physical = Physical(calls, device, granularity(calls, device))
        try:
            os.close(physical.export())
        finally:
            physical.release()
    except DriverError as error:
        return None if error.out_of_memory else str(error)
    return None


def import_refused(error: DriverError) -> bool:
    """Whether a handle could not be opened at all; else its memory could not be mapped."""
    return error.call == _IMPORT


_NO_FABRIC = frozenset({"CUDA_ERROR_NOT_PERMITTED", "CUDA_ERROR_NOT_SUPPORTED", "CUDA_ERROR_INVALID_VALUE"})
"""Refusals of a machine without it: no channel, no such hardware, a driver that has not heard of it."""

_NO_DESCRIPTORS = {
    "CUDA_ERROR_NOT_SUPPORTED": "memory of this device cannot be shared by descriptor (vmm), as on WSL; by handle (ipc)"
    " it may be, which is not durable"
}

_NO_CHANNEL = "this process is not on the IMEX channel of the memory's owner; a container needs its device file"


def _descriptor(module: Any) -> Any:
    return module.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR


def _fabric(module: Any) -> Any:
    return module.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC


def _import(calls: Calls, source: int | bytes) -> Any:
    module = calls.module
    if isinstance(source, int):
        return calls.cuMemImportFromShareableHandle(source, _descriptor(module))
    if len(source) != FABRIC_BYTES:
        raise ValueError(f"a fabric handle of {len(source)} bytes; it has {FABRIC_BYTES}")
    handle = module.CUmemFabricHandle()
    ctypes.memmove(handle.getPtr(), source, FABRIC_BYTES)
    with explained({"CUDA_ERROR_NOT_PERMITTED": _NO_CHANNEL}):
        return calls.cuMemImportFromShareableHandle(handle.getPtr(), _fabric(module))


def _properties(module: Any, device: int, kinds: _Kinds = _Kinds.DESCRIPTOR) -> Any:
    properties = module.CUmemAllocationProp()
    properties.type = module.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = module.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = device
    properties.requestedHandleTypes = kinds
    return properties
