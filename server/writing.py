"""Writing to the journal: all that was decided, before anybody hears of it, and again where there was no room."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from cubroker.protocol.system_errors import explain
from cubroker.server.ledger import Ledger
from cubroker.server.scribe import Changes, Scribe

if TYPE_CHECKING:
    from cubroker.server.store.store import Store

log = logging.getLogger(__name__)

PAUSE = 0.5
"""Seconds after which what could not be written is written again."""


class Writing:
    """Brings what changed from the ledger and the scribe to the journal.

    Args:
        ledger: has one half of what is to be written.
        scribe: has the other.
        store: has the journal.
        again: called when it is time for another attempt at :meth:`write`.
    """

    def __init__(self, ledger: Ledger, scribe: Scribe, store: Store, again: Callable[[], None]) -> None:
        self._ledger = ledger
        self._scribe = scribe
        self._store = store
        self._again = again
        self._unwritten: Changes = []
        self._retry: asyncio.TimerHandle | None = None

    @property
    def behind(self) -> bool:
        """Whether something could not be written yet."""
        return bool(self._unwritten)

    def write(self) -> bool:
        """Write what changed since the last time; False if there is no room for it now."""
        self._unwritten += self._ledger.changes()
        self._unwritten += self._scribe.changes()
        if self._unwritten:
            try:
                self._store.commit(self._unwritten)
            except (OSError, MemoryError) as error:
                return self._write_later(error)
            self._unwritten = []
        return True

    def close(self) -> None:
        """Make no more attempts."""
        if self._retry:
            self._retry.cancel()

    def _write_later(self, error: OSError | MemoryError) -> bool:
        if self._retry is None:
            log.error("the journal takes nothing, so requests wait: %s", explain(error))
            self._retry = asyncio.get_running_loop().call_later(PAUSE, self._write_again)
        return False

    def _write_again(self) -> None:
        self._retry = None
        self._again()
