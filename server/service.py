"""The broker as a service: whoever started it hears when it serves, how it fares, and that its loop goes round."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from cubroker.protocol.errors import Unavailable
from cubroker.server.store.notify import Manager

log = logging.getLogger(__name__)

ENDING = 60.0
"""Seconds that the end of a broker may take once it has waited for what it lent."""

PERIOD = 10.0
"""Seconds after which the status is told again, if it changed, where no watchdog asks for more."""


class Service:
    """Speaks to the service manager from the loop that serves, so that a loop which hangs falls silent.

    Args:
        manager: who is told; None: nobody.
        status: returns in one line how the broker fares.
    """

    def __init__(self, manager: Manager | None, status: Callable[[], str]) -> None:
        self._manager = manager
        self._status = status
        self._told = ""
        self._stopping = False
        self._timer: asyncio.TimerHandle | None = None

    def ready(self) -> None:
        """Say that clients are served, and keep saying how it goes."""
        if self._manager:
            self._told = self._status()
            self._say(self._manager.ready, self._told)
            self._beat(self._manager)

    def reloading(self) -> None:
        """Say that settings are read again; :meth:`ready` says that it is done."""
        if self._manager:
            self._say(self._manager.reloading)

    def draining(self, seconds: float) -> None:
        """Say that it ends, and that it may take ``seconds`` until it begins to; and keep saying how it goes."""
        if self._manager:
            self._stopping = True
            self._say(self._manager.stopping, seconds + ENDING)
            self._beat(self._manager)

    def stopping(self) -> None:
        """Say that it ends, and nothing more."""
        if self._timer:
            self._timer.cancel()
        if self._manager and not self._stopping:
            self._say(self._manager.stopping)

    def _beat(self, manager: Manager) -> None:
        if self._timer:
            self._timer.cancel()
        interval = manager.watchdog_interval
        if interval:
            self._say(manager.watchdog)
        if (status := self._status()) != self._told:
            self._told = status
            self._say(manager.status, status)
        self._timer = asyncio.get_running_loop().call_later(min(interval or PERIOD, PERIOD), self._beat, manager)

    def _say(self, message: Callable[..., None], *arguments: str | float) -> None:
        try:
            message(*arguments)
        except Unavailable as error:
            log.warning("%s", error.message)
