"""The host driver as a whole, in the shape of the module ``cuda.bindings.driver``.

Its functions take and return what the bindings' own do: their structs and enums, and tuples that begin with a
``CUresult``. They imitate the behaviour that GPUs showed, and refuse where a GPU's behaviour is undefined.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from cuda.bindings import driver as cuda

from cubroker.driver import kernels
from cubroker.driver.buffers import differ, keep_first, round_up
from cubroker.driver.host.devices import Refusal, Result, answers, check
from cubroker.driver.host.multicast import MulticastFunctions

_ENTRY = re.compile(rb"\.visible \.entry (\w+)\(")
_PIECE = 16
_WORD = (1 << 64) - 1


class HostModule(MulticastFunctions):
    """All functions of the host driver; structs, enums and constants are those of the bindings.

    PTX is not run, but a launch does the work of the entries that are known, before it returns.
    """

    #: Whether it is other than real hardware; see :func:`cubroker.driver.checked_calls.emulated`.
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
        check(entry in _ENTRIES, Result.CUDA_ERROR_NOT_SUPPORTED)
        if not self.records(hStream):
            work, words = _ENTRIES[entry]
            work(self, gridDimX, blockDimX, *_arguments(kernelParams, words))

    def _of_module(self, module: Any) -> list[int]:
        """Return the numbers of the functions of a module; refuse an unknown one."""
        with self.lock:
            found = [number for number, (owner, _) in self._functions.items() if owner == int(module)]
        check(found, Result.CUDA_ERROR_INVALID_HANDLE)
        return found

    def _broadcast(self, _: int, __: int, target: int, source: int, pieces: int) -> None:
        check(not (target | source) % _PIECE, Result.CUDA_ERROR_MISALIGNED_ADDRESS)
        nbytes = pieces * _PIECE
        try:
            stored = self.store(target, self.readable(source, nbytes), nbytes)
        except Refusal:
            stored = False
        check(stored, Result.CUDA_ERROR_ILLEGAL_ADDRESS)  # a GPU's context would be lost

    def _digest(self, blocks: int, _: int, source: int, pieces: int, sums: int) -> None:
        """Store the sums of a digest as those of the first block, and zeros for the others."""
        check(not (source | sums) % _PIECE, Result.CUDA_ERROR_MISALIGNED_ADDRESS)
        with _faulting():
            start = self.readable(source, pieces * _PIECE)
        check(self.is_pinned(sums, blocks * _PIECE), Result.CUDA_ERROR_ILLEGAL_ADDRESS)
        read = (ctypes.c_ubyte * (pieces * _PIECE)).from_address(start) if isinstance(start, int) else start
        stored = (ctypes.c_uint64 * (2 * blocks)).from_address(sums)
        stored[:] = [*kernels.sums(read), *[0] * (2 * blocks - 2)]

    def _batched_copy(self, blocks: int, threads: int, count: int, *table: int) -> None:
        """Copy the chunks that there are blocks for, segment by segment."""
        for _, target, source, nbytes in _segments(blocks, threads, count, table):
            for to, at, part in self._parts(target, source, nbytes):
                with _faulting():
                    ctypes.memmove(self._checked(to, part, writing=True), self.readable(at, part), part)

    def _batched_compare(self, blocks: int, threads: int, count: int, flags: int, *table: int) -> None:
        """Compare the chunks that there are blocks for, segment by segment."""
        check(self.is_pinned(flags, 4 * count), Result.CUDA_ERROR_ILLEGAL_ADDRESS)
        for entry, one, other, nbytes in _segments(blocks, threads, count, table):
            for here, there, part in self._parts(one, other, nbytes):
                with _faulting():
                    if differ(self.readable(here, part), self.readable(there, part), part):
                        ctypes.c_uint32.from_address(flags + 4 * entry).value = 1

    def _parts(self, one: int, other: int, nbytes: int) -> Iterator[tuple[int, int, int]]:
        """Cut a segment where a region of memory ends: ordinary loads and stores may cross into the next one."""
        while nbytes > 0:
            with self.lock:
                ends = [region.end - at for at in (one, other) if (region := self.addresses.find(at))]
            check(len(ends) == 2, Result.CUDA_ERROR_ILLEGAL_ADDRESS)
            part = min(nbytes, *ends)
            yield one, other, part
            one, other, nbytes = one + part, other + part, nbytes - part

    def forked(self) -> None:
        """Refuse all calls in a forked child, if the parent used the driver. The parent's mappings stay readable."""
        if self.initialised_by:
            self.initialised_by = 0  # no process, so that it stays refused

    def __getattr__(self, name: str) -> Any:
        if name.startswith("CU"):
            return getattr(cuda, name)
        raise AttributeError(f"the host driver has no {name}")


@contextmanager
def _faulting() -> Iterator[None]:
    """End a kernel's refused access with the result of a GPU, whose context would be lost."""
    try:
        yield
    except Refusal:
        raise Refusal(Result.CUDA_ERROR_ILLEGAL_ADDRESS) from None


def _segments(blocks: int, threads: int, count: int, table: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
    """Yield the number, the addresses and the bytes of each segment of a table, as far as there are blocks for it."""
    check(threads == kernels.THREADS and 0 < count <= kernels.ENTRIES)
    start = 0
    for entry in range(count):
        one, other, end = table[3 * entry : 3 * entry + 3]
        end = min(end, blocks * kernels.CHUNK)
        yield entry, (one + start) & _WORD, (other + start) & _WORD, end - start
        start = round_up(end, kernels.CHUNK)


def _arguments(given: Any, sizes: tuple[int, ...]) -> list[int]:
    """Return the words of arguments as the bindings take them: values and their types, or the address of pointers."""
    if not isinstance(given, int):
        return list(given[0])
    pointers = (ctypes.c_void_p * len(sizes)).from_address(given)
    return [
        word
        for at, size in zip(pointers, sizes, strict=True)
        for word in (ctypes.c_uint64 * size).from_address(at or 0)
    ]


_ENTRIES: Mapping[bytes, tuple[Callable[..., None], tuple[int, ...]]] = {
    b"cubroker_broadcast": (HostModule._broadcast, (1, 1, 1)),
    b"cubroker_digest": (HostModule._digest, (1, 1, 1)),
    b"cubroker_batched_copy": (HostModule._batched_copy, (1, 3 * kernels.ENTRIES)),
    b"cubroker_batched_compare": (HostModule._batched_compare, (1, 1, 3 * kernels.ENTRIES)),
}
"""What each known entry does, with its blocks, threads and arguments; and the sizes of these in words of 64 bits."""

_modules: dict[tuple[int, int, int], HostModule] = {}


def host_module(count: int, size: int, island: int) -> HostModule:
    """Return the driver of such devices (see ``DeviceFunctions``): one per process, as there is one CUDA driver."""
    key = count, size, island
    return keep_first(_modules, key, lambda: _made(*key), lambda _: None)


def _made(count: int, size: int, island: int) -> HostModule:
    module = HostModule(count, size, island)
    os.register_at_fork(after_in_child=module.forked)
    return module
