"""A lease for memory that sleeps: the same version again, mapped where it was."""

from __future__ import annotations

from collections.abc import Sequence

from cubroker.client import devices
from cubroker.client.loans import Loan
from cubroker.driver import DriverError
from cubroker.protocol.errors import CubrokerError, Invalid
from cubroker.protocol.messages import Attach, Attached, Created


class Waking(Loan):
    """One request for such a lease. It becomes the sleeper's own, or goes back; whoever gives up waiting loses nothing.

    Args:
        sleeper: the loan whose memory sleeps.
    """

    def __init__(self, sleeper: Loan) -> None:
        super().__init__(sleeper._session)
        self._sleeper = sleeper

    def wake(self, body: Attach) -> None:
        """Ask for the lease, and return when the memory is mapped; raises as :meth:`Session.borrow` does."""
        self._session.borrow(body, self)

    def _open(self, reply: Attached | Created, given: Sequence[int]) -> None:
        try:
            if self._abandoned:
                return self._end()
            mapped = self._sleeper.resume(reply, given)
            if mapped is None:
                raise Invalid(f"pool {reply.name!r} version {reply.version} was closed while it was woken")
        except (CubrokerError, DriverError) as error:
            self._fail(devices.failure(error, f"waking pool {reply.name!r} version {reply.version}"))
            return self._end()
        finally:
            self._session.inbox.close(given)
        future, self._granted = self._granted, None
        assert future is not None
        future.set((reply, mapped))
        if self._sleeper.lease != self.lease:
            return self._end()  # another call was faster
        return self._session.forget(self)
