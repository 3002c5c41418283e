"""A process that reaches into others: ``python intruder.py NAME=PID …``; it says in JSON which attacks came through.

``python intruder.py BROKER PIPE LISTENER PATH`` is a gateway that does the same once it listens, and then ends; so is
``python intruder.py BROKER PIPE``, which gets the other two by that pipe. The variable ``INTRUDER_WITHOUT`` names the
part of its confinement that such a gateway leaves out.

An attack comes through unless the kernel forbids it; that it then finds nothing at an address is no defence. Each is
tried on a child of this process, too, which has no defence at all.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import mmap
import os
import platform
import resource
import signal
import socket
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


def connect(pid: int) -> None:
    with socket.socket(socket.AF_UNIX) as channel:
        channel.connect(sys.argv[-1])


def lower_limit(pid: int) -> None:
    resource.prlimit(pid, resource.RLIMIT_NOFILE, resource.prlimit(pid, resource.RLIMIT_NOFILE))


def execute(pid: int) -> None:
    if not os.fork():
        os._exit(0)


def have_code(pid: int) -> None:
    mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC).close()


def own_signals(pid: int) -> None:
    fcntl.fcntl(int(sys.argv[1]), fcntl.F_SETOWN, pid)


BEYOND: dict[str, Callable[[int], None]] = {
    "opens a file": lambda pid: os.close(os.open("/etc/passwd", os.O_RDONLY)),
    "looks at a directory": lambda pid: os.close(os.open("/", os.O_RDONLY)),
    "makes a file": lambda pid: os.close(os.open(f"{sys.argv[-1]}.new", os.O_CREAT | os.O_WRONLY)),
    "removes the socket": lambda pid: os.unlink(sys.argv[-1]),  # noqa: PTH108
    "reaches a network": lambda pid: socket.socket(socket.AF_INET).close(),
    "connects": connect,
    "signals it": lambda pid: os.kill(pid, signal.SIGCONT),
    "has the kernel signal it": own_signals,
    "limits it": lower_limit,
    "starts a process": execute,
    "makes memory executable": have_code,
}
"""What a process may do to others of its user that cannot be traced, and to the machine."""

FILES = {"opens a file", "looks at a directory", "makes a file", "removes the socket", "opens its files"}
"""What Landlock denies, whatever its version; the filter of system calls denies it as well."""


def attack(pid: int, attacks: dict[str, Callable[[int], None]] = ATTACKS) -> list[str]:
    """Try everything on a process, and return what came through."""
    through = []
    for name, attempt in attacks.items():
        try:
            attempt(pid)
        except PermissionError:
            continue
        except OSError:  # it was not forbidden
            pass
        through.append(name)
    return sorted(through)


def main() -> None:
    targets = {name: int(pid) for name, _, pid in (each.partition("=") for each in sys.argv[1:])}
    # Until it answers it has files of others open, those that it is loaded from.
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
        assert child.stdin
        assert child.stdout
        os.write(child.stdin.fileno(), b"x")
        os.read(child.stdout.fileno(), 1)
        json.dump({name: attack(pid) for name, pid in {**targets, "its own child": child.pid}.items()}, sys.stdout)


def as_gateway() -> None:
    """Be a gateway, and attack its broker instead of serving it."""
    from cubroker.server.transport import gateway

    broker = int(sys.argv.pop(1))
    if without := os.environ.get("INTRUDER_WITHOUT"):
        assert callable(getattr(gateway, without))
        setattr(gateway, without, lambda: None)
    setattr(gateway.Gateway, "run", lambda self: print(json.dumps(attack(broker, ATTACKS | BEYOND)), flush=True))  # noqa: B010
    gateway.main()


if __name__ == "__main__":
    if "=" in sys.argv[1]:
        main()
    else:
        as_gateway()
