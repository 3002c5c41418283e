"""Refusals in the log: a line for each, and few lines for many, so that no user can fill a disk with them."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from cubroker.server.peers import Peer

log = logging.getLogger(__name__)

BURST = 20
"""Lines about refusals that one user has at once."""

REFILL = 10.0
"""Seconds after which a user has one more."""

MAX_USERS = 1024
"""Users that are remembered; the one that was refused longest ago is forgotten first."""


@dataclass(slots=True)
class _Account:
    """Lines that a user has left, as of a time, and those since its last line that were not written."""

    left: float
    since: float
    hushed: int = 0


class Allowance:
    """How much of the log each user may fill.

    Args:
        burst: lines that one has at once.
        refill: seconds after which it has one more.
        clock: the time in seconds, from any beginning.
    """

    def __init__(self, burst: int, refill: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._burst = burst
        self._refill = refill
        self._clock = clock
        self._accounts: OrderedDict[int, _Account] = OrderedDict()

    def take(self, uid: int) -> int | None:
        """Take a line; return how many were not written since the one before, or None if this one is not to be."""
        account = self._account(uid)
        if account.left < 1:
            account.hushed += 1
            return None
        account.left -= 1
        hushed, account.hushed = account.hushed, 0
        return hushed

    def _account(self, uid: int) -> _Account:
        now = self._clock()
        account = self._accounts.pop(uid, None) or _Account(self._burst, now)
        account.left = min(self._burst, account.left + (now - account.since) / self._refill)
        account.since = now
        self._accounts[uid] = account
        if len(self._accounts) > MAX_USERS:
            self._accounts.popitem(last=False)
        return account


class Denials:
    """Writes who was refused what to the log, so many lines per user and time.

    Args:
        clock: the time in seconds, from any beginning.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._allowance = Allowance(BURST, REFILL, clock)

    def log(self, peer: Peer, reason: str) -> None:
        """Log that a process was refused something, unless its user had too many lines lately."""
        hushed = self._allowance.take(peer.uid)
        if hushed is None:
            return
        more = f" ({hushed} more refusals of this user are not in the log)" if hushed else ""
        fields = {"pid": peer.pid, "uid": peer.uid, "why": reason}
        log.warning("process %d (user %d) was refused: %s%s", peer.pid, peer.uid, reason, more, extra=fields)
