"""Device memory: one thread per device, since freeing 64 GB takes 46 ms and the event loop has none to spare.

Memory that is shared as ``ipc`` has an address, and so needs a context of the device, which takes half a gigabyte of
it: the first such allocation makes one. Other memory is not mapped here, and so not cleared either: it comes all zero.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from cubroker.driver import Context, Device, Driver, DriverError, Physical
from cubroker.protocol.errors import InternalFailure, Unavailable
from cubroker.protocol.messages import DESCRIPTOR
from cubroker.server.ledger.entries import BY_DESCRIPTOR, VMM
from cubroker.server.ledger.events import Allocate, Allocated, Event, Free, Freed, NotAllocated
from cubroker.server.ledger.room import rounded
from cubroker.server.orders import Orders
from cubroker.server.process_memory import MemoryWatch

if TYPE_CHECKING:
    from cubroker.driver.linux import FileId
    from cubroker.server.store.store import Store

log = logging.getLogger(__name__)


class Mapped:
    """An allocation with an address, which others open with a handle."""

    descriptor = -1

    def __init__(self, context: Context, nbytes: int) -> None:
        self._context = context
        self.nbytes = nbytes
        self._pointer = context.allocate(nbytes)

    @property
    def file(self) -> FileId | None:
        """The file that it is, on an emulated device."""
        return self._context.file_id(self._pointer)

    def share(self) -> bytes:
        """Return the handle, once it is cleared: nobody may read what was there."""
        self._context.clear(self._pointer, self.nbytes)
        return self._context.export(self._pointer)

    def release(self) -> None:
        """Free it."""
        self._context.free(self._pointer)


class Unmapped:
    """An allocation without an address here, which others map with ``descriptor``, or by fabric handle if it may be."""

    def __init__(self, driver: Driver, index: int, nbytes: int, *, fabric: bool) -> None:
        self.nbytes = nbytes
        self._driver = driver
        self.physical = driver.create(index, nbytes, fabric=fabric)
        self.descriptor = -1

    @property
    def file(self) -> FileId | None:
        """The file that it is, on an emulated device, once it is shared."""
        return self._driver.file_id(self.descriptor)

    def share(self) -> bytes:
        """Make the descriptor; return the fabric handle, or what stands for the descriptor among the handles."""
        self.descriptor = self.physical.export()
        return self.physical.export_fabric() or DESCRIPTOR

    def release(self) -> None:
        """Give it up. The device has it back when no client has it, mapped or as a descriptor, either."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.physical.release()


class Inherited:
    """An allocation that an earlier broker made: a descriptor of it is all there is, if there is one."""

    def __init__(self, driver: Driver, index: int, nbytes: int, descriptors: Sequence[int]) -> None:
        self.nbytes = nbytes
        self._driver = driver
        self._index = index
        self._descriptors = descriptors

    @property
    def file(self) -> FileId | None:
        """The file that it is, on an emulated device; None as well if no descriptor of it is left."""
        return self._driver.file_id(self._descriptors[0]) if self._descriptors else None

    @cached_property
    def physical(self) -> Physical:
        """The memory, imported when somebody asks for it."""
        return self._driver.adopt(self._index, self.nbytes, self._descriptors[0])

    def release(self) -> None:
        """Give it up, as :meth:`Unmapped.release` does."""
        for descriptor in self._descriptors:
            os.close(descriptor)
        if "physical" in self.__dict__:
            self.physical.release()


def stored_as(ticket: int, number: int) -> str:
    """Return what the descriptor of an allocation is called where it outlives the broker."""
    return f"m{ticket}.{number}"


