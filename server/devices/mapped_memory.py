"""The broker's memory that processes have mapped or open: compared with their leases now and then.

Memory of emulated devices is files without a place in any folder, and the kernel tells under /proc which process refers
to which file, by a mapping or a descriptor. A file is known by its device and inode, which no process can choose; its
name only says which lines are worth a look. Unknown is what the kernel does not let this process read: that takes the
same user and a process that is dumpable, or CAP_SYS_PTRACE (ptrace(2), "ptrace access mode checking"). Nor does the
kernel show descriptors in flight in a socket, or those of a thread that has a descriptor table of its own.

What processes keep of a GPU's memory is another module's, :mod:`cubroker.server.devices.gpu_processes`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import select
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from cubroker.driver.system_calls import FileId
from cubroker.server.devices.allocator import MemoryWatch, WorkerThread
from cubroker.server.event_queue import EventQueue, MappedCheckDone, MappedCheckDue
from cubroker.server.ledger.access import ROOT
from cubroker.server.ledger.events import AllocationId, ProcessMemory, ProcessScanFinished, ProcessScanStarted

log = logging.getLogger(__name__)

PROC = Path("/proc")

_NAME = "/memfd:cubroker-"  #: How the names of the memory's files begin.
_STARTTIME = 19  #: Where ``stat`` has the start time, counted after the name (proc_pid_stat(5), field 22).


def references(pid: int, known: Collection[FileId]) -> set[FileId] | None:
    """Return which of the ``known`` files a process has mapped or open; None if this process may not know.

    Raises:
        ProcessLookupError: the process has ended.
    """
    place = PROC / str(pid)
    try:
        return {file for file in (*_mapped(place), *_open(place)) if file in known}
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
    """Return when a process started, in the kernel's ticks; None if it has ended. Pid and start name one process."""
    try:
        stat = (PROC / str(pid) / "stat").read_bytes()
    except OSError:
        return None
    return int(stat.rpartition(b")")[2].split()[_STARTTIME])


def _mapped(place: Path) -> set[FileId]:
    """Return the memory files that a process maps. Once its first thread has ended, only the others have any."""
    if maps := (place / "maps").read_bytes():
        return set(_files(maps))
    found = set[FileId]()
    for task in (place / "task").iterdir():
        try:
            found.update(_files((task / "maps").read_bytes()))
        except (FileNotFoundError, ProcessLookupError):  # that thread has ended meanwhile
            continue
    return found


def _files(maps: bytes) -> Iterator[FileId]:
    """Yield the memory files in the text of maps (proc(5))."""
    mark = f" {_NAME}".encode()
    at = maps.find(mark)
    while at >= 0:
        # A path that contains the mark further on belongs to another file, which is not a known one.
        _, _, _, device, inode, *_ = maps[maps.rfind(b"\n", 0, at) + 1 : at].split(None, 5)
        major, minor = (int(part, 16) for part in device.split(b":"))
        yield FileId(os.makedev(major, minor), int(inode))
        at = maps.find(mark, at + 1)


def _open(place: Path) -> set[FileId]:
    """Return the memory files behind a process's descriptors."""
    files = set[FileId]()
    for descriptor in (place / "fd").iterdir():
        try:
            if str(descriptor.readlink()).startswith(_NAME):
                found = descriptor.stat()
                files.add(FileId(found.st_dev, found.st_ino))
        except (FileNotFoundError, ProcessLookupError):  # it was closed meanwhile
            continue
    return files


class FilePart(NamedTuple):
    """The memory that one file is."""

    allocation: AllocationId
    nbytes: int


