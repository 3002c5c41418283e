"""Device memory: an allocator for each device, and the multicast objects that bind memory of several devices together.

The event loop must not wait for the driver: freeing 64 GB takes 46 ms. So each device has a thread, and multicast,
whose calls may block, has another. Requests are submitted to a thread, and each outcome returns through the broker's
queue as an event of the ledger.

Memory shared as ``ipc`` has an address and therefore needs a context of the device, which costs half a gigabyte of the
device's memory: the first such allocation makes the context. Other memory is neither mapped nor cleared here: the
driver hands it out filled with zeros.

Only this module makes multicast objects and binds memory to them. If one cannot be made, for any reason, copies replace
multicast on all devices of the group: no pool is refused for that.
"""

from __future__ import annotations

import logging
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from queue import SimpleQueue
from typing import Generic, TypeVar

from cubroker.driver import Context, Device, Driver, DriverError, Multicast, Physical, device_names
from cubroker.driver.system_calls import FileId
from cubroker.protocol.errors import InternalFailure, Invalid, Unavailable
from cubroker.protocol.messages import BY_DESCRIPTOR, DESCRIPTOR, IPC, MULTICAST, VMM
from cubroker.server.config import DEFAULT_BUDGET
from cubroker.server.config.schema import OTHERS, Budgets, parse_budget
from cubroker.server.event_queue import Event, EventQueue
from cubroker.server.ledger import events
from cubroker.server.ledger.events import AllocationId
from cubroker.server.ledger.memory import COPIES, rounded
from cubroker.server.ledger.records import Budget, listed
from cubroker.server.store.store import Store

log = logging.getLogger(__name__)

Request = TypeVar("Request")


class WorkerThread(ABC, Generic[Request]):
    """A thread that executes requests one at a time, in the order of their submission; the queue gets the outcomes."""

    def __init__(self, name: str, queue: EventQueue) -> None:
        self._queue = queue
        self._requests: SimpleQueue[Request | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name)
        self._thread.start()

    def submit(self, request: Request) -> None:
        """Queue a request."""
        self._requests.put(request)

    def close(self) -> None:
        """Finish what is queued, release everything that is not in use, and end the thread."""
        self._requests.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (request := self._requests.get()) is not None:
            try:
                self._queue.put_threadsafe(self._execute(request))
            except Exception:  # all later requests would wait for ever
                log.exception("%s failed in an unexpected way, and has no outcome", request)
        self._release_all()

    @abstractmethod
    def _execute(self, request: Request) -> Event:
        """Return the outcome of a request, on the thread; if this raises an exception, the request has none."""

    def _release_all(self) -> None:
        """Release everything that is not in use, on the thread, after the last request."""


class MemoryWatch:
    """An observer: the devices' threads report allocated and freed memory, and another thread asks who refers to it.

    This base class observes nothing.
    """

    def allocated(self, files: Mapping[FileId, tuple[AllocationId, int]]) -> None:
        """Note allocations and their bytes, by file; only memory of emulated devices has files."""

    def freed(self, allocations: Collection[AllocationId]) -> None:
        """Note that the broker frees memory: a process that refers to it keeps it allocated."""

    def adjust(self, *, looked_at: bool) -> None:
        """Note whether :meth:`look` will be called; if not, work that only serves it is omitted."""

    def freeing(self, device: str) -> Callable[[AllocationId, int], None]:
        """Prepare for frees on a device, by UUID; the result is called with each freed allocation and its bytes."""
        return lambda _, __: None

    def look(self, clients: Collection[tuple[int, int]], users: Collection[int]) -> list[events.ProcessMemory]:
        """Return the memory that processes refer to.

        Args:
            clients: process id (0: unknown here) and user of each process that has a session.
            users: users whose other processes count as well.
        """
        return []


class IpcAllocation:
    """An allocation with an address, which clients open with a handle."""

    descriptor = -1

    def __init__(self, context: Context, nbytes: int) -> None:
        self._context = context
        self.nbytes = nbytes
        self._pointer = context.allocate(nbytes)

    @property
    def file(self) -> FileId | None:
        """Its file on an emulated device."""
        return self._context.file_id(self._pointer)

    def share(self) -> bytes:
        """Return the handle, after clearing the memory: no tenant reads another's bytes."""
        self._context.clear(self._pointer, self.nbytes)
        return self._context.export(self._pointer)

    def release(self) -> None:
        """Free the memory."""
        self._context.free(self._pointer)


