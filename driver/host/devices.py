"""Host devices and their contexts."""

# ruff: noqa: D102  (the functions are NVIDIA's, and described in the reference of the CUDA driver API)

from __future__ import annotations

import ctypes
import hashlib
import itertools
import os
from pathlib import Path
from typing import Any

from cuda.bindings import driver as cuda

from cubroker.driver.host.answers import Refusal, Result, answers
from cubroker.driver.host.state import State

VERSION = 13000
"""The CUDA version whose behaviour is imitated: 13.0."""

_Attribute = cuda.CUdevice_attribute
_SUPPORTED = frozenset(
    {
        _Attribute.CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING,
        _Attribute.CU_DEVICE_ATTRIBUTE_INTEGRATED,
        _Attribute.CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED,
        _Attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED,
        _Attribute.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
        _Attribute.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED,  # also where there is no channel
    }
)
"""The attributes that are 1 on every host device. Multicast depends on the island; all others are 0."""

_CREATED = 1 << 20
"""The number of the first context that is nobody's primary one."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Devices(State):
    """The functions that need no current context, and those that change it.

    A context that a program creates beside the primary one is only a second name for the device: what is
    allocated in it does not end with it.
    """

    def __init__(self, count: int, size: int, island: int | None = None) -> None:
        super().__init__(count, size, island)
        self._numbers = itertools.count(_CREATED)

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
        octets = hashlib.sha256(_BOOT_ID.read_bytes() + b"%d" % self.index(dev)).digest()[:16]
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

    @answers(1)
    def cuDevicePrimaryCtxRetain(self, dev: Any) -> Any:
        with self.lock:
            self.retained[self.index(dev)] += 1
        return cuda.CUcontext(int(dev) + 1)  # not 0, which stands for none

    @answers(0)
    def cuDevicePrimaryCtxRelease(self, dev: Any) -> None:
        device = self.index(dev)
        with self.lock:
            if not self.retained[device]:
                raise Refusal(Result.CUDA_ERROR_INVALID_CONTEXT)
            self.retained[device] -= 1
            if not self.retained[device]:
                self.destroy(device)
            unneeded = None if any(self.retained) else self.owner
            if unneeded:
                self.owner = None
        if unneeded:
            unneeded.stop()  # which waits for its thread, so that nobody should wait for the lock meanwhile

    @answers(1)
    def cuCtxCreate(self, ctxCreateParams: Any, flags: int, dev: Any) -> Any:
        device = self.index(dev)
        with self.lock:
            number = next(self._numbers)
            self.created[number] = device
        self.stack.append(number)
        return cuda.CUcontext(number)

    @answers(0)
    def cuCtxDestroy(self, ctx: Any) -> None:
        number = int(ctx)
        with self.lock:
            if self.created.pop(number, None) is None:
                raise Refusal(Result.CUDA_ERROR_INVALID_CONTEXT)
        if self.stack[-1:] == [number]:
            self.stack.pop()

    @answers(0)
    def cuCtxPushCurrent(self, ctx: Any) -> None:
        self.device_of(ctx)
        self.stack.append(int(ctx))

    @answers(1)
    def cuCtxPopCurrent(self) -> Any:
        if not self.stack:
            raise Refusal(Result.CUDA_ERROR_INVALID_CONTEXT)
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

    @answers(0)
    def cuCtxSynchronize(self) -> None:
        self.current()
        self.captures.check_all()
