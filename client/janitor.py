"""The thread on which memory is mapped and unmapped.

Python delivers signals to the main thread alone, so here no KeyboardInterrupt can come between a
driver call and the note that it was made. What is to be done when an object dies comes here too: a
finalizer runs anywhere, at any time, even inside a lock, and may be interrupted like any Python code.
Where an object is guarded, its death runs no Python at all, but one call into C, which leaves work here.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, TypeVar
from weakref import ref

T = TypeVar("T")

Task = Callable[[], None]

FIRST_RETRY = 0.1
LAST_RETRY = 30.0
"""Seconds until what failed is tried again: at first, and at most; it doubles in between."""


class OwnThread(Thread):
    """A thread of a session, which waits for none: two that wait for each other would do so until their time is up."""


class Guard(ref[T]):
    """A weak reference that knows what is to be done when its object is gone."""

    __slots__ = ("task",)

    task: Task


class Janitor:
    """Does what it is given, in order, on its own thread."""

    def __init__(self) -> None:
        self._tasks: SimpleQueue[Guard[Any] | Task | None] = SimpleQueue()
        self._guards: dict[int, Guard[Any]] = {}
        self._later: list[tuple[float, int, Task]] = []  # a heap, by time and then by order
        self._order = itertools.count()
        self._thread = OwnThread(target=self._run, name="cubroker-janitor", daemon=True)

    def start(self) -> None:
        """Start the thread. Should that be interrupted, :meth:`stop` ends it, whether it runs or not."""
        self._thread.start()

    def put(self, task: Task | Guard[Any]) -> None:
        """Have ``task`` done; that of a guard once, whether it is asked for here or by the death of its object."""
        self._tasks.put(task)

    def guard(self, thing: T, task: Task) -> Guard[T]:
        """Have ``task`` done when ``thing`` is gone. In a forked child, which has no such thread, nothing happens."""
        guard = Guard(thing, self._tasks.put)
        guard.task = task
        self._guards[id(guard)] = guard  # the collector does not call back a reference that is garbage itself
        return guard

    def later(self, task: Task, seconds: float) -> None:
        """Have ``task`` done after some seconds, unless the thread ends before. Called on this thread alone."""
        heapq.heappush(self._later, (time.monotonic() + seconds, next(self._order), task))

    def stop(self) -> None:
        """End the thread after the tasks that it has."""
        self._tasks.put(None)

    def join(self, timeout: float) -> None:
        """Wait up to ``timeout`` seconds for the thread to end."""
        self._thread.join(timeout)

    def _run(self) -> None:
        while (task := self._next()) is not None:
            if not isinstance(task, Guard):
                task()
            elif self._guards.pop(id(task), None):
                task.task()
            del task  # whatever it refers to must not live until the next one comes
        self._guards.clear()  # they refer to this object
        self._later.clear()

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
    """Has a task of the janitor's done again when it has failed, later each time."""

    def __init__(self, janitor: Janitor, task: Task) -> None:
        self._janitor = janitor
        self._task = task
        self._pause = FIRST_RETRY

    @property
    def first(self) -> bool:
        """Whether the task has never failed."""
        return self._pause == FIRST_RETRY

    def again(self) -> None:
        """The task has failed."""
        self._janitor.later(self._task, self._pause)
        self._pause = min(2 * self._pause, LAST_RETRY)
