"""Whether two descriptors are one open file, and not merely the same file opened twice."""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform

F_DUPFD_QUERY = 1027
"""Linux 6.10 (linux/fcntl.h; Python does not name it)."""

KCMP = {"x86_64": 312, "aarch64": 272}
"""The number of the call kcmp(2), by machine; it has no function in the C library."""

_KCMP_FILE = 0


def same_file(one: int, other: int) -> bool:
    """Whether two descriptors share an open file; False where the kernel does not tell."""
    try:
        return bool(fcntl.fcntl(one, F_DUPFD_QUERY, other))
    except OSError:
        return same_by_comparison(one, other)


def same_by_comparison(one: int, other: int) -> bool:
    """Ask as kernels before 6.10 have to be asked; a container may forbid it, and then the answer is False."""
    call = KCMP.get(platform.machine())
    if call is None:
        return False
    pid = os.getpid()
    arguments = (ctypes.c_long(value) for value in (call, pid, pid, _KCMP_FILE, one, other))
    return bool(ctypes.CDLL(None).syscall(*arguments) == 0)
