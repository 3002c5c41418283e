"""The threads of a load or a comparison, and how an interrupt of the caller ends them.

An interrupt of the caller stops the work without ever being raised inside it. Python delivers signals to the main
thread alone, where they can break even Python's own ``Thread.start``, ``Condition`` and executors. So the caller starts
all work with one call into C, and then only waits.
"""

from __future__ import annotations

import os
from _thread import start_new_thread
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from threading import Thread
from typing import Any, Generic, ParamSpec, Protocol, TypeVar, cast

from cubroker.client.fork_guard import OwnerProcess
from cubroker.client.transport import zmq_preflight
from cubroker.client.transport.requests import Future
from cubroker.protocol.errors import Unavailable

MAX_THREADS = 12
"""The most threads of a comparison. They all need the interpreter, and 16 on 16 cores were slower by a sixth."""

REPORT_SECONDS = 0.1
"""Seconds between reports of progress."""

Progress = Callable[[int, int], None]
"""Called with the bytes done so far and the bytes in all."""


class Clearable(Protocol):
    """A collection of work that is left to do."""

    def clear(self) -> None:
        """Drop all of it."""


P = ParamSpec("P")
T = TypeVar("T")


def run_workers(
    name: str, todo: deque[Any], work: Callable[[list[int]], T], total: int, progress: Progress | None
) -> T:
    """Run ``work(done)`` on a thread of its own and return its result; an interrupt or error of the caller ends it.

    Args:
        name: of the thread.
        todo: what is left to do; the work ends when it is empty.
        work: does the work with ``len(done)`` threads; each counts the bytes that it has done in its item of ``done``.
        total: bytes in all.
        progress: called by this thread, now and then, with bytes done and bytes in all.
    """
    done = [0] * count_threads(len(todo), MAX_THREADS)
    thread = SupervisedCall(name, partial(work, done), todo.clear)
    try:
        thread.begin()
        return thread.result((lambda: progress(sum(done), total)) if progress else None)
    finally:
        thread.end()


def count_threads(tasks: int, limit: int) -> int:
    """Return how many threads share some tasks: at most ``limit``, and at most one per core."""
    return max(1, min(len(os.sched_getaffinity(0)), limit, tasks))


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
    """The threads that share the work ``todo``. If a thread cannot start, ``todo`` is cleared, so that all end."""

    def __init__(self, count: int, name: str, todo: Clearable) -> None:
        super().__init__(count, name)
        self._name = name
        self._todo = todo

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> futures.Future[T]:
        """Have a thread call ``fn``; raises ``Unavailable`` if no thread can start."""
        try:
            return super().submit(fn, *args, **kwargs)
        except RuntimeError as error:
            self._todo.clear()
            raise _no_thread(self._name, error) from error


def _no_thread(name: str, error: RuntimeError) -> Unavailable:
    return Unavailable(f"{name} has no threads to work in: {error}; {zmq_preflight.thread_limits()}")


class SupervisedThread(ABC, Generic[T]):
    """A thread whose work may use objects that an interrupt could break.

    Its caller calls :meth:`begin` within a ``try`` block that ends with :meth:`end`.
    """

    def __init__(self, name: str) -> None:
        #: Whether the caller no longer wants the result.
        self.dropped = False
        self._owner = OwnerProcess()
        self._name = name
        self._begun = False
        self._done: Future[None] = Future()
        self._over: Future[None] = Future()
        self._value: T | None = None
        self._error: BaseException | None = None

    @abstractmethod
    def work(self) -> T:
        """Do the work, on the thread."""

    @abstractmethod
    def stop(self) -> None:
        """Make the work end early: called in the caller's thread, at any time, also when it is done."""

    def clean(self) -> None:
        """Clean up, on the thread, after the result was handed over; raises nothing."""

    def begin(self) -> None:
        """Start the thread; raises ``Unavailable`` if it is already certain that threads have run out."""
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


class SupervisedCall(SupervisedThread[T]):
    """A thread that makes one call, which ``stop`` makes end early."""

    def __init__(self, name: str, call: Callable[[], T], stop: Callable[[], object]) -> None:
        super().__init__(name)
        self._call = call
        self._stop = stop

    def work(self) -> T:
        """Make the call."""
        return self._call()

    def stop(self) -> None:
        """Make the call end early."""
        self._stop()
