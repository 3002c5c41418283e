"""Multicast objects of host devices, with the rules that are documented or reported of real ones.

Undefined uses are refused here, with one exception: an ordinary load through a multicast address is counted, and gets
bytes that no process has stored.

Processes share a table of an object in shared memory, whose descriptor is the object's. Every process that has the
descriptor can write to the table, just as one with a GPU's descriptor can add devices and bind memory. Values read from
it are therefore checked again wherever they are used. A process that dies leaves a whole table: the system releases its
lock, and a row counts only once it is written. A live process may keep the lock, stopped or out of malice, so no step
of an object's end takes it. Processes of other builds share the table: its layout must not change.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import secrets
import stat
import struct
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from cuda.bindings import driver as cuda

from cubroker.driver import system_calls
from cubroker.driver.buffers import HANDLE_BYTES
from cubroker.driver.host import shared_memory
from cubroker.driver.host.device_memory import Bytes, MemoryFunctions
from cubroker.driver.host.devices import Refusal, Result, answers, check
from cubroker.driver.host.shared_memory import BLOCK, SharedFd, SharedFds
from cubroker.driver.host.virtual_memory import (
    WRITE,
    AddressRange,
    Mappable,
    MappedRegion,
    PhysicalMemory,
    VirtualMemoryFunctions,
    check_blocks,
)

OPTIONS = "CUBROKER_HOST_MULTICAST"  #: For tests: the variable with options, ``slots=2,cuMulticastBindMem=401``.
RECOMMENDED = 4 * BLOCK  #: Bytes: the recommended granularity; the minimum is one block.
JUNK = b"\xdb"  #: The bytes that ordinary loads get.
NAME = "cubroker-multicast"  #: The name of a table's memory, which tells it from a device's.

MAX_DEVICES = 64
MAX_BINDINGS = 1024

_LOCK = struct.Struct("@hhqqi0q")  # struct flock: type, whence, start, length (0: all), process (0)

_KINDS = {
    int(cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_NONE),
    int(cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
}
_FABRIC = int(cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC)
_GRANULARITIES = {
    int(cuda.CUmulticastGranularity_flags.CU_MULTICAST_GRANULARITY_MINIMUM): BLOCK,
    int(cuda.CUmulticastGranularity_flags.CU_MULTICAST_GRANULARITY_RECOMMENDED): RECOMMENDED,
}


@dataclass(frozen=True)
class Options:
    """What ``OPTIONS`` sets."""

    #: How many objects a process can have.
    slots: int = 256
    #: The status with which each function fails, if it is to fail.
    statuses: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> Options:
        """Read ``slots=2,cuMulticastCreate=801``; raises ValueError for anything else."""
        items = [item.partition("=") for item in text.split(",") if item.strip()]
        try:
            numbers = {name.strip(): int(number) for name, _, number in items}
            slots = numbers.pop("slots", cls.slots)
            return cls(slots, {name: Result(status) for name, status in numbers.items()})
        except ValueError as error:
            raise ValueError(f"{OPTIONS}={text}: {error}; write slots=2,cuMulticastCreate=801") from None


# -- the table of an object ---------------------------------------------------------------------------


class Binding(NamedTuple):
    """Bytes of a device's memory, bound at an offset."""

    device: int
    offset: int
    nbytes: int
    #: The handle that the memory is fetched with.
    handle: bytes

    @property
    def end(self) -> int:
        return self.offset + self.nbytes

    def overlaps(self, other: Binding) -> bool:
        """Whether both are of one device and have offsets in common."""
        return self.device == other.device and self.offset < other.end and other.offset < self.end


class _Row(ctypes.Structure):
    _fields_ = (
        ("device", ctypes.c_uint32),
        ("taken", ctypes.c_uint32),
        ("offset", ctypes.c_uint64),
        ("nbytes", ctypes.c_uint64),
        ("handle", ctypes.c_ubyte * HANDLE_BYTES),
    )

    def binding(self) -> Binding:
        return Binding(self.device, self.offset, self.nbytes, bytes(self.handle))


