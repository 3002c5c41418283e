"""Which memory of emulated devices a process refers to, as the kernel tells under /proc: by mappings and descriptors.

Such memory is files without a place in any folder. One is known by its device and inode, which no process can choose;
its name only says which lines are worth a look. What the kernel does not let this process read is unknown: that takes
the same user and a process that is dumpable, or CAP_SYS_PTRACE (ptrace(2), "ptrace access mode checking"). Nor does the
kernel show descriptors that are under way in a socket, or those of a thread that has a table of its own.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from cubroker.driver.linux import FileId
from cubroker.server.ledger.events import Process

log = logging.getLogger(__name__)

MAX_FREED = 16_384
"""Files of freed memory that are remembered; beyond it those that no process was found to refer to go first."""

PROC = Path("/proc")

_MARK = b" /memfd:cubroker-"
"""How the names of all such files begin in the maps of a process."""

_STARTTIME = 19
"""Where that stands in ``stat`` behind the name (proc_pid_stat(5), field 22)."""

_LINK = "/memfd:cubroker-"
"""And behind a descriptor of them."""


class MemoryWatch:
    """Told by the devices' threads what becomes of memory, and asked by another thread who refers to it.

    This one sees nothing.
    """

    def allocated(self, ticket: int, files: Mapping[FileId, int]) -> None:
        """Note memory, in bytes by file; there are none on GPUs."""

    def freed(self, ticket: int) -> None:
        """Note that the broker has freed memory: processes that refer to it still have it."""

    def adjust(self, *, looked_at: bool) -> None:
        """Note whether :meth:`look` is called from now on: what only serves that, and costs, is left out otherwise."""

    def freeing(self, device: str, ticket: int) -> Callable[[int], None]:
        """The broker lets go of a ticket's memory, on a device by UUID; to be told each piece's bytes once it has."""
        return lambda _: None

    def look(self, clients: Collection[tuple[int, int]], users: Collection[int]) -> list[Process]:
        """Return which memory processes refer to, those that have a session, and others of these users.

        Args:
            clients: process id (0: not known here) and user of each.
            users: whose other processes count.
        """
        return []


class Part(NamedTuple):
    """The memory that one file is: of which ticket, and how many bytes."""

    ticket: int
    nbytes: int


class Files(MemoryWatch):
    """The files that the broker's memory is and was, on emulated devices, and the processes that refer to them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._parts: dict[FileId, Part] = {}
        self._tickets: dict[int, tuple[FileId, ...]] = {}
        self._freed: dict[FileId, None] = {}
        self._kept: dict[FileId, None] = {}  # freed, and found when processes were looked at last

    def allocated(self, ticket: int, files: Mapping[FileId, int]) -> None:
        """Note memory, in bytes by file."""
        with self._lock:
            self._tickets[ticket] = tuple(files)
            self._parts.update({file: Part(ticket, nbytes) for file, nbytes in files.items()})

    def freed(self, ticket: int) -> None:
        """Note that the broker has freed memory: processes that refer to it still have it."""
        with self._lock:
            self._freed.update(dict.fromkeys(self._tickets.pop(ticket, ())))
            while len(self._freed) + len(self._kept) > MAX_FREED:
                files = self._freed or self._kept
                oldest = next(iter(files))
                del files[oldest], self._parts[oldest]

    def look(self, clients: Collection[tuple[int, int]], users: Collection[int]) -> list[Process]:
        """Return which memory processes refer to. Where the kernel does not tell, that is None; others are left out."""
        with self._lock:
            known = dict(self._parts)
        others = _others(users) if users and known else set()
        looked, everything = list[Process](), set[FileId]()
        for pid, uid in sorted({*clients, *others}):
            try:
                files = references(pid, known) if pid else None
            except ProcessLookupError:
                continue
            client = (pid, uid) in clients
            if files is not None:
                everything |= files
                if client or user(pid) == uid:  # of a client its pidfd says that it is still the same process
                    looked.append(Process(pid, uid, _by_ticket(files, known)))
            elif client:
                looked.append(Process(pid, uid, None))
        self._sort(everything)
        return looked

    def _sort(self, found: Collection[FileId]) -> None:
        """Tell apart what is freed: what was found now, and what was not."""
        with self._lock:
            freed = {**self._kept, **self._freed}
            self._kept = {file: None for file in freed if file in found}
            self._freed = {file: None for file in freed if file not in found}


def _others(users: Collection[int]) -> set[tuple[int, int]]:
    try:
        return set(processes(users))
    except OSError as error:
        log.warning("the processes of users without a session cannot be looked at: %s", error)
        return set()


def _by_ticket(files: Iterable[FileId], known: Mapping[FileId, Part]) -> dict[int, int]:
    nbytes: dict[int, int] = {}
    for file in files:
        part = known[file]
        nbytes[part.ticket] = nbytes.get(part.ticket, 0) + part.nbytes
    return nbytes


def references(pid: int, known: Collection[FileId]) -> set[FileId] | None:
    """Return which of these files a process has mapped or open; None if this process cannot find out.

    Raises:
        ProcessLookupError: it has ended.
    """
    place = PROC / str(pid)
    try:
        return {file for file in (*_mapped(place), *_open(place)) if file in known}
    except (FileNotFoundError, ProcessLookupError):
        raise ProcessLookupError(f"process {pid} has ended") from None
    except OSError:  # it is not permitted, or this process has no descriptor left to read it with
        return None


def processes(users: Collection[int]) -> Iterator[tuple[int, int]]:
    """Yield process id and user of every process of these users that can be seen from here."""
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


def _mapped(place: Path) -> set[FileId]:
    """Return the files of a process's mappings. When its first thread has ended, only the others have any."""
    maps = (place / "maps").read_bytes()
    if maps:
        return set(_files(maps))
    found = set[FileId]()
    for task in (place / "task").iterdir():
        try:
            found.update(_files((task / "maps").read_bytes()))
        except (FileNotFoundError, ProcessLookupError):  # that thread has ended meanwhile
            continue
    return found


def _files(maps: bytes) -> Iterator[FileId]:
    """Yield the files in the text of maps (proc(5)) that are named as memory is."""
    at = maps.find(_MARK)
    while at >= 0:
        # A path with such words in it may begin before them, and is then of another file than any that is known.
        _, _, _, device, inode, *_ = maps[maps.rfind(b"\n", 0, at) + 1 : at].split(None, 5)
        major, minor = (int(part, 16) for part in device.split(b":"))
        yield FileId(os.makedev(major, minor), int(inode))
        at = maps.find(_MARK, at + 1)


def _open(place: Path) -> set[FileId]:
    """Return the files behind a process's descriptors that are named as memory is."""
    files = set[FileId]()
    for descriptor in (place / "fd").iterdir():
        try:
            if str(descriptor.readlink()).startswith(_LINK):
                found = descriptor.stat()
                files.add(FileId(found.st_dev, found.st_ino))
        except (FileNotFoundError, ProcessLookupError):  # it was closed meanwhile
            continue
    return files


def started(pid: int) -> int | None:
    """Return when a process began, in the kernel's ticks; None if it has ended. No other has that and its number."""
    try:
        stat = (PROC / str(pid) / "stat").read_bytes()
    except OSError:
        return None
    return int(stat.rpartition(b")")[2].split()[_STARTTIME])
