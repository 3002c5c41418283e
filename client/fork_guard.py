"""Objects that belong to one process: guards against forked children and pickling, and weak references.

A forked child inherits objects, but neither their threads nor the right to act for the parent. It closes its copies of
a session's descriptors and touches nothing else; every call raises ``Invalid`` there.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from threading import RLock, Thread
from typing import Generic, NoReturn, Self, TypeVar
from weakref import ref

from cubroker.protocol.errors import Invalid

T = TypeVar("T")

fork_lock = RLock()
"""While a thread holds it, no other thread forks this process. It must be held only briefly."""


class OwnerProcess:
    """The process that made this object, and may use what belongs to it."""

    __slots__ = ("pid",)

    def __init__(self) -> None:
        self.pid = os.getpid()

    def here(self) -> bool:
        """Whether this is that process."""
        return os.getpid() == self.pid

    def check(self) -> None:
        """Raise ``Invalid`` in any other process."""
        if os.getpid() != self.pid:
            raise Invalid(
                f"this Broker belongs to process {self.pid}, and this is its child {os.getpid()};"
                f" open a Broker in each process, and start those that use devices by spawn, not by fork"
            )


class Closeable(ABC):
    """A context manager that closes its object at the end; ``_owner`` is the process of the object."""

    _owner: OwnerProcess

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._owner.here():  # a forked child that leaves a block of its parent's has nothing to close
            self.close()

    @abstractmethod
    def close(self) -> None:
        """Close the object; a second call does nothing."""


class NotPicklable:
    """A base of objects that belong to one process; to copy or pickle one raises an error that says what to do."""

    __slots__ = ()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} cannot be copied, nor be sent to another process; open a Broker there, and"
            f" attach by name"
        )


class SessionThread(Thread):
    """A thread of a session. It never waits for a session: two that wait for each other would time out."""


class WeakRefs(Generic[T]):
    """A set that keeps nothing alive, for members that are hashed by identity. Safe in any thread.

    A single call into C removes a dead member. The callback of ``weakref.WeakSet`` is Python code: a KeyboardInterrupt
    in there is printed and lost.
    """

    __slots__ = ("_refs",)

    def __init__(self) -> None:
        self._refs: set[ref[T]] = set()

    def add(self, thing: T) -> None:
        """Add a member."""
        self._refs.add(ref(thing, self._refs.discard))

    def discard(self, thing: T) -> None:
        """Remove a member, if it is one."""
        self._refs.discard(ref(thing))

    def __iter__(self) -> Iterator[T]:
        for reference in self._refs.copy():  # tuple() could run the garbage collector, which changes the set
            thing = reference()
            if thing is not None:
                yield thing


os.register_at_fork(before=fork_lock.acquire, after_in_parent=fork_lock.release, after_in_child=fork_lock.release)
