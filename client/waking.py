"""A lease for memory that sleeps: the same version again, mapped where it was."""

from __future__ import annotations

from collections.abc import Sequence

from cubroker.client.addresses import Source
from cubroker.client.loans import Loan
from cubroker.client.mapping import Mapped
from cubroker.protocol.errors import Invalid
from cubroker.protocol.messages import Attach, Attached, Created


class Waking(Loan):
    """One request for such a lease. It becomes the sleeper's own, or goes back; whoever gives up waiting loses nothing.

    Args:
        sleeper: the loan whose memory sleeps.
    """

    _doing = "waking"

    def __init__(self, sleeper: Loan) -> None:
        super().__init__(sleeper._session)
        self._sleeper = sleeper

    def wake(self, body: Attach) -> None:
        """Ask for the lease, and return when the memory is mapped; raises as :meth:`Session.borrow` does."""
        self._session.borrow(body, self)

    def give_up(self) -> None:
        """As :meth:`Loan.give_up`, for what the sleeper maps."""
        self._sleeper.give_up()

    def _map(self, reply: Attached | Created, given: Sequence[Source]) -> Mapped:
        mapped = self._sleeper.resume(reply, given)
        if mapped is None:
            raise Invalid(f"pool {reply.name!r} version {reply.version} was closed while it was woken")
        return mapped

    def _opened(self, _: Mapped) -> None:
        if self._sleeper.lease == self.lease:
            self._session.forget(self)
        else:
            self._end()  # another call was faster
