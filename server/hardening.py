"""Hardening of our processes: hide them, start Python safely, return freed memory; and the gateway's confinement.

*Hiding.* A process may open the files that any other process of its user has open (``/proc/PID/fd``), read and write
that process's memory, and trace it. A broker holds the memory of all users, and the journal with the secrets of all
sessions. So its processes clear ``PR_SET_DUMPABLE``. The kernel then refuses all of this except to a holder of
CAP_SYS_PTRACE, and gives their files in ``/proc`` to root. A process is open to others until it makes that call: while
the interpreter starts, and while a command's modules are imported.

*Confinement.* A peer that exploits libzmq runs code in the gateway, as the broker's user. Once the gateway listens, the
kernel allows it only what its loop and libzmq's threads need. Two mechanisms keep such code from the rest of the
machine; neither needs a privilege, and neither can be undone:

* Landlock denies access to files, TCP and abstract sockets, and signals to processes outside. It applies to a thread
  and the threads that this thread starts, so the gateway enables it before libzmq's threads start.
* A filter (seccomp) refuses every system call that is not in :data:`CALLS`, with EPERM. The gateway installs it in all
  its threads when everything is open. From then on no file, socket or process can be opened, traced or signalled, and
  no memory can be made executable. libzmq's threads may still be starting, so the filter allows the calls for that.

The filter is written out here, about 120 instructions. libseccomp, which pyseccomp loads, could generate it, but most
containers lack that system library.

A kernel may have both mechanisms, one or none (:func:`obstacles`); the broker logs what is missing, and serves without.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import resource
import signal
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NAME, PR_SET_NO_NEW_PRIVS = 1, 4, 15, 38  #: Options of prctl(2).

M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3  #: Parameters of ``mallopt`` (malloc.h).

BLOCK = 512 << 10
"""Bytes from which a block gets a mapping of its own, which is unmapped when the block is freed.

It is more than the 256 KiB that asyncio allocates for each read: mapping those would cost three page faults a batch."""


def hide() -> None:
    """Close this process to others of its user, and leave no core dump. Its children are closed until they exec."""
    prctl(PR_SET_DUMPABLE, 0)
    # The kernel never dumps this process anyway. The limit is for its children, which lose the option when they exec.
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
    32 MiB. After one message of 10 MiB all later ones came from the heap, which can shrink only at its end: the broker
    kept 30 MiB more after a flood of them. A limit that a program sets stays. Other C libraries need no ``mallopt``,
    and have none.
    """
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(M_MMAP_THRESHOLD, BLOCK)
        mallopt(M_TRIM_THRESHOLD, BLOCK)


