"""What the processes that have a multicast object share of it: a table in memory, which is also its descriptor.

Everybody who has the descriptor can write to the table, as whoever has a GPU's can add devices and bind memory. What
is read from it is therefore checked again wherever it is used. A process that dies leaves a table that is whole: the
system gives its lock up, and a row counts only once it is written. One that lives may keep the lock, stopped or out of
malice: so nothing that has to be done at an object's end takes it.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import secrets
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from cubroker.driver import linux
from cubroker.driver.host import descriptors, futex, memory
from cubroker.driver.host.memory import BLOCK
from cubroker.driver.host.sharing import HANDLE_BYTES

NAME = "cubroker-multicast"
"""What the table's memory is called, by which it is told from a device's."""

MAX_DEVICES = 64
MAX_BINDINGS = 1024

_LOCK = struct.Struct("@hhqqi0q")  # struct flock: type, whence, start, length (0: all), process (0)


class Binding(NamedTuple):
    """``nbytes`` bytes of a device's memory, bound at ``offset``; ``handle`` is what the memory is fetched with."""

    device: int
    offset: int
    nbytes: int
    handle: bytes

    @property
    def end(self) -> int:
        """The first offset behind it."""
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
    """The table by its descriptor, which no other process has: locks on it are this object's alone.

    Attributes:
        nbytes: the size of the multicast object.
        size: how many devices it is for.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._mutex = threading.Lock()
        self._pointer = memory.map_alone(fd, ctypes.sizeof(_Layout))
        self._layout = _Layout.from_address(self._pointer)
        self.nbytes, self.size = int(self._layout.nbytes), int(self._layout.size)

    @classmethod
    def create(cls, nbytes: int, size: int) -> Table:
        """Make the table of a new object, whose creator this process is."""
        made = memory.create(ctypes.sizeof(_Layout), NAME)
        try:
            os.pwrite(made, struct.pack("@QI", nbytes, size), 0)
            table = cls._of(made)
        finally:
            descriptors.close(made)
        fcntl.flock(table._fd, fcntl.LOCK_SH)
        return table

    @classmethod
    def adopt(cls, descriptor: int) -> Table:
        """Return the table that a descriptor stands for, or a fresh one if its creator has released the object.

        Raises:
            LookupError: it stands for none.
        """
        if not memory.sealed(descriptor) or os.fstat(descriptor).st_size != ctypes.sizeof(_Layout):
            raise LookupError(f"descriptor {descriptor} is not a multicast object")
        table = cls._of(descriptor)
        if not 0 < table.size <= MAX_DEVICES or not 0 < table.nbytes < 1 << 47 or table.nbytes % BLOCK:
            table.close()
            raise LookupError(f"descriptor {descriptor} is not a multicast object")
        if table._abandoned():
            table.close()
            return cls.create(table.nbytes, table.size)
        return table

    @classmethod
    def _of(cls, descriptor: int) -> Table:
        with descriptors.books() as ours:
            ours.add(fd := _reopen(descriptor))
        try:
            return cls(fd)
        except OSError:
            descriptors.close(fd)
            raise

    def export(self) -> int:
        """Return a descriptor for others."""
        return _reopen(self._fd)

    def abandon(self) -> None:
        """The creator has released the object: who imports it from now on gets a fresh one."""
        fcntl.flock(self._fd, fcntl.LOCK_UN)

    def close(self) -> None:
        """Let go of it."""
        memory.unmap(self._pointer, ctypes.sizeof(_Layout))
        descriptors.close(self._fd)

    # -- devices -----------------------------------------------------------------------------------

    @property
    def devices(self) -> tuple[int, ...]:
        """Those that were added."""
        return tuple(self._layout.devices[: min(self._layout.added, self.size)])

    def add(self, device: int) -> bool:
        """Add a device, unless it is there or the object has as many as it is for; return whether it was added."""
        with self._changing():
            known = self.devices
            if device in known or len(known) == self.size:
                return False
            self._layout.devices[len(known)] = device
            self._layout.added = len(known) + 1
        futex.wake(self._pointer + _Layout.added.offset)
        return True

    def await_devices(self) -> None:
        """Return once every device was added, by whichever process."""
        while (added := self._layout.added) < self.size:
            futex.wait(self._pointer + _Layout.added.offset, added)

    # -- bindings ----------------------------------------------------------------------------------

    @property
    def changes(self) -> int:
        """A number that is another one after bindings have changed."""
        return int(self._layout.changes)

    def bindings(self) -> list[Binding]:
        """Return all of them, whoever bound the memory."""
        with self._changing():
            return [row.binding() for row in self._rows() if row.taken]

    def bind(self, binding: Binding) -> bool:
        """Enter a binding, unless something of that device is bound there; MemoryError if the table is full."""
        with self._changing():
            if any(row.taken and row.binding().overlaps(binding) for row in self._rows()):
                return False
            row = self._vacant()
            row.device, row.offset, row.nbytes = binding.device, binding.offset, binding.nbytes
            row.handle[:] = binding.handle
            row.taken = 1
            self._changed()
        return True

    def unbind(self, device: int, offset: int, nbytes: int) -> Binding | None:
        """Take out the binding of a device at exactly these offsets and return it, if there is one. No wait."""
        for row in self._rows():
            binding = row.binding()
            if row.taken and (binding.device, binding.offset, binding.nbytes) == (device, offset, nbytes):
                row.taken = 0
                self._changed()
                return binding
        return None

    def _changed(self) -> None:
        """Say that bindings have changed; a count could lose one of two changes at the same time."""
        self._layout.changes = secrets.randbits(32)

    def _vacant(self) -> _Row:
        rows = self._rows()
        for row in rows:
            if not row.taken:
                return row
        if len(rows) == MAX_BINDINGS:
            raise MemoryError
        self._layout.used = len(rows) + 1
        return self._rows()[-1]

    def _rows(self) -> list[_Row]:
        """Return the rows that were ever taken."""
        rows: list[_Row] = self._layout.rows[: min(self._layout.used, MAX_BINDINGS)]
        return rows

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Keep other threads and other processes from changing the table meanwhile."""
        with self._mutex:
            fcntl.fcntl(self._fd, linux.F_OFD_SETLKW, _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
            try:
                yield
            finally:
                fcntl.fcntl(self._fd, linux.F_OFD_SETLK, _LOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, 0, 0, 0))

    def _abandoned(self) -> bool:
        """Whether the creator no longer has the object; it holds a shared lock as long as it does."""
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        fcntl.flock(self._fd, fcntl.LOCK_UN)
        return True


def _reopen(descriptor: int) -> int:
    """Return a descriptor with locks of its own, which duplicates would share."""
    return os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
