"""Memory of host devices: allocating it, copying it, and sharing it by legacy IPC handle."""

from __future__ import annotations

import ctypes
import os
import stat
from collections.abc import Callable
from typing import Any

from cuda.bindings import driver as cuda

from cubroker.driver import system_calls
from cubroker.driver.buffers import handle_bytes, handle_of
from cubroker.driver.host import shared_memory
from cubroker.driver.host.devices import Refusal, Result, answers, check
from cubroker.driver.host.shared_memory import Block, OpenedRegion, SharedFd
from cubroker.driver.host.streams import EventFunctions

Bytes = int | ctypes.Array[ctypes.c_char]  #: Bytes to copy: their address, or the bytes themselves.


def _in_default_stream(function: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
    """Return the function without its stream, which is its last argument."""
    return lambda self, *args: function(self, *args, 0)


class MemoryFunctions(EventFunctions):
    """Device memory, pinned host memory, and legacy IPC with the refusals and the counting that GPUs showed."""

    def __init__(self, count: int, size: int, island: int | None = None) -> None:
        super().__init__(count, size, island)
        self._pinned: dict[int, int] = {}
        self._registered: dict[int, int] = {}

    @answers(1)
    def cuMemAlloc(self, bytesize: int) -> Any:
        heap = self.heaps[self._check_waits()]
        check(bytesize > 0)
        with self.lock:
            return cuda.CUdeviceptr(heap.allocate(bytesize))

    @answers(0)
    def cuMemFree(self, dptr: Any) -> None:
        self._check_waits()
        with self.lock:
            block, pointer = self._allocation(int(dptr))
            check(pointer == int(dptr))
            self.free(block, pointer)

    @answers(2)
    def cuMemGetInfo(self) -> tuple[int, int]:
        heap = self.heaps[self.current()]
        return heap.total - heap.used, heap.total

    @answers(0)
    def cuMemsetD8Async(self, dstDevice: Any, uc: int, N: int, hStream: Any) -> None:
        if not self.records(hStream):
            shared_memory.fill(self._checked(dstDevice, N, writing=True), uc, N)

    @answers(0)
    def cuMemcpyHtoDAsync(self, dstDevice: Any, srcHost: int, ByteCount: int, hStream: Any) -> None:
        if not self.records(hStream):
            ctypes.memmove(self._checked(dstDevice, ByteCount, writing=True), srcHost, ByteCount)

    @answers(0)
    def cuMemcpyDtoHAsync(self, dstHost: int, srcDevice: Any, ByteCount: int, hStream: Any) -> None:
        if not self.records(hStream):
            ctypes.memmove(dstHost, self.readable(srcDevice, ByteCount), ByteCount)

    @answers(0)
    def cuMemcpyDtoDAsync(self, dstDevice: Any, srcDevice: Any, ByteCount: int, hStream: Any) -> None:
        if not self.records(hStream):
            self.deliver(dstDevice, self.readable(srcDevice, ByteCount), ByteCount)

    cuMemsetD8 = _in_default_stream(cuMemsetD8Async)
    cuMemcpyHtoD = _in_default_stream(cuMemcpyHtoDAsync)
    cuMemcpyDtoH = _in_default_stream(cuMemcpyDtoHAsync)
    cuMemcpyDtoD = _in_default_stream(cuMemcpyDtoDAsync)

    @answers(1)
    def cuMemHostAlloc(self, bytesize: int, Flags: int) -> int:
        self._check_waits()
        check(bytesize > 0)
        pointer = shared_memory.map_private(bytesize)
        self._pinned[pointer] = bytesize
        return pointer

    @answers(0)
    def cuMemFreeHost(self, p: int) -> None:
        self._check_waits()
        nbytes = self._pinned.pop(p, 0)
        check(nbytes)
        shared_memory.unmap(p, nbytes)

    @answers(0)
    def cuMemHostRegister(self, p: int, bytesize: int, Flags: int) -> None:
        self._check_waits()
        check(bytesize > 0)
        with self.lock:
            apart = all(p + bytesize <= start or start + size <= p for start, size in self._registered.items())
            check(apart, Result.CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED)
            self._registered[p] = bytesize

    @answers(0)
    def cuMemHostUnregister(self, p: int) -> None:
        self._check_waits()
        with self.lock:
            check(p in self._registered, Result.CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED)
            del self._registered[p]

    @answers(1)
    def cuIpcGetMemHandle(self, dptr: Any) -> Any:
        self.current()
        with self.lock:
            block, pointer = self._allocation(int(dptr))
            if pointer not in block.handles:
                shared = SharedFd(block.fd, block.device, pointer - block.pointer)
                block.handles[pointer] = self.shared.share(shared)
            return handle_of(cuda.CUipcMemHandle(), block.handles[pointer], "a handle")

    @answers(1)
    def cuIpcOpenMemHandle(self, handle: Any, Flags: int) -> Any:
        device = self.current()
        check(Flags == cuda.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
        raw = handle_bytes(handle)
        with self.lock:
            check(not shared_memory.by_this_process(raw), Result.CUDA_ERROR_INVALID_CONTEXT)
            # One context per device and process opens memory.
            check(self.stack[-1] not in self.created, Result.CUDA_ERROR_INVALID_HANDLE)
            pointer = self._open_again(device, raw)
        return cuda.CUdeviceptr(pointer or self._open_first(device, raw))

    @answers(0)
    def cuIpcCloseMemHandle(self, dptr: Any) -> None:
        self.current()
        with self.lock:
            region = self.addresses.find(int(dptr))
            if not isinstance(region, OpenedRegion) or region.opened != int(dptr):
                raise Refusal(Result.CUDA_ERROR_INVALID_VALUE)
            region.count -= 1
            if not region.count:
                self.unmap(region)

    def file_id(self, pointer: int) -> system_calls.FileId:
        """Return the file that holds the memory at an address that this process allocated."""
        with self.lock:
            return system_calls.file_id(self._allocation(pointer)[0].fd)

    def readable(self, pointer: Any, nbytes: int) -> Bytes:
        """Return the bytes that the current device reads at an address."""
        return self._checked(pointer, nbytes, writing=False)

    def is_pinned(self, pointer: int, nbytes: int) -> bool:
        """Whether all of some bytes are pinned host memory, which every device reads and writes."""
        with self.lock:
            pinned = *self._pinned.items(), *self._registered.items()
        return any(start <= pointer <= pointer + nbytes <= start + size for start, size in pinned)

    def deliver(self, pointer: Any, source: Bytes, nbytes: int) -> None:
        ctypes.memmove(self._checked(pointer, nbytes, writing=True), source, nbytes)

    def _allocation(self, address: int) -> tuple[Block, int]:
        """Return the block and the pointer of the allocation that an address lies in; the caller holds the lock."""
        block = self.addresses.find(address)
        if not isinstance(block, Block) or (pointer := block.holding(address)) is None:
            raise Refusal(Result.CUDA_ERROR_INVALID_VALUE)
        return block, pointer

    def _checked(self, pointer: Any, nbytes: int, *, writing: bool) -> int:
        """Return the address of device memory that may be so used; the copy itself runs without the lock."""
        device, start = self.current(), int(pointer)
        with self.lock:
            check(nbytes >= 0 and self.addresses.allows(device, start, nbytes, writing=writing))
        return start

    def _check_waits(self) -> int:
        """Refuse a call that may wait for work, as allocating does; return the current device."""
        device = self.current()
        self.check_unsafe()
        return device

    def _open_again(self, device: int, raw: bytes) -> int | None:
        region = self.opened.get((device, raw))
        if region is None:
            return None
        region.count += 1
        return region.opened

    def _open_first(self, device: int, raw: bytes) -> int:
        """Fetch and map the memory, without the lock while its owner is asked: another thread may be faster."""
        try:
            fd, owner, offset = shared_memory.fetch(raw)
        except LookupError:
            raise Refusal(Result.CUDA_ERROR_INVALID_VALUE) from None
        try:
            check(stat.S_ISREG(os.fstat(fd).st_mode))  # else it is a handle of an event
            check(shared_memory.sealed(fd), Result.CUDA_ERROR_OPERATING_SYSTEM)
            nbytes = os.fstat(fd).st_size
            check(offset < nbytes)
            check(self.reaches(device, owner), Result.CUDA_ERROR_PEER_ACCESS_UNSUPPORTED)
            with self.lock:
                self.admit(device, owner)
                return self._open_again(device, raw) or self._map(device, raw, fd, nbytes, offset, owner)
        finally:
            shared_memory.close(fd)

    def _map(self, device: int, raw: bytes, fd: int, nbytes: int, offset: int, owner: int) -> int:
        try:
            base = shared_memory.map_shared(fd, nbytes)
        except OSError:
            raise Refusal(Result.CUDA_ERROR_MAP_FAILED) from None
        region = OpenedRegion(device, base, nbytes, raw, base + offset, owner)
        self.addresses.add(region)
        self.opened[device, raw] = region
        return region.opened
