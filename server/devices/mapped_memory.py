"""Finds the broker's memory that processes have mapped or open, so that the ledger can compare it with their leases.

Memory of emulated devices consists of files without a path, and /proc shows which process refers to which file, by a
mapping or a descriptor. A file is identified by its device and inode, which no process can choose; its name only
selects the lines to parse. If the kernel does not let this process read the entries of another, what that one refers to
is unknown: reading them requires the same user and a process that is dumpable, or CAP_SYS_PTRACE (ptrace(2), "ptrace
access mode checking"). Descriptors in flight in a socket are not shown, nor those of a thread with a descriptor table
of its own.

For a GPU, NVML (libnvidia-ml, a part of the driver) has a figure for each process with a context: the bytes of device
memory that NVML counts for it. Measured on an H200 with driver 580.159, with an exporter that had a context: while the
exporter has memory, NVML counts it for no importer. From the moment that the exporter frees it, NVML counts it for the
process that still has it mapped or open, if that process has a context; by legacy handle and by descriptor alike. So if
the figure of a process rises by exactly the size of an allocation as that is freed, the process keeps the allocation;
it has released it when the figure has fallen by as much. A broker that lends only ``vmm`` memory has no context;
tests/gpu/test_process_memory.py measures with and without one.

That is evidence, not proof: the figure includes a process's own allocations. A process that allocates exactly as much
at the same moment is mistaken for one that keeps memory; one that frees as much hides that it keeps memory. A holder
without a context has no figure. So a process for which nothing is seen is unknown.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import NamedTuple

from cubroker.driver.system_calls import FileId
from cubroker.server.devices.allocator import MemoryWatch, WorkerThread
from cubroker.server.event_queue import EventQueue, MappedCheckDone, MappedCheckDue
from cubroker.server.ledger.events import AllocationId, ProcessMemory, ProcessScanFinished, ProcessScanStarted
from cubroker.server.ledger.tables import ROOT

log = logging.getLogger(__name__)

PROC = Path("/proc")

_NAME = "/memfd:cubroker-"  #: The prefix of the names of the memory's files.
_STARTTIME = 19  #: Where ``stat`` has the start time, counted after the name (proc_pid_stat(5), field 22).


def references(pid: int, known: Collection[FileId]) -> set[FileId] | None:
    """Return which of the ``known`` files a process has mapped or open; None if this process may not read that.

    Raises:
        ProcessLookupError: the process has ended.
    """
    place = PROC / str(pid)
    try:
        return {file for file in _referred(place) if file in known}
    except (FileNotFoundError, ProcessLookupError):
        raise ProcessLookupError(f"process {pid} has ended") from None
    except OSError:  # not permitted, or no descriptor is left to read it with
        return None


def processes(users: Collection[int]) -> Iterator[tuple[int, int]]:
    """Yield process id and user of every process of these users that is visible here."""
    for place in PROC.iterdir():
        if place.name.isdecimal() and (uid := user(int(place.name))) in users:
            yield int(place.name), uid


def user(pid: int) -> int:
    """Return the effective user of a process, -1 if it has ended; the owner of its folder may be root instead."""
    try:
        status = (PROC / str(pid) / "status").read_bytes()
    except OSError:
        return -1
    return int(status.partition(b"\nUid:")[2].split(None, 2)[1])


def started(pid: int) -> int | None:
    """Return when a process started, in the kernel's ticks; None if it has ended. Pid and start identify a process."""
    try:
        stat = (PROC / str(pid) / "stat").read_bytes()
    except OSError:
        return None
    return int(stat.rpartition(b")")[2].split()[_STARTTIME])


def _referred(place: Path) -> Iterator[FileId]:
    """Yield the memory files that a process refers to. After the end of its first thread, only the others list any."""
    if maps := (place / "maps").read_bytes():
        yield from _files(maps)
        yield from _open(place)
        return
    for task in (place / "task").iterdir():
        try:
            yield from _files((task / "maps").read_bytes())
            yield from _open(task)
        except (FileNotFoundError, ProcessLookupError):  # that thread has ended meanwhile
            continue


def _files(maps: bytes) -> Iterator[FileId]:
    """Yield the memory files in the text of maps (proc(5))."""
    mark = f" {_NAME}".encode()
    at = maps.find(mark)
    while at >= 0:
        # If a path contains the mark further on, the line is of another file, whose inode is not a known one.
        _, _, _, device, inode, *_ = maps[maps.rfind(b"\n", 0, at) + 1 : at].split(None, 5)
        major, minor = (int(part, 16) for part in device.split(b":"))
        yield FileId(os.makedev(major, minor), int(inode))
        at = maps.find(mark, at + 1)


def _open(place: Path) -> Iterator[FileId]:
    """Yield the memory files behind the descriptors of a process or a thread."""
    for descriptor in (place / "fd").iterdir():
        try:
            if str(descriptor.readlink()).startswith(_NAME):
                found = descriptor.stat()
                yield FileId(found.st_dev, found.st_ino)
        except (FileNotFoundError, ProcessLookupError):  # it was closed meanwhile
            continue


