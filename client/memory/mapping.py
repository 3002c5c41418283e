"""The memory of one lease in this process: its addresses, what is mapped there, and who uses it.

:class:`AddressSpace` maps and unmaps, on the cleanup thread alone, so that nothing comes between a driver call and the
note that it was made. Pools and tensors refer to a :class:`LeasedMemory`: the memory lives as long as that object does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import RLock

import msgspec

from cubroker.client import devices
from cubroker.client.cleanup_thread import Guard
from cubroker.client.fork_guard import OwnerProcess, WeakRefs
from cubroker.driver import Context, CurrentContext, Device, Driver, DriverError
from cubroker.driver.buffers import round_up
from cubroker.driver.vmm import Reservation, replace, unmap
from cubroker.protocol.errors import Invalid, Unavailable, Unsupported
from cubroker.protocol.layout import Layout, TensorIndex
from cubroker.protocol.messages import BY_DESCRIPTOR, Attached, ReplicaHandles

log = logging.getLogger(__name__)

MAX_NAMED = 8
"""Tensors that a message names."""

Source = int | bytes
"""What opens memory that is then mapped at reserved addresses: a descriptor, or a fabric handle."""

Piece = tuple[bytes, int, Source | None]
"""An allocation: its handle, its bytes, and the source that opens it, unless a legacy handle does."""


Spot = tuple[str, int]
"""One piece of a version's memory: the UUID of its device, and the number of the allocation."""


class AllocationHandle(msgspec.Struct, frozen=True):
    """One allocation of a pool, for a library or server that opens CUDA memory itself; see :meth:`Pool.handles`."""

    #: Its number in the layout: the ``allocation`` of its tensors, which begin there at their ``offset``.
    allocation: int
    #: How it is shared: ``ipc``, ``vmm`` or ``multicast``.
    share: str
    #: The device in whose memory it lies.
    device: Device
    #: Its bytes, as in the layout; the device may have allocated more.
    nbytes: int
    #: For ``ipc``, the 64 bytes that ``cudaIpcOpenMemHandle`` takes, which returns the address of the first byte of the
    #: allocation; any process that knows them can open the memory. None for other kinds: their descriptors are closed
    #: once mapped, and an importer cannot export the memory again.
    handle: bytes | None

    def __repr__(self) -> str:
        """Show all fields except the handle, since others may read a log."""
        shown = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.__struct_fields__ if name != "handle")
        return f"AllocationHandle({shown})"


class DeviceMapping(msgspec.Struct, eq=False):
    """The memory of a version that one device uses."""

    #: The context in which it is mapped.
    context: Context
    #: The device in whose memory it lies.
    memory: Device
    #: The address of each allocation of the layout, in order; None for those on other devices.
    pointers: tuple[int | None, ...]
    #: The legacy handle of each allocation; None for those that were opened in another way, or are not here.
    handles: tuple[bytes | None, ...]
    #: Where this device reads the same allocations of the replica before it, if it reaches them directly.
    upstream: tuple[int, ...] | None = None

    def pointer(self, allocation: int) -> int:
        """Return the address of an allocation that is here."""
        pointer = self.pointers[allocation]
        assert pointer is not None
        return pointer