class _Layout(ctypes.Structure):
    _fields_ = (
        ("nbytes", ctypes.c_uint64),
        ("size", ctypes.c_uint32),
        ("added", ctypes.c_uint32),
        ("changes", ctypes.c_uint32),
        ("used", ctypes.c_uint32),
        ("devices", ctypes.c_uint32 * MAX_DEVICES),
        ("rows", _Row * MAX_BINDINGS),
    )


class Table:
    """The table of a descriptor, which this opens again, so that locks on it belong to this object alone."""

    def __init__(self, descriptor: int) -> None:
        with shared_memory.fork_lock() as ours:
            self._fd = _reopen(descriptor)
            ours.add(self._fd)
        try:
            self._pointer = shared_memory.map_unforked(self._fd, ctypes.sizeof(_Layout))
        except OSError:
            shared_memory.close(self._fd)
            raise
        self._mutex = threading.Lock()
        self._layout = _Layout.from_address(self._pointer)
        #: The size of the multicast object.
        self.nbytes = int(self._layout.nbytes)
        #: The number of devices that it is for.
        self.size = int(self._layout.size)

    @classmethod
    def create(cls, nbytes: int, size: int) -> Table:
        """Make the table of a new object, whose creator this process is."""
        made = shared_memory.create(ctypes.sizeof(_Layout), NAME)
        try:
            os.pwrite(made, struct.pack("@QI", nbytes, size), 0)
            table = cls(made)
        finally:
            shared_memory.close(made)
        fcntl.flock(table._fd, fcntl.LOCK_SH)
        return table

    @classmethod
    def adopt(cls, descriptor: int) -> Table:
        """Return the table of a descriptor, or a fresh one if its creator has released the object.

        Raises:
            LookupError: it is no table.
        """
        if not shared_memory.sealed(descriptor) or os.fstat(descriptor).st_size != ctypes.sizeof(_Layout):
            raise LookupError(f"descriptor {descriptor} is not a multicast object")
        table = cls(descriptor)
        if not 0 < table.size <= MAX_DEVICES or not 0 < table.nbytes < 1 << 47 or table.nbytes % BLOCK:
            table.close()
            raise LookupError(f"descriptor {descriptor} is not a multicast object")
        if table._abandoned():
            table.close()
            return cls.create(table.nbytes, table.size)
        return table

    def export(self) -> int:
        return _reopen(self._fd)

    def abandon(self) -> None:
        """Note that the creator has released the object: later imports get a fresh one."""
        fcntl.flock(self._fd, fcntl.LOCK_UN)

    def close(self) -> None:
        shared_memory.unmap(self._pointer, ctypes.sizeof(_Layout))
        shared_memory.close(self._fd)

    @property
    def devices(self) -> tuple[int, ...]:
        return tuple(self._layout.devices[: min(self._layout.added, self.size)])

    def add(self, device: int) -> bool:
        """Add a device, unless it is there or the object has as many as it is for; return whether it was added."""
        with self._changing():
            known = self.devices
            if device in known or len(known) == self.size:
                return False
            self._layout.devices[len(known)] = device
            self._layout.added = len(known) + 1
        system_calls.futex_wake(self._pointer + _Layout.added.offset)
        return True

    def await_devices(self) -> None:
        """Return once every device was added, by any process."""
        while (added := self._layout.added) < self.size:
            system_calls.futex_wait(self._pointer + _Layout.added.offset, added)

    @property
    def changes(self) -> int:
        """A number that differs after bindings have changed."""
        return int(self._layout.changes)

    def bindings(self) -> list[Binding]:
        """Return the bindings of all processes."""
        with self._changing():
            return [row.binding() for row in self._rows() if row.taken]

    def bind(self, binding: Binding) -> bool:
        """Enter a binding, unless its device has one there; raises MemoryError if the table is full."""
        with self._changing():
            rows = self._rows()
            if any(row.taken and row.binding().overlaps(binding) for row in rows):
                return False
            row = next((row for row in rows if not row.taken), None)
            if row is None:
                if len(rows) == MAX_BINDINGS:
                    raise MemoryError
                self._layout.used = len(rows) + 1
                row = self._layout.rows[len(rows)]
            row.device, row.offset, row.nbytes = binding.device, binding.offset, binding.nbytes
            row.handle[:] = binding.handle
            row.taken = 1
            self._changed()
        return True

    def unbind(self, device: int, offset: int, nbytes: int) -> Binding | None:
        """Remove the binding of a device at exactly these offsets and return it, if any; never waits."""
        for row in self._rows():
            binding = row.binding()
            if row.taken and (binding.device, binding.offset, binding.nbytes) == (device, offset, nbytes):
                row.taken = 0
                self._changed()
                return binding
        return None

    def _changed(self) -> None:
        """Mark bindings as changed; a count could lose one of two changes at the same time."""
        self._layout.changes = secrets.randbits(32)

    def _rows(self) -> list[_Row]:
        """Return the rows that were ever used."""
        rows: list[_Row] = self._layout.rows[: min(self._layout.used, MAX_BINDINGS)]
        return rows

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Keep other threads and processes from changing the table."""
        with self._mutex:
            fcntl.fcntl(self._fd, system_calls.F_OFD_SETLKW, _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
            try:
                yield
            finally:
                fcntl.fcntl(self._fd, system_calls.F_OFD_SETLK, _LOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, 0, 0, 0))

    def _abandoned(self) -> bool:
        """Whether the creator no longer has the object, on which it holds a shared lock."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        return True


