"""Storing to all replicas of a multicast version at once, from the device of one of them.

That goes through multicast objects, or by a copy to each replica, as the broker found for all holders together. A copy
goes from device to device where the one reaches the other, else through host memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from cubroker.client.addresses import Addresses, Source
from cubroker.client.mapping import Place
from cubroker.driver import Context, Driver, DriverError, Window
from cubroker.driver.multicast import unavailable
from cubroker.driver.window import PIECE
from cubroker.protocol.errors import NotFound, Unavailable
from cubroker.protocol.messages import Attached, Created, Team

STAGE = 8 << 20
"""Bytes that are copied through host memory at a time."""


class Windows:
    """Through multicast objects, one per allocation.

    Attributes:
        sizes: theirs; none where copies take their place.
    """

    def __init__(self, home: Context, windows: Sequence[Window]) -> None:
        self.sizes = tuple(window.nbytes for window in windows)
        self._home = home
        self._windows = tuple(windows)

    def pointer(self, allocation: int, offset: int) -> int:
        """Return the address by which a place in every replica is stored to."""
        return self._windows[allocation].pointer + offset

    def store(self, source: int, allocation: int, offset: int, nbytes: int) -> None:
        """Copy bytes at an address of the home device to a place in every replica; done when it returns.

        The kernel stores whatever lies in whole pieces, copies through the same addresses the rest.

        Raises:
            DriverError: the driver refused; some replicas may have the bytes.
        """
        window = self._windows[allocation]
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


Outlet = Windows | Copies | Refused
"""A way to store to all replicas, if this process has one."""


def connect(
    addresses: Addresses,
    driver: Driver,
    reply: Attached | Created,
    sizes: Sequence[int],
    sources: Sequence[Source],
    places: Sequence[Place],
) -> Outlet | None:
    """Map what it takes to store to all replicas of a version; what is mapped when this fails is for ``addresses``.

    Args:
        addresses: the lease's.
        driver: this process's.
        reply: what the lease brought.
        sizes: bytes of every allocation of the layout.
        sources: the descriptors of all replicas, then those of the multicast objects.
        places: the replicas that are mapped already, the first on the device that stores.

    Returns:
        None if the holder may not write, or has no replica on its own device.

    Raises:
        CubrokerError, DriverError: the driver refused.
    """
    team, home = reply.team, places[0]
    if team is None or (isinstance(reply, Attached) and not reply.writable) or home.context.device != home.memory:
        return None
    why = ""
    if team.sizes:
        try:
            given = sources[-len(team.sizes) :]
            pairs = zip(team.sizes, given, strict=True)
            with addresses.all_or_none():
                return Windows(home.context, [addresses.window(home.context, size, each) for size, each in pairs])
        except DriverError as error:
            if not unavailable(error):
                raise
            why = str(error)
        if isinstance(reply, Attached):  # the other replicas are not at hand
            return Refused(why)
    left = iter(sources)
    try:
        rest = [(replica, tuple(islice(left, len(replica.handles)))) for replica in reply.replicas]
        with addresses.all_or_none():
            return Copies(home, [addresses.reach(driver, home, *each, sizes) for each in rest[1:]])
    except NotFound as error:
        return Refused(error.message)


def check_same(label: str, outlet: Outlet | None, team: Team | None) -> None:
    """Raise ``Unavailable`` unless the ``team`` of a new lease has what a holder's outlet was made of."""
    if outlet is None or isinstance(outlet, Refused):
        return
    if team is None or outlet.sizes != team.sizes:
        now = f"{team.how}: {team.why}" if team else "not at all"
        raise Unavailable(
            f"{label} is not stored to as when it fell asleep (now: {now}), so what used the addresses cannot go on; it"
            f" stays asleep: close it, and attach again"
        )


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
