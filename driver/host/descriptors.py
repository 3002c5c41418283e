"""What is open here for host devices: a forked child closes it, or it would keep what its parent has given back.

Whichever thread forks, each descriptor is on the books from the moment that it is open until it is closed. What the
driver's functions return is not: it is the caller's.
"""

from __future__ import annotations

import fcntl
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_unforked = threading.RLock()
_open: set[int | socket.socket] = set()


@contextmanager
def books() -> Iterator[set[int | socket.socket]]:
    """Keep other threads from forking until what is opened is in this set. Nothing may wait meanwhile."""
    with _unforked:
        yield _open


def duplicate(fd: int) -> int:
    """Return another descriptor of the same."""
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 0)


def close(*fds: int) -> None:
    """Close descriptors that are on the books."""
    with books() as ours:
        for fd in fds:
            ours.discard(fd)
            os.close(fd)


def _forked() -> None:
    while _open:
        inherited = _open.pop()
        if isinstance(inherited, int):
            os.close(inherited)
        else:
            inherited.close()


os.register_at_fork(before=_unforked.acquire, after_in_parent=_unforked.release, after_in_child=_unforked.release)
os.register_at_fork(after_in_child=_forked)
