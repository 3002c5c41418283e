"""Host devices: what all functions share, their properties, contexts, and peer access between them."""

from __future__ import annotations

import ctypes
import errno
import functools
import hashlib
import itertools
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from cuda.bindings import driver as cuda

from cubroker.driver.host import shared_memory
from cubroker.driver.host.shared_memory import AddressMap, Block, Heap, OpenedRegion, SharedFds, join_stopped, stopped

PEERS = "CUBROKER_HOST_PEERS"  #: For tests: the variable with the most peers that a device can have; unset: any number.
VERSION = 13000  #: The CUDA version whose behaviour is imitated: 13.0.

Result = cuda.CUresult

_Attribute = cuda.CUdevice_attribute
_SUPPORTED = frozenset(
    {
        _Attribute.CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING,
        _Attribute.CU_DEVICE_ATTRIBUTE_INTEGRATED,
        _Attribute.CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED,
        _Attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
        _Attribute.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
        _Attribute.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED,  # also where there is no channel
        _Attribute.CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED,
    }
)
"""The attributes that are 1 on every host device. Multicast depends on the island; all others are 0."""

_FIRST_NUMBER = 1 << 20  #: The first number of what calls make; those of primary contexts are less.

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id").read_bytes()
"""The kernel's id of this boot, which makes UUIDs of host devices differ from those of other boots."""

# All by number: the bindings have names for the last attribute, and for atomic operations, only since CUDA 13.0.
_PERFORMANCE_RANK, _ACCESS, _NATIVE_ATOMICS, _ARRAY_ACCESS, _ONLY_PARTIAL_NATIVE_ATOMICS = range(1, 6)
_LINK = {_PERFORMANCE_RANK: 0, _ACCESS: 1, _NATIVE_ATOMICS: 1, _ARRAY_ACCESS: 1, _ONLY_PARTIAL_NATIVE_ATOMICS: 0}
"""Between devices that reach each other, as between two H200s; between others all are 0."""

_OPERATIONS = range(13)  #: The atomic operations of 13.0, CU_ATOMIC_OPERATION_INTEGER_ADD to _FLOAT_MAX.

_NO_FORM = 0
"""What two H200s answer for each operation (driver 580.159), although their link says that it has native atomics."""

P = ParamSpec("P")
F = TypeVar("F", bound="DeviceFunctions")


class Refusal(Exception):
    """The call ends with this ``CUresult``."""

    def __init__(self, status: Any) -> None:
        super().__init__(status)
        self.status = status


def answers(
    values: int,
) -> Callable[[Callable[Concatenate[F, P], Any]], Callable[Concatenate[F, P], tuple[Any, ...]]]:
    """Make a method answer as a binding, ``(status, value…)`` with ``values`` values, each ``None`` on failure.

    ``Refusal``, ``MemoryError`` and the system's errors become the statuses that a GPU's driver gives for them.
    """

    def decorate(method: Callable[Concatenate[F, P], Any]) -> Callable[Concatenate[F, P], tuple[Any, ...]]:
        @functools.wraps(method)
        def answer(self: F, /, *args: P.args, **kwargs: P.kwargs) -> tuple[Any, ...]:
            try:
                self.check_call(method.__name__)
                result = method(self, *args, **kwargs)
            except (Refusal, MemoryError, OSError) as error:
                return _status(error), *(None,) * values
            finally:
                if stopped and not (self.lock._is_owned() or shared_memory.fork_lock_held()):  # type: ignore[attr-defined]
                    join_stopped()  # else a finalizer makes this call inside another one, and the next call does it
            if values == 1:
                return Result.CUDA_SUCCESS, result
            return Result.CUDA_SUCCESS, *(result or ())

        return answer

    return decorate


def check(valid: object, status: Any = Result.CUDA_ERROR_INVALID_VALUE) -> None:
    """Refuse the call unless ``valid`` is true."""
    if not valid:
        raise Refusal(status)


def _status(error: Refusal | MemoryError | OSError) -> Any:
    if isinstance(error, Refusal):
        return error.status
    if isinstance(error, TimeoutError):
        return Result.CUDA_ERROR_TIMEOUT
    if isinstance(error, MemoryError) or error.errno in (errno.ENOMEM, errno.ENOSPC):
        return Result.CUDA_ERROR_OUT_OF_MEMORY
    return Result.CUDA_ERROR_OPERATING_SYSTEM


