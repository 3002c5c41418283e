"""The memory of one lease, as this process has it mapped; whoever holds the object may use its addresses."""

from __future__ import annotations

from collections.abc import Callable
from threading import RLock
from typing import TYPE_CHECKING

from cubroker.client.living import Living
from cubroker.client.processes import Owner
from cubroker.driver import Context, Device
from cubroker.protocol.errors import Invalid

if TYPE_CHECKING:
    from cubroker.client.broadcast import Outlet
    from cubroker.client.janitor import Guard


class Place:
    """What one device has of a version.

    Attributes:
        context: in which it is mapped.
        memory: the device.
        pointers: the address of each allocation of the layout, in order; None for those that it has not got.
        upstream: where this device reads the same allocations of the replica before it, if it reaches them directly.
    """

    __slots__ = ("context", "memory", "pointers", "upstream")

    def __init__(self, context: Context, memory: Device, pointers: tuple[int | None, ...]) -> None:
        self.context = context
        self.memory = memory
        self.pointers = pointers
        self.upstream: tuple[int, ...] | None = None


class Mapped:
    """Mapped memory. It is unmapped, and the lease given back, when nobody refers to this object any more.

    Args:
        label: what it is, for messages: ``pool 'llama' version 2``.
        places: one per device.
        share: how it is shared.
        readonly: whether nobody here may write it: it was published, and not as writable.
        finish: starts the unmapping, as the end of this object does; whichever comes first counts.
        outlet: the way to store to all replicas of a multicast version, if there is one here.

    Attributes:
        guard: what waits for the end of this object. The collector tells it before it calls finalizers, which may still
            use the object then, or keep it; the memory does not wait for them.
    """

    def __init__(
        self,
        label: str,
        places: tuple[Place, ...],
        share: str,
        *,
        readonly: bool,
        finish: Callable[[], None],
        outlet: Outlet | None = None,
    ) -> None:
        self.label = label
        self.places = places
        self.share = share
        self.readonly = readonly
        self.outlet = outlet
        self.asleep = False
        self.guard: Guard[Mapped] | None = None
        self._finish = finish
        self._owner = Owner()
        self._ended = False
        self._lock = RLock()  # a finalizer or a signal handler may end it in the middle
        self._lent: Living[Lent] = Living()

    @property
    def protected(self) -> bool:
        """Whether the device refuses what is written here: a legacy handle has no read-only mapping."""
        return self.readonly and self.share != "ipc"

    def check(self) -> None:
        """Raise ``Invalid`` if the memory is not mapped, or in a forked child."""
        self._owner.check()
        if self._ended or (self.guard is not None and self.guard() is None):
            raise Invalid(f"{self.label} was given back, and its tensors with it")
        if self.asleep:
            raise Invalid(f"{self.label} is asleep: its memory is not mapped; wake the pool before using its tensors")

    def lend(self, name: str, *, held: bool = False, storing: bool = False) -> Lent:
        """Note that somebody outside uses tensor ``name``, for as long as the returned object lives.

        ``held``: and that the memory may not even sleep meanwhile; ``storing``: because all replicas are stored to.
        """
        self._owner.check()
        with self._lock:
            lent = Lent(self, name, held=held, storing=storing)
            self._lent.add(lent)
            try:
                self.check()
            except Invalid:
                del lent  # a traceback may keep this frame for long
                raise
        return lent

    def sleep(self) -> tuple[str, ...]:
        """Refuse every use from now on, until :meth:`wake`, unless tensors are held; returns the names of those."""
        with self._lock:
            names = tuple(sorted({lent.name for lent in self._lent if lent.held}))
            if not names:
                self.asleep = True
        return names

    def wake(self) -> None:
        """The memory is mapped again."""
        self.asleep = False

    def holder(self) -> Lent | None:
        """Return what holds a tensor, if anything does; a store to all replicas only if nothing else does."""
        held = [lent for lent in self._lent if lent.held]
        return min(held, key=lambda lent: lent.storing, default=None)

    def end(self, prepare: Callable[[], Callable[[], None]] | None = None) -> tuple[str, ...]:
        """Unmap now, whoever holds this object, unless tensors are in use outside; returns the names of those.

        ``prepare`` is called just before, when nobody can begin to use one any more; if it fails, nothing has ended.
        It returns what starts the unmapping instead of ``finish``. From that call on the end is not undone.
        """
        with self._lock:
            names = tuple(sorted({lent.name for lent in self._lent}))
            if not names:
                self._ended = True
                try:
                    finish = prepare() if prepare else self._finish
                except BaseException:
                    self._ended = False
                    raise
                finish()
        return names


class Lent:
    """A tensor in use outside of this package: under a numpy array, or behind a DLPack capsule."""

    __slots__ = ("__array_interface__", "__weakref__", "held", "mapped", "name", "storing")

    def __init__(self, mapped: Mapped, name: str, *, held: bool, storing: bool) -> None:
        self.mapped = mapped
        self.name = name
        self.held = held
        self.storing = storing
        self.__array_interface__: dict[str, object] = {}