class VmmAllocation:
    """An allocation without an address here; clients map ``descriptor``, or import a fabric handle if ``fabric``."""

    def __init__(self, driver: Driver, index: int, nbytes: int, *, fabric: bool) -> None:
        self.nbytes = nbytes
        self._driver = driver
        self.physical = driver.create(index, nbytes, fabric=fabric)
        self.descriptor = -1

    @property
    def file(self) -> FileId | None:
        """Its file on an emulated device, once it is shared."""
        return self._driver.file_id(self.descriptor)

    def share(self) -> bytes:
        """Export the descriptor; return the fabric handle, or the placeholder for a descriptor among handles."""
        self.descriptor = self.physical.export()
        return self.physical.export_fabric() or DESCRIPTOR

    def release(self) -> None:
        """Release the memory. The device gets it back once no client has it mapped or has a descriptor of it."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.physical.release()


class AdoptedAllocation:
    """An allocation of an earlier broker, of which only stored descriptors exist, or none."""

    def __init__(self, driver: Driver, index: int, nbytes: int, descriptors: Sequence[int]) -> None:
        self.nbytes = nbytes
        self._driver = driver
        self._index = index
        self._descriptors = descriptors

    @property
    def file(self) -> FileId | None:
        """Its file on an emulated device; None also without a descriptor."""
        return self._driver.file_id(self._descriptors[0]) if self._descriptors else None

    @cached_property
    def physical(self) -> Physical:
        """The memory, imported on first use."""
        return self._driver.adopt(self._index, self.nbytes, self._descriptors[0])

    def release(self) -> None:
        """Release the memory, as :meth:`VmmAllocation.release` does."""
        for descriptor in self._descriptors:
            os.close(descriptor)
        if "physical" in self.__dict__:
            self.physical.release()


def stored_as(ticket: int, number: int) -> str:
    """Return the name under which the store keeps the descriptor of an allocation."""
    return f"m{ticket}.{number}"


class DeviceAllocator(WorkerThread[events.Allocate | events.Free]):
    """The broker's memory on one device, and the thread that allocates, clears, exports and frees it.

    A ``Free`` that is submitted before its ``Allocate`` has finished is executed after it. The queue receives the
    outcome of each request. ``store`` is None if there is none.
    """

    def __init__(
        self,
        driver: Driver,
        device: Device,
        queue: EventQueue,
        store: Store | None = None,
        watch: MemoryWatch | None = None,
    ) -> None:
        self._driver = driver
        self._device = device
        self._store = store
        self._watch = watch or MemoryWatch()
        #: Tickets whose descriptors the store has.
        self._stored: set[int] = set()
        #: Tickets that stay allocated when this closes.
        self._left: set[int] = set()
        #: The allocations, by ticket and number.
        self._pieces: dict[int, dict[int, IpcAllocation | VmmAllocation | AdoptedAllocation]] = {}
        super().__init__(f"device-{device.index}", queue)

    def adopt(self, ticket: int, sizes: Mapping[int, int], descriptors: Mapping[int, Sequence[int]]) -> None:
        """Take over the memory that an earlier broker allocated as ``ticket``; call this before :meth:`submit`.

        ``sizes`` has the bytes of each allocation by number, and ``descriptors`` the descriptors of the same ones.
        """
        self._stored.add(ticket)
        self._pieces[ticket] = {
            number: AdoptedAllocation(self._driver, self._device.index, rounded(size), descriptors[number])
            for number, size in sizes.items()
        }
        self._note_files(ticket)

    def leave(self, ticket: int) -> None:
        """Keep a ticket's memory allocated when this closes: a client uses it. The end of the process may free it."""
        self._left.add(ticket)

    @property
    def leaves(self) -> bool:
        """Whether any memory stays allocated when this closes."""
        return bool(self._left)

    def physicals(self, ticket: int) -> tuple[Physical, ...]:
        """Return the memory without addresses of a ticket, from its reported allocation until its free is submitted."""
        pieces = self._pieces[ticket].values()
        return tuple(piece.physical for piece in pieces if not isinstance(piece, IpcAllocation))

    def _execute(self, request: events.Allocate | events.Free) -> Event:
        if isinstance(request, events.Allocate):
            return self._allocate(request)
        return events.Freed(request.ticket, request.numbers, self._free(request.ticket, request.numbers))

    def _release_all(self) -> None:
        for ticket in self._pieces.keys() - self._stored - self._left:
            self._free(ticket)

    def _allocate(self, request: events.Allocate) -> events.Allocated | events.AllocationFailed:
        """Allocate all sizes of a request, or none of them."""
        self._pieces[request.ticket] = {}
        try:
            return self._obtain(request)
        except DriverError as error:
            code, reason = "out_of_memory" if error.out_of_memory else "device", str(error)
        except MemoryError:
            code, reason = "out_of_memory", "the broker's host has no memory left"
        except Unavailable as error:
            code, reason = error.code, error.message
        except Exception as error:  # without an outcome, its client would wait for ever
            log.exception("%s failed in an unexpected way", request)
            code, reason = InternalFailure.code, f"the broker itself failed: {error!r}; its log says more"
        device = self._device
        named = listed(device.index, device.name, device.uuid)
        message = f"the broker's device {named} cannot provide {sum(request.sizes)} bytes: {reason}"
        log.warning("%s", message)
        return events.AllocationFailed(request.ticket, code, message, self._free(request.ticket))

    def _obtain(self, request: events.Allocate) -> events.Allocated:
        pieces: list[IpcAllocation | VmmAllocation] = []
        for number, size in enumerate(request.sizes):
            pieces.append(self._piece(request, rounded(size)))
            self._pieces[request.ticket][number] = pieces[-1]
        handles = tuple(piece.share() for piece in pieces)
        self._note_files(request.ticket)
        descriptors = tuple(piece.descriptor for piece in pieces if piece.descriptor >= 0)
        if request.durable and self._store:
            self._stored.add(request.ticket)
            for number, descriptor in enumerate(descriptors):
                self._store.hold(stored_as(request.ticket, number), [descriptor])
        return events.Allocated(request.ticket, handles, descriptors)

    def _note_files(self, ticket: int) -> None:
        found = {AllocationId(ticket, number): piece for number, piece in self._pieces[ticket].items()}
        self._watch.allocated({file: (each, piece.nbytes) for each, piece in found.items() if (file := piece.file)})

    def _piece(self, request: events.Allocate, nbytes: int) -> IpcAllocation | VmmAllocation:
        if request.share in BY_DESCRIPTOR:
            fabric = request.share == VMM and not request.durable  # a fabric handle ends with the broker that made it
            return VmmAllocation(self._driver, self._device.index, nbytes, fabric=fabric)
        if request.share == IPC:
            return IpcAllocation(self._driver.context(self._device.index), nbytes)
        raise ValueError(f"unknown share kind {request.share!r}")

    def _free(self, ticket: int, numbers: Sequence[int] = ()) -> int:
        """Free memory of a ticket, by default all; return the bytes that the driver did not take back.

        Allocations that ended with an earlier broker are ignored.
        """
        there = self._pieces.get(ticket, {})
        found = [number for number in numbers or tuple(there) if number in there]
        pieces = {AllocationId(ticket, number): there[number] for number in found}
        for number in found:
            del there[number]
        stored = self._store if ticket in self._stored else None
        if not there:
            self._pieces.pop(ticket, None)
            self._stored.discard(ticket)
        unfreed = sum(piece.nbytes for piece in pieces.values())
        told: list[Callable[[AllocationId, int], None]] = []
        with self._logged():
            self._watch.freed(pieces)
            told.append(self._watch.freeing(self._device.uuid))
        for allocation, piece in pieces.items():
            with self._logged():
                if stored:  # the device does not get the memory back while the store has it
                    stored.drop(stored_as(*allocation))
                piece.release()
                unfreed -= piece.nbytes
                for freed in told:
                    freed(allocation, piece.nbytes)
        if unfreed:
            log.error("%d bytes of ticket %d remain allocated", unfreed, ticket)
        return unfreed

    @contextmanager
    def _logged(self) -> Iterator[None]:
        """Log an exception of a block and go on: the rest of a ticket is to be freed."""
        try:
            yield
        except DriverError as error:
            log.error("device %d: %s", self._device.index, error)
        except Exception:
            log.exception("device %d: freeing failed in an unexpected way", self._device.index)


