"""What leases store to all replicas by after a restart of the broker, on its way to them. Refers to no session."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from threading import RLock
from typing import TYPE_CHECKING

from cubroker.client.descriptors import Inbox
from cubroker.client.janitor import Janitor
from cubroker.client.loans import Loan
from cubroker.protocol.errors import CubrokerError, Unavailable
from cubroker.protocol.messages import Rebound

if TYPE_CHECKING:
    from cubroker.client.signals import Signal


class Rebinding:
    """Has every lease that a notice is for take what comes with it.

    Args:
        loans: those of the session, and its events.
        lock: held while ``loans`` change.
        inbox: where descriptors come.
        janitor: does what is to be done, and so after all that was to be done for the lease before.
    """

    def __init__(self, loans: Iterable[Loan | Signal], lock: RLock, inbox: Inbox, janitor: Janitor) -> None:
        self._loans = loans
        self._lock = lock
        self._inbox = inbox
        self._janitor = janitor

    def begin(self, notice: Rebound) -> None:
        """Bring a lease what a notice says, once it is there. Runs on the connection's thread."""
        self._inbox.rebound(notice, lambda given: self._janitor.put(lambda: self._bring(notice, given)))
        for loan in self._held():
            if loan.lease == notice.lease:
                loan.give_up()

    def fail(self, reason: CubrokerError) -> None:
        """The connection is over: nothing comes any more. Runs on its thread."""
        for loan in self._held():
            loan.give_up()
        self._janitor.put(lambda: self._fail(reason))

    def _bring(self, notice: Rebound, given: Sequence[int] | CubrokerError) -> None:
        if isinstance(given, Unavailable):  # the connection is over
            return None
        for loan in self._held():
            if loan.lease == notice.lease:
                return loan.rebound(notice, given)
        return None if isinstance(given, CubrokerError) else self._inbox.close(given)

    def _fail(self, reason: CubrokerError) -> None:
        for loan in self._held():
            loan.unreachable(reason)

    def _held(self) -> list[Loan]:
        with self._lock:
            return [loan for loan in self._loans if isinstance(loan, Loan)]
