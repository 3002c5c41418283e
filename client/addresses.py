"""Where the memory of a lease is among this process's addresses.

All of it is called on the janitor's thread, so that nothing interrupts a driver call and the note that it was made.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from cubroker.client import devices
from cubroker.client.mapping import Place
from cubroker.driver import Context, Device, Driver, DriverError, Window
from cubroker.driver.sizes import round_up
from cubroker.driver.vmm import Reservation
from cubroker.protocol.errors import Unavailable
from cubroker.protocol.messages import DESCRIPTOR, Replica

Piece = tuple[bytes, int, int | None]
"""An allocation: its handle, its bytes, and its descriptor if the handle wants one."""

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
        left, before = iter(descriptors), tuple[Piece, ...]()
        for replica in replicas:
            given = tuple(next(left) if handle == DESCRIPTOR else None for handle in replica.handles)
            pieces = tuple(zip(replica.handles, sizes, given, strict=True))
            places.append(self._replica(driver, replica.device, pieces, accessor))
            if len(places) > 1 and not self._readonly:
                places[-1].upstream = self._upstream(driver, places[-1], places[-2], before)
            before = pieces
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
        pieces = tuple(zip(replica.handles, sizes, descriptors, strict=True))
        return self._replica(driver, replica.device, pieces, home.memory.uuid if near else None)

    @contextmanager
    def all_or_none(self) -> Iterator[None]:
        """Unmap what was mapped in a block that fails; raises ``DriverError`` if even that is refused."""
        before = len(self._opened)
        try:
            yield
        except BaseException:
            self._close(before)
            raise

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

        Args:
            descriptors: in the order in which :meth:`open` and what came after it took them. Those that are left over
                were of no use before either.

        Raises:
            DriverError: it is asleep as before.
            Unavailable: these are not the descriptors of the same memory.
        """
        ranges = list(self._ranges())
        if len(ranges) > len(descriptors):
            raise Unavailable(f"the broker sent {len(descriptors)} descriptors for {len(ranges)} allocations")
        missing = [pair for pair in zip(ranges, descriptors, strict=False) if not pair[0].mapped]
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
        self._close(0)

    def _close(self, keep: int) -> None:
        while len(self._opened) > keep:
            self._opened[-1].close()
            del self._opened[-1]

    def _ranges(self) -> Iterator[Reservation]:
        return (each for each in self._opened if isinstance(each, Reservation))

    def _replica(self, driver: Driver, device: str, pieces: Sequence[Piece], accessor: str | None) -> Place:
        context = devices.context(driver, accessor or device)
        memory = devices.find(driver, device)
        granule = _granule(driver, memory, pieces)
        pointers = tuple(self._piece(context, piece, granule, readonly=self._readonly) for piece in pieces)
        return Place(context, memory, pointers)

    def _upstream(self, driver: Driver, place: Place, before: Place, pieces: Sequence[Piece]) -> tuple[int, ...] | None:
        """Return where a replica's device reads the one before it; None if it has to be filled in another way.

        It is mapped once more, for this device: what another device has opened is copied through host memory, at a
        tenth of the speed (two H200, whatever peer access was enabled).
        """
        if None in before.pointers:  # a shard
            return None
        try:
            if not driver.peers.can_access(place.memory.index, before.memory.index):
                return None
            granule = _granule(driver, before.memory, pieces)
            pointers = (self._piece(place.context, piece, granule, readonly=True) for piece in pieces)
            return tuple(pointer for pointer in pointers if pointer is not None)
        except DriverError as error:
            log.debug("device %d does not read from %d: %s", place.memory.index, before.memory.index, error)
            return None

    def _piece(self, context: Context, piece: Piece, granule: int, *, readonly: bool) -> int | None:
        handle, size, descriptor = piece
        if descriptor is not None:
            return self._map(context, round_up(size, granule), descriptor, readonly=readonly)
        return self._open(context, handle) if handle else None

    def _open(self, context: Context, handle: bytes) -> int:
        opened = Opened(context, context.open(handle))
        self._opened.append(opened)
        return opened.pointer

    def _map(self, context: Context, nbytes: int, descriptor: int, *, readonly: bool) -> int:
        reservation = context.reserve(nbytes)
        self._opened.append(reservation)
        reservation.map(descriptor, readonly=readonly)
        return reservation.pointer


def _granule(driver: Driver, memory: Device, pieces: Sequence[Piece]) -> int:
    return driver.granularity(memory.index) if any(handle == DESCRIPTOR for handle, _, _ in pieces) else 1
