"""Linux calls and constants that a Python built against an older C library lacks; also futexes and huge pages.

The Pythons of conda and many of uv's are built so, to run anywhere.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import platform
import resource
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

MFD_CLOEXEC, MFD_ALLOW_SEALING = 1, 2

F_ADD_SEALS, F_GET_SEALS = 1033, 1034
F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW = 1, 2, 4

F_OFD_SETLK, F_OFD_SETLKW = 37, 38

_PIDFD_OPEN = 434  # on every architecture
_FUTEX = 202 if platform.machine() == "x86_64" else 98  # 98 on every newer architecture
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
HUGE_PAGE = 2 << 20
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_MADV_POPULATE_WRITE = 23
FAILED = ctypes.c_void_p(-1).value  #: What ``mmap`` and ``mremap`` return at an error.
_ALL = 2**31 - 1

libc = ctypes.CDLL(None, use_errno=True)  #: The C library that runs, which may be newer than Python's.
libc.syscall.restype = ctypes.c_long
libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
libc.mmap.restype = ctypes.c_void_p
libc.mremap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
libc.mremap.restype = ctypes.c_void_p
libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
libc.madvise.argtypes = libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class FileId(NamedTuple):
    """Identity of a file: the same for all its descriptors and mappings, and unique while the file exists."""

    device: int
    inode: int


def file_id(fd: int) -> FileId:
    """Return the identity of a descriptor's file; raises ``OSError``."""
    found = os.fstat(fd)
    return FileId(found.st_dev, found.st_ino)


def memfd_create(name: str, flags: int) -> int:
    """Return the descriptor of a new file in memory; raises ``OSError``."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, flags)
    return _checked(libc.memfd_create(os.fsencode(name), flags))


def pidfd_open(pid: int) -> int:
    """Return a descriptor that turns readable when the process ends; raises ``OSError``."""
    if hasattr(os, "pidfd_open"):
        return os.pidfd_open(pid)
    return _checked(_syscall(_PIDFD_OPEN, pid, 0))


def make_room(count: int) -> None:
    """Make room for ``count`` more descriptors in the kernel's table of this process, as far as its limit allows.

    Growing the table past 64 descriptors, and past each doubling, takes 25 to 50 ms in a process with several threads:
    the thread that needs a descriptor waits until no thread uses the old table. With one thread it takes no time.
    """
    with suppress(OSError):  # there may be no more
        first = os.open("/", os.O_PATH | os.O_CLOEXEC)
        try:
            least = min(first + count, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 1)
            os.close(fcntl.fcntl(first, fcntl.F_DUPFD_CLOEXEC, least))
        finally:
            os.close(first)


def futex_wait(address: int, value: int) -> None:
    """Sleep until some process calls ``futex_wake``, unless the 32 bits there are no longer ``value``.

    It may return early.
    """
    _syscall(_FUTEX, address, _FUTEX_WAIT, value, 0, 0, 0)


def futex_wake(address: int) -> None:
    """Wake every thread that waits at the address, in all processes that have the memory mapped."""
    _syscall(_FUTEX, address, _FUTEX_WAKE, _ALL, 0, 0, 0)


class HugePages:
    """Memory of this process alone, in huge pages if the system has them; forked children do not inherit it.

    A child would share its pages, and the parent's next write would go to a copy of the page, of which a device does
    not know. Only :meth:`close` unmaps the memory: Python's ``mmap`` would unmap the addresses in a forked child as
    well, where something else may be mapped there.

    Raises:
        OSError: there is no room.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._whole = nbytes + HUGE_PAGE
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        start: int | None = libc.mmap(None, self._whole, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
        if start is None or start == FAILED:
            raise _last_error()
        self._starts = [start]  # until it is unmapped
        self._open = True
        #: A token of each call of `populate` that may be writing, and so keeps the memory mapped.
        self._writing: set[object] = set()
        #: Its address, a multiple of a huge page's size.
        self.pointer = start + -start % HUGE_PAGE
        if libc.madvise(start, self._whole, mmap.MADV_DONTFORK):
            error = _last_error()
            self.close()
            raise error
        #: Whether the system has huge pages; a kernel that is built without them refuses.
        self._huge = not libc.madvise(start, self._whole, mmap.MADV_HUGEPAGE) and _has_huge_pages()

    def populate(self, offset: int, nbytes: int) -> None:
        """Bring the pages of a part into memory, zeroed; several threads may do so at the same time.

        One call writes to all bytes of huge pages, which zeroes them once more: a call for each page would need the
        interpreter each time. MADV_POPULATE_WRITE, or a read into them, would hold the lock of the process's mappings
        meanwhile, and other threads that map memory would wait for it. Small pages are too many to be written to:
        MADV_POPULATE_WRITE brings them into memory, except on kernels before 5.14, which do nothing.
        """
        token = object()
        try:
            self._writing.add(token)
            if self._open:  # read last: either `close` sees the entry, or this line sees `close`
                if self._huge:
                    ctypes.memset(self.pointer + offset, 0, nbytes)
                else:
                    libc.madvise(self.pointer + offset, nbytes, _MADV_POPULATE_WRITE)
        finally:
            self._writing.discard(token)
            if not self._open:
                self.close()

    def close(self) -> None:
        """Unmap it; while calls of :meth:`populate` write to it, as after an interrupt, the last of these unmaps it."""
        self._open = False
        if not self._writing:
            with suppress(IndexError):
                libc.munmap(self._starts.pop(), self._whole)


def _has_huge_pages() -> bool:
    try:
        return "[never]" not in _HUGE_PAGES.read_text()
    except OSError:
        return False


def _syscall(*numbers: int) -> int:
    return int(libc.syscall(*map(ctypes.c_long, numbers)))


def _checked(result: int) -> int:
    if result < 0:
        raise _last_error()
    return result


def _last_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
