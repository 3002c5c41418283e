"""Work that may block, on a thread of its own: the event loop has no time for it."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from queue import SimpleQueue
from typing import Generic, TypeVar

Q = TypeVar("Q")


class Orders(ABC, Generic[Q]):
    """Requests, and the thread that does them one after the other, in the order they were made."""

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[Q | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=name)
        self._thread.start()

    def submit(self, request: Q) -> None:
        """Queue a request."""
        self._queue.put(request)

    def close(self) -> None:
        """Finish what is queued, give back everything that nobody uses, and end the thread."""
        self._queue.put(None)
        self._thread.join()

    def _serve(self) -> None:
        while (request := self._queue.get()) is not None:
            self._do(request)
        self._give_all_back()

    @abstractmethod
    def _do(self, request: Q) -> None:
        """Do what is asked; on the thread, which an error would end."""

    @abstractmethod
    def _give_all_back(self) -> None:
        """Nothing more is asked."""
