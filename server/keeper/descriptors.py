"""The descriptors that ``cubroker keep`` holds, by name: the store itself, and room for it."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import platform
import re
import resource
import select
from collections.abc import Sequence

from cubroker.protocol.errors import Invalid
from cubroker.server.store.sd_notify import LONGEST_NAME, close_all

NAMELESS = "stored"  #: The name of a descriptor without one, or with an invalid one; as systemd calls it.

MOST_BYTES = 131072 - len("LISTEN_FDNAMES=") - 1
"""Bytes for all names together: no string of an environment may be longer (MAX_ARG_STRLEN)."""

DEFAULT_DESCRIPTORS = 4096

MOST_DESCRIPTORS = MOST_BYTES // (LONGEST_NAME + 1)
"""Descriptors whose names, however long, fit in the environment of the next run: a broker relies on the number."""

SPARE = 1024  #: Files that the child may have open besides those that it stored and got back.

F_DUPFD_QUERY = 1027  #: Linux 6.10 (linux/fcntl.h; Python does not name it).

KCMP = {"x86_64": 312, "aarch64": 272}
"""The number of the system call kcmp(2), by machine; the C library has no function for it."""

_KCMP_FILE = 0

_NAME = re.compile(r"[ -9;-~]{1,255}")

_Inode = tuple[int, int]


class FdSet:
    """Up to ``limit`` stored descriptors. ``epoll`` reports those that hang up; its other events belong to others."""

    def __init__(self, limit: int, epoll: select.epoll) -> None:
        self.limit = limit
        self._epoll = epoll
        #: The name of each descriptor, in the order of their arrival; to be read alone.
        self.names: dict[int, str] = {}
        self._inodes: dict[int, _Inode] = {}
        self._by_inode: dict[_Inode, list[int]] = {}
        self._bytes = 0

    def __len__(self) -> int:
        return len(self.names)

    def __contains__(self, descriptor: int) -> bool:
        return descriptor in self.names

    def add(self, name: str | None, descriptors: Sequence[int], *, poll: bool) -> list[str]:
        """Store descriptors, and return complaints. Duplicates, and those without room, are closed."""
        complaints = []
        if name is None or not _NAME.fullmatch(name):
            complaints.append(f"{name!r} is no name for a descriptor, so it is kept as {NAMELESS!r}")
            name = NAMELESS
        dropped = 0
        for descriptor in descriptors:
            inode = _inode(descriptor)
            if any(same_file(descriptor, known) for known in self._by_inode.get(inode, ())):
                close_all([descriptor])
            elif len(self) >= self.limit or self._bytes + len(name) + 1 > MOST_BYTES:
                close_all([descriptor])
                dropped += 1
            else:
                self.names[descriptor] = name
                self._inodes[descriptor] = inode
                self._by_inode.setdefault(inode, []).append(descriptor)
                self._bytes += len(name) + 1
                complaints += self._watch(descriptor, name) if poll else ()
        if dropped:
            complaints.append(
                f"THE STORE IS FULL with {len(self)} of {self.limit} descriptors and {self._bytes} of {MOST_BYTES} "
                f"bytes of names: {dropped} named {name!r} are dropped, and will be missing after a restart"
            )
        return complaints

    def remove(self, name: str) -> None:
        """Close all descriptors of a name."""
        for descriptor in [known for known, called in self.names.items() if called == name]:
            self.drop(descriptor)

    def drop(self, descriptor: int) -> None:
        """Close one descriptor."""
        self._bytes -= len(self.names.pop(descriptor)) + 1
        inode = self._inodes.pop(descriptor)
        self._by_inode[inode].remove(descriptor)
        if not self._by_inode[inode]:
            del self._by_inode[inode]
        with contextlib.suppress(OSError):  # it was not polled
            self._epoll.unregister(descriptor)  # closing does not, while others have the same file open
        close_all([descriptor])

    def close(self) -> None:
        """Close all."""
        for descriptor in list(self.names):
            self.drop(descriptor)

    def _watch(self, descriptor: int, name: str) -> Sequence[str]:
        try:
            self._epoll.register(descriptor, 0)  # hang-ups and errors are reported unasked
        except PermissionError:
            pass  # a kind of file that never hangs up
        except OSError as error:
            return [f"whether {name!r} hangs up cannot be seen ({error.strerror}), so it stays until removed"]
        return ()


def make_room(descriptors: int | None) -> int:
    """Raise the limit of open files, the child's too, for that many stored descriptors; return their number.

    The child gets each of them back, and may have opened as many for others: hence twice as many. None: 4096, or as
    many as the limit allows. Raises ``Invalid`` if it cannot be raised so far, or they cannot all be handed over.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        hard = 2**31
    most = (hard - SPARE) // 2
    limit = min(DEFAULT_DESCRIPTORS, most) if descriptors is None else descriptors
    needed = 2 * max(limit, 1) + SPARE
    if not 0 < limit <= most:
        raise Invalid(
            f"to keep {max(limit, 1)} descriptors takes a limit of {needed} open files, and it cannot be raised above "
            f"{hard}: raise that (ulimit -Hn, LimitNOFILE=), or keep fewer with --descriptors"
        )
    if limit > MOST_DESCRIPTORS:
        raise Invalid(
            f"{limit} descriptors cannot be handed to the next run: their names have to fit in {MOST_BYTES} bytes of"
            f" its environment; keep at most {MOST_DESCRIPTORS} with --descriptors"
        )
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    return limit


def _inode(descriptor: int) -> _Inode:
    """Return the inode of a descriptor, so that few files have to be compared; (0, 0) if the file does not say."""
    try:
        status = os.fstat(descriptor)
    except OSError:
        return 0, 0
    return status.st_dev, status.st_ino


def same_file(one: int, other: int) -> bool:
    """Whether two descriptors share an open file, and not merely an inode; False where the kernel does not tell."""
    try:
        return bool(fcntl.fcntl(one, F_DUPFD_QUERY, other))
    except OSError:
        return same_by_comparison(one, other)


def same_by_comparison(one: int, other: int) -> bool:
    """Compare as kernels before 6.10 do; a container may forbid it, and then the answer is False."""
    call = KCMP.get(platform.machine())
    if call is None:
        return False
    pid = os.getpid()
    arguments = (ctypes.c_long(value) for value in (call, pid, pid, _KCMP_FILE, one, other))
    return bool(ctypes.CDLL(None).syscall(*arguments) == 0)
