"""Virtual memory management: physical memory shared by descriptor or fabric handle, and addresses to map it at.

Creating and exporting need no context. The memory lives while any process of the host has a descriptor or a mapping
of it, even after its creator has ended. Another memory can be mapped at the same addresses later.

A fabric handle is 64 bytes, and needs an IMEX channel in both processes. Only a trial shows whether memory can have
one: the device's attribute says what the hardware supports.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from enum import IntFlag
from typing import Any

from cubroker.driver.buffers import handle_bytes, handle_of
from cubroker.driver.checked_calls import NO_ADDRESSES, Calls, DriverError, explained, tolerated, unmapped
from cubroker.driver.context import ContextResource, PrimaryContext

_IMPORT = "cuMemImportFromShareableHandle"


class _Kinds(IntFlag):
    """Kinds of handles, as bits. The bindings' enum has no combinations, and accepts these instead."""

    DESCRIPTOR = 1
    FABRIC = 8


class Physical:
    """Memory of one device, without an address; see :meth:`Driver.create` and :meth:`Driver.adopt`."""

    def __init__(
        self, calls: Calls, device: int, nbytes: int, *, fabric: bool = False, descriptor: int | None = None
    ) -> None:
        #: The ordinal of its device.
        self.device = device
        self.nbytes = nbytes
        self._calls = calls
        self._fabric = fabric
        #: The driver's handle of it.
        self.handle = self._created() if descriptor is None else _import(calls, descriptor)

    def export(self) -> int:
        """Return a descriptor that another process can import; the caller closes it, and it is closed on exec."""
        return export(self._calls, self.handle)

    def export_fabric(self) -> bytes | None:
        """Return the fabric handle, 64 bytes, with which other processes import it; None if it cannot have one.

        Until the memory is released, every process that knows the bytes and is on the same channel can read and write
        it.
        """
        if not self._fabric:
            return None
        with tolerated(*_NO_FABRIC):
            return handle_bytes(self._calls.cuMemExportToShareableHandle(self.handle, _fabric(self._calls.module), 0))
        return None

    def release(self) -> None:
        """Release the handle, once; the memory stays while there is a descriptor or a mapping."""
        self._calls.cuMemRelease(self.handle)

    def _created(self) -> Any:
        """Create it for both kinds of handles if a fabric handle was asked for, and for descriptors if that is refused.

        Each creation tries again, so it notices if a channel appears or disappears. It first tries the smallest size: a
        driver may clear all of the memory before it refuses, which took half of the time for 5.5 GB on an H200.
        """
        if self._fabric:
            kinds = _Kinds.DESCRIPTOR | _Kinds.FABRIC
            properties = _properties(self._calls, self.device, kinds)
            with tolerated(*_NO_FABRIC):
                least = granularity(self._calls, self.device, kinds)
                self._calls.cuMemRelease(self._calls.cuMemCreate(least, properties, 0))
                return self._calls.cuMemCreate(self.nbytes, properties, 0)
            self._fabric = False
        with explained(_NO_DESCRIPTORS):
            return self._calls.cuMemCreate(self.nbytes, _properties(self._calls, self.device), 0)


