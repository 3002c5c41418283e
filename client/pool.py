"""A published version, attached to by this process."""

from __future__ import annotations

from contextlib import suppress
from threading import RLock
from typing import Self

from cubroker.client.loans import Loan
from cubroker.client.mapping import Mapped
from cubroker.client.replica import Index, Replica
from cubroker.protocol.errors import Unavailable


class Pool(Replica):
    """The tensors of one version on one device, by name, and the lease that keeps them there.

    Closing it makes it useless here at once. The memory stays mapped, and the lease held, until the
    last of its tensors, and of whatever arrays and framework tensors were made from them, is gone.

    Attributes:
        name: the pool's name.
        version: the version, from 1 on.
        lease: the lease's number.
    """

    def __init__(self, loan: Loan, mapped: Mapped, index: Index, name: str, version: int) -> None:
        super().__init__(mapped, 0, index)
        self.name = name
        self.version = version
        self.lease = loan.lease
        self._loan = loan
        self._closing = RLock()  # a finalizer or a signal handler may close it in the middle

    def __repr__(self) -> str:
        state = ", closed" if self.closed else ""
        return f"<{type(self).__name__} {self.name!r} version {self.version}, {len(self)} tensors{state}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._loan.owner.here():  # in a child that leaves a block of its parent's, there is nothing to do
            self.close()

    @property
    def nbytes(self) -> int:
        """Bytes of the version on one device, padding included."""
        return self.layout.nbytes

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called, here or by the Broker."""
        return self._mapped is None

    def close(self) -> None:
        """Give the memory back: now, or with the last tensor or array of it that still lives.

        Raises:
            DeviceFailure: the memory could not be unmapped; the lease ends with this process.
            TimedOut: the memory is unmapped, but the broker has not yet confirmed that the lease is over.
        """
        if self.let_go():
            self.confirm()

    def let_go(self) -> bool:
        """Begin to close the pool, without waiting; returns whether :meth:`confirm` has something to wait for."""
        self._loan.owner.check()
        with self._closing:
            closed = self.closed
            if not closed:
                self._release()
        return not closed and self._loan.ending

    def confirm(self) -> None:
        """Wait for what :meth:`let_go` began; raises as :meth:`close` does."""
        with suppress(Unavailable):  # a broker that is gone holds no leases
            self._loan.confirm()

    def _release(self) -> None:
        self._drop()
