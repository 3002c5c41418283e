"""A client that attacks memory it was lent: ``… -m tests.integration.hostile.memory_attacker DIRECTORY UID WHAT POOL``.

As user ``UID``, which root alone may choose, it attaches to a pool (``WHAT`` is ``attach``) or begins a version of it
(``create``), takes the descriptor that comes, and says in JSON what it could change with it, and with what mode that is
open. Nothing of cubroker's that maps memory comes in between.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import mmap
import os
import sys
from collections.abc import Callable
from pathlib import Path

from cubroker.driver import system_calls
from cubroker.protocol.messages import Attach, Attached
from tests.unit.server.clients import session

FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE = 1, 2
F_SEAL_WRITE = 8
EXTENT = 4096
"""Bytes at the beginning of the memory: what is changed."""

libc = ctypes.CDLL(None, use_errno=True)
libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long)
libc.mprotect.argtypes = libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
libc.mmap.restype = ctypes.c_void_p


def check(status: int | None) -> None:
    if status:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def mapped(descriptor: int, access: int) -> int:
    pointer = libc.mmap(None, EXTENT, access, mmap.MAP_SHARED, descriptor, 0)
    check(pointer == ctypes.c_void_p(-1).value)
    return int(pointer)


def map_for_writing(descriptor: int) -> None:
    ctypes.memset(mapped(descriptor, mmap.PROT_READ | mmap.PROT_WRITE), 66, 1)


def protect(descriptor: int) -> None:
    pointer = mapped(descriptor, mmap.PROT_READ)
    check(libc.mprotect(pointer, EXTENT, mmap.PROT_READ | mmap.PROT_WRITE))
    ctypes.memset(pointer, 66, 1)


def take_pages(descriptor: int) -> None:
    check(libc.madvise(mapped(descriptor, mmap.PROT_READ), EXTENT, mmap.MADV_REMOVE))


def punch(descriptor: int) -> None:
    check(libc.fallocate(descriptor, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, EXTENT))


def change_flags(descriptor: int) -> None:
    fcntl.fcntl(descriptor, fcntl.F_SETFL, os.O_RDWR)
    os.pwrite(descriptor, b"B", 0)


def open_again(flags: int) -> Callable[[int], None]:
    return lambda descriptor: os.close(os.open(f"/proc/self/fd/{descriptor}", flags))


ATTACKS: dict[str, Callable[[int], object]] = {
    "maps it for writing": map_for_writing,
    "makes a mapping of it writable": protect,
    "takes pages away from a mapping": take_pages,
    "writes it": lambda descriptor: os.pwrite(descriptor, b"B", 0),
    "writes it after a change of flags": change_flags,
    "punches a hole": punch,
    "shrinks it": lambda descriptor: os.ftruncate(descriptor, 0),
    "opens it again": open_again(os.O_RDWR),
    "opens it again to append": open_again(os.O_WRONLY | os.O_APPEND),
    "has everybody open it": lambda descriptor: os.fchmod(descriptor, 0o777),
    "seals it": lambda descriptor: fcntl.fcntl(descriptor, system_calls.F_ADD_SEALS, F_SEAL_WRITE),
}


def attack(descriptor: int) -> list[str]:
    """Try everything, and return what came through."""
    through = []
    for name, attempt in ATTACKS.items():
        try:
            attempt(descriptor)
        except OSError:
            continue
        through.append(name)
    return sorted(through)


def main() -> None:
    directory, uid, what, pool = sys.argv[1:]
    if os.getuid() != int(uid):
        os.setgroups([])
        os.setgid(int(uid))
        os.setuid(int(uid))
    with session(Path(directory)) as client:
        where = Attach(pool, 0, client.devices()[0].uuid, 0.0)
        lent = client.ask(where, Attached) if what == "attach" else client.create(pool, share="vmm")
        (descriptor,) = client.descriptors(lent.lease, 1)
        opened = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE
        mode = os.fstat(descriptor).st_mode & 0o777
        json.dump({"through": attack(descriptor), "reads": opened == os.O_RDONLY, "mode": mode}, sys.stdout)


if __name__ == "__main__":
    main()