@contextmanager
def blocked(signals: Iterable[int]) -> Iterator[None]:
    """Block signals in this thread while the context lasts; threads and processes started in it keep them blocked."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def python_command(module: str, *arguments: str) -> list[str]:
    """Return the command line that runs a module with this interpreter; the linter allows no other way.

    ``python -m`` and ``python -c`` put the current directory before the standard library on the path of imports: a file
    ``json.py`` there would run with the rights of any user who starts cubroker in that directory. ``-P`` leaves it out.
    An interpreter that has ``-I`` passes that on instead: it leaves out ``PYTHONPATH``, too.
    """
    return [sys.executable, "-I" if sys.flags.isolated else "-P", "-m", module, *arguments]  # noqa: TID251


# -- the gateway's confinement -------------------------------------------------------------------------

MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  #: Machines with a filter, and their numbers (linux/audit.h).

CALLS: Mapping[str, tuple[int | None, int | None]] = {
    # messages
    "read": (0, 63),
    "write": (1, 64),
    "readv": (19, 65),
    "writev": (20, 66),
    "sendto": (44, 206),
    "recvfrom": (45, 207),
    "sendmsg": (46, 211),
    "recvmsg": (47, 212),
    # connections
    "accept": (43, 202),
    "accept4": (288, 242),
    "shutdown": (48, 210),
    "getsockname": (51, 204),
    "getpeername": (52, 205),
    "setsockopt": (54, 208),
    "getsockopt": (55, 209),
    "close": (3, 57),
    # waiting
    "poll": (7, None),
    "ppoll": (271, 73),
    "epoll_wait": (232, None),
    "epoll_pwait": (281, 22),
    "epoll_ctl": (233, 21),
    "futex": (202, 98),
    "clock_gettime": (228, 113),
    "clock_nanosleep": (230, 115),
    "nanosleep": (35, 101),
    "sched_yield": (24, 124),
    "restart_syscall": (219, 128),
    # memory
    "brk": (12, 214),
    "munmap": (11, 215),
    "mremap": (25, 216),
    "madvise": (28, 233),
    "getrandom": (318, 278),
    # threads, signals, the end
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "sigaltstack": (131, 132),
    "getpid": (39, 172),
    "gettid": (186, 178),
    "set_robust_list": (273, 99),
    "rseq": (334, 293),
    "sched_getparam": (143, 121),
    "sched_getscheduler": (145, 120),
    "sched_getaffinity": (204, 123),
    "exit": (60, 93),
    "exit_group": (231, 94),
}
"""Allowed system calls, and their numbers on the two machines; None: that machine has another call for the same."""

MMAP, MPROTECT = (9, 222), (10, 226)
FCNTL, TGKILL, PRCTL, SCHED_SETSCHEDULER = (72, 25), (234, 131), (157, 167), (144, 119)
F_SETFL = 4

SECCOMP = {"x86_64": 317, "aarch64": 277}
SECCOMP_SET_MODE_FILTER, SECCOMP_GET_ACTION_AVAIL = 1, 2
SECCOMP_FILTER_FLAG_TSYNC = 1
ALLOW, REFUSE = 0x7FFF0000, 0x00050000 | errno.EPERM

LANDLOCK_CREATE_RULESET, LANDLOCK_RESTRICT_SELF = 444, 446
LANDLOCK_CREATE_RULESET_VERSION = 1
FILES = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
"""How many kinds of access to files a version of Landlock knows; versions after 5 know at least as many."""

LOAD, EQUAL, GREATER, ANY_BIT, RETURN = 0x20, 0x15, 0x25, 0x45, 0x06
NUMBER, MACHINE = 0, 4  #: Offsets in ``seccomp_data`` of the call's number and of the machine.


class Instruction(NamedTuple):
    """An instruction of a filter (``struct sock_filter``)."""

    code: int
    #: Instructions to skip if the condition holds, and if not.
    if_true: int
    if_false: int
    operand: int


def obstacles() -> list[str]:
    """Return why a gateway on this machine cannot be confined fully, a clause for each reason."""
    found = []
    if platform.machine() not in MACHINES:
        found.append(f"there is no system call filter for {platform.machine()}")
    elif reason := _unavailable(_filter_available):
        found.append(f"the kernel has no system call filter ({reason})")
    if reason := _unavailable(_landlock_version):
        found.append(f"the kernel has no Landlock ({reason})")
    return found


def restrict_files() -> None:
    """Deny this thread, and the threads that it starts, all files and all processes outside, if there is Landlock.

    Raises:
        OSError: the kernel has Landlock, and refuses these rules.
    """
    if _unavailable(_landlock_version):
        return
    version = _landlock_version()
    rules = struct.pack("QQQ", (1 << FILES[min(version, 5)]) - 1, 3 if version >= 4 else 0, 3 if version >= 6 else 0)
    size = len(rules) if version >= 6 else 16 if version >= 4 else 8
    ruleset = _call(LANDLOCK_CREATE_RULESET, rules, size, 0)
    try:
        _call(LANDLOCK_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


def filter_calls() -> None:
    """Refuse all threads of this process the calls that are not in :data:`CALLS`, if the kernel has filters.

    Raises:
        OSError: the kernel has filters, and refuses this one.
    """
    machine = platform.machine()
    if machine not in MACHINES or _unavailable(_filter_available):
        return
    code = b"".join(struct.pack("HBBI", *each) for each in program(machine, os.getpid()))
    buffer = ctypes.create_string_buffer(code, len(code))
    length = len(code) // struct.calcsize("HBBI")
    described = struct.pack("HxxxxxxP", length, ctypes.addressof(buffer))
    if thread := _call(SECCOMP[machine], SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, described):
        raise OSError(errno.EPERM, f"thread {thread} has a system call filter of its own")


def program(machine: str, pid: int) -> Iterable[Instruction]:
    """Yield the instructions of the filter for a process on a machine."""
    column = list(MACHINES).index(machine)
    yield Instruction(LOAD, 0, 0, MACHINE)
    yield Instruction(EQUAL, 1, 0, MACHINES[machine])
    yield Instruction(RETURN, 0, 0, REFUSE)
    yield Instruction(LOAD, 0, 0, NUMBER)
    for numbers in CALLS.values():
        if (number := numbers[column]) is not None:
            yield Instruction(EQUAL, 0, 1, number)
            yield Instruction(RETURN, 0, 0, ALLOW)
    for call in (MMAP, MPROTECT):
        yield from _judge(call[column], 2, ANY_BIT, mmap.PROT_EXEC, REFUSE, ALLOW)
    # Commands above F_SETFL include F_SETOWN and F_SETSIG, by which the kernel signals any process of this user.
    yield from _judge(FCNTL[column], 1, GREATER, F_SETFL, REFUSE, ALLOW)
    yield from _judge(TGKILL[column], 0, EQUAL, pid, ALLOW, REFUSE)  # abort()
    yield from _judge(PRCTL[column], 0, EQUAL, PR_SET_NAME, ALLOW, REFUSE)
    yield from _judge(SCHED_SETSCHEDULER[column], 1, EQUAL, os.SCHED_OTHER, ALLOW, REFUSE)
    yield Instruction(RETURN, 0, 0, REFUSE)


def _judge(call: int, argument: int, condition: int, operand: int, then: int, otherwise: int) -> Iterable[Instruction]:
    """Answer a call ``then`` if one of its arguments fulfils a condition, and ``otherwise`` if not."""
    yield Instruction(EQUAL, 0, 4, call)
    yield Instruction(LOAD, 0, 0, 16 + 8 * argument)  # the lower half: these arguments are ints
    yield Instruction(condition, 0, 1, operand)
    yield Instruction(RETURN, 0, 0, then)
    yield Instruction(RETURN, 0, 0, otherwise)


def _filter_available() -> int:
    return _call(SECCOMP[platform.machine()], SECCOMP_GET_ACTION_AVAIL, 0, struct.pack("I", REFUSE & 0x7FFF0000))


def _landlock_version() -> int:
    return _call(LANDLOCK_CREATE_RULESET, 0, 0, LANDLOCK_CREATE_RULESET_VERSION)


def _unavailable(ask: Callable[[], int]) -> str:
    """Return why the system call of ``ask`` failed; an empty text if it succeeded."""
    try:
        ask()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _call(number: int, *arguments: int | bytes) -> int:
    """Make a system call with numbers and addresses of bytes; raises ``OSError``."""
    library = ctypes.CDLL(None, use_errno=True)
    given = (each if isinstance(each, bytes) else ctypes.c_long(each) for each in arguments)
    result: int = library.syscall(ctypes.c_long(number), *given)
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
