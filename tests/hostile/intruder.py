"""A process that reaches into others: ``python intruder.py NAME=PID …``; it says in JSON which attacks came through.

An attack comes through unless the kernel forbids it; that it then finds nothing at an address is no defence. Each is
tried on a child of this process, too, which has no defence at all.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable

PTRACE_ATTACH, PTRACE_DETACH = 16, 17
PIDFD_GETFD = 438
PROCESS_VM_READV = {"x86_64": 310, "aarch64": 270}[platform.machine()]
PROCESS_VM_WRITEV = {"x86_64": 311, "aarch64": 271}[platform.machine()]

FORBIDDEN = (errno.EACCES, errno.EPERM)

libc = ctypes.CDLL(None, use_errno=True)


def call(number: int, *arguments: int) -> None:
    """Make a system call; raises ``PermissionError`` if it is forbidden, and nothing if it fails for other reasons."""
    if libc.syscall(*(ctypes.c_long(each) for each in (number, *arguments))) < 0 and ctypes.get_errno() in FORBIDDEN:
        raise PermissionError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def open_files(pid: int) -> None:
    for number in range(64):
        try:
            os.close(os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR))
        except OSError as error:
            if error.errno in FORBIDDEN:
                raise


def file(name: str, flags: int) -> Callable[[int], None]:
    return lambda pid: os.close(os.open(f"/proc/{pid}/{name}", flags))


def trace(pid: int) -> None:
    if libc.ptrace(PTRACE_ATTACH, pid, None, None):
        raise PermissionError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    os.waitpid(pid, 0x40000000)
    libc.ptrace(PTRACE_DETACH, pid, None, None)


def transfer(number: int) -> Callable[[int], None]:
    """Copy a byte of the process, which has none at that address."""
    vector = (ctypes.c_size_t * 2)(4096, 1)
    return lambda pid: call(number, pid, ctypes.addressof(vector), 1, ctypes.addressof(vector), 1, 0)


def take_descriptor(pid: int) -> None:
    pidfd = os.pidfd_open(pid)
    try:
        call(PIDFD_GETFD, pidfd, 1, 0)
    finally:
        os.close(pidfd)


ATTACKS: dict[str, Callable[[int], None]] = {
    "opens its files": open_files,
    "opens its memory": file("mem", os.O_RDWR),
    "reads its environment": file("environ", os.O_RDONLY),
    "reads where its memory lies": file("maps", os.O_RDONLY),
    "traces it": trace,
    "reads its memory": transfer(PROCESS_VM_READV),
    "writes its memory": transfer(PROCESS_VM_WRITEV),
    "takes a descriptor": take_descriptor,
}


def attack(pid: int) -> list[str]:
    """Try everything on a process, and return what came through."""
    through = []
    for name, attempt in ATTACKS.items():
        try:
            attempt(pid)
        except PermissionError:
            continue
        through.append(name)
    return sorted(through)


def main() -> None:
    targets = {name: int(pid) for name, _, pid in (each.partition("=") for each in sys.argv[1:])}
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
        json.dump({name: attack(pid) for name, pid in {**targets, "its own child": child.pid}.items()}, sys.stdout)


if __name__ == "__main__":
    main()
