"""Memory of host devices: allocating it, and copying into, out of and within it."""

# ruff: noqa: D102  (the functions are NVIDIA's, and described in the reference of the CUDA driver API)

from __future__ import annotations

import ctypes
from typing import Any

from cuda.bindings import driver as cuda

from cubroker.driver.host import memory
from cubroker.driver.host.answers import Refusal, Result, answers
from cubroker.driver.host.heap import Block
from cubroker.driver.host.state import State


class Storage(State):
    """Device memory and pinned host memory."""

    def __init__(self, count: int, size: int, island: int | None = None) -> None:
        super().__init__(count, size, island)
        self._pinned: dict[int, int] = {}

    @answers(1)
    def cuMemAlloc(self, bytesize: int) -> Any:
        heap = self.heaps[self.current()]
        _check_size(bytesize)
        with self.lock:
            return cuda.CUdeviceptr(heap.allocate(bytesize))

    @answers(0)
    def cuMemFree(self, dptr: Any) -> None:
        self.current()
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
        memory.fill(self._writable(dstDevice, N), uc, N)

    @answers(0)
    def cuMemcpyHtoD(self, dstDevice: Any, srcHost: int, ByteCount: int) -> None:
        ctypes.memmove(self._writable(dstDevice, ByteCount), srcHost, ByteCount)

    @answers(0)
    def cuMemcpyHtoDAsync(self, dstDevice: Any, srcHost: int, ByteCount: int, hStream: Any) -> None:
        ctypes.memmove(self._writable(dstDevice, ByteCount), srcHost, ByteCount)

    @answers(0)
    def cuMemcpyDtoH(self, dstHost: int, srcDevice: Any, ByteCount: int) -> None:
        ctypes.memmove(dstHost, self.readable(srcDevice, ByteCount), ByteCount)

    @answers(0)
    def cuMemcpyDtoD(self, dstDevice: Any, srcDevice: Any, ByteCount: int) -> None:
        self.deliver(dstDevice, self.readable(srcDevice, ByteCount), ByteCount)

    @answers(0)
    def cuMemcpyDtoDAsync(self, dstDevice: Any, srcDevice: Any, ByteCount: int, hStream: Any) -> None:
        self.deliver(dstDevice, self.readable(srcDevice, ByteCount), ByteCount)

    @answers(1)
    def cuMemHostAlloc(self, bytesize: int, Flags: int) -> int:
        self.current()
        _check_size(bytesize)
        pointer = memory.map_private(bytesize)
        self._pinned[pointer] = bytesize
        return pointer

    @answers(0)
    def cuMemFreeHost(self, p: int) -> None:
        self.current()
        nbytes = self._pinned.pop(p, None)
        if nbytes is None:
            raise Refusal(Result.CUDA_ERROR_INVALID_VALUE)
        memory.unmap(p, nbytes)

    def readable(self, pointer: Any, nbytes: int) -> int | ctypes.Array[ctypes.c_char]:
        """Return where the bytes are that the current device reads at an address."""
        return self._checked(int(pointer), nbytes, writing=False)

    def deliver(self, pointer: Any, source: int | ctypes.Array[ctypes.c_char], nbytes: int) -> None:
        """Copy bytes from device memory to device memory."""
        ctypes.memmove(self._writable(pointer, nbytes), source, nbytes)

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
