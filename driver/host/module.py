"""The functions of ``cuda.bindings.driver`` that cubroker calls, answered out of host memory.

They take and return what the bindings' own do: their structs and enums, and tuples that begin with a
``CUresult``. They imitate what GPUs were seen to do; where a GPU's behaviour is undefined, they refuse.
Work is done when a call returns, so streams and events are always finished.
"""

# ruff: noqa: D102  (the functions are NVIDIA's, and described in the CUDA driver API's reference)

from __future__ import annotations

import ctypes
import hashlib
import itertools
import os
import threading
from pathlib import Path
from typing import Any

from cuda.bindings import driver as cuda

from cubroker.driver.host import memory, sharing
from cubroker.driver.host.answers import Refusal, Result, answers
from cubroker.driver.host.heap import AddressMap, Block, Heap, Opened

VERSION = 13000
"""The CUDA version whose behaviour is imitated: 13.0."""

_ATTRIBUTES = {
    cuda.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING: 1,
    cuda.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_INTEGRATED: 1,
}


class HostModule:
    """``count`` devices of ``size`` bytes each. Structs and enums are those of the bindings themselves.

    One lock guards the tables; it is never held while bytes are copied or another process is asked.
    """

    def __init__(self, count: int, size: int) -> None:
        self._size = size
        self._initialised_by: int | None = None
        self._lock = threading.Lock()
        self._thread = threading.local()
        self._addresses = AddressMap()
        self._heaps = [Heap(device, size, self._addresses) for device in range(count)]
        self._retained = [0] * count
        self._opened: dict[tuple[int, bytes], Opened] = {}
        self._owner: sharing.Owner | None = None
        self._pinned: dict[int, int] = {}
        self._numbers = itertools.count(1)
        self._streams: set[int] = set()
        self._events: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("CU"):
            return getattr(cuda, name)
        raise AttributeError(f"the host driver has no {name}")

    def check_usable(self) -> None:
        """Raise ``Refusal`` before ``cuInit``, and in a forked child for good."""
        if self._initialised_by != os.getpid():
            raise Refusal(Result.CUDA_ERROR_NOT_INITIALIZED)

    def forked(self) -> None:
        """In a forked child: let go of the parent's address and descriptors. Its mappings stay readable."""
        if self._owner:
            self._owner.forked()
        for heap in self._heaps:
            heap.forked()

    # -- the driver and its devices ----------------------------------------------------------------

    def cuInit(self, Flags: int) -> tuple[Any]:
        """Once per process; a forked child of an initialised one is refused."""
        if Flags:
            return (Result.CUDA_ERROR_INVALID_VALUE,)
        if self._initialised_by is None:
            self._initialised_by = os.getpid()
        return (Result.CUDA_SUCCESS if self._initialised_by == os.getpid() else Result.CUDA_ERROR_NOT_INITIALIZED,)

    def cuDriverGetVersion(self) -> tuple[Any, int]:
        """Answer at any time, as the real one."""
        return Result.CUDA_SUCCESS, VERSION

    @answers(1)
    def cuDeviceGetCount(self) -> int:
        return len(self._heaps)

    @answers(1)
    def cuDeviceGet(self, ordinal: int) -> Any:
        return cuda.CUdevice(self._index(ordinal))

    @answers(1)
    def cuDeviceGetName(self, length: int, dev: Any) -> bytes:
        name = f"cubroker host device {self._index(dev)}".encode()
        return name[: length - 1].ljust(length, b"\0")

    @answers(1)
    def cuDeviceGetUuid(self, dev: Any) -> Any:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        uuid = cuda.CUuuid()
        octets = hashlib.sha256(f"{boot} {self._index(dev)}".encode()).digest()[:16]
        ctypes.memmove(uuid.getPtr(), octets, len(octets))
        return uuid

    @answers(1)
    def cuDeviceTotalMem(self, dev: Any) -> int:
        return self._heaps[self._index(dev)].total

    @answers(1)
    def cuDeviceGetAttribute(self, attrib: Any, dev: Any) -> int:
        self._index(dev)
        return _ATTRIBUTES.get(attrib, 0)

    # -- contexts ----------------------------------------------------------------------------------

    @answers(1)
    def cuDevicePrimaryCtxRetain(self, dev: Any) -> Any:
        index = self._index(dev)
        with self._lock:
            self._retained[index] += 1
        return cuda.CUcontext(index + 1)

    @answers(0)
    def cuDevicePrimaryCtxRelease(self, dev: Any) -> None:
        index = self._index(dev)
        with self._lock:
            if not self._retained[index]:
                raise Refusal(Result.CUDA_ERROR_INVALID_CONTEXT)
            self._retained[index] -= 1
            if not self._retained[index]:
                self._destroy(index)
            owner = None if any(self._retained) else self._owner
            if owner:
                self._owner = None
        if owner:
            owner.stop()

    @answers(0)
    def cuCtxPushCurrent(self, ctx: Any) -> None:
        self._stack().append(self._context(ctx))

    @answers(1)
    def cuCtxPopCurrent(self) -> Any:
        if not self._stack():
            raise Refusal(Result.CUDA_ERROR_INVALID_CONTEXT)
        return cuda.CUcontext(self._stack().pop() + 1)

    @answers(0)
    def cuCtxSetCurrent(self, ctx: Any) -> None:
        stack = self._stack()
        del stack[-1:]
        if int(ctx):
            stack.append(self._context(ctx))

    @answers(1)
    def cuCtxGetCurrent(self) -> Any:
        return cuda.CUcontext(self._stack()[-1] + 1 if self._stack() else 0)

    @answers(1)
    def cuCtxGetDevice(self) -> Any:
        return cuda.CUdevice(self._current())

    @answers(0)
    def cuCtxSynchronize(self) -> None:
        self._current()

    # -- memory ------------------------------------------------------------------------------------

    @answers(1)
    def cuMemAlloc(self, bytesize: int) -> Any:
        heap = self._heaps[self._current()]
        if bytesize <= 0:
            raise Refusal(Result.CUDA_ERROR_INVALID_VALUE)
        with self._lock:
            return cuda.CUdeviceptr(heap.allocate(bytesize))

    @answers(0)
    def cuMemFree(self, dptr: Any) -> None:
        self._current()
        with self._lock:
            block = self._addresses.find(int(dptr))
            if not isinstance(block, Block) or int(dptr) not in block.sizes:
                raise Refusal(Result.CUDA_ERROR_INVALID_VALUE)
            self._free(block, int(dptr))

    @answers(2)
    def cuMemGetInfo(self) -> tuple[int, int]:
        heap = self._heaps[self._current()]
        return heap.total - heap.used, heap.total

    @answers(2)
    def cuMemGetAddressRange(self, dptr: Any) -> tuple[Any, int]:
        self._current()
        with self._lock:
            region = self._addresses.find(int(dptr))
            if region is None:
                raise Refusal(Result.CUDA_ERROR_NOT_FOUND)
            base, nbytes = region.around(int(dptr))
        return cuda.CUdeviceptr(base), nbytes

    @answers(0)
    def cuMemsetD8(self, dstDevice: Any, uc: int, N: int) -> None:
        memory.fill(self._device_bytes(dstDevice, N), uc, N)

    @answers(0)
    def cuMemcpyHtoD(self, dstDevice: Any, srcHost: int, ByteCount: int) -> None:
        ctypes.memmove(self._device_bytes(dstDevice, ByteCount), srcHost, ByteCount)

    @answers(0)
    def cuMemcpyHtoDAsync(self, dstDevice: Any, srcHost: int, ByteCount: int, hStream: Any) -> None:
        self._known(self._streams, hStream, default=True)
        ctypes.memmove(self._device_bytes(dstDevice, ByteCount), srcHost, ByteCount)

    @answers(0)
    def cuMemcpyDtoH(self, dstHost: int, srcDevice: Any, ByteCount: int) -> None:
        ctypes.memmove(dstHost, self._device_bytes(srcDevice, ByteCount), ByteCount)

    @answers(0)
    def cuMemcpyDtoD(self, dstDevice: Any, srcDevice: Any, ByteCount: int) -> None:
        target, source = self._device_bytes(dstDevice, ByteCount), self._device_bytes(srcDevice, ByteCount)
        ctypes.memmove(target, source, ByteCount)

    @answers(1)
    def cuMemHostAlloc(self, bytesize: int, Flags: int) -> int:
        self._current()
        if bytesize <= 0:
            raise Refusal(Result.CUDA_ERROR_INVALID_VALUE)
        pointer = memory.map_private(bytesize)
        self._pinned[pointer] = bytesize
        return pointer

    @answers(0)
    def cuMemFreeHost(self, p: int) -> None:
        self._current()
        nbytes = self._pinned.pop(p, None)
        if nbytes is None:
            raise Refusal(Result.CUDA_ERROR_INVALID_VALUE)
        memory.unmap(p, nbytes)

    # -- streams and events ------------------------------------------------------------------------

    @answers(1)
    def cuStreamCreate(self, Flags: int) -> Any:
        return cuda.CUstream(self._new(self._streams))

    @answers(0)
    def cuStreamSynchronize(self, hStream: Any) -> None:
        self._known(self._streams, hStream, default=True)

    @answers(0)
    def cuStreamDestroy(self, hStream: Any) -> None:
        self._streams.remove(self._known(self._streams, hStream))

    @answers(1)
    def cuEventCreate(self, Flags: int) -> Any:
        return cuda.CUevent(self._new(self._events))

    @answers(0)
    def cuEventRecord(self, hEvent: Any, hStream: Any) -> None:
        self._known(self._events, hEvent)
        self._known(self._streams, hStream, default=True)

    @answers(0)
    def cuEventQuery(self, hEvent: Any) -> None:
        self._known(self._events, hEvent)

    @answers(0)
    def cuEventSynchronize(self, hEvent: Any) -> None:
        self._known(self._events, hEvent)

    @answers(0)
    def cuEventDestroy(self, hEvent: Any) -> None:
        self._events.remove(self._known(self._events, hEvent))

    # -- memory of other processes -----------------------------------------------------------------

    @answers(1)
    def cuIpcGetMemHandle(self, dptr: Any) -> Any:
        self._current()
        with self._lock:
            block = self._addresses.find(int(dptr))
            if not isinstance(block, Block):
                raise Refusal(Result.CUDA_ERROR_INVALID_VALUE)
            self._owner = self._owner or sharing.Owner()
            raw = self._owner.export(block)
        handle = cuda.CUipcMemHandle()
        ctypes.memmove(handle.getPtr(), raw, len(raw))
        return handle

    @answers(1)
    def cuIpcOpenMemHandle(self, handle: Any, Flags: int) -> Any:
        device = self._current()
        if Flags != cuda.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS:
            raise Refusal(Result.CUDA_ERROR_INVALID_VALUE)
        raw = ctypes.string_at(handle.getPtr(), sharing.HANDLE_BYTES)
        with self._lock:
            if self._owner and self._owner.owns(raw):
                raise Refusal(Result.CUDA_ERROR_INVALID_CONTEXT)
            known = self._count_again(device, raw)
        return cuda.CUdeviceptr(known or self._open(device, raw))

    @answers(0)
    def cuIpcCloseMemHandle(self, dptr: Any) -> None:
        self._current()
        with self._lock:
            region = self._addresses.find(int(dptr))
            if not isinstance(region, Opened) or region.pointer != int(dptr):
                raise Refusal(Result.CUDA_ERROR_INVALID_VALUE)
            region.count -= 1
            if not region.count:
                self._unmap(region)

    # -- what the functions share ------------------------------------------------------------------

    def _stack(self) -> list[int]:
        """The devices whose contexts this thread has pushed, the current one last."""
        stack: list[int] = self._thread.__dict__.setdefault("stack", [])
        return stack

    def _current(self) -> int:
        stack = self._stack()
        if not stack or not self._retained[stack[-1]]:
            raise Refusal(Result.CUDA_ERROR_INVALID_CONTEXT)
        return stack[-1]

    def _context(self, ctx: Any) -> int:
        index = int(ctx) - 1
        if not 0 <= index < len(self._retained) or not self._retained[index]:
            raise Refusal(Result.CUDA_ERROR_INVALID_CONTEXT)
        return index

    def _index(self, dev: Any) -> int:
        index = int(dev)
        if not 0 <= index < len(self._heaps):
            raise Refusal(Result.CUDA_ERROR_INVALID_DEVICE)
        return index

    def _device_bytes(self, pointer: Any, nbytes: int) -> int:
        """Return the address of device memory that is ours to touch, all of it in one region."""
        self._current()
        with self._lock:
            if self._addresses.find(int(pointer), nbytes) is None:
                raise Refusal(Result.CUDA_ERROR_INVALID_VALUE)
        return int(pointer)

    def _new(self, kind: set[int]) -> int:
        self._current()
        kind.add(number := next(self._numbers))
        return number

    def _known(self, kind: set[int], item: Any, *, default: bool = False) -> int:
        if int(item) not in kind and not (default and int(item) == 0):
            raise Refusal(Result.CUDA_ERROR_INVALID_HANDLE)
        return int(item)

    def _free(self, block: Block, pointer: int) -> None:
        if self._owner and len(block.sizes) == 1:
            self._owner.withdraw(block)
        self._heaps[block.device].free(block, pointer)

    def _open(self, device: int, raw: bytes) -> int:
        """Map what the owner of ``raw`` sends, unless another thread was faster."""
        try:
            fd = sharing.fetch(raw)
        except LookupError:
            raise Refusal(Result.CUDA_ERROR_INVALID_VALUE) from None
        try:
            nbytes = memory.size(fd)
            with self._lock:
                if pointer := self._count_again(device, raw):
                    return pointer
                region = Opened(device, memory.map_shared(fd, nbytes), nbytes, raw)
                self._addresses.add(region)
                self._opened[device, raw] = region
                return region.pointer
        finally:
            os.close(fd)

    def _count_again(self, device: int, raw: bytes) -> int | None:
        region = self._opened.get((device, raw))
        if region is None:
            return None
        region.count += 1
        return region.pointer

    def _unmap(self, region: Opened) -> None:
        del self._opened[region.device, region.handle]
        self._addresses.remove(region)

    def _destroy(self, device: int) -> None:
        """Free everything in a context that nobody retains any more."""
        for region in [region for region in self._opened.values() if region.device == device]:
            self._unmap(region)
        for block in self._heaps[device].blocks():
            for pointer in list(block.sizes):
                self._free(block, pointer)
