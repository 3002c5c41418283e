"""Legacy IPC on host devices: handles of this process's memory, and other processes' memory by handle."""

# ruff: noqa: D102  (the functions are NVIDIA's, and described in the reference of the CUDA driver API)

from __future__ import annotations

import ctypes
import os
import stat
from typing import Any

from cuda.bindings import driver as cuda

from cubroker.driver.host import descriptors, memory, sharing
from cubroker.driver.host.answers import Refusal, Result, answers
from cubroker.driver.host.heap import Block, Opened
from cubroker.driver.host.state import State


class Ipc(State):
    """The three functions, with the refusals and the counting that GPUs were seen to have."""

    @answers(1)
    def cuIpcGetMemHandle(self, dptr: Any) -> Any:
        self.current()
        with self.lock:
            block = self.addresses.find(int(dptr))
            allocation = block.holding(int(dptr)) if isinstance(block, Block) else None
            if not isinstance(block, Block) or allocation is None:
                raise Refusal(Result.CUDA_ERROR_INVALID_VALUE)
            self.owner = self.owner or sharing.Owner()
            raw = self.owner.export(block, allocation)
        handle = cuda.CUipcMemHandle()
        ctypes.memmove(handle.getPtr(), raw, len(raw))
        return handle

    @answers(1)
    def cuIpcOpenMemHandle(self, handle: Any, Flags: int) -> Any:
        device = self.current()
        if Flags != cuda.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS:
            raise Refusal(Result.CUDA_ERROR_INVALID_VALUE)
        raw = ctypes.string_at(handle.getPtr(), sharing.HANDLE_BYTES)
        with self.lock:
            if sharing.by_this_process(raw):
                raise Refusal(Result.CUDA_ERROR_INVALID_CONTEXT)
            if self.stack[-1] in self.created:  # one context per device and process opens memory
                raise Refusal(Result.CUDA_ERROR_INVALID_HANDLE)
            pointer = self._open_again(device, raw)
        return cuda.CUdeviceptr(pointer or self._open_first(device, raw))

    @answers(0)
    def cuIpcCloseMemHandle(self, dptr: Any) -> None:
        self.current()
        with self.lock:
            region = self.addresses.find(int(dptr))
            if not isinstance(region, Opened) or region.opened != int(dptr):
                raise Refusal(Result.CUDA_ERROR_INVALID_VALUE)
            region.count -= 1
            if not region.count:
                self.unmap(region)

    def _open_first(self, device: int, raw: bytes) -> int:
        """Map what the owner sends; no lock is held while it is asked, so another thread may have been faster."""
        try:
            fd, owner, offset = sharing.fetch(raw)
        except LookupError:
            raise Refusal(Result.CUDA_ERROR_INVALID_VALUE) from None
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):  # a handle of an event
                raise Refusal(Result.CUDA_ERROR_INVALID_VALUE)
            nbytes = memory.sealed_size(fd)
            if offset >= nbytes:
                raise Refusal(Result.CUDA_ERROR_INVALID_VALUE)
            if not self.reaches(device, owner):
                raise Refusal(Result.CUDA_ERROR_PEER_ACCESS_UNSUPPORTED)
            with self.lock:
                self.admit(device, owner)
                return self._open_again(device, raw) or self._map(device, raw, fd, nbytes, offset, owner)
        finally:
            descriptors.close(fd)

    def _open_again(self, device: int, raw: bytes) -> int | None:
        region = self.opened.get((device, raw))
        if region is None:
            return None
        region.count += 1
        return region.opened

    def _map(self, device: int, raw: bytes, fd: int, nbytes: int, offset: int, owner: int) -> int:
        try:
            base = memory.map_shared(fd, nbytes)
        except OSError:
            raise Refusal(Result.CUDA_ERROR_MAP_FAILED) from None
        region = Opened(device, base, nbytes, raw, base + offset, owner)
        self.addresses.add(region)
        self.opened[device, raw] = region
        return region.opened
