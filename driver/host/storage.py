"""Memory of host devices: allocating it, and copying into, out of and within it."""

# ruff: noqa: D102  (the functions are NVIDIA's, and described in the reference of the CUDA driver API)

from __future__ import annotations

import ctypes
from typing import Any

from cuda.bindings import driver as cuda

from cubroker.driver import linux
from cubroker.driver.host import memory
from cubroker.driver.host.answers import Refusal, Result, answers
from cubroker.driver.host.heap import Block
from cubroker.driver.host.state import State


class Storage(State):
    """Device memory and pinned host memory."""

    def __init__(self, count: int, size: int, island: int | None = None) -> None:
        super().__init__(count, size, island)
        self._pinned: dict[int, int] = {}
        self._registered: dict[int, int] = {}

    @answers(1)
    def cuMemAlloc(self, bytesize: int) -> Any:
        heap = self.heaps[self.current()]
        self.captures.check_unsafe()
        _check_size(bytesize)
        with self.lock:
            return cuda.CUdeviceptr(heap.allocate(bytesize))

    @answers(0)
    def cuMemFree(self, dptr: Any) -> None:
        self.current()
        self.captures.check_unsafe()
        with self.lock:
            block = self.addresses.find(int(dptr))
            if not isinstance(block, Block) or int(dptr) not in block.allocations:
                raise Refusal(Result.CUDA_ERROR_INVALID_VALUE)
            self.free(block, [int(dptr)])

    @answers(2)
    def cuMemGetInfo(self) -> tuple[int, int]:
        heap = self.heaps[self.current()]
        return heap.total - heap.used, heap.total

    @answers(2)
    def cuMemGetAddressRange(self, dptr: Any) -> tuple[Any, int]:
        self.current()
        with self.lock:
            region = self.addresses.find(int(dptr))
            part = region.holding(int(dptr)) if isinstance(region, Block) else region
        if part is None:
            raise Refusal(Result.CUDA_ERROR_NOT_FOUND)
        return cuda.CUdeviceptr(part.pointer), part.nbytes

    @answers(0)
    def cuMemsetD8(self, dstDevice: Any, uc: int, N: int) -> None:
        self._fill(dstDevice, uc, N, 0)

    @answers(0)
    def cuMemsetD8Async(self, dstDevice: Any, uc: int, N: int, hStream: Any) -> None:
        self._fill(dstDevice, uc, N, hStream)

    @answers(0)
    def cuMemcpyHtoD(self, dstDevice: Any, srcHost: int, ByteCount: int) -> None:
        self._copy_in(dstDevice, srcHost, ByteCount, 0)

    @answers(0)
    def cuMemcpyHtoDAsync(self, dstDevice: Any, srcHost: int, ByteCount: int, hStream: Any) -> None:
        self._copy_in(dstDevice, srcHost, ByteCount, hStream)

    @answers(0)
    def cuMemcpyDtoH(self, dstHost: int, srcDevice: Any, ByteCount: int) -> None:
        self._copy_out(dstHost, srcDevice, ByteCount, 0)

    @answers(0)
    def cuMemcpyDtoHAsync(self, dstHost: int, srcDevice: Any, ByteCount: int, hStream: Any) -> None:
        self._copy_out(dstHost, srcDevice, ByteCount, hStream)

    @answers(0)
    def cuMemcpyDtoD(self, dstDevice: Any, srcDevice: Any, ByteCount: int) -> None:
        self._copy(dstDevice, srcDevice, ByteCount, 0)

    @answers(0)
    def cuMemcpyDtoDAsync(self, dstDevice: Any, srcDevice: Any, ByteCount: int, hStream: Any) -> None:
        self._copy(dstDevice, srcDevice, ByteCount, hStream)

    @answers(1)
    def cuMemHostAlloc(self, bytesize: int, Flags: int) -> int:
        self.current()
        self.captures.check_unsafe()
        _check_size(bytesize)
        pointer = memory.map_private(bytesize)
        self._pinned[pointer] = bytesize
        return pointer

    @answers(0)
    def cuMemFreeHost(self, p: int) -> None:
        self.current()
        self.captures.check_unsafe()
        nbytes = self._pinned.pop(p, None)
        if nbytes is None:
            raise Refusal(Result.CUDA_ERROR_INVALID_VALUE)
        memory.unmap(p, nbytes)

    @answers(0)
    def cuMemHostRegister(self, p: int, bytesize: int, Flags: int) -> None:
        self.current()
        self.captures.check_unsafe()
        _check_size(bytesize)
        with self.lock:
            if p in self._registered:
                raise Refusal(Result.CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED)
            self._registered[p] = bytesize

    @answers(0)
    def cuMemHostUnregister(self, p: int) -> None:
        self.current()
        self.captures.check_unsafe()
        with self.lock:
            if self._registered.pop(p, None) is None:
                raise Refusal(Result.CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED)

    def file_id(self, pointer: int) -> linux.FileId:
        """Return which file the memory at an address is that this process allocated."""
        with self.lock:
            block = self.addresses.find(pointer)
            assert isinstance(block, Block)
            return linux.file_id(block.fd)

    def readable(self, pointer: Any, nbytes: int) -> int | ctypes.Array[ctypes.c_char]:
        """Return where the bytes are that the current device reads at an address."""
        return self._checked(int(pointer), nbytes, writing=False)

    def is_pinned(self, pointer: int, nbytes: int) -> bool:
        """Whether all of some bytes are pinned host memory, which every device reads and writes."""
        return any(start <= pointer <= pointer + nbytes <= start + size for start, size in (*self._pinned.items(),))

    def deliver(self, pointer: Any, source: int | ctypes.Array[ctypes.c_char], nbytes: int) -> None:
        """Copy bytes from device memory to device memory."""
        ctypes.memmove(self._writable(pointer, nbytes), source, nbytes)

    def _fill(self, target: Any, value: int, nbytes: int, stream: Any) -> None:
        if not self.captures.records(int(stream)):
            memory.fill(self._writable(target, nbytes), value, nbytes)

    def _copy_in(self, target: Any, source: int, nbytes: int, stream: Any) -> None:
        if not self.captures.records(int(stream)):
            ctypes.memmove(self._writable(target, nbytes), source, nbytes)

    def _copy_out(self, target: int, source: Any, nbytes: int, stream: Any) -> None:
        if not self.captures.records(int(stream)):
            ctypes.memmove(target, self.readable(source, nbytes), nbytes)

    def _copy(self, target: Any, source: Any, nbytes: int, stream: Any) -> None:
        if not self.captures.records(int(stream)):
            self.deliver(target, self.readable(source, nbytes), nbytes)

    def _writable(self, pointer: Any, nbytes: int) -> int:
        return self._checked(int(pointer), nbytes, writing=True)

    def _checked(self, pointer: int, nbytes: int, *, writing: bool) -> int:
        """Return the address of device memory that may be so used; the copy itself runs without the lock."""
        device = self.current()
        with self.lock:
            if nbytes < 0 or not self.addresses.allows(device, pointer, nbytes, writing=writing):
                raise Refusal(Result.CUDA_ERROR_INVALID_VALUE)
        return pointer


def _check_size(nbytes: int) -> None:
    if nbytes <= 0:
        raise Refusal(Result.CUDA_ERROR_INVALID_VALUE)