class Reservation(ContextResource):
    """A range of addresses at which memory of the same size can be mapped; see :meth:`Context.reserve`."""

    def __init__(self, context: PrimaryContext, nbytes: int) -> None:
        super().__init__(context)
        self.nbytes = nbytes
        #: Whether memory is mapped there now.
        self.mapped = False
        with explained({"CUDA_ERROR_OUT_OF_MEMORY": NO_ADDRESSES}), context.current():
            #: Its first address.
            self.pointer: int = int(self._calls.cuMemAddressReserve(nbytes, 0, 0, 0))

    def map(self, source: int | bytes, *, readonly: bool) -> None:
        """Map the memory of a descriptor or a fabric handle, which is not needed afterwards.

        The memory may be of another device that this one reaches. The driver refuses copies into a read-only mapping,
        and a kernel that writes to it ends its own context and no other.

        Raises:
            DriverError: memory is mapped there already, the source is not memory of this size, or the device does not
                reach the memory. Nothing is mapped then. See also :func:`import_refused`.
        """
        with explained(self._refusals), self._context.current(), ExitStack() as undo:
            handle = _import(self._calls, source)
            try:
                self._calls.cuMemMap(self.pointer, self.nbytes, 0, handle, 0)
                undo.callback(self._calls.cuMemUnmap, self.pointer, self.nbytes)
            finally:
                self._calls.cuMemRelease(handle)  # a mapping keeps the memory
            self._calls.cuMemSetAccess(self.pointer, self.nbytes, [self._access(readonly)], 1)
            undo.pop_all()
            self.mapped = True

    def protect(self, *, readonly: bool) -> None:
        """Set the access to the mapped memory, once all work submitted in the context is done."""
        with explained(self._refusals), self._context.current():
            self._context.synchronize()  # running work would fault
            self._calls.cuMemSetAccess(self.pointer, self.nbytes, [self._access(readonly)], 1)

    def unmap(self) -> None:
        """Unmap the memory once all work submitted in the context is done. The addresses stay reserved."""
        unmap([self])

    def close(self) -> None:
        """Unmap the memory, if any, and release the addresses; to be called once."""
        if self.mapped:
            self.unmap()
        with self._context.current():
            self._calls.cuMemAddressFree(self.pointer, self.nbytes)

    def vacate(self) -> None:
        """Unmap the memory without waiting; no submitted work may use it any more."""
        with self._context.current():
            self._calls.cuMemUnmap(self.pointer, self.nbytes)
            self.mapped = False

    def fill(self, handle: Any, *, readonly: bool) -> None:
        """Map the memory of a handle of the driver's; raises as :meth:`map`."""
        with explained(self._refusals), self._context.current():
            self._calls.cuMemMap(self.pointer, self.nbytes, 0, handle, 0)
            self.mapped = True
            try:
                self._calls.cuMemSetAccess(self.pointer, self.nbytes, [self._access(readonly)], 1)
            except BaseException:
                self.vacate()
                raise

    def _refusals(self) -> dict[str, str]:
        """Return explanations of refusals, by name of the result: for memory out of reach, and as for an open.

        NVIDIA does not document which of the two results means out of reach, nor that the refusals of an open occur
        here; users of other projects met them.
        """
        device = self._context.device.index
        unreachable = f"the memory is on a device that device {device} does not reach"
        return unmapped(device, host=self._context.host) | {
            "CUDA_ERROR_INVALID_DEVICE": unreachable,
            "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED": unreachable,
        }

    def _access(self, readonly: bool) -> Any:
        module = self._calls.module
        flags = module.CUmemAccess_flags
        access = module.CUmemAccessDesc()
        access.location.type = module.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = self._context.device.index
        access.flags = flags.CU_MEM_ACCESS_FLAGS_PROT_READ if readonly else flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        return access


def unmap(reservations: Sequence[Reservation]) -> None:
    """Unmap the memory of some reservations, last first, once all work in their contexts is done.

    Each context is waited for once, all of them before anything is unmapped.

    Raises:
        DriverError: some of the memory is still mapped, as each reservation says.
    """
    with _all_current(reservations) as contexts:
        for context in contexts:
            context.synchronize()  # cuMemUnmap waits for nothing: running work would fault
        for reservation in reversed(reservations):
            reservation.vacate()


@contextmanager
def _all_current(reservations: Sequence[Reservation]) -> Iterator[Sequence[PrimaryContext]]:
    """Make the contexts of reservations current for the block, and not in every call in it; yield each once."""
    contexts = tuple(dict.fromkeys(reservation._context for reservation in reservations))
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context.current())
        yield contexts


class HalfReplaced(DriverError):
    """Memory was to be replaced at several addresses, and could neither be replaced everywhere nor be put back."""


