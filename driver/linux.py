"""What Linux has, and a Python does not name that was built against an older C library.

Those of conda are, and many of uv's, since they are to run anywhere.
"""

from __future__ import annotations

import ctypes
import os
from typing import NamedTuple

MFD_CLOEXEC, MFD_ALLOW_SEALING = 1, 2

F_ADD_SEALS, F_GET_SEALS = 1033, 1034
F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW = 1, 2, 4

F_OFD_SETLK, F_OFD_SETLKW = 37, 38

_PIDFD_OPEN = 434  # the number of the call on every machine


class FileId(NamedTuple):
    """What all descriptors and mappings of one file have in common, and those of no other while it exists."""

    device: int
    inode: int


def file_id(fd: int) -> FileId:
    """Return which file a descriptor is of; raises ``OSError``."""
    found = os.fstat(fd)
    return FileId(found.st_dev, found.st_ino)


def memfd_create(name: str, flags: int) -> int:
    """Return the descriptor of a new file in memory; raises ``OSError``."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, flags)
    return _checked(_libc().memfd_create(os.fsencode(name), flags))


def pidfd_open(pid: int) -> int:
    """Return a descriptor of a process, which turns readable when that ends; raises ``OSError``."""
    if hasattr(os, "pidfd_open"):
        return os.pidfd_open(pid)
    return _checked(_libc().syscall(ctypes.c_long(_PIDFD_OPEN), ctypes.c_long(pid), ctypes.c_long(0)))


def _libc() -> ctypes.CDLL:
    """The C library that is here, which may be a newer one."""
    return ctypes.CDLL(None, use_errno=True)


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
