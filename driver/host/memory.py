"""Shared memory by address: memfds, mapped, cleared and unmapped through libc.

``mmap.mmap`` would keep a descriptor of its own per mapping and could not unmap under a live buffer,
which is exactly what a device pointer does.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
from pathlib import Path

from cubroker.driver import linux
from cubroker.driver.host import descriptors

BLOCK = 2 << 20
"""Bytes: the granularity of device memory; larger allocations are multiples of it, small ones share one."""

_SEALS = linux.F_SEAL_SHRINK | linux.F_SEAL_GROW | linux.F_SEAL_SEAL
_MAP_NORESERVE = 0x4000
_MAP_FIXED = 0x10
_EMPTY = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
_NO_ACCESS = 0
_ALL_ACCESS = mmap.PROT_READ | mmap.PROT_WRITE
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_libc.mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def create(nbytes: int, name: str = "cubroker-host") -> int:
    """Return the descriptor of new shared memory, all zero; its size never changes, so no access to it can fault."""
    with descriptors.books() as ours:
        ours.add(fd := linux.memfd_create(name, linux.MFD_CLOEXEC | linux.MFD_ALLOW_SEALING))
    try:
        os.ftruncate(fd, nbytes)
        fcntl.fcntl(fd, linux.F_ADD_SEALS, _SEALS)
    except OSError:
        descriptors.close(fd)
        raise
    return fd


def sealed_size(fd: int) -> int:
    """Return the bytes of memory that came from another process; raises OSError unless they can never shrink."""
    if not sealed(fd):
        raise OSError(errno.EPERM, "the memory is not sealed")
    return os.fstat(fd).st_size


def sealed(fd: int) -> bool:
    """Whether the size of shared memory can never change."""
    return fcntl.fcntl(fd, linux.F_GET_SEALS) & _SEALS == _SEALS


def writable(fd: int) -> bool:
    """Whether shared memory can be written with this descriptor."""
    return fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDWR


def name_of(fd: int) -> str:
    """Return the name that shared memory was created with, in whichever process."""
    return str(Path(f"/proc/self/fd/{fd}").readlink()).removeprefix("/memfd:").removesuffix(" (deleted)")


def identity(fd: int) -> object:
    """Return what is the same for all descriptors of the same memory, and for those of no other while it exists."""
    found = os.fstat(fd)
    return found.st_dev, found.st_ino


def map_shared(fd: int, nbytes: int) -> int:
    """Map the memory of ``fd`` and return its address; the descriptor is not needed afterwards."""
    return _map(fd, nbytes, _ALL_ACCESS, mmap.MAP_SHARED | _MAP_NORESERVE)


def map_alone(fd: int, nbytes: int) -> int:
    """Map the memory of ``fd`` and return its address, at which a forked child has nothing."""
    with descriptors.books():
        pointer = map_shared(fd, nbytes)
        if _libc.madvise(pointer, nbytes, mmap.MADV_DONTFORK):
            error = _error("madvise")
            unmap(pointer, nbytes)
            raise error
    return pointer


def map_private(nbytes: int) -> int:
    """Map ``nbytes`` of this process's own memory and return their address."""
    return _map(-1, nbytes, _ALL_ACCESS, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def reserve(nbytes: int, alignment: int) -> int:
    """Keep addresses free of anything else and return the first, a multiple of ``alignment``; nothing is there yet."""
    whole = _map(-1, nbytes + alignment, _NO_ACCESS, _EMPTY)
    before = -whole % alignment
    for start, size in ((whole, before), (whole + before + nbytes, alignment - before)):
        if size:
            unmap(start, size)
    return whole + before


def map_at(pointer: int, fd: int, nbytes: int) -> None:
    """Map the memory of ``fd`` at an address that is reserved; nobody has access to it yet."""
    _map(fd, nbytes, _NO_ACCESS, mmap.MAP_SHARED | _MAP_NORESERVE | _MAP_FIXED, pointer)


def unmap_at(pointer: int, nbytes: int) -> None:
    """Undo ``map_at``: the addresses are reserved again."""
    _map(-1, nbytes, _NO_ACCESS, _EMPTY | _MAP_FIXED, pointer)


def protect(pointer: int, nbytes: int, access: int) -> None:
    """Give access to what is mapped at an address: ``PROT_READ``, ``PROT_WRITE``, both or 0."""
    if _libc.mprotect(pointer, nbytes, access):
        raise _error("mprotect")


def unmap(pointer: int, nbytes: int) -> None:
    """Undo a mapping; the pages of shared memory go with its last mapping and descriptor."""
    if _libc.munmap(pointer, nbytes):
        raise _error("munmap")


def fill(pointer: int, value: int, nbytes: int) -> None:
    """Set shared memory to a value. Whole pages of zeros are given back to the system instead of written."""
    if value == 0 and pointer % mmap.PAGESIZE == 0 and nbytes and nbytes % mmap.PAGESIZE == 0:
        if _libc.madvise(pointer, nbytes, mmap.MADV_REMOVE):
            raise _error("madvise")
    else:
        ctypes.memset(pointer, value, nbytes)


def _map(fd: int, nbytes: int, access: int, flags: int, at: int | None = None) -> int:
    pointer: int | None = _libc.mmap(at, nbytes, access, flags, fd, 0)
    if pointer is None or pointer == _FAILED:
        raise _error("mmap")
    return pointer


def _error(call: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{call}: {os.strerror(number)}")
