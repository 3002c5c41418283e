"""The descriptors that ``cubroker keep`` keeps, by name: the store itself."""

from __future__ import annotations

import contextlib
import os
import re
import select
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from cubroker.server.store.datagrams import close_all
from cubroker.server.store.same import same_file

NAMELESS = "stored"
"""The name of what comes without one, or with one that cannot be given back; as systemd calls it."""

MOST_BYTES = 131072 - len("LISTEN_FDNAMES=") - 1
"""What the names of all have to fit in: no string of an environment may be longer (MAX_ARG_STRLEN)."""

_NAME = re.compile(r"[ -9;-~]{1,255}")

_Inode = tuple[int, int]


class Kept:
    """Stored descriptors.

    Args:
        limit: how many there may be.
        epoll: told of those that are to be removed when they hang up. Its other events are others'.
        complain: told of what is dropped.
    """

    def __init__(self, limit: int, epoll: select.epoll, complain: Callable[[str], None]) -> None:
        self.limit = limit
        self._epoll = epoll
        self._complain = complain
        self._names: dict[int, str] = {}
        self._inodes: dict[int, _Inode] = {}
        self._by_inode: dict[_Inode, list[int]] = {}
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, descriptor: int) -> bool:
        return descriptor in self._names

    @property
    def names(self) -> Mapping[int, str]:
        """The name of each descriptor, in the order in which they came."""
        return MappingProxyType(self._names)

    def add(self, name: str | None, descriptors: Sequence[int], *, poll: bool) -> None:
        """Keep descriptors; what is kept already, and what there is no room for, is closed."""
        if name is None or not _NAME.fullmatch(name):
            self._complain(f"{name!r} is no name for a descriptor, so it is kept as {NAMELESS!r}")
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
                self._keep(descriptor, name, inode, poll=poll)
        if dropped:
            self._complain(
                f"THE STORE IS FULL with {len(self)} of {self.limit} descriptors and {self._bytes} of {MOST_BYTES} "
                f"bytes of names: {dropped} named {name!r} are dropped, and will be missing after a restart"
            )

    def remove(self, name: str) -> None:
        """Close everything that has a name."""
        for descriptor in [known for known, called in self._names.items() if called == name]:
            self.drop(descriptor)

    def drop(self, descriptor: int) -> None:
        """Close one descriptor."""
        self._bytes -= len(self._names.pop(descriptor)) + 1
        inode = self._inodes.pop(descriptor)
        self._by_inode[inode].remove(descriptor)
        if not self._by_inode[inode]:
            del self._by_inode[inode]
        with contextlib.suppress(OSError):  # it was not polled
            self._epoll.unregister(descriptor)  # closing does not, while others have the same file open
        close_all([descriptor])

    def close(self) -> None:
        """Close all."""
        for descriptor in list(self._names):
            self.drop(descriptor)

    def _keep(self, descriptor: int, name: str, inode: _Inode, *, poll: bool) -> None:
        self._names[descriptor] = name
        self._inodes[descriptor] = inode
        self._by_inode.setdefault(inode, []).append(descriptor)
        self._bytes += len(name) + 1
        if poll:
            self._watch(descriptor, name)

    def _watch(self, descriptor: int, name: str) -> None:
        try:
            self._epoll.register(descriptor, 0)  # that it hung up, or failed, is told unasked
        except PermissionError:
            pass  # a kind of file that never hangs up
        except OSError as error:
            self._complain(f"whether {name!r} hangs up cannot be seen ({error.strerror}), so it stays until removed")


def _inode(descriptor: int) -> _Inode:
    """Return which file it is, so that few have to be compared; (0, 0) for one that does not say."""
    try:
        status = os.fstat(descriptor)
    except OSError:
        return 0, 0
    return status.st_dev, status.st_ino
