"""The thread on which memory is mapped and unmapped.

Python delivers signals to the main thread alone, so here no KeyboardInterrupt can come between a
driver call and the note that it was made. Finalizers run anywhere, at any time, even inside a lock:
all that they may do is to leave work here.
"""

from __future__ import annotations

from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread

from cubroker.client.processes import Owner


class Janitor:
    """Does what it is given, in order, on its own thread."""

    def __init__(self) -> None:
        self._owner = Owner()
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = Thread(target=self._run, name="cubroker-janitor", daemon=True)
        self._thread.start()

    def put(self, task: Callable[[], None]) -> None:
        """Have ``task`` done; safe in finalizers (``SimpleQueue.put`` is reentrant). In a forked child: nothing."""
        if self._owner.here():
            self._tasks.put(task)

    def stop(self) -> None:
        """End the thread after the tasks that it has."""
        self._tasks.put(None)

    def join(self, timeout: float) -> None:
        """Wait up to ``timeout`` seconds for the thread to end."""
        self._thread.join(timeout)

    def _run(self) -> None:
        while task := self._tasks.get():
            task()
            del task  # whatever it refers to must not live until the next one comes