def _reopen(descriptor: int) -> int:
    """Return a descriptor with locks of its own; a duplicate would share them."""
    return os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)


# -- an object in this process ------------------------------------------------------------------------


class _Bound(NamedTuple):
    """The whole memory that a binding is a part of, mapped here."""

    pointer: int
    nbytes: int
    #: Where in the memory the bound bytes begin.
    start: int


class MulticastObject:
    """A multicast object that this process has created or imported. A handle counts as one use, and so does a mapping.

    The driver holds its lock around all calls except ``settle`` and ``store``, and has a use during those.
    """

    def __init__(self, table: Table, *, kinds: int) -> None:
        self.kinds = kinds
        self.table = table
        self.nbytes = table.nbytes
        self._uses = 1
        self._shared = SharedFds()
        self._fds: dict[bytes, int] = {}
        self._bound: dict[Binding, _Bound] = {}
        self._seen = -1
        self._storing = threading.Lock()

    @classmethod
    def adopt(cls, descriptor: int, devices: int) -> MulticastObject:
        """Return the multicast object of a descriptor, which stays the caller's.

        If the creator has released it or has ended, the result is a new object without devices and memory, as on GPUs.

        Raises:
            LookupError: it is none, or has devices that are not below ``devices``.
            OSError: the system is short of something.
        """
        table = Table.adopt(descriptor)
        if all(device < devices for device in table.devices):
            return cls(table, kinds=0)
        table.close()
        raise LookupError(f"descriptor {descriptor} is a multicast object of other devices")

    def export(self) -> int:
        return self.table.export()

    def release(self) -> None:
        self.table.abandon()
        self.drop()

    def settle(self) -> None:
        """Return once all devices were added, with all bound memory mapped here; may take long, and needs no lock."""
        self.table.await_devices()
        with self._storing:
            self._update()

    def mapped_at(self, pointer: int, reserved: AddressRange) -> MulticastRegion:
        self.hold()
        return MulticastRegion(next(iter(self.table.devices), 0), pointer, self.nbytes, reserved, team=self)

    def hold(self) -> None:
        self._uses += 1

    def drop(self) -> None:
        """Count one use less, and end with the last one; processes that have the memory mapped keep it."""
        self._uses -= 1
        if self._uses:
            return
        for bound in self._bound.values():
            shared_memory.unmap(bound.pointer, bound.nbytes)
        for handle in tuple(self._fds):
            self._withdraw(handle)
        self.table.close()

    def bind(self, physical: PhysicalMemory, start: int, offset: int, nbytes: int) -> bool:
        """Bind memory, and serve it to every process that has the object; False if the offsets are taken."""
        with shared_memory.fork_lock() as ours:
            ours.add(fd := shared_memory.duplicate(physical.fd))
        handle = self._shared.share(SharedFd(fd, physical.device, start))
        self._fds[handle] = fd
        with ExitStack() as undo:
            undo.callback(self._withdraw, handle)
            if entered := self.table.bind(Binding(physical.device, offset, nbytes, handle)):
                undo.pop_all()
        return entered

    def unbind(self, device: int, offset: int, nbytes: int) -> bool:
        """Undo a binding of any process; False if there is none such."""
        binding = self.table.unbind(device, offset, nbytes)
        if binding and binding.handle in self._fds:
            self._withdraw(binding.handle)
        return binding is not None

    def _withdraw(self, handle: bytes) -> None:
        self._shared.withdraw(handle)
        shared_memory.close(self._fds.pop(handle))

    def store(self, offset: int, source: int, nbytes: int) -> bool:
        """Copy bytes to every device's memory; False, and nothing is copied, if some device has none there."""
        end = offset + nbytes
        with self._storing:
            self._update()
            devices = self.table.devices
            pieces = [
                (bound.pointer + bound.start - binding.offset, first, last)
                for binding, bound in self._bound.items()
                if binding.device in devices
                and (first := max(offset, binding.offset)) < (last := min(end, binding.end))
            ]
            if sum(last - first for _, first, last in pieces) < nbytes * self.table.size:
                return False
            for base, first, last in pieces:
                ctypes.memmove(base + first, source + first - offset, last - first)
        return True

    def _update(self) -> None:
        """Map memory that was bound since the last time, and unmap memory that was unbound.

        Memory that cannot be fetched is left out: the process that bound it has ended.
        """
        changes = self.table.changes
        if changes == self._seen:
            return
        bindings = {binding for binding in self.table.bindings() if binding.end <= self.nbytes}
        for binding in self._bound.keys() - bindings:
            bound = self._bound.pop(binding)
            shared_memory.unmap(bound.pointer, bound.nbytes)
        for binding in bindings - self._bound.keys():
            if found := _fetch(binding):
                self._bound[binding] = found
        self._seen = changes


