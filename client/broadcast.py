"""Storing to all replicas of a multicast version at once, from the device of one of them.

That goes through multicast objects, or by a copy to each replica, as the broker found for all holders together. A copy
goes from device to device where the one reaches the other, else through host memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from cubroker.client.futures import Future
from cubroker.client.mapping import Place
from cubroker.driver import Context, Window
from cubroker.driver.window import PIECE

STAGE = 8 << 20
"""Bytes that are copied through host memory at a time."""


class Windows:
    """Through multicast objects, one per allocation.

    Attributes:
        windows: what the objects are mapped into.
        sizes: theirs; none where copies take their place.
    """

    def __init__(self, home: Context, windows: Sequence[Window]) -> None:
        self.windows = tuple(windows)
        self.sizes = tuple(window.nbytes for window in windows)
        self._home = home

    def pointer(self, allocation: int, offset: int) -> int:
        """Return the address by which a place in every replica is stored to."""
        return self.windows[allocation].pointer + offset

    def store(self, source: int, allocation: int, offset: int, nbytes: int) -> None:
        """Copy bytes at an address of the home device to a place in every replica; done when it returns.

        The kernel stores whatever lies in whole pieces, copies through the same addresses the rest.

        Raises:
            DriverError: the driver refused; some replicas may have the bytes.
        """
        window = self.windows[allocation]
        target = self.pointer(allocation, offset)
        alike = (source - target) % PIECE == 0
        head = min(-target % PIECE, nbytes) if alike else nbytes
        middle = (nbytes - head) // PIECE * PIECE
        tail = nbytes - head - middle
        self._home.synchronize()  # whatever fills the source
        if middle:
            window.broadcast(source + head, target + head, middle)
        with self._home.stream() as stream:
            for start, length in ((0, head), (head + middle, tail)):
                if length:
                    stream.copy(target + start, source + start, length)
            stream.synchronize()


class Copies:
    """By a copy to each replica.

    Args:
        home: the replica of the device that stores.
        others: the other replicas, in the context in which each is mapped: the home device's where that reaches it.
    """

    def __init__(self, home: Place, others: Sequence[Place]) -> None:
        self.sizes: tuple[int, ...] = ()
        self._home = home
        self._others = tuple(others)

    def store(self, source: int, allocation: int, offset: int, nbytes: int) -> None:
        """Do as :meth:`Windows.store`: copy to the home device's replica, and on from there."""
        home = self._home.context
        home.synchronize()  # whatever fills the source
        first = _address(self._home, allocation) + offset
        near = [place for place in self._others if place.context is home]
        with home.stream() as stream:
            if source != first:
                stream.copy(first, source, nbytes)
                stream.synchronize()
            for place in near:
                stream.copy(_address(place, allocation) + offset, first, nbytes)
            stream.synchronize()
        for place in self._others:
            if place.context is not home:
                _stage(home, first, place.context, _address(place, allocation) + offset, nbytes)


class Refused:
    """Not at all: this process cannot do what others can, and ``why``."""

    def __init__(self, why: str) -> None:
        self.why = why


class Unbound:
    """Not now: the replicas are being bound together anew, since the broker was started again.

    Attributes:
        before: the way that there was, or that was begun; what it needs may not be mapped.
        over: settled as soon as this is so no more, or never will be.
    """

    def __init__(self, before: Windows | Copies | None = None) -> None:
        self.before = before
        self.over: Future[None] = Future()


Outlet = Windows | Copies | Refused | Unbound
"""A way to store to all replicas, if this process has one."""


def _stage(source: Context, first: int, target: Context, second: int, nbytes: int) -> None:
    """Copy from one device to another through host memory."""
    buffer = bytearray(min(STAGE, nbytes))
    for start in range(0, nbytes, STAGE):
        piece = memoryview(buffer)[: min(STAGE, nbytes - start)]
        source.read_into(first + start, piece)
        target.write(second + start, piece)


def _address(place: Place, allocation: int) -> int:
    pointer = place.pointers[allocation]
    assert pointer is not None
    return pointer
