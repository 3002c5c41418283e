"""Where the memory of a lease is among this process's addresses.

All of it is called on the janitor's thread, so that nothing interrupts a driver call and the note that it was made.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from cubroker.client import devices
from cubroker.client.mapping import Place
from cubroker.driver import Context, Device, Driver, DriverError, Window, Working
from cubroker.driver.sizes import round_up
from cubroker.driver.vmm import Reservation
from cubroker.protocol.errors import Unavailable
from cubroker.protocol.messages import Replica

Source = int | bytes
"""What opens memory without an address: a descriptor, or a fabric handle."""

Piece = tuple[bytes, int, Source | None]
"""An allocation: its handle, its bytes, and what opens it if that is no legacy handle."""

log = logging.getLogger(__name__)


class Opened:
    """An allocation that its legacy handle opened."""

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
        thread: the context that the holder's thread works in, if any.
    """

    def __init__(self, *, readonly: bool, thread: Working | None) -> None:
        self._readonly = readonly
        self._thread = thread
        self._opened: list[Opened | Reservation] = []

    def open(
        self,
        driver: Driver,
        replicas: Sequence[Replica],
        sizes: Sequence[int],
        sources: Sequence[Source],
        accessor: str | None,
    ) -> tuple[Place, ...]:
        """Map the allocations of every replica. What is mapped when this fails is for :meth:`close`.

        Args:
            driver: this process's.
            replicas: what the lease brought.
            sizes: bytes of every allocation of the layout.
            sources: what opens each of the allocations, in the order of the handles; none if legacy handles do.
            accessor: the UUID of the device that shall reach the memory; by default each replica's own.

        Raises:
            CubrokerError, DriverError, ValueError: a device is not there, or the driver refused.
        """
        places: list[Place] = []
        left, before = iter(sources), tuple[Piece, ...]()
        for replica in replicas:
            given = tuple(next(left) if sources and handle else None for handle in replica.handles)
            pieces = tuple(zip(replica.handles, sizes, given, strict=True))
            places.append(self._replica(driver, replica.device, pieces, accessor))
            if len(places) > 1 and not self._readonly:
                places[-1].upstream = self._upstream(driver, places[-1], places[-2], before)
            before = pieces
        return tuple(places)

    def window(self, context: Context, nbytes: int) -> Window:
        """Reserve addresses for a multicast object that a context's device stores to; nothing is mapped there yet.

        Raises:
            DriverError: the driver refused, or a setting did.
        """
        window = context.window(nbytes)
        self._opened.append(window)
        return window

    def reach(
        self, driver: Driver, home: Place, replica: Replica, sources: Sequence[Source], sizes: Sequence[int]
    ) -> Place:
        """Map another replica for the device of ``home`` to write, or, if it does not reach it, for its own device.

        Raises:
            NotFound: this process does not see its device.
            CubrokerError, DriverError: the driver refused.
        """
        near = driver.peers.can_access(home.memory.index, devices.find(driver, replica.device).index)
        pieces = tuple(zip(replica.handles, sizes, sources, strict=True))
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

    def wake(self, sources: Sequence[Source]) -> None:
        """Map the same memory where it was.

        Args:
            sources: what opens it, in the order in which it was opened. Those that are left over were of no use before
                either.

        Raises:
            DriverError: it is asleep as before.
            Unavailable: these do not open the same memory.
        """
        ranges = list(self._ranges())
        if len(ranges) > len(sources):
            raise Unavailable(f"the broker sent what opens {len(sources)} allocations, for {len(ranges)}")
        missing = [pair for pair in zip(ranges, sources, strict=False) if not pair[0].mapped]
        try:
            for range_, source in missing:
                range_.map(source, readonly=self._readonly)
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
        handle, size, source = piece
        if source is not None:
            return self._map(context, round_up(size, granule), source, readonly=readonly)
        return self._open(context, handle) if handle else None

    def _open(self, context: Context, handle: bytes) -> int:
        context.check_thread(self._thread)
        opened = Opened(context, context.open(handle))
        self._opened.append(opened)
        return opened.pointer

    def _map(self, context: Context, nbytes: int, source: Source, *, readonly: bool) -> int:
        reservation = context.reserve(nbytes)
        self._opened.append(reservation)
        reservation.map(source, readonly=readonly)
        return reservation.pointer


def _granule(driver: Driver, memory: Device, pieces: Sequence[Piece]) -> int:
    return driver.granularity(memory.index) if any(source is not None for _, _, source in pieces) else 1