class DeviceMemory(Orders[Allocate | Free]):
    """What the broker has allocated on one device, and the thread that allocates, clears, exports and frees it.

    So a ``Free`` that overtakes its ``Allocate`` in time still finds it done.

    Args:
        driver: the device's; used on the thread alone.
        device: whose memory it is.
        report: takes what came of each request; called on the thread.
        store: where descriptors of durable memory outlive the broker, if there is one.
        watch: takes note of what becomes of the memory.
    """

    def __init__(
        self,
        driver: Driver,
        device: Device,
        report: Callable[[Event], None],
        store: Store | None = None,
        watch: MemoryWatch | None = None,
    ) -> None:
        self._driver = driver
        self._device = device
        self._report = report
        self._store = store
        self._watch = watch or MemoryWatch()
        self._stored: set[int] = set()
        self._left: set[int] = set()
        self._pieces: dict[int, list[Mapped | Unmapped | Inherited]] = {}
        super().__init__(f"device-{device.index}")

    def adopt(self, ticket: int, sizes: Sequence[int], descriptors: Sequence[Sequence[int]]) -> None:
        """Take over what an earlier broker allocated as ``ticket``; before anything is submitted."""
        self._stored.add(ticket)
        self._pieces[ticket] = [
            Inherited(self._driver, self._device.index, rounded(size), one)
            for size, one in zip(sizes, descriptors, strict=True)
        ]
        self._note_files(ticket)

    def leave(self, ticket: int) -> None:
        """Leave a ticket's memory as it is when this closes: somebody uses it. The end of the process may take it."""
        self._left.add(ticket)

    @property
    def leaves(self) -> bool:
        """Whether any memory is left as it is."""
        return bool(self._left)

    def physicals(self, ticket: int) -> tuple[Physical, ...]:
        """Return the memory without addresses of a ticket that was reported allocated and is not to be freed yet."""
        return tuple(piece.physical for piece in self._pieces[ticket] if not isinstance(piece, Mapped))

    def _do(self, request: Allocate | Free) -> None:
        if isinstance(request, Allocate):
            self._report(self._allocate(request))
        elif not self._free(request.ticket):
            self._report(Freed(request.ticket))

    def _give_all_back(self) -> None:
        for ticket in self._pieces.keys() - self._stored - self._left:
            self._free(ticket)

    def _allocate(self, request: Allocate) -> Allocated | NotAllocated:
        """Allocate all sizes of a request, or none of them."""
        self._pieces[request.ticket] = []
        try:
            return self._obtain(request)
        except DriverError as error:
            code, reason = "out_of_memory" if error.out_of_memory else "device", str(error)
        except MemoryError:
            code, reason = "out_of_memory", "the broker's host has no memory left"
        except Unavailable as error:
            code, reason = error.code, error.message
        # A thread that ended here would leave this request and all later ones waiting for ever.
        except Exception as error:
            log.exception("%s failed in an unexpected way", request)
            code, reason = InternalFailure.code, f"the broker itself failed: {error!r}; its log says more"
        return self._undo(request, code, reason)

    def _obtain(self, request: Allocate) -> Allocated:
        pieces: list[Mapped | Unmapped] = []
        for size in request.sizes:
            pieces.append(self._piece(request, rounded(size)))
            self._pieces[request.ticket].append(pieces[-1])
        handles = tuple(piece.share() for piece in pieces)
        self._note_files(request.ticket)
        descriptors = tuple(piece.descriptor for piece in pieces if piece.descriptor >= 0)
        if request.durable and self._store:
            self._stored.add(request.ticket)
            for number, descriptor in enumerate(descriptors):
                self._store.hold(stored_as(request.ticket, number), [descriptor])
        return Allocated(request.ticket, handles, descriptors)

    def _note_files(self, ticket: int) -> None:
        files = ((piece.file, piece.nbytes) for piece in self._pieces[ticket])
        self._watch.allocated(ticket, {file: nbytes for file, nbytes in files if file})

    def _piece(self, request: Allocate, nbytes: int) -> Mapped | Unmapped:
        if request.share in BY_DESCRIPTOR:
            fabric = request.share == VMM and not request.durable  # a fabric handle ends with the broker that made it
            return Unmapped(self._driver, self._device.index, nbytes, fabric=fabric)
        return Mapped(self._driver.context(self._device.index), nbytes)

    def _undo(self, request: Allocate, code: str, reason: str) -> NotAllocated:
        """Free what there is of a request that failed."""
        device = self._device
        message = f"device {device.index} ({device.name}) cannot provide {sum(request.sizes)} bytes: {reason}"
        log.warning("%s", message)
        return NotAllocated(request.ticket, code, message, self._free(request.ticket))

    def _free(self, ticket: int) -> int:
        """Free a ticket's memory; return the bytes that the driver does not take back, which stay counted."""
        pieces = self._pieces.pop(ticket, [])
        self._watch.freed(ticket)
        if self._store and ticket in self._stored:
            self._stored.remove(ticket)
            for number in range(len(pieces)):
                self._store.drop(stored_as(ticket, number))
        freed = self._watch.freeing(self._device.uuid, ticket)
        kept = [piece for piece in pieces if not self._give_back(piece, freed)]
        if kept:
            log.error("%d of %d allocations of ticket %d remain allocated", len(kept), len(pieces), ticket)
        return sum(piece.nbytes for piece in kept)

    def _give_back(self, piece: Mapped | Unmapped | Inherited, freed: Callable[[int], None]) -> bool:
        try:
            piece.release()
        except DriverError as error:
            log.error("device %d: %s", self._device.index, error)
            return False
        except Exception:  # as in an allocation, the thread must go on
            log.exception("device %d: freeing failed in an unexpected way", self._device.index)
            return False
        freed(piece.nbytes)
        return True
