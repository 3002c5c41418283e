"""The thread that maps and unmaps memory.

Python delivers signals to the main thread alone, so on this thread no KeyboardInterrupt comes between a driver call and
the note that it was made. Finalizers send their work here too: a finalizer runs anywhere, at any time, even inside a
lock, and may be interrupted like any Python code. The death of a guarded object therefore runs no Python at all, but
one call into C, which puts the object's task into the queue of this thread.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, TypeVar
from weakref import ref

from cubroker.client.fork_guard import SessionThread
from cubroker.client.transport.requests import Future

log = logging.getLogger(__name__)

T = TypeVar("T")

Task = Callable[[], None]

FIRST_RETRY = 0.1
LAST_RETRY = 30.0
"""Seconds until a failed task is tried again: the first pause, which doubles with each failure, and the longest."""


class Guard(ref[T]):
    """A weak reference with the task for the death of its object."""

    __slots__ = ("task",)

    task: Task


class CleanupThread:
    """A thread that does tasks in the order in which they were put."""

    def __init__(self) -> None:
        self._tasks: SimpleQueue[Guard[Any] | Task | None] = SimpleQueue()
        #: Queues a task, by one call into C. A guard's task runs once, for this call or the death of the object.
        self.put: Callable[[Task | Guard[Any]], None] = self._tasks.put
        self._guards: dict[int, Guard[Any]] = {}
        self._later: list[tuple[float, int, Task]] = []  # a heap, by time and then by order
        self._order = itertools.count()
        #: Whether a task has failed, which ends the thread: nothing is mapped or unmapped any more.
        self.failed = False
        #: Called then.
        self.on_failure: Callable[[], None] | None = None
        #: Delivered at the end of the thread.
        self.ended: Future[None] = Future()
        self._thread = SessionThread(target=self._run, name="cubroker-cleanup", daemon=True)

    def start(self) -> None:
        """Start the thread. If that is interrupted, :meth:`stop` ends the thread, whether it runs or not."""
        self._thread.start()

    def guard(self, thing: T, task: Task) -> Guard[T]:
        """Do ``task`` when ``thing`` is dead. In a forked child, which has no such thread, nothing happens."""
        guard = Guard(thing, self.put)
        guard.task = task
        self._guards[id(guard)] = guard  # the collector does not call back a reference that is garbage itself
        return guard

    def later(self, task: Task, seconds: float) -> None:
        """Do ``task`` after some seconds, unless the thread ends before. Called on this thread alone."""
        heapq.heappush(self._later, (time.monotonic() + seconds, next(self._order), task))

    def stop(self) -> None:
        """End the thread after the tasks that are queued."""
        self._tasks.put(None)

    def join(self) -> None:
        """Wait for the thread, which has ``ended``."""
        self._thread.join()

    def _run(self) -> None:
        try:
            while (task := self._next()) is not None:
                if not isinstance(task, Guard):
                    task()
                elif self._guards.pop(id(task), None):
                    task.task()
                del task  # its objects must not live until the next task comes
        except BaseException:
            self.failed = True
            if on_failure := self.on_failure:
                on_failure()
            raise
        finally:
            self._guards.clear()  # they refer to this object
            self._later.clear()
            self.on_failure = None
            self.ended.set(None)

    def _next(self) -> Guard[Any] | Task | None:
        """Wait for the next task, or for one whose time has come; None ends the thread."""
        while self._later:
            pause = self._later[0][0] - time.monotonic()
            if pause <= 0:
                return heapq.heappop(self._later)[2]
            try:
                return self._tasks.get(timeout=pause)
            except Empty:
                continue
        return self._tasks.get()


class Retry:
    """Repeats a failed task on the cleanup thread, with longer and longer pauses."""

    def __init__(self, cleanup: CleanupThread, task: Task) -> None:
        self._cleanup = cleanup
        self._task = task
        self._pause = FIRST_RETRY

    def again(self, failure: str) -> None:
        """Repeat the task, which has failed; the first ``failure`` is logged."""
        if self._pause == FIRST_RETRY:
            log.error("%s; this process tries again until it succeeds", failure)
        self._cleanup.later(self._task, self._pause)
        self._pause = min(2 * self._pause, LAST_RETRY)
