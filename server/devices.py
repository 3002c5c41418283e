"""Device memory: one thread per device, since freeing 64 GB takes 46 ms and the event loop has none to spare."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue

from cubroker.driver import Context, DriverError
from cubroker.protocol.errors import InternalFailure
from cubroker.server.events import Allocate, Allocated, Event, Free, Freed, NotAllocated
from cubroker.server.room import rounded

log = logging.getLogger(__name__)


class DeviceMemory:
    """What the broker has allocated on one device, and the thread that allocates, clears, exports and frees it.

    Requests are done in the order they were made, so a ``Free`` that overtakes its ``Allocate`` in time
    still finds it done.

    Args:
        context: the device, used on the thread alone.
        report: takes what came of each request; called on the thread.
    """

    def __init__(self, context: Context, report: Callable[[Event], None]) -> None:
        self._context = context
        self._report = report
        self._pieces: dict[int, dict[int, int]] = {}  # by ticket: pointers, and the bytes of each
        self._queue: SimpleQueue[Allocate | Free | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=f"device-{context.device.index}")
        self._thread.start()

    def submit(self, request: Allocate | Free) -> None:
        """Queue a request."""
        self._queue.put(request)

    def close(self) -> None:
        """Finish what is queued, free everything that is left, and end the thread."""
        self._queue.put(None)
        self._thread.join()

    def _serve(self) -> None:
        while (request := self._queue.get()) is not None:
            if isinstance(request, Allocate):
                self._report(self._allocate(request))
            elif not self._free(request.ticket):
                self._report(Freed(request.ticket))
        for ticket in list(self._pieces):
            self._free(ticket)

    def _allocate(self, request: Allocate) -> Allocated | NotAllocated:
        """Allocate all sizes of a request, or none of them."""
        self._pieces[request.ticket] = {}
        try:
            return Allocated(request.ticket, self._obtain(request))
        except DriverError as error:
            code, reason = "out_of_memory" if error.out_of_memory else "device", str(error)
        except MemoryError:
            code, reason = "out_of_memory", "the broker's host has no memory left"
        # A thread that ended here would leave this request and all later ones waiting for ever.
        except Exception as error:
            log.exception("%s failed in an unexpected way", request)
            code, reason = InternalFailure.code, f"the broker itself failed: {error!r}; its log says more"
        return self._undo(request, code, reason)

    def _obtain(self, request: Allocate) -> tuple[bytes, ...]:
        context = self._context
        pieces = self._pieces[request.ticket]
        for size in request.sizes:
            whole = rounded(size)
            pointer = context.allocate(whole)
            pieces[pointer] = whole
            context.clear(pointer, whole)  # before there is a handle: nobody may read what was there
        return tuple(context.export(pointer) for pointer in pieces)

    def _undo(self, request: Allocate, code: str, reason: str) -> NotAllocated:
        """Free what there is of a request that failed."""
        device = self._context.device
        message = f"device {device.index} ({device.name}) cannot provide {sum(request.sizes)} bytes: {reason}"
        log.warning("%s", message)
        return NotAllocated(request.ticket, code, message, self._free(request.ticket))

    def _free(self, ticket: int) -> int:
        """Free a ticket's memory; return the bytes that the driver does not take back, which stay counted."""
        pieces = self._pieces.pop(ticket, {})
        kept = [nbytes for pointer, nbytes in pieces.items() if not self._give_back(pointer)]
        if kept:
            log.error("%d of %d allocations of ticket %d remain allocated", len(kept), len(pieces), ticket)
        return sum(kept)

    def _give_back(self, pointer: int) -> bool:
        try:
            self._context.free(pointer)
        except DriverError as error:
            log.error("device %d: %s", self._context.device.index, error)
            return False
        except Exception:  # as in an allocation, the thread must go on
            log.exception("device %d: freeing failed in an unexpected way", self._context.device.index)
            return False
        return True
