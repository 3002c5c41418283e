"""The host driver as a whole, in the shape of the module ``cuda.bindings.driver``.

Its functions take and return what the bindings' own do: their structs and enums, and tuples that begin with a
``CUresult``. They imitate the behaviour that GPUs showed, and refuse where a GPU's behaviour is undefined.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable
from functools import partial
from typing import Any

from cuda.bindings import driver as cuda

from cubroker.driver import digest
from cubroker.driver.basics import keep_first
from cubroker.driver.host.devices import Refusal, Result, answers, check
from cubroker.driver.host.multicast import MulticastFunctions

_ENTRY = re.compile(rb"\.visible \.entry (\w+)\(")
_PIECE = 16


class HostModule(MulticastFunctions):
    """All functions of the host driver; structs, enums and constants are those of the bindings.

    PTX is not run, but a launch does the work of the entries that are known, before it returns.
    """

    #: Whether it is other than real hardware; see :mod:`cubroker.driver.multicast_guard`.
    emulated = True

    def __init__(self, count: int, size: int, island: int | None = None) -> None:
        super().__init__(count, size, island)
        self._functions: dict[int, tuple[int, bytes]] = {}  # module and entry of each

    @answers(1)
    def cuModuleLoadData(self, image: bytes) -> Any:
        self.current()
        entries = _ENTRY.findall(image)
        check(entries and image.endswith(b"\0"), Result.CUDA_ERROR_INVALID_PTX)
        number = next(self.numbers)
        with self.lock:
            self._functions |= {next(self.numbers): (number, entry) for entry in entries}
        return cuda.CUmodule(number)

    @answers(1)
    def cuModuleGetFunction(self, hmod: Any, name: bytes) -> Any:
        functions = {self._functions[number][1]: number for number in self._of_module(hmod)}
        check(name in functions, Result.CUDA_ERROR_NOT_FOUND)
        return cuda.CUfunction(functions[name])

    @answers(0)
    def cuModuleUnload(self, hmod: Any) -> None:
        with self.lock:
            for number in self._of_module(hmod):
                del self._functions[number]

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
        _, entry = self._functions.get(int(f), (0, b""))
        check(entry, Result.CUDA_ERROR_INVALID_HANDLE)
        sizes = gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ
        check(min(sizes) >= 1 and not sharedMemBytes and not extra)
        known: dict[bytes, Callable[..., None]] = {
            b"cubroker_broadcast": self._broadcast,
            b"cubroker_digest": partial(self._digest, gridDimX),
        }
        check(entry in known, Result.CUDA_ERROR_NOT_SUPPORTED)
        if not self.records(hStream):
            known[entry](*kernelParams[0])

    def _of_module(self, module: Any) -> list[int]:
        """Return the numbers of the functions of a module; refuse an unknown one."""
        with self.lock:
            found = [number for number, (owner, _) in self._functions.items() if owner == int(module)]
        check(found, Result.CUDA_ERROR_INVALID_HANDLE)
        return found

    def _broadcast(self, target: int, source: int, pieces: int) -> None:
        check(not (target | source) % _PIECE, Result.CUDA_ERROR_MISALIGNED_ADDRESS)
        nbytes = pieces * _PIECE
        try:
            stored = self.store(target, self.readable(source, nbytes), nbytes)
        except Refusal:
            stored = False
        check(stored, Result.CUDA_ERROR_ILLEGAL_ADDRESS)  # a GPU's context would be lost

    def _digest(self, blocks: int, source: int, pieces: int, sums: int) -> None:
        """Store the sums of a digest as those of the first block, and zeros for the others."""
        check(not (source | sums) % _PIECE, Result.CUDA_ERROR_MISALIGNED_ADDRESS)
        try:
            start = self.readable(source, pieces * _PIECE)
        except Refusal:
            raise Refusal(Result.CUDA_ERROR_ILLEGAL_ADDRESS) from None
        check(self.is_pinned(sums, blocks * _PIECE), Result.CUDA_ERROR_ILLEGAL_ADDRESS)
        read = (ctypes.c_ubyte * (pieces * _PIECE)).from_address(start) if isinstance(start, int) else start
        stored = (ctypes.c_uint64 * (2 * blocks)).from_address(sums)
        stored[:] = [*digest.sums(read), *[0] * (2 * blocks - 2)]

    def forked(self) -> None:
        """Refuse all calls in a forked child, if the parent used the driver. The parent's mappings stay readable."""
        if self.initialised_by:
            self.initialised_by = 0  # no process, so that it stays refused

    def __getattr__(self, name: str) -> Any:
        if name.startswith("CU"):
            return getattr(cuda, name)
        raise AttributeError(f"the host driver has no {name}")


_modules: dict[tuple[int, int, int], HostModule] = {}


def host_module(count: int, size: int, island: int) -> HostModule:
    """Return the driver of such devices (see ``DeviceFunctions``): one per process, as there is one CUDA driver."""
    key = count, size, island
    return keep_first(_modules, key, lambda: _made(*key), lambda _: None)


def _made(count: int, size: int, island: int) -> HostModule:
    module = HostModule(count, size, island)
    os.register_at_fork(after_in_child=module.forked)
    return module
