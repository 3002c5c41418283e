"""What other processes of the same user can take from one of ours: nothing.

A user's processes may open what each of them has open (``/proc/PID/fd``), read and write its memory, and trace it. A
broker holds the memory of all users, and the journal with the secrets of all sessions; so the kernel is told that its
processes are not to be dumped (``PR_SET_DUMPABLE``), which forbids all of that to everybody but a holder of
CAP_SYS_PTRACE, and hands their files in ``/proc`` to root.

A program that is started can be dumped until it says so: the interpreter, and the imports of a command, come before.
"""

from __future__ import annotations

import ctypes
import os
import resource

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS = 1, 4, 38
"""What prctl(2) is asked for; Python has no names for it."""


def hide() -> None:
    """Close this process to others of its user, and leave no core dump. Its children are closed until they exec."""
    prctl(PR_SET_DUMPABLE, 0)
    # The kernel dumps no such process. What this one starts inherits the limit, and not the above.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def prctl(option: int, value: int) -> None:
    """Set something of this process, or of this thread; raises ``OSError``."""
    library = ctypes.CDLL(None, use_errno=True)
    # Some options are refused unless the arguments that they do not use are 0, in whole registers.
    if library.prctl(option, *(ctypes.c_ulong(each) for each in (value, 0, 0, 0))):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
