"""Which processes keep GPU memory that the broker has freed, as far as NVML's figures tell.

NVML (libnvidia-ml, which comes with the driver) has a figure for each process with a context on a GPU: the bytes that
count for it. Measured on an H200 with driver 580.159, with an exporter that had a context: while the exporter has
memory, NVML counts it for no importer. From the moment that the exporter frees it, it counts for the process that still
has it mapped or open, if that has a context; by legacy handle and by descriptor alike. So a process whose figure rises
by exactly the size of a piece as that piece is freed keeps the piece, and has let go when its figure has fallen by as
much. A broker that lends ``vmm`` memory alone has no context; tests/gpu/test_process_memory.py measures with and
without.

That is evidence, and no proof: a process's own allocations are in the same figure. A process that allocates or frees
exactly as much at the same moment is mistaken for one that keeps memory, or hides it. A holder without a context is in
no figure. So a process of which nothing is seen is unknown.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial

from cubroker.server.devices.allocator import MemoryWatch
from cubroker.server.devices.mapped_memory import started, user
from cubroker.server.ledger.events import AllocationId, ProcessMemory

log = logging.getLogger(__name__)

MAX_KEEPERS, MAX_PIECES = 4096, 4096
"""Processes, and pieces of each, that are remembered. Past it the oldest are forgotten."""

_SUCCESS, _INSUFFICIENT_SIZE = 0, 7
_NOT_AVAILABLE = (1 << 64) - 1

_ROOM, _MORE_ROOM = 64, 16
"""Processes for which there is room at first, and that may start while the room is being enlarged."""


class NvmlError(Exception):
    """A function failed: its name, and the number that it returned."""


class _ProcessInfo(ctypes.Structure):
    """``nvmlProcessInfo_t`` (nvml.h)."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


class Nvml:
    """NVML's figures, by three of its functions. It makes no context and takes no GPU memory.

    It is called through ctypes: the functions and their structs have kept their shape, so no package is needed.

    Raises:
        OSError: the library is not there, as where there is no driver.
        NvmlError: it does not work here.
    """

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libnvidia-ml.so.1")
        self._call("nvmlInit_v2")
        self._devices: dict[str, ctypes.c_void_p] = {}

    def processes(self, uuid: str) -> dict[int, int]:
        """Return the bytes of a device's memory that count for each process that has a context on it.

        Raises:
            NvmlError: NVML does not tell, or does not know the device.
        """
        device = self._device(uuid)
        room = _ROOM
        while True:
            count, rows = ctypes.c_uint(room), (_ProcessInfo * room)()
            status = self._status("nvmlDeviceGetComputeRunningProcesses_v3", device, ctypes.byref(count), rows)
            if status == _SUCCESS:
                return {row.pid: row.used for row in rows[: count.value] if row.used != _NOT_AVAILABLE}
            if status != _INSUFFICIENT_SIZE:
                raise NvmlError("nvmlDeviceGetComputeRunningProcesses_v3", status)
            room = count.value + _MORE_ROOM

    def _device(self, uuid: str) -> ctypes.c_void_p:
        if uuid not in self._devices:
            device = ctypes.c_void_p()
            self._call("nvmlDeviceGetHandleByUUID", uuid.encode(), ctypes.byref(device))
            self._devices[uuid] = device
        return self._devices[uuid]

    def _call(self, name: str, *args: object) -> None:
        if status := self._status(name, *args):
            raise NvmlError(name, status)

    def _status(self, name: str, *args: object) -> int:
        try:
            function = getattr(self._library, name)
        except AttributeError:
            raise NvmlError(name, "this driver does not have it") from None
        return int(function(*args))


@dataclass(slots=True, eq=False)
class Retention:
    """A process that keeps freed memory of a device."""

    pid: int
    #: When the process started, in the kernel's ticks.
    began: int
    device: str
    #: The largest figure since, less the bytes that the process has let go of.
    peak: int
    #: Each allocation that it keeps and its bytes, the oldest first.
    pieces: deque[tuple[AllocationId, int]] = field(default_factory=partial(deque, maxlen=MAX_PIECES))

    def add(self, allocation: AllocationId, nbytes: int) -> None:
        """Note a piece, by which the figure has just risen."""
        self.pieces.append((allocation, nbytes))
        self.peak += nbytes

    def see(self, figure: int) -> None:
        """Note the figure now: the process has let go of as much as it has fallen by, the oldest pieces first."""
        self.peak = max(self.peak, figure)
        while self.pieces and self.peak - figure >= self.pieces[0][1]:
            self.peak -= self.pieces.popleft()[1]


class NvmlWatch(MemoryWatch):
    """Compares the figures of processes before and after the broker frees memory."""

    def __init__(self) -> None:
        self._looked_at = True
        self._lock = threading.Lock()
        self._keepers: dict[tuple[str, int], Retention] = {}

    def adjust(self, *, looked_at: bool) -> None:
        """Ask for no figures as memory is freed while nothing looks at them; what is known stays known."""
        self._looked_at = looked_at

    def freeing(self, device: str) -> Callable[[AllocationId, int], None]:
        """Note the figures before memory is freed; the result compares them after each piece, of so many bytes."""
        before = self._figures(device) if self._looked_at else None

        def freed(allocation: AllocationId, nbytes: int) -> None:
            nonlocal before
            if before:
                after = self._figures(device) or {}
                for pid, figure in after.items():
                    if figure - before.get(pid, 0) == nbytes and (began := started(pid)) is not None:
                        with self._lock:
                            self._keeper(device, pid, began, figure - nbytes).add(allocation, nbytes)
                before = after

        return freed

    def look(self, clients: Collection[tuple[int, int]], users: Collection[int]) -> list[ProcessMemory]:
        """Return what processes keep of freed memory; of a client that keeps none, None: it is unknown."""
        memory: dict[int, dict[AllocationId, int]] = {}
        with self._lock:
            figures = {device: self._figures(device) for device in {device for device, _ in self._keepers}}
            for key, keeper in tuple(self._keepers.items()):
                if (seen := figures[keeper.device]) is not None:
                    keeper.see(seen.get(keeper.pid, 0))
                if not keeper.pieces or started(keeper.pid) != keeper.began:
                    del self._keepers[key]
                if key in self._keepers:
                    memory.setdefault(keeper.pid, {}).update(keeper.pieces)
        looked = [ProcessMemory(pid, uid, memory.get(pid)) for pid, uid in clients]
        others = ((pid, user(pid)) for pid in memory.keys() - {pid for pid, _ in clients})
        return looked + [ProcessMemory(pid, uid, memory[pid]) for pid, uid in others if uid in users]

    def _keeper(self, device: str, pid: int, began: int, figure: int) -> Retention:
        """Return the record of a process, a new one if it has none."""
        keeper = self._keepers.pop((device, pid), None)
        if keeper is None or keeper.began != began:
            keeper = Retention(pid, began, device, figure)
        self._keepers[device, pid] = keeper
        if len(self._keepers) > MAX_KEEPERS:
            del self._keepers[next(iter(self._keepers))]
        return keeper

    @cached_property
    def nvml(self) -> Nvml | None:
        """The library, loaded on first use; None if it cannot be used."""
        try:
            return Nvml()
        except (OSError, NvmlError) as error:
            log.warning("which processes keep freed GPU memory is unknown: NVML cannot be used: %s", error)
            return None

    def _figures(self, device: str) -> Mapping[int, int] | None:
        """Return the figure of every process on a device; None if NVML does not tell."""
        try:
            return self.nvml.processes(device) if self.nvml else None
        except NvmlError as error:
            log.debug("device %s: %s", device, error)
            return None