# -- multicast ---------------------------------------------------------------------------------------

WORKS = "every device takes part"


class MulticastBinder(WorkerThread[events.BindMulticast | events.UnbindMulticast]):
    """The broker's multicast objects, and the thread that makes and releases them.

    An ``UnbindMulticast`` that is submitted before its ``BindMulticast`` has finished is executed after it. The queue
    receives the outcome of each request. ``memory`` has the devices' allocators by UUID; a member's memory stays
    allocated until its group is unbound.
    """

    def __init__(self, driver: Driver, memory: Mapping[str, DeviceAllocator], queue: EventQueue) -> None:
        self._driver = driver
        self._memory = memory
        #: The callbacks that unbind a group's memory and release its objects, by group.
        self._groups: dict[int, ExitStack] = {}
        #: Groups that stay bound when this closes.
        self._left: set[int] = set()
        super().__init__("multicast", queue)

    def leave(self, group: int) -> None:
        """Keep a group bound when this closes: a client uses its memory."""
        self._left.add(group)

    def _execute(self, request: events.BindMulticast | events.UnbindMulticast) -> Event:
        if isinstance(request, events.BindMulticast):
            return self._bind(request)
        self._unbind(request.group)
        return events.MulticastUnbound(request.group)

    def _release_all(self) -> None:
        for group in self._groups.keys() - self._left:
            self._unbind(group)

    def _bind(self, request: events.BindMulticast) -> events.MulticastBound:
        """Make all objects of a request, or none of them."""
        members = {uuid for uuid, _ in request.members}
        devices = [device.index for device in self._driver.devices if device.uuid in members]
        try:
            obstacles = filter(None, map(self._driver.multicast_obstacle, devices))
            why = next(obstacles, None)
            return events.MulticastBound(request.group, COPIES, why) if why else self._make(request, devices)
        except DriverError as error:
            log.warning("multicast is unavailable on devices %s; using copies instead: %s", devices, error)
            return events.MulticastBound(request.group, COPIES, str(error))
        except Exception as error:  # without an outcome, its client would wait for ever
            log.exception("%s failed in an unexpected way", request)
            return events.MulticastBound(request.group, COPIES, repr(error))

    def _make(self, request: events.BindMulticast, devices: Sequence[int]) -> events.MulticastBound:
        """Make an object for each allocation of the pool, and bind the allocation of every device to it."""
        memory = [self._memory[uuid].physicals(ticket) for uuid, ticket in request.members]
        sizes, descriptors = [], []
        with ExitStack() as undo:
            for number, size in enumerate(request.sizes):
                multicast: Multicast = self._driver.multicast(devices, size)
                undo.callback(multicast.release)  # which unbinds the memory, too
                for pieces in memory:
                    multicast.bind(pieces[number], keep=True)
                sizes.append(multicast.nbytes)
                descriptors.append(multicast.export())
                undo.callback(os.close, descriptors[-1])
            self._groups[request.group] = undo.pop_all()
        return events.MulticastBound(request.group, MULTICAST, WORKS, tuple(sizes), tuple(descriptors))

    def _unbind(self, group: int) -> None:
        """Release a group's objects, if it has any. An object that the driver does not release is logged and lost."""
        try:
            if (objects := self._groups.pop(group, None)) is not None:
                objects.close()
        except DriverError as error:
            log.error("multicast group %d: %s", group, error)
        except Exception:  # its memory is to be freed all the same
            log.exception("multicast group %d: unbinding failed in an unexpected way", group)


