"""A broker that calls back what it lent: it is drained by hand, or was told to end."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from math import inf
from pathlib import Path

from cubroker.client.futures import Future
from cubroker.protocol.errors import CubrokerError
from cubroker.protocol.messages import Draining

log = logging.getLogger(__name__)


class Recall:
    """Whether the broker of a session is draining.

    Args:
        directory: the broker's.
        held: what the session holds.

    Attributes:
        why: why the broker lends nothing new; nothing if it does.
    """

    def __init__(self, directory: Path, held: Collection[object]) -> None:
        self.why = ""
        self._directory = directory
        self._held = held
        self._news: Future[None] = Future()  # the next; no Condition, whose lock an interrupt may leave shut
        self._error: CubrokerError | None = None

    def tell(self, notice: Draining) -> None:
        """Take note of what the broker says. Runs on the connection's thread."""
        if notice.why == self.why:
            return
        self.why = notice.why
        if notice.why:
            level = logging.WARNING if self._held else logging.INFO
            log.log(level, "the broker on %s is draining, give back what you hold: %s", self._directory, notice.why)
        else:
            log.info("the broker on %s lends again", self._directory)
        self._wake()

    def fail(self, error: CubrokerError) -> None:
        """There will be no more news."""
        self._error = self._error or error
        self._wake()

    def wait(self, timeout: float | None, *, over: bool) -> bool:
        """Wait up to ``timeout`` seconds until the broker drains, or until that is ``over``; whether it is so.

        Raises:
            Unavailable: the broker is gone, or the session ends.
        """
        deadline = time.monotonic() + (inf if timeout is None else timeout)
        while True:
            news = self._news  # taken before the look, so that none is missed
            if self._error:
                raise self._error.anew()
            if bool(self.why) != over:
                return True
            left = deadline - time.monotonic()
            if left <= 0 or not news.wait(None if left == inf else left):
                return bool(self.why) != over

    def _wake(self) -> None:
        news, self._news = self._news, Future()
        news.set(None)
