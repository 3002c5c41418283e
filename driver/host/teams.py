"""Multicast objects as one process has them: the memory that it has bound, and what it stores through to."""

from __future__ import annotations

import ctypes
import os
import stat
import threading
from dataclasses import dataclass, field

from cubroker.driver.host import descriptors, memory, sharing
from cubroker.driver.host.ranges import Mapping, Physical, Range
from cubroker.driver.host.table import NAME, Binding, Table


@dataclass
class _Bound:
    """All of the memory that a binding is of, mapped here; ``place`` is where in it the bound bytes begin."""

    pointer: int
    nbytes: int
    place: int


class Team:
    """A multicast object, which this process has created or imported. A handle counts as a use of it, and each mapping.

    The driver holds its lock around all calls but ``settle`` and ``store``, and a use during those.
    """

    def __init__(self, table: Table, *, kinds: int) -> None:
        self.kinds = kinds
        self.table = table
        self.nbytes = table.nbytes
        self._uses = 1
        self._offers = sharing.Offers()
        self._offered: dict[bytes, int] = {}
        self._bound: dict[bytes, _Bound] = {}
        self._bindings: list[Binding] = []
        self._seen = -1
        self._storing = threading.Lock()

    # -- as any handle -----------------------------------------------------------------------------

    def export(self) -> int:
        """Return a descriptor of it, which whoever receives it can import."""
        return self.table.export()

    def release(self) -> None:
        """Let go of the handle; mappings stay, and so do other processes' handles."""
        self.table.abandon()
        self.drop()

    def settle(self) -> None:
        """Return once all devices were added, with all that is bound mapped here; takes long, and needs no lock."""
        self.table.await_devices()
        with self._storing:
            self._look()

    def mapped_at(self, pointer: int, reserved: Range) -> Window:
        """Put a window on it at vacant addresses."""
        self.hold()
        return Window(next(iter(self.table.devices), 0), pointer, self.nbytes, reserved, team=self)

    def hold(self) -> None:
        """Count one more use."""
        self._uses += 1

    def drop(self) -> None:
        """Count one use less, and end with the last one; who has the memory mapped keeps it."""
        self._uses -= 1
        if self._uses:
            return
        for bound in self._bound.values():
            memory.unmap(bound.pointer, bound.nbytes)
        for handle in tuple(self._offered):
            self._withdraw(handle)
        self.table.close()

    # -- binding -----------------------------------------------------------------------------------

    def bind(self, physical: Physical, place: int, offset: int, nbytes: int) -> bool:
        """Bind memory, which is kept for whoever has the object; False if something is bound there already."""
        with descriptors.books() as ours:
            ours.add(fd := descriptors.duplicate(physical.fd))
        handle = self._offers.add(sharing.Offer(fd, physical.device, place))
        self._offered[handle] = fd
        entered = False
        try:
            entered = self.table.bind(Binding(physical.device, offset, nbytes, handle))
        finally:
            if not entered:
                self._withdraw(handle)
        return entered

    def unbind(self, device: int, offset: int, nbytes: int) -> bool:
        """Undo a binding, whichever process made it; False if there is none such."""
        binding = self.table.unbind(device, offset, nbytes)
        if binding and binding.handle in self._offered:
            self._withdraw(binding.handle)
        return binding is not None

    def _withdraw(self, handle: bytes) -> None:
        self._offers.withdraw(handle)
        descriptors.close(self._offered.pop(handle))

    # -- storing -----------------------------------------------------------------------------------

    def store(self, offset: int, source: int, nbytes: int) -> bool:
        """Copy bytes to every device's memory; False, and nothing is copied, where some device has none."""
        with self._storing:
            self._look()
            pieces = [piece for device in self.table.devices for piece in self._pieces(device, offset, nbytes)]
            if sum(length for _, _, length in pieces) < nbytes * self.table.size:
                return False
            for target, start, length in pieces:
                ctypes.memmove(target, source + start, length)
        return True

    def _pieces(self, device: int, offset: int, nbytes: int) -> list[tuple[int, int, int]]:
        """Return where each part of some bytes goes: its address, where it begins among them, and its length."""
        found = []
        for binding in self._bindings:
            bound = self._bound.get(binding.handle)
            start, end = max(offset, binding.offset), min(offset + nbytes, binding.end)
            if bound and binding.device == device and start < end:
                found.append((bound.pointer + bound.place + start - binding.offset, start - offset, end - start))
        return found

    def _look(self) -> None:
        """Map what was bound since the last time, and unmap what no longer is.

        What cannot be had is left out: whoever bound it is gone, and nobody here had it mapped.
        """
        changes = self.table.changes
        if changes == self._seen:
            return
        self._bindings = [b for b in self.table.bindings() if b.end <= self.nbytes]
        for handle in self._bound.keys() - {binding.handle for binding in self._bindings}:
            bound = self._bound.pop(handle)
            memory.unmap(bound.pointer, bound.nbytes)
        for binding in self._bindings:
            if binding.handle not in self._bound and (found := _fetch(binding)):
                self._bound[binding.handle] = found
        self._seen = changes


@dataclass(eq=False)
class Window(Mapping):
    """All of a multicast object, at addresses that only one-to-all stores may use.

    Nothing is mapped there for this process: what it loads or stores past the driver faults.
    """

    team: Team = field(kw_only=True)

    @property
    def whole(self) -> object:
        """Itself: no other work goes across its ends."""
        return self

    def allows(self, device: int, *, writing: bool) -> bool:
        """Whether access was set for the device, to load: ordinary stores are refused, and loads counted."""
        return not writing and super().allows(device, writing=writing)

    def set_access(self, access: dict[int, int]) -> None:
        """Set the access of some devices."""
        self.access |= access

    def remove(self) -> None:
        """Undo it."""
        super().remove()
        self.team.drop()


def adopt(descriptor: int, devices: int) -> Team:
    """Return the multicast object that a descriptor stands for; the descriptor stays the caller's.

    If its creator has released it, or is gone, it is a fresh one without devices and memory, as on GPUs.

    Raises:
        LookupError: it stands for none, or for one with devices that are not among so many.
        OSError: the system is short of something.
    """
    table = Table.adopt(descriptor)
    if all(device < devices for device in table.devices):
        return Team(table, kinds=0)
    table.close()
    raise LookupError(f"descriptor {descriptor} is a multicast object of other devices")


def is_team(descriptor: int) -> bool:
    """Whether a descriptor, of whatever it may be, stands for a multicast object."""
    try:
        return memory.name_of(descriptor) == NAME
    except OSError:
        return False


def _fetch(binding: Binding) -> _Bound | None:
    """Map the memory of a binding, if its process answers and tells the truth."""
    try:
        fd, device, place = sharing.fetch(binding.handle)
    except LookupError:
        return None
    try:
        nbytes = os.fstat(fd).st_size
        usable = stat.S_ISREG(os.fstat(fd).st_mode) and memory.sealed(fd) and memory.writable(fd)
        if not usable or place + binding.nbytes > nbytes or device != binding.device:
            return None
        return _Bound(memory.map_shared(fd, nbytes), nbytes, place)
    finally:
        descriptors.close(fd)