class DeviceFunctions:
    """``count`` devices of ``size`` bytes each, as one process sees them, and the functions that change contexts.

    Devices reach each other's memory in groups of ``island`` devices, counted from the first; by default all do. A
    context that a program creates in addition to the primary one is only a second name for the device: memory allocated
    in it does not end with it. Peer access is enabled in one direction at a time, from one context to another.
    """

    def __init__(self, count: int, size: int, island: int | None = None) -> None:
        #: Guards the tables. It is never held while bytes are copied or another process is asked.
        self.lock = threading.RLock()  # reentrant: a finalizer that copies may run in the middle of a call
        #: The process id of ``cuInit``; 0 in a forked child, which stays refused.
        self.initialised_by: int | None = None
        self.addresses = AddressMap()
        #: The memory of each device.
        self.heaps = [Heap(device, size, self.addresses) for device in range(count)]
        self.island = island or count
        #: How often each device's primary context is retained.
        self.retained = [0] * count
        #: The numbers of what calls make.
        self.numbers = itertools.count(_FIRST_NUMBER)
        #: The devices of contexts other than the primary ones, by number.
        self.created: dict[int, int] = {}
        #: Other processes' memory that is open here, by device and handle.
        self.opened: dict[tuple[int, bytes], OpenedRegion] = {}
        #: The handles of this process's memory and events.
        self.shared = SharedFds()
        self._enabled: dict[tuple[int, int], tuple[int, int]] = {}  # contexts, and their devices
        self._thread = threading.local()

    def check_call(self, name: str) -> None:
        """Refuse every call before ``cuInit``, and in a forked child permanently."""
        check(self.initialised_by == os.getpid(), Result.CUDA_ERROR_NOT_INITIALIZED)

    # -- devices -----------------------------------------------------------------------------------

    def cuInit(self, Flags: int) -> tuple[Any]:
        if Flags:
            return (Result.CUDA_ERROR_INVALID_VALUE,)
        if self.initialised_by is None:
            self.initialised_by = os.getpid()
        return (Result.CUDA_SUCCESS if self.initialised_by == os.getpid() else Result.CUDA_ERROR_NOT_INITIALIZED,)

    def cuDriverGetVersion(self) -> tuple[Any, int]:
        return Result.CUDA_SUCCESS, VERSION

    @answers(1)
    def cuDeviceGetCount(self) -> int:
        return len(self.heaps)

    @answers(1)
    def cuDeviceGet(self, ordinal: int) -> Any:
        return cuda.CUdevice(self.index(ordinal))

    @answers(1)
    def cuDeviceGetName(self, length: int, dev: Any) -> bytes:
        name = f"cubroker host device {self.index(dev)}".encode()
        return name[: length - 1].ljust(length, b"\0")

    @answers(1)
    def cuDeviceGetUuid(self, dev: Any) -> Any:
        octets = hashlib.sha256(_BOOT_ID + b"%d" % self.index(dev)).digest()[:16]
        uuid = cuda.CUuuid()
        ctypes.memmove(uuid.getPtr(), octets, len(octets))
        return uuid

    @answers(1)
    def cuDeviceTotalMem(self, dev: Any) -> int:
        return self.heaps[self.index(dev)].total

    @answers(1)
    def cuDeviceGetAttribute(self, attrib: Any, dev: Any) -> int:
        device = self.index(dev)
        if attrib == _Attribute.CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED:
            return int(self.reached(device) > 1)
        return int(attrib in _SUPPORTED)

    def index(self, dev: Any) -> int:
        check(0 <= int(dev) < len(self.heaps), Result.CUDA_ERROR_INVALID_DEVICE)
        return int(dev)

    # -- contexts ----------------------------------------------------------------------------------

    @answers(1)
    def cuDevicePrimaryCtxRetain(self, dev: Any) -> Any:
        with self.lock:
            self.retained[self.index(dev)] += 1
        return cuda.CUcontext(int(dev) + 1)  # not 0, which stands for none

    @answers(0)
    def cuDevicePrimaryCtxRelease(self, dev: Any) -> None:
        device = self.index(dev)
        with self.lock:
            check(self.retained[device], Result.CUDA_ERROR_INVALID_CONTEXT)
            self.retained[device] -= 1
            if not self.retained[device]:
                self.destroy(device)

    @answers(1)
    def cuCtxCreate(self, ctxCreateParams: Any, flags: int, dev: Any) -> Any:
        device, number = self.index(dev), next(self.numbers)
        with self.lock:
            self.created[number] = device
        self.stack.append(number)
        return cuda.CUcontext(number)

    @answers(0)
    def cuCtxDestroy(self, ctx: Any) -> None:
        with self.lock:
            check(self.created.pop(int(ctx), None) is not None, Result.CUDA_ERROR_INVALID_CONTEXT)
        if self.stack[-1:] == [int(ctx)]:
            self.stack.pop()

    @answers(0)
    def cuCtxPushCurrent(self, ctx: Any) -> None:
        self.device_of(ctx)
        self.stack.append(int(ctx))

    @answers(1)
    def cuCtxPopCurrent(self) -> Any:
        check(self.stack, Result.CUDA_ERROR_INVALID_CONTEXT)
        return cuda.CUcontext(self.stack.pop())

    @answers(0)
    def cuCtxSetCurrent(self, ctx: Any) -> None:
        if int(ctx):
            self.device_of(ctx)
        self.stack[-1:] = [int(ctx)] if int(ctx) else []

    @answers(1)
    def cuCtxGetCurrent(self) -> Any:
        return cuda.CUcontext(self.stack[-1] if self.stack else 0)

    @answers(1)
    def cuCtxGetDevice(self) -> Any:
        return cuda.CUdevice(self.current())

    @property
    def stack(self) -> list[int]:
        """The contexts that this thread has pushed, by number, the current one last."""
        stack: list[int] = self._thread.__dict__.setdefault("stack", [])
        return stack

    def current(self) -> int:
        return self.device_of(self.stack[-1] if self.stack else 0)

    def device_of(self, context: Any) -> int:
        """Return the device of a context. A primary context's number is its device's index plus 1."""
        number = int(context)
        if number in self.created:
            return self.created[number]
        retained = 0 < number <= len(self.retained) and self.retained[number - 1]
        check(retained, Result.CUDA_ERROR_INVALID_CONTEXT)
        return number - 1

    def destroy(self, device: int) -> None:
        """End everything in the context of a device, and access from and to it; the caller holds the lock."""
        for region in tuple(self.opened.values()):
            if region.device == device:
                self.unmap(region)
        for block in tuple(self.heaps[device].blocks.values()):
            for pointer in tuple(block.allocations):
                self.free(block, pointer)
        self._enabled = {pair: devices for pair, devices in self._enabled.items() if device + 1 not in pair}

    def free(self, block: Block, pointer: int) -> None:
        """Free an allocation of a block; the caller holds the lock."""
        self.shared.withdraw(block.handles.pop(pointer, b""))
        self.heaps[block.device].free(block, pointer)

    def unmap(self, region: OpenedRegion) -> None:
        """Unmap another process's memory; the caller holds the lock."""
        del self.opened[region.device, region.handle]
        self.addresses.remove(region)

    # -- peers -------------------------------------------------------------------------------------

    @answers(1)
    def cuDeviceCanAccessPeer(self, dev: Any, peerDev: Any) -> int:
        device, peer = self.index(dev), self.index(peerDev)
        return int(device != peer and self.reaches(device, peer))

    @answers(1)
    def cuDeviceGetP2PAttribute(self, attrib: Any, srcDevice: Any, dstDevice: Any) -> int:
        linked = self._linked(srcDevice, dstDevice)
        check(int(attrib) in _LINK)
        return _LINK[int(attrib)] if linked else 0

    @answers(1)
    def cuDeviceGetP2PAtomicCapabilities(
        self, operations: Any, count: int, srcDevice: Any, dstDevice: Any
    ) -> list[int]:
        self._linked(srcDevice, dstDevice)
        check(operations and count == len(operations) and all(int(item) in _OPERATIONS for item in operations))
        return [_NO_FORM] * count

    @answers(0)
    def cuCtxEnablePeerAccess(self, peerContext: Any, Flags: int) -> None:
        device, peer = self.current(), self.device_of(peerContext)
        check(not Flags)
        check(device != peer and self.reaches(device, peer), Result.CUDA_ERROR_PEER_ACCESS_UNSUPPORTED)
        pair = self.stack[-1], int(peerContext)
        with self.lock:
            check(pair not in self._enabled, Result.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED)
            self.admit(device, peer)
            self._enabled[pair] = device, peer

    @answers(0)
    def cuCtxDisablePeerAccess(self, peerContext: Any) -> None:
        self.current()
        self.device_of(peerContext)
        pair = self.stack[-1], int(peerContext)
        with self.lock:
            check(self._enabled.pop(pair, None), Result.CUDA_ERROR_PEER_ACCESS_NOT_ENABLED)

    def admit(self, device: int, peer: int) -> None:
        """Refuse a peer if a device has no room for it in addition to its others; the caller holds the lock."""
        opened = {region.owner for region in self.opened.values() if region.device == device}
        enabled = {other for near, other in self._enabled.values() if near == device}
        limit = os.environ.get(PEERS, "")
        if limit.isdecimal():
            room = len((opened | enabled | {peer}) - {device}) <= int(limit)
            check(room, Result.CUDA_ERROR_TOO_MANY_PEERS)

    def reaches(self, device: int, other: int) -> bool:
        """Whether a device can access another's memory, or its own."""
        return device // self.island == other // self.island

    def reached(self, device: int) -> int:
        """Return the number of devices in a device's group."""
        return sum(self.reaches(device, other) for other in range(len(self.heaps)))

    def _linked(self, source: Any, target: Any) -> bool:
        device, peer = self.index(source), self.index(target)
        check(device != peer, Result.CUDA_ERROR_INVALID_DEVICE)
        return self.reaches(device, peer)