class FileWatch(MemoryWatch):
    """The files of the broker's memory on emulated devices, freed memory included, and the processes that use them."""

    MAX_FREED = 16_384
    """Files of freed memory that are remembered. Past it those that no process was found to use are forgotten first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: The allocation whose memory a file is, and its bytes.
        self._parts: dict[FileId, tuple[AllocationId, int]] = {}
        self._files: dict[AllocationId, FileId] = {}
        #: Freed, and not found in use by the last look.
        self._freed: dict[FileId, None] = {}
        #: Freed, and found in use by the last look.
        self._kept: dict[FileId, None] = {}

    def allocated(self, files: Mapping[FileId, tuple[AllocationId, int]]) -> None:
        """Note allocations and their bytes by file."""
        with self._lock:
            self._files.update({allocation: file for file, (allocation, _) in files.items()})
            self._parts.update(files)

    def freed(self, allocations: Collection[AllocationId]) -> None:
        """Note that the broker frees memory."""
        with self._lock:
            self._freed.update({self._files.pop(each): None for each in allocations if each in self._files})
            while len(self._freed) + len(self._kept) > self.MAX_FREED:
                files = self._freed or self._kept
                oldest = next(iter(files))
                del files[oldest], self._parts[oldest]

    def look(self, clients: Collection[tuple[int, int]], users: Collection[int]) -> list[ProcessMemory]:
        """Return the memory that processes refer to; None for a client whose entries in /proc cannot be read."""
        with self._lock:
            known = dict(self._parts)
        others = set[tuple[int, int]]()
        if users and known:
            try:
                others = set(processes(users))
            except OSError as error:
                log.warning("the processes of users without a session cannot be checked: %s", error)
        looked, everything = list[ProcessMemory](), set[FileId]()
        for pid, uid in sorted({*clients, *others}):
            try:
                files = references(pid, known) if pid else None
            except ProcessLookupError:
                continue
            client = (pid, uid) in clients
            if files is not None:
                everything |= files
                if client or user(pid) == uid:  # a client's pidfd proves that it is still the same process
                    looked.append(ProcessMemory(pid, uid, dict(known[file] for file in files)))
            elif client:
                looked.append(ProcessMemory(pid, uid, None))
        with self._lock:
            freed = {**self._kept, **self._freed}
            self._kept = {file: None for file in freed if file in everything}
            self._freed = {file: None for file in freed if file not in everything}
        return looked


class SessionProcess(NamedTuple):
    """A process that has a session."""

    pid: int
    #: The user of the session.
    uid: int
    #: -1 once the process has ended.
    pidfd: int


class CheckRequest(NamedTuple):
    """The processes to look at: ``clients``, by process id and user, and all other processes of ``users``."""

    clients: frozenset[tuple[int, int]]
    users: frozenset[int]


class MappedChecks(WorkerThread[CheckRequest]):
    """Reports to the ledger what processes have mapped and open: regularly, and soon after leases end.

    Reading /proc takes a while, so the thread does it; all else here runs on the broker's loop. A check goes through
    the broker's queue: for :class:`MappedCheckDue` the broker calls :meth:`begin`, for :class:`MappedCheckDone`
    :meth:`finish`.

    Processes without a session are checked as well, so that a process hides nothing by closing its session. Those of
    root and of the broker's user are not, since some hold the broker's memory by duty: its keeper, or process 1.

    ``seconds`` is the time from one check to the next; 0 disables checks.
    """

    SOON = 0.2
    """Seconds from the end of a lease to the next check: other leases may end with it."""

    REST_FACTOR = 20
    """A pause lasts at least this many times as long as the check before it: checks use a twentieth of a processor at
