"""Kernels on host devices: PTX is not run here, but what its entries are known to do is done."""

# ruff: noqa: D102  (the functions are NVIDIA's, and described in the reference of the CUDA driver API)

from __future__ import annotations

import ctypes
import itertools
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from cuda.bindings import driver as cuda

from cubroker.driver import digest
from cubroker.driver.host.answers import Refusal, Result, answers
from cubroker.driver.host.multicast import Multicast

_ENTRY = re.compile(rb"\.visible \.entry (\w+)\(")
_PIECE = 16


class Kernels(Multicast):
    """Modules and functions by number. A launch does its work before it returns."""

    def __init__(self, count: int, size: int, island: int | None = None) -> None:
        super().__init__(count, size, island)
        self._loaded: dict[int, dict[bytes, int]] = {}
        self._functions: dict[int, bytes] = {}
        self._next_number = itertools.count(1)

    @answers(1)
    def cuModuleLoadData(self, image: bytes) -> Any:
        self.current()
        if not _ENTRY.search(image) or not image.endswith(b"\0"):
            raise Refusal(Result.CUDA_ERROR_INVALID_PTX)
        with self.lock:
            number = next(self._next_number)
            self._loaded[number] = {name: next(self._next_number) for name in _ENTRY.findall(image)}
            self._functions |= {function: name for name, function in self._loaded[number].items()}
        return cuda.CUmodule(number)

    @answers(1)
    def cuModuleGetFunction(self, hmod: Any, name: bytes) -> Any:
        if int(hmod) not in self._loaded:
            raise Refusal(Result.CUDA_ERROR_INVALID_HANDLE)
        if name not in self._loaded[int(hmod)]:
            raise Refusal(Result.CUDA_ERROR_NOT_FOUND)
        return cuda.CUfunction(self._loaded[int(hmod)][name])

    @answers(0)
    def cuModuleUnload(self, hmod: Any) -> None:
        with self.lock:
            functions = self._loaded.pop(int(hmod), None)
            if functions is None:
                raise Refusal(Result.CUDA_ERROR_INVALID_HANDLE)
            for function in functions.values():
                del self._functions[function]

    @answers(0)
    def cuLaunchKernel(
        self,
        f: Any,
        gridDimX: int,
        gridDimY: int,
        gridDimZ: int,
        blockDimX: int,
        blockDimY: int,
        blockDimZ: int,
        sharedMemBytes: int,
        hStream: Any,
        kernelParams: Any,
        extra: int,
    ) -> None:
        self.current()
        name = self._functions.get(int(f))
        if name is None:
            raise Refusal(Result.CUDA_ERROR_INVALID_HANDLE)
        if min(gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ) < 1 or sharedMemBytes or extra:
            raise Refusal(Result.CUDA_ERROR_INVALID_VALUE)
        known: dict[bytes, Callable[..., None]] = {
            b"cubroker_broadcast": self._broadcast,
            b"cubroker_digest": partial(self._digest, gridDimX),
        }
        if name not in known:
            raise Refusal(Result.CUDA_ERROR_NOT_SUPPORTED)
        if not self.captures.records(int(hStream)):
            known[name](*kernelParams[0])

    def _broadcast(self, target: int, source: int, pieces: int) -> None:
        if target % _PIECE or source % _PIECE:
            raise Refusal(Result.CUDA_ERROR_MISALIGNED_ADDRESS)
        nbytes = pieces * _PIECE
        try:
            stored = self.store(target, self.readable(source, nbytes), nbytes)
        except Refusal:
            stored = False
        if not stored:  # a GPU's context would be lost
            raise Refusal(Result.CUDA_ERROR_ILLEGAL_ADDRESS)

    def _digest(self, blocks: int, source: int, pieces: int, sums: int) -> None:
        """Store the sums of a digest as those of the first block, and none for the others."""
        if source % _PIECE or sums % _PIECE:
            raise Refusal(Result.CUDA_ERROR_MISALIGNED_ADDRESS)
        try:
            start = self.readable(source, pieces * _PIECE)
        except Refusal:
            raise Refusal(Result.CUDA_ERROR_ILLEGAL_ADDRESS) from None
        if not self.is_pinned(sums, blocks * _PIECE):
            raise Refusal(Result.CUDA_ERROR_ILLEGAL_ADDRESS)
        read = (ctypes.c_ubyte * (pieces * _PIECE)).from_address(start) if isinstance(start, int) else start
        stored = (ctypes.c_uint64 * (2 * blocks)).from_address(sums)
        stored[:] = [*digest.sums(read), *[0] * (2 * blocks - 2)]
