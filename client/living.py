"""Collections that hold nothing alive.

Unlike ``weakref.WeakSet`` they forget what dies by a call into C alone. Its callback is Python code, in which a
KeyboardInterrupt can come up; it is then printed and lost.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Generic, TypeVar
from weakref import ref

T = TypeVar("T")


class Living(Generic[T]):
    """What was added and is still alive. Safe in any thread."""

    __slots__ = ("_refs",)

    def __init__(self) -> None:
        self._refs: set[ref[T]] = set()

    def add(self, thing: T) -> None:
        """Add a thing that is hashed by identity."""
        self._refs.add(ref(thing, self._refs.discard))

    def discard(self, thing: T) -> None:
        """Forget a thing, if it is there."""
        self._refs.discard(ref(thing))

    def __iter__(self) -> Iterator[T]:
        for reference in self._refs.copy():  # tuple() would let the collector in, which changes the set
            thing = reference()
            if thing is not None:
                yield thing