most."""

    MAX_USERS = 4096
    """Users whose processes without a session are looked at. Past it the earliest are forgotten."""

    def __init__(self, queue: EventQueue, watch: MemoryWatch, seconds: float) -> None:
        self._watch = watch
        self._seconds = seconds
        watch.adjust(looked_at=seconds > 0)
        self._loop = asyncio.get_running_loop()
        self._users: dict[int, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        #: The loop's time before which no check begins.
        self._rested = 0.0
        self._running = False
        #: Whether another check is wanted soon after the one that runs.
        self._again = False
        #: Whether the check that runs began before checks were disabled.
        self._void = False
        self._stopped = False
        super().__init__("mapped-checks", queue)
        self._schedule(seconds)

    def adjust(self, seconds: float) -> None:
        """Change the time from one check to the next; if checks are disabled, forget what the last one found."""
        self._seconds = seconds
        self._watch.adjust(looked_at=seconds > 0)
        if not seconds:
            self._void = self._running  # leases that end from now on are not noted
            self._queue.put(ProcessScanFinished(()))
        self._schedule(self.SOON)

    def joined(self, uid: int) -> None:
        """Note that a user has a session."""
        if uid not in (ROOT, os.geteuid()):
            self._users.pop(uid, None)
            self._users[uid] = None
            if len(self._users) > self.MAX_USERS:
                del self._users[next(iter(self._users))]
        self.soon()

    def soon(self) -> None:
        """Check soon: a lease has ended."""
        if self._running:
            self._again = True
        elif self._timer is None or self._timer.when() > max(self._loop.time() + self.SOON, self._rested):
            self._schedule(self.SOON)

    def begin(self, sessions: Iterable[SessionProcess]) -> None:
        """Begin the check that is due, of the processes that have sessions now."""
        self._timer = None
        clients = _living(sessions)
        if self._running or self._stopped or not self._seconds or not (clients or self._users):
            return  # the next session that opens schedules another check
        self._running, self._again, self._void = True, False, False
        self._queue.put(ProcessScanStarted())
        self.submit(CheckRequest(frozenset(clients), frozenset(self._users)))

    def finish(self, done: MappedCheckDone, sessions: Iterable[SessionProcess]) -> None:
        """Tell the ledger what a check found, except of clients that have ended: others may have their pids now."""
        self._running = False
        if self._stopped:
            return
        self._rested = self._loop.time() + self.REST_FACTOR * done.seconds
        if not self._void:
            gone = done.clients - _living(sessions)
            found = tuple(each for each in done.found if (each.pid, each.uid) not in gone)
            self._queue.put(ProcessScanFinished(found))
        self._schedule(self.SOON if self._again else self._seconds)

    def stop(self) -> None:
        """Tell the ledger nothing more; the thread runs until :meth:`close`."""
        self._stopped = True
        self._schedule(0)

    def _schedule(self, seconds: float) -> None:
        if self._timer:
            self._timer.cancel()
            self._timer = None
        if self._seconds and not self._stopped and not self._running:
            when = max(self._loop.time() + seconds, self._rested)
            self._timer = self._loop.call_at(when, self._queue.put, MappedCheckDue())

    def _execute(self, request: CheckRequest) -> MappedCheckDone:
        began = time.monotonic()
        found: list[ProcessMemory] = []
        try:
            found = self._watch.look(request.clients, request.users)
        # If the thread ended here, no check would follow; and a failed look must not harm the broker.
        except Exception:
            log.exception("the broker failed at checking which memory processes have mapped")
        return MappedCheckDone(request.clients, tuple(found), time.monotonic() - began)


def _living(sessions: Iterable[SessionProcess]) -> set[tuple[int, int]]:
    """Return process id and user of the sessions whose process has not ended."""
    held = [each for each in sessions if each.pidfd >= 0]
    poll = select.poll()
    for each in held:
        poll.register(each.pidfd, select.POLLIN)
    ended = {pidfd for pidfd, _ in poll.poll(0)}
    return {(each.pid, each.uid) for each in held if each.pidfd not in ended}


# -- GPUs ----------------------------------------------------------------------------------------------

MAX_KEEPERS, MAX_PIECES = 4096, 4096  #: Processes, and pieces of each, that are remembered: the latest.

_SUCCESS, _INSUFFICIENT_SIZE = 0, 7
_NOT_AVAILABLE = (1 << 64) - 1

_ROOM, _MORE_ROOM = 64, 16
"""Processes that the first buffer has room for, and processes that may start before a larger one is filled."""


class NvmlError(Exception):
    """A function of NVML failed: its name, and the number that it returned or the reason why it was not called."""


class _ProcessInfo(ctypes.Structure):
    """``nvmlProcessInfo_t`` (nvml.h)."""

    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


class Nvml:
    """NVML's figures, read with three of its functions. NVML makes no context and uses no GPU memory.

    The library is called through ctypes: its functions and structs do not change, so no package is needed.

    Raises:
        OSError: the library does not exist, for example because there is no driver.
        NvmlError: the library cannot be initialised.
    """

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libnvidia-ml.so.1")
        self._call("nvmlInit_v2")
        self._devices: dict[str, ctypes.c_void_p] = {}

    def processes(self, uuid: str) -> dict[int, int]:
        """Return the bytes of a device's memory that NVML counts for each process that has a context on it.

        Raises:
            NvmlError: NVML has no figures, or does not know the device.
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
    #: The largest figure since this record was made, less the bytes that the process has released.
    peak: int
    #: Each allocation that it keeps and its bytes, the oldest first.
    pieces: deque[tuple[AllocationId, int]] = field(default_factory=partial(deque, maxlen=MAX_PIECES))

    def add(self, allocation: AllocationId, nbytes: int) -> None:
        """Note a piece, by which the figure has just risen."""
        self.pieces.append((allocation, nbytes))
        self.peak += nbytes

    def see(self, figure: int) -> None:
        """Note the present figure. If it has fallen, the process has released as much, the oldest pieces first."""
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
        """Note whether :meth:`look` will be called; if not, frees read no figures. What is known stays known."""
        self._looked_at = looked_at

    def freeing(self, device: str) -> Callable[[AllocationId, int], None]:
        """Note the figures before memory is freed; the result compares them after each freed allocation."""
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
        """Return the freed memory that processes keep; None for a client that is not known to keep any."""
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
        """Return the figure of every process on a device; None if NVML reports none."""
        try:
            return self.nvml.processes(device) if self.nvml else None
        except NvmlError as error:
            log.debug("device %s: %s", device, error)
            return None
