"""The threads of a load or a comparison, and how an interrupt of the caller ends them.

An interrupt of the caller stops the work without ever being raised inside it. Python delivers signals to the main
thread alone, where they can break even Python's own ``Thread.start``, ``Condition`` and executors. So the caller starts
all work with one call into C, and then only waits.
"""

from __future__ import annotations

from _thread import start_new_thread
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent import futures
from threading import Thread
from typing import Generic, ParamSpec, Self, TypeVar, cast

from cubroker.client.fork_guard import OwnerProcess
from cubroker.client.transport.connection import thread_limits
from cubroker.client.transport.requests import Future
from cubroker.protocol.errors import Unavailable

try:
    from concurrent.futures import ThreadPoolExecutor
except RuntimeError as error:  # it cannot be imported for the first time while the interpreter exits
    raise Unavailable(f"no threads to work in: {error}; {thread_limits()}") from error

REPORT_SECONDS = 0.1
"""Seconds between reports of progress."""

Progress = Callable[[int, int], None]
"""Called with the bytes done so far and the bytes in all."""


P = ParamSpec("P")
T = TypeVar("T")


def drain(todo: deque[T], do: Callable[[T], None]) -> None:
    """Call ``do`` with one item after the other until none is left; an error drops the items of all threads."""
    try:
        while True:
            try:
                item = todo.popleft()
            except IndexError:
                break
            do(item)
    finally:
        todo.clear()


class WorkerThreads(ThreadPoolExecutor):
    """Threads that share some work. If a thread cannot start, ``stop`` is called, so that the others end."""

    def __init__(self, count: int, name: str, stop: Callable[[], object]) -> None:
        super().__init__(count, name)
        self._name = name
        self._stop = stop

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> futures.Future[T]:
        """Have a thread call ``fn``; raises ``Unavailable`` if no thread can start."""
        try:
            return super().submit(fn, *args, **kwargs)
        except RuntimeError as error:
            self._stop()
            raise _no_thread(self._name, error) from error


def _no_thread(name: str, error: RuntimeError) -> Unavailable:
    return Unavailable(f"{name} has no threads to work in: {error}; {thread_limits()}")


class SupervisedThread(ABC, Generic[T]):
    """A thread whose work may use objects that an interrupt could break.

    Its caller calls :meth:`begin` within a ``with`` block, which ends with :meth:`end`.
    """

    def __init__(self, name: str) -> None:
        #: Whether the caller no longer wants the result.
        self.dropped = False
        self._owner = OwnerProcess()
        self._name = name
        self._started = False
        self._begun = False
        self._done: Future[None] = Future()
        self._over: Future[None] = Future()
        self._value: T | None = None
        self._error: BaseException | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    @abstractmethod
    def work(self) -> T:
        """Do the work, on the thread."""

    @abstractmethod
    def stop(self) -> None:
        """Make the work end early: called in the caller's thread, at any time, also when it is done."""

    def clean(self) -> None:
        """Clean up, on the thread, after the result was handed over; raises nothing."""

    def begin(self) -> None:
        """Start the thread, unless that was done; raises ``Unavailable`` if it is certain that threads have run out."""
        if self._started:
            return
        self._started = True
        try:
            start_new_thread(self._start, ())
        except RuntimeError as error:
            raise _no_thread(self._name, error) from error

    def result(self, report: Callable[[], None] | None = None) -> T:
        """Return the value of the work, or raise its error, or ``Unavailable`` if threads have run out.

        ``report`` is called by this thread, now and then, and once more when the work is done.
        """
        while not self._done.wait(REPORT_SECONDS if report else None):
            if report:
                report()
        if self._error:
            try:
                raise self._error
            finally:
                self._error = None  # its traceback refers to this object
        if report:
            report()
        return cast(T, self._value)

    def drop(self) -> None:
        """Stop the work and wait until it has ended; an interrupt of this wait is raised only then."""
        self._leave(self._done)

    def end(self) -> None:
        """Do the same, and wait for ``clean`` as well. In a forked child there is nothing to end."""
        self._leave(self._over)
        self._error = None  # of work whose result is not wanted any more

    def _leave(self, future: Future[None]) -> None:
        if not self._owner.here():  # a forked child does not have the thread
            return
        self.dropped = True
        self.stop()
        interrupt: BaseException | None = None
        while self._begun and not future.done():
            try:
                future.wait()
            except BaseException as error:  # noqa: BLE001  a signal handler may raise any
                interrupt = error
        try:
            if interrupt:
                raise interrupt
        finally:
            del interrupt  # its traceback has this frame

    def _start(self) -> None:
        try:
            Thread(target=self._run, name=self._name, daemon=False).start()
        except RuntimeError as error:
            self._error = _no_thread(self._name, error)
            self._done.set(None)
            self._over.set(None)

    def _run(self) -> None:
        self._begun = True
        try:
            if not self.dropped:  # `_leave` sets it and then reads `_begun`: at least one sees the other's
                self._value = self.work()
        except BaseException as error:  # noqa: BLE001  the caller raises it
            self._error = error
        self._done.set(None)
        try:
            self.clean()
        finally:
            self._over.set(None)