class LeasedMemory:
    """Mapped memory. It is unmapped, and the lease given back, with the last reference to this object.

    ``finish`` starts the unmapping while this object still lives; whichever comes first counts.
    """

    def __init__(
        self, label: str, places: tuple[DeviceMapping, ...], share: str, *, readonly: bool, finish: Callable[[], None]
    ) -> None:
        #: A name for messages: ``pool 'llama' version 2``.
        self.label = label
        #: One per device.
        self.places = places
        self.share = share
        #: Whether this process may not write the memory: it was published, and not as writable.
        self.readonly = readonly
        self.asleep = False
        #: Watches for the end of this object. The garbage collector notifies it before it calls finalizers, which may
        #: still use the object or keep it; the memory is unmapped nevertheless.
        self.guard: Guard[LeasedMemory] | None = None
        self._finish = finish
        self._owner = OwnerProcess()
        #: Why the memory has ended; empty while it has not. One call into C adds or removes a reason, without a lock.
        self._ends: set[object] = set()
        self._switching = False
        self._lock = RLock()  # a finalizer or a signal handler may call `end` while this thread holds it
        self._uses: WeakRefs[TensorUse] = WeakRefs()

    @property
    def protected(self) -> bool:
        """Whether the device refuses writes: the memory of a legacy handle cannot be mapped read-only."""
        return self.readonly and self.share in BY_DESCRIPTOR

    def spots(self) -> list[Spot]:
        """Return what is mapped, in the order in which it was opened."""
        return [
            (place.memory.uuid, number)
            for place in self.places
            for number, pointer in enumerate(place.pointers)
            if pointer is not None
        ]

    def matched(self, reply: Attached, given: Sequence[Source], layout: Layout) -> list[Source]:
        """Return what opens the memory of another version, in the order of :meth:`spots`.

        Args:
            reply: the broker's answer to the request for that version.
            given: what opens its allocations, in order.
            layout: the one that both must have.

        Raises:
            Unsupported: that version cannot take the place of this one; the text says why not.
        """
        own = reply.replicas[:1] if reply.team else reply.replicas
        spots = [(each.device, number) for each in own for number, handle in enumerate(each.handles) if handle]
        here, other = self.spots(), TensorIndex.decode(reply.layout).layout
        elsewhere = sorted(set(here).symmetric_difference(spots))
        why = ""
        if reply.share != self.share:
            why = f"it is shared as {reply.share}, and not as {self.share}"
        elif reply.writable == self.readonly:
            why = "its readers may write it" if reply.writable else "its readers may not write it"
        elif other != layout:
            why = other.difference(layout)
        elif elsewhere:
            device, allocation = elsewhere[0]
            why = f"its allocation {allocation} lies {'not' if elsewhere[0] in here else 'also'} on device {device}"
        if why:
            raise Unsupported(
                f"pool {reply.name!r} version {reply.version} cannot take the place of {self.label}: {why}; close the"
                f" pool, and attach to that version"
            )
        opens = dict(zip(spots, given, strict=False))
        return [opens[spot] for spot in here]

    def check(self) -> None:
        """Raise ``Invalid`` if the memory is not mapped, or in a forked child."""
        self._owner.check()
        if self._ends or (self.guard is not None and self.guard() is None):
            raise Invalid(f"{self.label} was given back, and its tensors with it")
        if self.asleep:
            raise Invalid(f"{self.label} is asleep: its memory is not mapped; wake the pool before using its tensors")
        if self._switching:
            raise Invalid(f"{self.label} is being switched to another version in another thread; try again after that")

    def lend(self, name: str, *, held: bool = False, storing: bool = False) -> TensorUse:
        """Note a use of tensor ``name`` outside of this package, for as long as the returned object lives."""
        self._owner.check()
        with self._lock:
            use = TensorUse(self, name, held=held, storing=storing)
            self._uses.add(use)
            try:
                self.check()
            except Invalid:
                del use  # a traceback may keep this frame for long
                raise
        return use

    def sleep(self) -> str:
        """Set ``asleep``, which refuses every use, unless tensors are held; returns the names of held tensors."""
        with self._lock:
            held = self._in_use(held=True)
            if not held:
                self.asleep = True
        return held

    @contextmanager
    def switching(self) -> Iterator[None]:
        """Refuse every use within a ``with`` block; raises ``Invalid`` if tensors are held. On the cleanup thread.

        It takes no lock, since a signal handler that waits for this thread may hold it. Instead, :meth:`lend` notes a
        use and then checks whether uses are refused; this method refuses uses and then looks for noted ones.
        """
        self._switching = True
        try:
            if held := self._in_use(held=True):
                raise Invalid(f"{self.label} cannot be switched while tensors of it are copied or held: {held}")
            yield
        finally:
            self._switching = False

    def begin_publication(self) -> None:
        """Refuse every write from now on, until :meth:`end_publication`.

        Raises:
            Invalid: the memory was given back or is published, or tensors are held; writes are allowed as before.
        """
        with self._lock:
            self.check()
            if self.readonly:
                raise Invalid(f"{self.label} is being sealed in another thread, or was sealed in place")
            self.readonly = True
            if held := self._in_use(held=True):
                self.readonly = False
                raise Invalid(f"{self.label} cannot be sealed while tensors of it are copied or held: {held}")

    def end_publication(self, label: str = "", *, readonly: bool) -> None:
        """Note whether the memory may be written from now on, and its new ``label``, if it has another one."""
        self.readonly = readonly
        self.label = label or self.label

    def holder(self) -> TensorUse | None:
        """Return a use that holds a tensor, if there is one; a store to all replicas only if there is no other."""
        held = [use for use in self._uses if use.held]
        return min(held, key=lambda use: use.storing, default=None)

    def end(self, finish: Callable[[], None] | None = None, why: object = None) -> str:
        """Unmap now, even if objects refer to this one, unless tensors are in use outside; returns their names.

        Args:
            finish: starts the unmapping; by default the ``finish`` that this object was made with.
            why: the reason that :meth:`take_back` can remove again.
        """
        with self._lock:
            names = self._in_use()
            if not names:
                self._ends.add(why)
                (finish or self._finish)()
        return names

    def take_back(self, why: object) -> None:
        """Allow uses again, unless the memory has ended for another reason than ``why``. On the cleanup thread."""
        self._ends.discard(why)

    def _in_use(self, *, held: bool = False) -> str:
        """Name the tensors that are in use outside, or only those that are held: the first few, for a message."""
        names = sorted({use.name for use in self._uses if use.held or not held})
        more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
        return ", ".join(names[:MAX_NAMED]) + more