def _fetch(binding: Binding) -> _Bound | None:
    """Map the memory of a binding; None if its process does not answer, or the answer does not fit the binding."""
    try:
        fd, device, start = shared_memory.fetch(binding.handle)
    except LookupError:
        return None
    try:
        nbytes = os.fstat(fd).st_size
        usable = stat.S_ISREG(os.fstat(fd).st_mode) and shared_memory.sealed(fd) and shared_memory.writable(fd)
        if not usable or start + binding.nbytes > nbytes or device != binding.device:
            return None
        return _Bound(shared_memory.map_shared(fd, nbytes), nbytes, start)
    finally:
        shared_memory.close(fd)


@dataclass(eq=False)
class MulticastRegion(MappedRegion):
    """All of a multicast object, at addresses that only one-to-all stores may use.

    The process has no access there: its own loads and stores, past the driver, fault.
    """

    team: MulticastObject = field(kw_only=True)

    @property
    def whole(self) -> object:
        return self  # no other work goes across its ends

    def allows(self, device: int, *, writing: bool) -> bool:
        """Whether the device may load: ordinary loads are counted, and ordinary stores refused."""
        return not writing and super().allows(device, writing=writing)

    def set_access(self, access: dict[int, int]) -> None:
        self.access |= access

    def remove(self) -> None:
        super().remove()
        self.team.drop()

    def retained(self) -> Mappable:
        """Refuse: it is not known whether a GPU's driver would."""
        raise Refusal(Result.CUDA_ERROR_NOT_SUPPORTED)


# -- the functions ------------------------------------------------------------------------------------