# -- budgets -----------------------------------------------------------------------------------------


def device_budgets(devices: Sequence[Device], budgets: Budgets) -> list[Budget]:
    """Return the budget of every device, by the configuration's rules.

    Raises:
        Invalid: a budget names a device that is not served, or does not fit its device.
    """
    rules = budgets if isinstance(budgets, Mapping) else {OTHERS: budgets}
    named: dict[Device, str] = {}
    for name in rules.keys() - {OTHERS}:
        try:
            device = device_names.find(name, devices, "this broker has")
        except device_names.UnknownDevice as error:
            raise Invalid(f"a budget for device {name!r}, which is not served: {error}; {OTHERS} is for all") from None
        if device in named:
            raise Invalid(f"the budgets of {named[device]!r} and {name!r} are both for {device_names.label(device)}")
        named[device] = name
    granted = []
    for device in devices:
        rule = rules.get(named.get(device, OTHERS), DEFAULT_BUDGET)
        budget = parse_budget(rule, device.total, device_names.label(device))
        granted.append(Budget(device.index, device.uuid, device.name, device.total, budget))
    for each in granted:
        sizes = each.budget >> 20, each.total >> 20
        log.info("device %d: %s, %s, budget %d MiB of %d MiB", each.index, each.name, each.uuid, *sizes)
    return granted
