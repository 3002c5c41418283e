"""Work that threads share, and that an interrupt of its caller stops without ever coming into it.

Python delivers signals to the main thread alone, and there even its own ``Thread.start``, ``Condition`` and executors
can be left broken. So the caller starts everything with one call into C, and then only waits.
"""

from __future__ import annotations

from _thread import start_new_thread
from collections import deque
from collections.abc import Callable
from threading import Thread
from typing import Generic, TypeVar, cast

from cubroker.client.futures import Future

T = TypeVar("T")

REPORT = 0.1
"""Seconds between reports of progress."""

Progress = Callable[[int, int], None]
"""Called with the bytes done so far and the bytes there are."""


def work_off(todo: deque[T], do: Callable[[T], None]) -> None:
    """Do one after the other until nothing is left; what fails leaves nothing to other threads either."""
    try:
        while True:
            try:
                each = todo.popleft()
            except IndexError:
                break
            do(each)
    finally:
        todo.clear()


class Boss(Generic[T]):
    """A thread of its own for ``work``, which may use whatever interrupts would break."""

    def __init__(self, name: str, work: Callable[[], T]) -> None:
        self._name = name
        self._work = work
        self._begun = False
        self._dropped = False
        self._over: Future[None] = Future()
        self._value: T | None = None
        self._error: BaseException | None = None

    def result(self, stop: Callable[[], object], report: Callable[[], None] | None = None) -> T:
        """Have the work done; return what it returns, or raise what it raises.

        Args:
            stop: makes the work end early, should this thread be interrupted or ``report`` fail. It is waited for.
            report: called by this thread, now and then, and at last when the work is done.
        """
        try:
            start_new_thread(self._start, ())
            while not self._over.wait(REPORT if report else None):
                if report:
                    report()
        finally:
            self._dropped = True
            stop()
            self._await()
        if self._error:
            try:
                raise self._error
            finally:
                self._error = None  # its traceback refers to this object
        if report:
            report()
        return cast(T, self._value)

    def _await(self) -> None:
        """Return when nothing goes on any more; an interrupt of this wait, too, is told only then."""
        interrupted = False
        while self._begun and not self._over.done():
            try:
                self._over.wait()
            except KeyboardInterrupt:
                interrupted = True
        if interrupted:
            raise KeyboardInterrupt

    def _start(self) -> None:
        try:
            Thread(target=self._run, name=self._name, daemon=False).start()
        except RuntimeError as error:  # threads have run out
            self._error = error
            self._over.set(None)

    def _run(self) -> None:
        self._begun = True
        try:
            if not self._dropped:  # whichever of this and `result` comes last sees the other's first line
                self._value = self._work()
        except BaseException as error:  # noqa: BLE001  whatever it is, the caller raises it
            self._error = error
        self._over.set(None)