class MulticastFunctions(MemoryFunctions, VirtualMemoryFunctions):
    """The functions. No wait holds the lock: other threads can add the missing devices."""

    def __init__(self, count: int, size: int, island: int | None = None) -> None:
        super().__init__(count, size, island)
        #: The number of ordinary loads through multicast addresses.
        self.violations = 0
        self.options = Options.parse(os.environ.get(OPTIONS, ""))

    @answers(1)
    def cuMulticastCreate(self, prop: Any) -> Any:
        check_blocks(prop.size)
        check(0 < prop.numDevices <= MAX_DEVICES and not prop.flags)
        check(prop.handleTypes != _FABRIC, Result.CUDA_ERROR_NOT_PERMITTED)  # as where there is no IMEX channel
        check(prop.handleTypes in _KINDS)
        check(self.island > 1, Result.CUDA_ERROR_NOT_SUPPORTED)
        with self.lock:
            if sum(isinstance(held, MulticastObject) for held in self.handles.values()) >= self.options.slots:
                raise MemoryError
            return self.handle(MulticastObject(Table.create(prop.size, prop.numDevices), kinds=prop.handleTypes))

    @answers(0)
    def cuMulticastAddDevice(self, mcHandle: Any, dev: Any) -> None:
        device = self.index(dev)
        with self.lock:
            table = self._team(mcHandle).table
            joins = self.reached(device) > 1 and all(self.reaches(device, other) for other in table.devices)
            check(joins, Result.CUDA_ERROR_INVALID_DEVICE)
            check(table.add(device))

    @answers(0)
    def cuMulticastBindMem(
        self, mcHandle: Any, mcOffset: int, memHandle: Any, memOffset: int, size: int, flags: int
    ) -> None:
        check_blocks(size)
        check(mcOffset % BLOCK == 0 and memOffset % BLOCK == 0 and not flags)
        self.settle(mcHandle)
        with self.lock:
            team, physical = self._team(mcHandle), self.held(memHandle)
            if not isinstance(physical, PhysicalMemory) or not physical.shareable or not physical.writable:
                raise Refusal(Result.CUDA_ERROR_INVALID_VALUE)
            check(mcOffset + size <= team.nbytes and memOffset + size <= physical.nbytes)
            check(physical.device in team.table.devices, Result.CUDA_ERROR_INVALID_DEVICE)
            check(team.bind(physical, memOffset, mcOffset, size))

    @answers(0)
    def cuMulticastUnbind(self, mcHandle: Any, dev: Any, mcOffset: int, size: int) -> None:
        device = self.index(dev)
        with self.lock:
            check(self._team(mcHandle).unbind(device, mcOffset, size))

    @answers(1)
    def cuMulticastGetGranularity(self, prop: Any, option: Any) -> int:
        check(0 < prop.numDevices <= MAX_DEVICES and int(option) in _GRANULARITIES)
        return _GRANULARITIES[int(option)]

    def check_call(self, name: str) -> None:
        """Refuse the functions that the options name, too."""
        super().check_call(name)
        if name in self.options.statuses:
            raise Refusal(self.options.statuses[name])

    def import_descriptor(self, descriptor: int) -> Mappable:
        name = ""
        with suppress(OSError):  # it may be of anything
            name = shared_memory.name_of(descriptor)
        if name == NAME:
            return MulticastObject.adopt(descriptor, len(self.heaps))
        return super().import_descriptor(descriptor)

    def settle(self, handle: Any) -> None:
        """Wait for the devices of a multicast object."""
        with self.lock:
            held = self.held(handle)
            if not isinstance(held, MulticastObject):
                return
            held.hold()
        try:
            held.settle()
        finally:
            with self.lock:
                held.drop()

    def readable(self, pointer: Any, nbytes: int) -> Bytes:
        """Count a load through a multicast address, and answer it with bytes that no process has stored."""
        source = super().readable(pointer, nbytes)
        with self.lock:
            if not isinstance(self.addresses.find(int(pointer)), MulticastRegion):
                return source
            self.violations += 1
        return ctypes.create_string_buffer(JUNK * nbytes, nbytes)

    def deliver(self, pointer: Any, source: Bytes, nbytes: int) -> None:
        if not self.store(int(pointer), source, nbytes):
            super().deliver(pointer, source, nbytes)

    def store(self, pointer: int, source: Bytes, nbytes: int) -> bool:
        """Store to every device's memory; False if ``pointer`` is not a multicast address."""
        device = self.current()
        with self.lock:
            region = self.addresses.find(pointer)
            if not isinstance(region, MulticastRegion):
                return False
            region.team.hold()
        try:
            start = source if isinstance(source, int) else ctypes.addressof(source)
            allowed = region.access.get(device, 0) & WRITE and pointer + nbytes <= region.end
            stored = allowed and region.team.store(pointer - region.pointer, start, nbytes)
            check(stored, Result.CUDA_ERROR_ILLEGAL_ADDRESS)
        finally:
            with self.lock:
                region.team.drop()
        return True

    def _team(self, handle: Any) -> MulticastObject:
        held = self.held(handle)
        if not isinstance(held, MulticastObject):
            raise Refusal(Result.CUDA_ERROR_INVALID_VALUE)
        return held
