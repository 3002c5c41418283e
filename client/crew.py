"""Threads that share one piece of work, and of which none is left when it is over."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Thread, current_thread


class Crew(ThreadPoolExecutor):
    """Up to ``count`` threads.

    The executor knows a thread when its start has returned. An interrupt can come before that, so each thread
    makes itself known before it takes any work.
    """

    def __init__(self, count: int, name: str) -> None:
        self._known: list[Thread] = []
        known = self._known  # not self: the threads must not keep it
        super().__init__(count, name, initializer=lambda: known.append(current_thread()))

    def end(self) -> None:
        """Drop what nobody has begun, and wait for the rest.

        The threads use memory that is about to be unmapped, so nothing cuts the wait for them short.
        """
        interrupted = False
        while True:
            try:
                self.shutdown(cancel_futures=True)
                for thread in self._known:
                    thread.join()
                break
            except KeyboardInterrupt:
                interrupted = True
        if interrupted:
            raise KeyboardInterrupt
