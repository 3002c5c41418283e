"""Where the memory of a lease is among this process's addresses.

All of it is called on the janitor's thread, so that nothing interrupts a driver call and the note that it was made.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from cubroker.client import devices
from cubroker.client.mapping import Place
from cubroker.driver import Context, Driver, DriverError, Window
from cubroker.driver.vmm import Reservation
from cubroker.protocol.errors import Unavailable
from cubroker.protocol.messages import DESCRIPTOR, Replica

log = logging.getLogger(__name__)


class Opened:
    """An allocation that its handle opened."""

    def __init__(self, context: Context, pointer: int) -> None:
        self.pointer = pointer
        self._context = context

    def close(self) -> None:
        """Unmap it."""
        self._context.close(self.pointer)


class Addresses:
    """What one lease has mapped. What sleeps keeps its addresses, and gets its memory back there.

    Args:
        readonly: whether to map the memory so that it cannot be written, where that can be had.
    """

    def __init__(self, *, readonly: bool) -> None:
        self._readonly = readonly
        self._opened: list[Opened | Reservation] = []

    def open(
        self,
        driver: Driver,
        replicas: Sequence[Replica],
        sizes: Sequence[int],
        descriptors: Sequence[int],
        accessor: str | None,
    ) -> tuple[Place, ...]:
        """Map the allocations of every replica. What is mapped when this fails is for :meth:`close`.

        Args:
            driver: this process's.
            replicas: what the lease brought.
            sizes: bytes of every allocation of the layout.
            descriptors: as many as the handles want, in their order.
            accessor: the UUID of the device that shall reach the memory; by default each replica's own.

        Raises:
            CubrokerError, DriverError, ValueError: a device is not there, or the driver refused.
        """
        places: list[Place] = []
        left, before = iter(descriptors), tuple[int | None, ...]()
        for replica in replicas:
            given = tuple(next(left) if handle == DESCRIPTOR else None for handle in replica.handles)
            places.append(self._replica(driver, replica, sizes, given, accessor))
            if len(places) > 1 and not self._readonly:
                places[-1].upstream = self._upstream(driver, places[-1], places[-2], sizes, before)
            before = given
        return tuple(places)

    def window(self, context: Context, nbytes: int, descriptor: int) -> Window:
        """Map a multicast object for the stores of a context's device.

        Raises:
            DriverError: the driver refused, or a setting did.
        """
        window = context.window(nbytes)
        self._opened.append(window)
        window.map(descriptor)
        return window

    def reach(
        self, driver: Driver, home: Place, replica: Replica, descriptors: Sequence[int], sizes: Sequence[int]
    ) -> Place:
        """Map another replica for the device of ``home`` to write, or, if it does not reach it, for its own device.

        Raises:
            NotFound: this process does not see its device.
            CubrokerError, DriverError: the driver refused.
        """
        near = driver.peers.can_access(home.memory.index, devices.find(driver, replica.device).index)
        return self._replica(driver, replica, sizes, descriptors, home.memory.uuid if near else None)

    @property
    def asleep(self) -> bool:
        """Whether memory is missing anywhere."""
        return not all(range_.mapped for range_ in self._ranges())

    def sleep(self) -> None:
        """Unmap the memory, and keep the addresses; what was unmapped before stays so.

        Raises:
            DriverError: some of it is still mapped.
        """
        for range_ in self._ranges():
            if range_.mapped:
                range_.unmap()

    def wake(self, descriptors: Sequence[int]) -> None:
        """Map the same memory where it was.

        Raises:
            DriverError: it is asleep as before.
            Unavailable: these are not the descriptors of the same memory.
        """
        ranges = list(self._ranges())
        if len(ranges) != len(descriptors):
            raise Unavailable(f"the broker sent {len(descriptors)} descriptors for {len(ranges)} allocations")
        missing = [pair for pair in zip(ranges, descriptors, strict=True) if not pair[0].mapped]
        try:
            for range_, descriptor in missing:
                range_.map(descriptor, readonly=self._readonly)
        except BaseException:
            for range_, _ in missing:
                if range_.mapped:
                    range_.unmap()
            raise

    def close(self) -> None:
        """Unmap everything, last first, and give the addresses back.

        Raises:
            DriverError: something is still mapped.
        """
        while self._opened:
            self._opened[-1].close()
            del self._opened[-1]

    def _ranges(self) -> Iterator[Reservation]:
        return (each for each in self._opened if isinstance(each, Reservation))

    def _replica(
        self, driver: Driver, replica: Replica, sizes: Sequence[int], given: Sequence[int | None], accessor: str | None
    ) -> Place:
        context = devices.context(driver, accessor or replica.device)
        memory = devices.find(driver, replica.device)
        granule = driver.granularity(memory.index) if DESCRIPTOR in replica.handles else 1
        pointers: list[int | None] = []
        for handle, size, descriptor in zip(replica.handles, sizes, given, strict=True):
            if descriptor is not None:
                pointers.append(self._map(context, _whole(size, granule), descriptor, readonly=self._readonly))
            else:
                pointers.append(self._open(context, handle) if handle else None)
        return Place(context, memory, tuple(pointers))

    def _upstream(
        self, driver: Driver, place: Place, before: Place, sizes: Sequence[int], given: Sequence[int | None]
    ) -> tuple[int, ...] | None:
        """Return where a replica's device reads the one before; None if it has to be filled in another way."""
        pointers = tuple(pointer for pointer in before.pointers if pointer is not None)
        if len(pointers) < len(sizes):  # a shard
            return None
        try:
            if not driver.peers.can_access(place.memory.index, before.memory.index):
                return None
            if None in given:
                return pointers
            granule = driver.granularity(before.memory.index)
            return tuple(
                self._map(place.context, _whole(size, granule), descriptor, readonly=True)
                for size, descriptor in zip(sizes, given, strict=True)
                if descriptor is not None
            )
        except DriverError as error:
            log.debug("device %d does not read from %d: %s", place.memory.index, before.memory.index, error)
            return None

    def _open(self, context: Context, handle: bytes) -> int:
        opened = Opened(context, context.open(handle))
        self._opened.append(opened)
        return opened.pointer

    def _map(self, context: Context, nbytes: int, descriptor: int, *, readonly: bool) -> int:
        reservation = context.reserve(nbytes)
        self._opened.append(reservation)
        reservation.map(descriptor, readonly=readonly)
        return reservation.pointer


def _whole(nbytes: int, granule: int) -> int:
    return -(-nbytes // granule) * granule
