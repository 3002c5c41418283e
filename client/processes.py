"""What happens to a session when its process forks or exits.

A forked child inherits objects, but neither their threads nor the right to act for the parent: it
closes its copy of the session's descriptors, gets an error from every call, and touches nothing else.
"""

from __future__ import annotations

import atexit
import os
from abc import ABC, abstractmethod
from threading import RLock
from typing import NoReturn, Protocol, Self

from cubroker.client.living import Living
from cubroker.protocol.errors import Invalid


class Owner:
    """The process that something belongs to: the one that made this object."""

    __slots__ = ("pid",)

    def __init__(self) -> None:
        self.pid = os.getpid()

    def here(self) -> bool:
        """Whether this is that process."""
        return os.getpid() == self.pid

    def check(self) -> None:
        """Raise ``Invalid`` in any other process."""
        if not self.here():
            raise Invalid(
                f"this Broker belongs to process {self.pid}, and this is its child {os.getpid()};"
                f" open a Broker in each process, and start those that use devices by spawn, not by fork"
            )


class Scoped(ABC):
    """A base of what a ``with`` block closes; ``_owner`` is whose it is."""

    _owner: Owner

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._owner.here():  # in a child that leaves a block of its parent's, there is nothing to do
            self.close()

    @abstractmethod
    def close(self) -> None:
        """Give it up; nothing happens if that was done before."""


class Unsendable:
    """A base of what there is once, and in one process: copying or pickling it says what to do instead."""

    __slots__ = ()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} cannot be copied, nor be sent to another process; open a Broker there, and"
            f" attach by name"
        )


class Inherited(Protocol):
    """What has to be told of forks and of the end."""

    def disown(self) -> None:
        """In a forked child: close what was inherited, without locks and without a word to anybody."""

    def stop(self) -> None:
        """The interpreter exits: end threads, within a bounded time."""


_known: Living[Inherited] = Living()

_unforked = RLock()


def unforked() -> RLock:
    """Return what keeps other threads from forking this process while it is held, which must be short."""
    return _unforked


def register(session: Inherited) -> None:
    """Tell ``session`` of forks and of the interpreter's end, while it lives."""
    _known.add(session)


def _forked() -> None:
    for session in _known:
        session.disown()


def _exit() -> None:
    for session in _known:
        session.stop()


os.register_at_fork(before=_unforked.acquire, after_in_parent=_unforked.release, after_in_child=_unforked.release)
os.register_at_fork(after_in_child=_forked)
atexit.register(_exit)
