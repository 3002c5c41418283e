"""What a mistake in the ledger leaves, found out at once by this broker and not by the next one.

The broker survives a mistake over one event; but what that left half-done may contradict the rest of the books. The
next broker would give such things up, or refuse all of them, and nobody would know why.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from cubroker.server.ledger import Ledger
from cubroker.server.ledger.auditing import Audit
from cubroker.server.ledger.events import Effect

log = logging.getLogger(__name__)

SHARE = 20
"""Looking at all the books takes one part of so many of the loop's time at most, however many mistakes there are."""

MOST = 20
"""Findings that are named."""


class Aftermath:
    """Goes on after a mistake, and says what it did to the books."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._loop = asyncio.get_running_loop()
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def recover(self) -> Sequence[Effect]:
        """Return what is to be done of an event all the same that an exception ended; the books are looked at soon."""
        if self._timer is None:
            self._timer = self._loop.call_at(max(self._due, self._loop.time()), self._look)
        try:
            return self._ledger.recover()
        # As over the event itself: others are served.
        except Exception:
            log.exception("the broker failed at going on after that")
            return self._ledger.give_up()

    def close(self) -> None:
        """Look at nothing any more."""
        if self._timer:
            self._timer.cancel()

    def _look(self) -> None:
        self._timer, began = None, self._loop.time()
        try:
            _tell(self._ledger.audit())
        finally:
            self._due = self._loop.time() + SHARE * (self._loop.time() - began)


def _tell(audit: Audit) -> None:
    if not (audit.disagreements or audit.given_up or audit.refused):
        log.warning("the ledger's books agree after that mistake; report it, with its traceback")
        return
    for finding in audit.disagreements[:MOST]:
        log.error("after that mistake the ledger's books do not agree: %s", finding)
    for finding in audit.given_up[:MOST]:
        log.error("the next broker would give up what contradicts the rest: %s", finding)
    if audit.refused:
        log.error("the next broker would refuse all that this one has recorded: %s", audit.refused)
    log.error("what is held goes on being served; %s", _advice(audit))


def _advice(audit: Audit) -> str:
    if audit.refused:
        return "do not restart the broker before everything was given back; report this, with the traceback"
    again = ", and publish anew what is lost then" if audit.given_up else ""
    return f"restart the broker when that suits, which puts the books in order{again}; report this, with the traceback"
