"""Multicast objects of host devices, with the rules that are documented or reported of real ones.

What is undefined there is refused here, with one exception: an ordinary load through a multicast address is counted,
and gets bytes that nobody has stored.
"""

# ruff: noqa: D102  (the functions are NVIDIA's, and described in the reference of the CUDA driver API)

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from cuda.bindings import driver as cuda

from cubroker.driver.host import ranges
from cubroker.driver.host.answers import Refusal, Result, answers
from cubroker.driver.host.memory import BLOCK
from cubroker.driver.host.ranges import WRITE, Physical
from cubroker.driver.host.storage import Storage
from cubroker.driver.host.table import MAX_DEVICES, Table
from cubroker.driver.host.teams import Team, Window
from cubroker.driver.host.vmm import Vmm, check, check_blocks

OPTIONS = "CUBROKER_HOST_MULTICAST"
"""The environment variable with options for tests: ``slots=2,cuMulticastBindMem=401``."""

RECOMMENDED = 4 * BLOCK
"""Bytes: the recommended granularity; the minimum is one block."""

JUNK = b"\xdb"
"""What ordinary loads get."""

_KINDS = {
    int(cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_NONE),
    int(cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
}
_FABRIC = int(cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC)
_GRANULARITIES = {
    int(cuda.CUmulticastGranularity_flags.CU_MULTICAST_GRANULARITY_MINIMUM): BLOCK,
    int(cuda.CUmulticastGranularity_flags.CU_MULTICAST_GRANULARITY_RECOMMENDED): RECOMMENDED,
}


@dataclass(frozen=True)
class Options:
    """How many objects a process can have, and with which status each function fails, if it does."""

    slots: int = 256
    statuses: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Options:
        """Read ``slots=2,cuMulticastCreate=801``; raises ValueError for anything else."""
        items = [item.partition("=") for item in text.split(",") if item.strip()]
        try:
            numbers = {name.strip(): int(number) for name, _, number in items}
            slots = numbers.pop("slots", cls.slots)
            return cls(slots, {name: int(Result(status)) for name, status in numbers.items()})
        except ValueError as error:
            raise ValueError(f"{OPTIONS}={text}: {error}; write slots=2,cuMulticastCreate=801") from None


class Multicast(Storage, Vmm):
    """The functions. Nothing waits with the lock: other threads can add the devices that are missing.

    ``violations`` counts the ordinary loads through multicast addresses.
    """

    def __init__(self, count: int, size: int, island: int | None = None) -> None:
        super().__init__(count, size, island)
        self.violations = 0
        self.options = Options.parse(os.environ.get(OPTIONS, ""))

    @answers(1)
    def cuMulticastCreate(self, prop: Any) -> Any:
        self._fail("cuMulticastCreate")
        check_blocks(prop.size)
        check(0 < prop.numDevices <= MAX_DEVICES and not prop.flags)
        if prop.handleTypes == _FABRIC:  # as where there is no IMEX channel
            raise Refusal(Result.CUDA_ERROR_NOT_PERMITTED)
        check(prop.handleTypes in _KINDS)
        if self.island == 1:
            raise Refusal(Result.CUDA_ERROR_NOT_SUPPORTED)
        with self.lock:
            if sum(isinstance(held, Team) for held in self.handles()) >= self.options.slots:
                raise MemoryError
            return self.handle(Team(Table.create(prop.size, prop.numDevices), kinds=prop.handleTypes))

    @answers(0)
    def cuMulticastAddDevice(self, mcHandle: Any, dev: Any) -> None:
        self._fail("cuMulticastAddDevice")
        device = self.index(dev)
        with self.lock:
            table = self._team(mcHandle).table
            if self.reached(device) < 2 or not all(self.reaches(device, other) for other in table.devices):
                raise Refusal(Result.CUDA_ERROR_INVALID_DEVICE)
            check(table.add(device))

    @answers(0)
    def cuMulticastBindMem(
        self, mcHandle: Any, mcOffset: int, memHandle: Any, memOffset: int, size: int, flags: int
    ) -> None:
        self._fail("cuMulticastBindMem")
        check_blocks(size)
        check(mcOffset % BLOCK == 0 and memOffset % BLOCK == 0 and not flags)
        self.settle(mcHandle)
        with self.lock:
            self._bind(self._team(mcHandle), mcOffset, self.held(memHandle), memOffset, size)

    @answers(0)
    def cuMulticastBindAddr(self, mcHandle: Any, mcOffset: int, memptr: Any, size: int, flags: int) -> None:
        self._fail("cuMulticastBindAddr")
        check_blocks(size)
        check(mcOffset % BLOCK == 0 and int(memptr) % BLOCK == 0 and not flags)
        self.settle(mcHandle)
        with self.lock:
            physical, offset = self._mapped(int(memptr), size)
            self._bind(self._team(mcHandle), mcOffset, physical, offset, size)

    @answers(0)
    def cuMulticastUnbind(self, mcHandle: Any, dev: Any, mcOffset: int, size: int) -> None:
        self._fail("cuMulticastUnbind")
        device = self.index(dev)
        with self.lock:
            check(self._team(mcHandle).unbind(device, mcOffset, size))

    @answers(1)
    def cuMulticastGetGranularity(self, prop: Any, option: Any) -> int:
        self._fail("cuMulticastGetGranularity")
        check(0 < prop.numDevices <= MAX_DEVICES and int(option) in _GRANULARITIES)
        return _GRANULARITIES[int(option)]

    def settle(self, handle: Any) -> None:
        """Wait for the devices of a multicast object, too."""
        with self.lock:
            held = self.held(handle)
            if not isinstance(held, Team):
                return
            held.hold()
        try:
            held.settle()
        finally:
            with self.lock:
                held.drop()

    def readable(self, pointer: Any, nbytes: int) -> int | ctypes.Array[ctypes.c_char]:
        """Count a load through a multicast address, and answer it with what nobody has stored."""
        source = super().readable(pointer, nbytes)
        with self.lock:
            if not isinstance(self.addresses.find(int(pointer)), Window):
                return source
            self.violations += 1
        return ctypes.create_string_buffer(JUNK * nbytes, nbytes)

    def deliver(self, pointer: Any, source: int | ctypes.Array[ctypes.c_char], nbytes: int) -> None:
        """Store to every device if it is a multicast address."""
        if not self.store(int(pointer), source, nbytes):
            super().deliver(pointer, source, nbytes)

    def store(self, pointer: int, source: int | ctypes.Array[ctypes.c_char], nbytes: int) -> bool:
        """Store to every device's memory; False if it is no multicast address at all."""
        device = self.current()
        with self._window(pointer) as window:
            if window is None:
                return False
            start = source if isinstance(source, int) else ctypes.addressof(source)
            allowed = window.access.get(device, 0) & WRITE and pointer + nbytes <= window.end
            if not allowed or not window.team.store(pointer - window.pointer, start, nbytes):
                raise Refusal(Result.CUDA_ERROR_ILLEGAL_ADDRESS)
        return True

    @contextmanager
    def _window(self, pointer: int) -> Iterator[Window | None]:
        """Keep the multicast object that an address is of, if any, while it is stored through."""
        with self.lock:
            window = self.addresses.find(pointer)
            if isinstance(window, Window):
                window.team.hold()
        if not isinstance(window, Window):
            yield None
            return
        try:
            yield window
        finally:
            with self.lock:
                window.team.drop()

    def _bind(self, team: Team, offset: int, physical: Any, place: int, nbytes: int) -> None:
        check(isinstance(physical, Physical) and physical.shareable and physical.writable)
        check(offset + nbytes <= team.nbytes and place + nbytes <= physical.nbytes)
        if physical.device not in team.table.devices:
            raise Refusal(Result.CUDA_ERROR_INVALID_DEVICE)
        check(team.bind(physical, place, offset, nbytes))

    def _mapped(self, pointer: int, nbytes: int) -> tuple[Physical, int]:
        """Return the memory at an address, of which there is a handle here yet, and where in it the address is."""
        mapping = self.addresses.find(pointer, nbytes)
        if isinstance(mapping, ranges.Mapping) and mapping.identity:
            for held in self.handles():
                if isinstance(held, Physical) and held.shareable and held.identity == mapping.identity:
                    return held, pointer - mapping.pointer
        raise Refusal(Result.CUDA_ERROR_INVALID_VALUE)

    def _team(self, handle: Any) -> Team:
        team = self.held(handle)
        if not isinstance(team, Team):
            raise Refusal(Result.CUDA_ERROR_INVALID_VALUE)
        return team

    def _fail(self, call: str) -> None:
        """Refuse as the options say."""
        if call in self.options.statuses:
            raise Refusal(Result(self.options.statuses[call]))