class FileWatch(MemoryWatch):
    """The files of the broker's memory on emulated devices, freed memory included, and the processes that use them."""

    MAX_FREED = 16_384
    """Files of freed memory that are remembered. Past it those that no process was found to use are forgotten first."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._parts: dict[FileId, FilePart] = {}
        self._files: dict[AllocationId, FileId] = {}
        #: Freed, and not found in use by the last look.
        self._freed: dict[FileId, None] = {}
        #: Freed, and found in use by the last look.
        self._kept: dict[FileId, None] = {}

    def allocated(self, files: Mapping[FileId, tuple[AllocationId, int]]) -> None:
        """Note allocations and their bytes by file."""
        with self._lock:
            self._files.update({allocation: file for file, (allocation, _) in files.items()})
            self._parts.update({file: FilePart(*part) for file, part in files.items()})

    def freed(self, allocations: Collection[AllocationId]) -> None:
        """Note that the broker frees memory."""
        with self._lock:
            self._freed.update({self._files.pop(each): None for each in allocations if each in self._files})
            while len(self._freed) + len(self._kept) > self.MAX_FREED:
                files = self._freed or self._kept
                oldest = next(iter(files))
                del files[oldest], self._parts[oldest]

    def look(self, clients: Collection[tuple[int, int]], users: Collection[int]) -> list[ProcessMemory]:
        """Return the memory that processes refer to; None for a client of which the kernel does not tell."""
        with self._lock:
            known = dict(self._parts)
        others = set[tuple[int, int]]()
        if users and known:
            try:
                others = set(processes(users))
            except OSError as error:
                log.warning("the processes of users without a session cannot be looked at: %s", error)
        looked, everything = list[ProcessMemory](), set[FileId]()
        for pid, uid in sorted({*clients, *others}):
            try:
                files = references(pid, known) if pid else None
            except ProcessLookupError:
                continue
            client = (pid, uid) in clients
            if files is not None:
                everything |= files
                if client or user(pid) == uid:  # a client's pidfd says that it is still the same process
                    looked.append(ProcessMemory(pid, uid, _by_allocation(files, known)))
            elif client:
                looked.append(ProcessMemory(pid, uid, None))
        with self._lock:
            freed = {**self._kept, **self._freed}
            self._kept = {file: None for file in freed if file in everything}
            self._freed = {file: None for file in freed if file not in everything}
        return looked


def _by_allocation(files: Iterable[FileId], known: Mapping[FileId, FilePart]) -> dict[AllocationId, int]:
    return {known[file].allocation: known[file].nbytes for file in files}


class SessionProcess(NamedTuple):
    """A process that has a session."""

    pid: int
    #: The user, as the session has it.
    uid: int
    #: -1 once the process has ended.
    pidfd: int


class CheckRequest(NamedTuple):
    """The processes to look at: these, by process id and user, and all others of these users."""

    clients: frozenset[tuple[int, int]]
    users: frozenset[int]


class MappedChecks(WorkerThread[CheckRequest]):
    """Has the ledger told what processes have mapped and open: regularly, and soon after leases end.

    Reading /proc takes a while, so the thread does it; all else here runs on the broker's loop. A check goes through
    the broker's queue: :class:`MappedCheckDue` leads to :meth:`begin`, and :class:`MappedCheckDone` to :meth:`finish`.

    Processes without a session count as well, so that hanging up hides nothing; but not those of root and of the
    broker's user, which hold the broker's memory by duty, such as its keeper and process 1.

    Args:
        queue: the broker's.
        watch: looks at the processes.
        seconds: from one check to the next; 0: no checks.
    """

    SOON = 0.2
    """Seconds from the end of a lease to the next check: other leases may end with it."""

    REST_FACTOR = 20
    """A pause lasts at least this many times as long as the check before: a twentieth of a processor at most."""

    MAX_USERS = 4096
    """Users whose processes without a session are looked at. Past it the earliest are forgotten."""

    def __init__(self, queue: EventQueue, watch: MemoryWatch, seconds: float) -> None:
        self._queue = queue
        self._watch = watch
        self._seconds = seconds
        watch.adjust(looked_at=seconds > 0)
        self._loop = asyncio.get_running_loop()
        self._users: dict[int, None] = {}
        self._timer: asyncio.TimerHandle | None = None
        #: The loop's time before which no check begins.
        self._rested = 0.0
        self._running = False
        #: Another check is wanted soon after the one that runs.
        self._again = False
        #: The one that runs began before checks were switched off.
        self._void = False
        self._stopped = False
        super().__init__("mapped-checks")
        self._schedule(seconds)

    def adjust(self, seconds: float) -> None:
        """Change the time from one check to the next; without checks nothing is known any more."""
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
            return  # the next session that opens leads to another
        self._running, self._again, self._void = True, False, False
        self._queue.put(ProcessScanStarted())
        self.submit(CheckRequest(frozenset(clients), frozenset(self._users)))

    def finish(self, done: MappedCheckDone, sessions: Iterable[SessionProcess]) -> None:
        """Tell the ledger what a check found, except of clients that have ended: their numbers may be others' now."""
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
        """Tell the ledger nothing more; the thread goes on until :meth:`close`."""
        self._stopped = True
        self._schedule(0)

    def _schedule(self, seconds: float) -> None:
        if self._timer:
            self._timer.cancel()
            self._timer = None
        if self._seconds and not self._stopped and not self._running:
            when = max(self._loop.time() + seconds, self._rested)
            self._timer = self._loop.call_at(when, self._queue.put, MappedCheckDue())

    def _execute(self, request: CheckRequest) -> None:
        began = time.monotonic()
        found: list[ProcessMemory] = []
        try:
            found = self._watch.look(request.clients, request.users)
        # If the thread ended here, no check would follow; and a failed look must not harm the broker.
        except Exception:
            log.exception("the broker failed at looking at the memory of processes")
        self._queue.put_threadsafe(MappedCheckDone(request.clients, tuple(found), time.monotonic() - began))


def _living(sessions: Iterable[SessionProcess]) -> set[tuple[int, int]]:
    """Return process id and user of the sessions whose process has not ended."""
    held = [each for each in sessions if each.pidfd >= 0]
    poll = select.poll()
    for each in held:
        poll.register(each.pidfd, select.POLLIN)
    ended = {pidfd for pidfd, _ in poll.poll(0)}
    return {(each.pid, each.uid) for each in held if each.pidfd not in ended}
