"""Which memory of emulated devices a process refers to, as the kernel tells under /proc: by mappings and descriptors.

Such memory is files without a place in any folder. One is known by its device and inode, which no process can choose;
its name only says which lines are worth a look. What the kernel does not let this process read is unknown: that takes
the same user and a process that is dumpable, or CAP_SYS_PTRACE (ptrace(2), "ptrace access mode checking"). Nor does the
kernel show descriptors that are under way in a socket, or those of a thread that has a table of its own.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from cubroker.driver.linux import FileId

MAX_FREED = 16_384
"""Files of freed memory that are remembered; beyond it those that no process was found to refer to go first."""

PROC = Path("/proc")

_MARK = b" /memfd:cubroker-"
"""How the names of all such files begin in the maps of a process."""

_LINK = "/memfd:cubroker-"
"""And behind a descriptor of it."""


class Part(NamedTuple):
    """The memory that one file is: of which ticket, and how many bytes."""

    ticket: int
    nbytes: int


class Files:
    """The files that the broker's memory is and was, told by the devices' threads and read by another one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._parts: dict[FileId, Part] = {}
        self._tickets: dict[int, tuple[FileId, ...]] = {}
        self._freed: dict[FileId, None] = {}

    def add(self, ticket: int, files: Mapping[FileId, int]) -> None:
        """Note memory, in bytes by file."""
        with self._lock:
            self._tickets[ticket] = tuple(files)
            self._parts.update({file: Part(ticket, nbytes) for file, nbytes in files.items()})

    def freed(self, ticket: int) -> None:
        """Note that the broker has freed memory: processes that refer to it still have it."""
        with self._lock:
            self._freed.update(dict.fromkeys(self._tickets.pop(ticket, ())))
            while len(self._freed) > MAX_FREED:
                oldest = next(iter(self._freed))
                del self._freed[oldest], self._parts[oldest]

    def found(self, files: Collection[FileId]) -> None:
        """Note which files processes refer to: of those that are freed they are remembered longest."""
        with self._lock:
            for file in self._freed.keys() & files:
                del self._freed[file]
                self._freed[file] = None

    def known(self) -> dict[FileId, Part]:
        """Return all files, those of freed memory among them."""
        with self._lock:
            return dict(self._parts)


def references(pid: int, known: Collection[FileId]) -> set[FileId] | None:
    """Return which of these files a process has mapped or open; None if the kernel does not let this process know.

    Raises:
        ProcessLookupError: it has ended.
    """
    place = PROC / str(pid)
    try:
        return {file for file in (*_mapped(place), *_open(place)) if file in known}
    except PermissionError:
        return None
    except FileNotFoundError:
        raise ProcessLookupError(f"process {pid} has ended") from None


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
