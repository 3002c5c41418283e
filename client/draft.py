"""A version that this process is filling."""

from __future__ import annotations

from cubroker.client.loans import Loan
from cubroker.client.mapping import Mapped
from cubroker.client.pool import Pool
from cubroker.client.replica import Index, Replica
from cubroker.client.requests import expect
from cubroker.protocol.errors import Invalid
from cubroker.protocol.messages import Sealed


class Draft(Pool):
    """The tensors of an unpublished version, which may be written: those of its first device, as a mapping.

    Leaving it without :meth:`seal` discards it. Its tensors end with it, sealed or discarded; arrays
    and framework tensors made from them must be dropped before a seal, and delay a discard.

    Attributes:
        replicas: the tensors on each device, in the order in which the devices were given.
    """

    _sealed = False

    def __init__(self, loan: Loan, mapped: Mapped, index: Index, name: str, version: int) -> None:
        super().__init__(loan, mapped, index, name, version)
        self.replicas = tuple(Replica(mapped, (place,), index) for place in mapped.places)

    def seal(self) -> int:
        """Unmap the memory and publish it, on all devices, as the pool's current version, whose number is returned.

        Work that was submitted to the devices is waited for.

        Raises:
            Invalid: arrays or framework tensors of it are in use; the draft stays open.
            DeviceFailure: the memory could not be unmapped yet; the draft is not published, and discarded when it is.
            Unavailable, TimedOut: the broker is gone or silent; the draft may or may not be published.
        """
        self._owner.check()
        with self._closing:
            mapped = self._memory()
            if in_use := mapped.end(prepare=self._loan.seal_at_end):
                names = ", ".join(in_use[:8]) + (f" and {len(in_use) - 8} more" if len(in_use) > 8 else "")
                raise Invalid(f"{self._label} is still in use: {names}; drop the arrays made from it, then seal")
            self._drop()
        return expect(self._loan.confirm(), Sealed).version

    def _release(self) -> None:
        if mapped := self._mapped:
            mapped.end()
        self._drop()

    def _drop(self) -> None:
        super()._drop()
        for replica in self.replicas:
            replica._drop()
