"""The thread on which memory is mapped and unmapped.

Python delivers signals to the main thread alone, so here no KeyboardInterrupt can come between a
driver call and the note that it was made. What is to be done when an object dies comes here too: a
finalizer runs anywhere, at any time, even inside a lock, and may be interrupted like any Python code.
Where an object is guarded, its death runs no Python at all, but one call into C, which leaves work here.
"""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread
from typing import Any, TypeVar
from weakref import ref

T = TypeVar("T")

Task = Callable[[], None]


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

    def stop(self) -> None:
        """End the thread after the tasks that it has."""
        self._tasks.put(None)

    def join(self, timeout: float) -> None:
        """Wait up to ``timeout`` seconds for the thread to end."""
        self._thread.join(timeout)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            if not isinstance(task, Guard):
                task()
            elif self._guards.pop(id(task), None):
                task.task()
            del task  # whatever it refers to must not live until the next one comes
        self._guards.clear()  # they refer to this object
