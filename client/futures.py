"""A result that another thread delivers: bare locks and no condition variable, since every request waits on one."""

from __future__ import annotations

from math import inf
from threading import Lock
from typing import Generic, TypeVar, cast

from cubroker.protocol.errors import CubrokerError, TimedOut

T = TypeVar("T")

PART = 1.0
"""Seconds: the most that a wait with a limit waits at a time."""


class Future(Generic[T]):
    """A value or an error to come. Any thread may wait, and any deliver; the first delivery counts."""

    __slots__ = ("_abandoned", "_done", "_error", "_gate", "_taken", "_value")

    def __init__(self) -> None:
        self._gate = Lock()  # held until the delivery
        self._gate.acquire()
        self._taken = Lock()  # held from the delivery on
        self._done = False  # what counts: whoever is interrupted while it passes the gate leaves it shut
        self._value: T | None = None
        self._error: CubrokerError | None = None
        self._abandoned = False

    def done(self) -> bool:
        """Whether :meth:`result` would return or raise at once."""
        return self._done

    def wait(self, timeout: float | None = None) -> bool:
        """Wait up to ``timeout`` seconds (None: without limit); whether something was delivered.

        Time in which this process is stopped hardly counts: it waits in parts, and a part is lost, not the whole.
        """
        left = inf if timeout is None else timeout
        part = min(PART, left / 10)
        while not self._done:
            if self._gate.acquire(timeout=part):
                self._gate.release()
            else:
                left -= part
                if left <= 0:
                    return self._done
        return True

    def result(self, timeout: float | None = None) -> T:
        """Wait like :meth:`wait` and return the value.

        Raises:
            TimedOut: nothing came in that time.
            CubrokerError: the error that was delivered.
        """
        if not self.wait(timeout):
            raise TimedOut(f"no result within {timeout:g} s")
        if self._error is not None:
            raise self._error.anew()
        return cast(T, self._value)

    def set(self, value: T) -> None:
        """Deliver the value; nobody keeps it if the waiter has left."""
        if self._taken.acquire(blocking=False):
            self._value = value
            if self._abandoned:
                self._value = None
            self._done = True
            self._gate.release()

    def fail(self, error: CubrokerError) -> None:
        """Deliver an error."""
        if self._taken.acquire(blocking=False):
            self._error = error
            self._done = True
            self._gate.release()

    def settle(self, outcome: T | CubrokerError) -> None:
        """Deliver a value or an error."""
        if isinstance(outcome, CubrokerError):
            self.fail(outcome)
        else:
            self.set(outcome)

    def abandon(self) -> None:
        """Leave: what was or will be delivered is dropped. A traceback may keep this object alive for long."""
        # Whichever of this and `set` comes last sees the other's first line, so the value never stays.
        self._abandoned = True
        self._value = None
