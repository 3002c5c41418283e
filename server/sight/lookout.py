"""Views of the ledger for another thread, which the broker's loop takes, and not more often than it has time for."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple

from cubroker.protocol.errors import InternalFailure
from cubroker.protocol.messages import View

PERIOD = 0.5
"""Seconds for which a view is good enough."""

SHARE = 20
"""A view that took so long is good enough for so many times as long: looking takes a twentieth of the loop at most."""

PATIENCE = 5.0
"""Seconds that the loop may take before whoever asks is told that it does not answer."""


class Seen(NamedTuple):
    """A view, and the revision that it shows."""

    view: View
    revision: int


class Lookout:
    """Gets views from the loop of the broker.

    Args:
        loop: the broker's.
        look: takes a view; called on that loop.
        revision: a number that changes with whatever can be seen; called on any thread.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, look: Callable[[], View], revision: Callable[[], int]) -> None:
        self.revision = revision
        self._loop = loop
        self._look = look
        self._turn = asyncio.Lock()
        self._latest: Seen | None = None
        self._until = 0.0

    async def view(self) -> Seen:
        """Return a view that is not old; raises ``TimeoutError`` if the loop does not answer."""
        # Whoever waits for its turn waits for the same loop, and is told as soon.
        async with asyncio.timeout(PATIENCE), self._turn:
            if self._latest is not None and time.monotonic() < self._until:
                return self._latest
            taken: Future[tuple[Seen, float]] = Future()
            self._loop.call_soon_threadsafe(self._take, taken)
            seen, cost = await asyncio.wrap_future(taken)
            self._latest, self._until = seen, time.monotonic() + max(PERIOD, SHARE * cost)
            return seen

    def _take(self, taken: Future[tuple[Seen, float]]) -> None:
        """Take a view on the broker's loop, unless nobody waits for it any more."""
        if not taken.set_running_or_notify_cancel():
            return
        began = time.monotonic()
        try:
            seen = Seen(self._look(), self.revision())
            taken.set_result((seen, time.monotonic() - began))
        finally:
            if not taken.done():  # by a mistake of ours, which the loop logs; whoever asked hears that there was one
                taken.set_exception(InternalFailure("the broker failed at looking at itself; its log says more"))
