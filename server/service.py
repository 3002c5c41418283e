"""The broker as a service: whoever started it hears when it serves, how it fares, and that its loop goes round."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from cubroker.server.store import words
from cubroker.server.store.outbox import Outbox

ENDING = 60.0
"""Seconds that the end of a broker may take once it has waited for what it lent."""

PERIOD = 10.0
"""Seconds after which the status is told again, if it changed, where no watchdog asks for more."""


class Service:
    """Speaks to the service manager from the loop that serves, so that a loop which hangs falls silent.

    Args:
        outbox: leads to who is told; None: nobody.
        status: returns in one line how the broker fares.
    """

    def __init__(self, outbox: Outbox | None, status: Callable[[], str]) -> None:
        self._outbox = outbox
        self._status = status
        self._told = ""
        self._stopping = False
        self._timer: asyncio.TimerHandle | None = None

    def ready(self) -> None:
        """Say that clients are served, and keep saying how it goes."""
        if self._outbox:
            self._told = self._status()
            self._outbox.say(words.ready(self._told))
            self._beat(self._outbox)

    def reloading(self) -> None:
        """Say that settings are read again; :meth:`ready` says that it is done."""
        if self._outbox:
            self._outbox.say(words.reloading())

    def draining(self, seconds: float) -> None:
        """Say that it ends, and that it may take ``seconds`` until it begins to; and keep saying how it goes."""
        if self._outbox:
            self._stopping = True
            self._outbox.say(words.stopping(seconds + ENDING))
            self._beat(self._outbox)

    def stopping(self) -> None:
        """Say that it ends, and nothing more."""
        if self._timer:
            self._timer.cancel()
        if self._outbox and not self._stopping:
            self._outbox.say(words.stopping(ENDING))

    def _beat(self, outbox: Outbox) -> None:
        if self._timer:
            self._timer.cancel()
        interval = outbox.manager.watchdog_interval
        if interval:
            outbox.say(words.WATCHDOG, "life")
        if (status := self._status()) != self._told:
            self._told = status
            outbox.say(words.status(status), "status")
        self._timer = asyncio.get_running_loop().call_later(min(interval or PERIOD, PERIOD), self._beat, outbox)