class TensorUse:
    """A tensor in use outside of this package: under a numpy array, or behind a DLPack capsule."""

    __slots__ = ("__array_interface__", "__weakref__", "held", "mapped", "name", "storing")

    def __init__(self, mapped: LeasedMemory, name: str, *, held: bool, storing: bool) -> None:
        self.mapped = mapped
        self.name = name
        #: Whether the memory may not even sleep during this use.
        self.held = held
        #: Whether it is held for a store to all replicas.
        self.storing = storing
        self.__array_interface__: dict[str, object] = {}


class AddressSpace:
    """The mappings of one lease. Sleeping memory keeps its addresses, and is mapped there again."""

    def __init__(self, driver: Driver, *, readonly: bool, thread: CurrentContext | None) -> None:
        self._driver = driver
        self._readonly = readonly  # as far as the driver can map so
        self._thread = thread  # the context that the caller's thread works in, if any
        #: What is mapped, in order: for a legacy handle its context and address, else a reservation, which can sleep.
        self._opened: list[tuple[Context, int] | Reservation] = []

    def open(
        self, replicas: Sequence[ReplicaHandles], sizes: Sequence[int], sources: Sequence[Source], accessor: str | None
    ) -> tuple[DeviceMapping, ...]:
        """Map the allocations of every replica of a lease. If this fails, :meth:`close` unmaps what was mapped.

        Args:
            replicas: those of the lease.
            sizes: bytes of every allocation of the layout.
            sources: what opens each of the allocations, in the order of the handles; empty if legacy handles do.
            accessor: the UUID of the device that accesses the memory; by default each replica's own.
        """
        places: list[DeviceMapping] = []
        left, before = iter(sources), tuple[Piece, ...]()
        for replica in replicas:
            given = tuple(next(left) if sources and handle else None for handle in replica.handles)
            pieces = tuple(zip(replica.handles, sizes, given, strict=True))
            places.append(self._replica(replica.device, pieces, accessor))
            if len(places) > 1 and not self._readonly:
                places[-1].upstream = self._upstream(places[-1], places[-2], before)
            before = pieces
        return tuple(places)

    def adopt(self, reservation: Reservation) -> None:
        """Take over a reservation that was made elsewhere: unmap and wake it with the others."""
        self._opened.append(reservation)

    def reach(
        self, home: DeviceMapping, replica: ReplicaHandles, sources: Sequence[Source], sizes: Sequence[int]
    ) -> DeviceMapping:
        """Map another replica for the device of ``home`` if that reaches its memory, else for its own device."""
        near = self._driver.peers.can_access(home.memory.index, devices.find(self._driver, replica.device).index)
        pieces = tuple(zip(replica.handles, sizes, sources, strict=True))
        return self._replica(replica.device, pieces, home.memory.uuid if near else None)

    @contextmanager
    def all_or_none(self) -> Iterator[None]:
        """Unmap what a block has mapped if the block fails; raises ``DriverError`` if the driver refuses to unmap."""
        before = len(self._opened)
        try:
            yield
        except BaseException:
            self.close(before)
            raise

    def mapped(self, first: int = 0) -> list[Reservation]:
        """Return the reservations that have memory mapped, in order; skip the ``first`` entries of all mappings."""
        return [each for each in self._opened[first:] if isinstance(each, Reservation) and each.mapped]

    @property
    def asleep(self) -> bool:
        """Whether any reservation has no memory mapped."""
        return not all(reservation.mapped for reservation in self._reservations())

    def sleep(self) -> None:
        """Unmap the memory that is mapped, and keep the addresses; raises ``DriverError`` if some is still mapped."""
        unmap(self.mapped())

    def wake(self, sources: Sequence[Source]) -> None:
        """Map the same memory where it was.

        Args:
            sources: what opens the memory, in the order in which it was opened first; further sources are ignored.

        Raises:
            DriverError: the memory is asleep as before.
            Unavailable: there are too few sources.
        """
        missing = [pair for pair in self._pairs(sources) if not pair[0].mapped]
        try:
            for reservation, source in missing:
                reservation.map(source, readonly=self._readonly)
        except BaseException:
            unmap([reservation for reservation, _ in missing if reservation.mapped])
            raise

    def replace(self, sources: Sequence[Source]) -> None:
        """Map other memory of the same sizes where this is: all of it, or nothing changes.

        Args:
            sources: as for :meth:`wake`.

        Raises:
            HalfReplaced: parts of the old and of the new memory may be mapped.
            DriverError: what was mapped still is.
            Unavailable: there are too few sources.
        """
        replace(self._pairs(sources), readonly=self._readonly)

    def protect(self, *, readonly: bool) -> None:
        """Set whether this process may write what is mapped, once submitted work is done; legacy handles stay writable.

        Raises:
            DriverError: the access is as before, unless the driver refuses to restore it as well.
        """
        changed: list[Reservation] = []
        try:
            for context in {each[0]: None for each in self._opened if not isinstance(each, Reservation)}:
                context.synchronize()
            for reservation in self._reservations():
                if reservation.mapped:
                    reservation.protect(readonly=readonly)
                    changed.append(reservation)
        except DriverError:
            for reservation in changed:
                with suppress(DriverError):
                    reservation.protect(readonly=not readonly)
            raise
        self._readonly = readonly

    def close(self, keep: int = 0) -> None:
        """Unmap all but the first ``keep``, last first, and free the addresses; raises ``DriverError`` if that fails.

        It waits for submitted work once per context; for each legacy handle the driver waits itself.
        """
        unmap(self.mapped(keep))
        while len(self._opened) > keep:
            match self._opened[-1]:
                case Reservation() as reservation:
                    reservation.close()
                case context, pointer:
                    context.close(pointer)
            del self._opened[-1]

    def _pairs(self, sources: Sequence[Source]) -> list[tuple[Reservation, Source]]:
        """Return each reservation with what opens its memory."""
        reservations = self._reservations()
        if len(reservations) > len(sources):
            raise Unavailable(
                f"the broker sent handles for {len(sources)} allocations, and {len(reservations)} are needed"
            )
        return list(zip(reservations, sources, strict=False))

    def _reservations(self) -> list[Reservation]:
        return [each for each in self._opened if isinstance(each, Reservation)]

    def _replica(self, device: str, pieces: Sequence[Piece], accessor: str | None) -> DeviceMapping:
        context = devices.context(self._driver, accessor or device)
        memory = devices.find(self._driver, device)
        granule = self._granule(memory, pieces)
        pointers = tuple(self._piece(context, piece, granule, readonly=self._readonly) for piece in pieces)
        handles = tuple(handle if source is None and handle else None for handle, _, source in pieces)
        return DeviceMapping(context, memory, pointers, handles)

    def _upstream(self, place: DeviceMapping, before: DeviceMapping, pieces: Sequence[Piece]) -> tuple[int, ...] | None:
        """Return where a replica's device reads the one before it; None if it has to be filled in another way.

        The replica before it is mapped once more, for this device: from the mapping of another device, the driver
        copies through host memory, at a tenth of the speed (two H200, with and without peer access).
        """
        if None in before.pointers:  # a shard
            return None
        try:
            if not self._driver.peers.can_access(place.memory.index, before.memory.index):
                return None
            granule = self._granule(before.memory, pieces)
            pointers = (self._piece(place.context, piece, granule, readonly=True) for piece in pieces)
            return tuple(pointer for pointer in pointers if pointer is not None)
        except DriverError as error:
            log.debug("device %d does not read from %d: %s", place.memory.index, before.memory.index, error)
            return None

    def _piece(self, context: Context, piece: Piece, granule: int, *, readonly: bool) -> int | None:
        """Map an allocation, and return its address; None if it lies on another device."""
        handle, size, source = piece
        if source is not None:
            reservation = context.reserve(round_up(size, granule))
            self._opened.append(reservation)
            reservation.map(source, readonly=readonly)
            return reservation.pointer
        if not handle:
            return None
        context.check_thread(self._thread)
        pointer = context.open(handle)
        self._opened.append((context, pointer))
        return pointer

    def _granule(self, memory: Device, pieces: Sequence[Piece]) -> int:
        return self._driver.granularity(memory.index) if any(source is not None for *_, source in pieces) else 1
