"""What every process of ours does for itself: hide from its user's other processes, return memory, start Python safely.

*Hiding.* A user's processes may open the files that each of them has open (``/proc/PID/fd``), read and write its
memory, and trace it. A broker holds the memory of all users, and the journal with the secrets of all sessions. So its
processes tell the kernel that they are not to be dumped (``PR_SET_DUMPABLE``): that forbids all of it to everybody but
a holder of CAP_SYS_PTRACE, and gives their files in ``/proc`` to root. A program can be dumped until it says so: the
interpreter, and the imports of a command, come before.
"""

from __future__ import annotations

import ctypes
import os
import resource
import sys

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS = 1, 4, 38  #: Options of prctl(2); Python has no names for them.

M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3  #: Parameters of ``mallopt`` (malloc.h).

BLOCK = 512 << 10
"""Bytes from which a block is mapped by itself, and unmapped when it is freed.

It is more than the 256 KiB that asyncio allocates for each read: mapping those costs three page faults a batch."""


def hide() -> None:
    """Close this process to others of its user, and leave no core dump. Its children are closed until they exec."""
    prctl(PR_SET_DUMPABLE, 0)
    # The kernel never dumps this process. Its children inherit this limit, but not the option.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def prctl(option: int, value: int) -> None:
    """Set an option of this process, or of this thread; raises ``OSError``."""
    library = ctypes.CDLL(None, use_errno=True)
    # Some options are refused unless the unused arguments are 0, in whole registers.
    if library.prctl(option, *(ctypes.c_ulong(each) for each in (value, 0, 0, 0))):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def return_freed_blocks() -> None:
    """Make the C library return every large block to the system when it is freed.

    glibc maps large blocks at first, too, but raises its limit for "large" to the largest block that was freed, up to
    32 MiB. After one message of 10 MiB all others came from its heap, which shrinks at its end alone: the broker kept
    30 MiB more after a flood of them. A limit that is set stays. Other C libraries need no ``mallopt``, and have none.
    """
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(M_MMAP_THRESHOLD, BLOCK)
        mallopt(M_TRIM_THRESHOLD, BLOCK)


def python_command(module: str, *arguments: str) -> list[str]:
    """Return the command line that runs a module with this interpreter; the linter allows no other way.

    ``python -m`` and ``python -c`` put the current directory before the standard library on the path of imports: a file
    ``json.py`` there would run with the rights of any user who starts cubroker in that directory. ``-P`` leaves it out.
    """
    return [sys.executable, "-P", "-m", module, *arguments]  # noqa: TID251
