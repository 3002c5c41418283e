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
"""Lines that one user has at once."""

REFILL = 10.0
"""Seconds after which a user has one more."""

MAX_USERS = 1024
"""Users that are remembered; the one that was refused longest ago is forgotten first."""


@dataclass(slots=True)
class _Account:
    """Lines that a user has left, as of a time, and the refusals since its last line that had none."""

    left: float
    since: float
    hushed: int = 0


class Denials:
    """Writes who was refused what to the log, so many lines per user and time.

    Args:
        clock: the time in seconds, from any beginning.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._accounts: OrderedDict[int, _Account] = OrderedDict()

    def log(self, peer: Peer, reason: str) -> None:
        """Log that a process was refused something, unless its user had too many lines lately."""
        account = self._account(peer.uid)
        if account.left < 1:
            account.hushed += 1
            return
        account.left -= 1
        more = f" ({account.hushed} more refusals of this user are not in the log)" if account.hushed else ""
        account.hushed = 0
        fields = {"pid": peer.pid, "uid": peer.uid, "why": reason}
        log.warning("process %d (user %d) was refused: %s%s", peer.pid, peer.uid, reason, more, extra=fields)

    def _account(self, uid: int) -> _Account:
        now = self._clock()
        account = self._accounts.pop(uid, None) or _Account(BURST, now)
        account.left = min(BURST, account.left + (now - account.since) / REFILL)
        account.since = now
        self._accounts[uid] = account
        if len(self._accounts) > MAX_USERS:
            self._accounts.popitem(last=False)
        return account
