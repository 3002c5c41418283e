"""The memory of one lease, as this process has it mapped; whoever holds the object may use its addresses."""

from __future__ import annotations

from collections.abc import Callable
from threading import RLock

from cubroker.client.living import Living
from cubroker.client.processes import Owner
from cubroker.driver import Context
from cubroker.protocol.errors import Invalid


class Place:
    """One device's copy of a version: the address of each allocation of its layout, in order."""

    __slots__ = ("context", "pointers")

    def __init__(self, context: Context, pointers: tuple[int, ...]) -> None:
        self.context = context
        self.pointers = pointers


class Mapped:
    """Mapped memory. It is unmapped, and the lease given back, when nobody refers to this object any more.

    Args:
        label: what it is, for messages: ``pool 'llama' version 2``.
        places: one per device.
        readonly: whether it was published, so that nobody may write it.
        finish: starts the unmapping, as the end of this object does; whichever comes first counts.
    """

    def __init__(self, label: str, places: tuple[Place, ...], *, readonly: bool, finish: Callable[[], None]) -> None:
        self.label = label
        self.places = places
        self.readonly = readonly
        self._finish = finish
        self._owner = Owner()
        self._ended = False
        self._lock = RLock()  # a finalizer or a signal handler may end it in the middle
        self._lent: Living[Lent] = Living()

    def check(self) -> None:
        """Raise ``Invalid`` if the memory is no longer mapped, or in a forked child."""
        self._owner.check()
        if self._ended:
            raise Invalid(f"{self.label} was given back, and its tensors with it")

    def lend(self, name: str) -> Lent:
        """Note that somebody outside uses tensor ``name``, for as long as the returned object lives."""
        self._owner.check()
        with self._lock:
            lent = Lent(self, name)
            self._lent.add(lent)
            self.check()
        return lent

    def end(self, prepare: Callable[[], None] | None = None) -> tuple[str, ...]:
        """Unmap now, whoever holds this object, unless tensors are in use outside; returns the names of those.

        ``prepare`` is called just before.
        """
        with self._lock:
            names = tuple(sorted({lent.name for lent in self._lent}))
            if not names:
                self._ended = True
                if prepare:
                    prepare()
                self._finish()
        return names


class Lent:
    """A tensor in use outside of this package: under a numpy array, or behind a DLPack capsule."""

    __slots__ = ("__array_interface__", "__weakref__", "mapped", "name")

    def __init__(self, mapped: Mapped, name: str) -> None:
        self.mapped = mapped
        self.name = name
        self.__array_interface__: dict[str, object] = {}