def replace(memory: Sequence[tuple[Reservation, int | bytes]], *, readonly: bool) -> None:
    """Map other memory in place of what is mapped in some reservations: in all of them, or in none.

    The steps that may well fail come first: all of the other memory is imported before anything is unmapped. Submitted
    work is waited for once in each context. The old memory is held until the end, and put back if anything fails.

    Args:
        memory: each reservation, with what opens the other memory of the same size.
        readonly: as for :meth:`Reservation.map`.

    Raises:
        HalfReplaced: the driver also refused to put memory back. Each reservation has the old, the other or no memory.
        DriverError: every reservation has the old memory. See also :func:`import_refused`.
    """
    with _all_current([reservation for reservation, _ in memory]) as contexts, ExitStack() as stack:
        others = [_hold(stack, reservation, source) for reservation, source in memory]
        before = [_hold(stack, reservation, None) for reservation, _ in memory]
        for context in contexts:
            context.synchronize()  # cuMemUnmap waits for nothing: running work would fault
        vacated: list[tuple[Reservation, Any]] = []
        try:
            for (reservation, _), other, old in zip(memory, others, before, strict=True):
                reservation.vacate()
                vacated.append((reservation, old))
                reservation.fill(other, readonly=readonly)
        except BaseException:
            _put_back(vacated, readonly=readonly)
            raise


def _hold(stack: ExitStack, reservation: Reservation, source: int | bytes | None) -> Any:
    """Return a handle, until the stack ends, of a source's memory or, if ``source`` is None, of the mapped memory."""
    calls = reservation._calls

    def release() -> None:
        with suppress(DriverError):  # the driver keeps the handle until this process ends; the mappings are right
            calls.cuMemRelease(handle)

    if source is None:
        handle = calls.cuMemRetainAllocationHandle(reservation.pointer)
    else:
        with explained(reservation._refusals):
            handle = _import(calls, source)
    stack.callback(release)
    return handle


def _put_back(vacated: Sequence[tuple[Reservation, Any]], *, readonly: bool) -> None:
    """Map the old memory again, last first; after all attempts, raise ``HalfReplaced`` if one failed."""
    refused: DriverError | None = None
    for reservation, old in reversed(vacated):
        try:
            if reservation.mapped:
                reservation.vacate()
            reservation.fill(old, readonly=readonly)
        except DriverError as error:
            refused = HalfReplaced(error.call, error.status, error.name, error.detail)
    try:
        if refused:
            raise refused
    finally:
        del refused  # its traceback has this frame


def export(calls: Calls, handle: Any) -> int:
    """Return a descriptor of a handle's memory or multicast object; the caller closes it, and it is closed on exec."""
    descriptor = int(calls.cuMemExportToShareableHandle(handle, _descriptor(calls.module), 0))
    os.set_inheritable(descriptor, False)
    return descriptor


def granularity(calls: Calls, device: int, kinds: _Kinds = _Kinds.DESCRIPTOR) -> int:
    """Return the unit of the sizes of physical memory, with these kinds of handles, and of reservations, in bytes."""
    minimum = calls.module.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
    return int(calls.cuMemGetAllocationGranularity(_properties(calls, device, kinds), minimum))


def obstacle(calls: Calls, device: int) -> str | None:
    """Return why memory of a device cannot be shared by descriptor here, or None; no context is made.

    The trial creates and exports memory of the smallest size. If the device is too full for that, the result is None.
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
    """Whether :meth:`Reservation.map` failed to open the handle; else it failed to map the memory."""
    return error.call == _IMPORT


_NO_FABRIC = frozenset({"CUDA_ERROR_NOT_PERMITTED", "CUDA_ERROR_NOT_SUPPORTED", "CUDA_ERROR_INVALID_VALUE"})
"""Refusals of fabric handles: no channel, no such hardware, a driver that does not know them."""

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
    handle = handle_of(module.CUmemFabricHandle(), source, "a fabric handle")
    with explained({"CUDA_ERROR_NOT_PERMITTED": _NO_CHANNEL}):
        return calls.cuMemImportFromShareableHandle(handle.getPtr(), _fabric(module))


def _properties(calls: Calls, device: int, kinds: _Kinds = _Kinds.DESCRIPTOR) -> Any:
    module = calls.module
    properties = module.CUmemAllocationProp()
    properties.type = module.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location.type = module.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    properties.location.id = device
    properties.requestedHandleTypes = kinds
    # So that a network adapter, if there is one, may read and write it: pools are fetched from other hosts.
    attribute = module.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED
    properties.allocFlags.gpuDirectRDMACapable = calls.cuDeviceGetAttribute(attribute, device)
    return properties
