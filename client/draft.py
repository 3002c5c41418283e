"""A version that this process is filling."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from cubroker.client import devices, digests
from cubroker.client.digests import Span
from cubroker.client.loans import Loan
from cubroker.client.mapping import Mapped
from cubroker.client.pool import Pool
from cubroker.client.replica import Index, Replica
from cubroker.client.requests import expect
from cubroker.driver import DriverError
from cubroker.protocol.errors import Invalid, Unsupported
from cubroker.protocol.messages import DIGESTS, Sealed


class Draft(Pool):
    """The tensors of an unpublished version, which may be written: those of its first device, as a mapping.

    Leaving it without :meth:`seal` discards it. Its tensors end with it, sealed or discarded; arrays
    and framework tensors made from them must be dropped before a seal, and delay a discard.

    Attributes:
        replicas: the tensors on each device, in the order in which the devices were given.
    """

    _sealed = False

    def __init__(
        self, loan: Loan, mapped: Mapped, index: Index, name: str, version: int, *, scratch: bool = False
    ) -> None:
        super().__init__(loan, mapped, index, name, version)
        self._scratch = scratch
        self.replicas = tuple(Replica(mapped, (place,), index) for place in mapped.places)

    def seal(self, *, digest: bool = False) -> int:
        """Unmap the memory and publish it, on all devices, as the pool's current version, whose number is returned.

        Work that was submitted to the devices is waited for.

        Args:
            digest: have each device compute a digest of what it holds, padding included, and publish these as well, so
                that :meth:`Pool.check` finds bytes that are changed later. It takes about as long as reading all once.

        Raises:
            Invalid: arrays or framework tensors of it are in use; the draft stays open.
            Unsupported: a digest of what its readers may write, or for a broker that is too old; the draft stays open.
            DeviceFailure, OutOfMemory: a digest could not be computed; the draft stays open.
            DeviceFailure: the memory could not be unmapped yet; the draft is not published, and discarded when it is.
            Unavailable, TimedOut: the broker is gone or silent; the draft may or may not be published.
        """
        self._owner.check()
        with self._closing:
            mapped = self._memory()
            if in_use := mapped.end(prepare=self._digesting() if digest else lambda: self._loan.seal):
                names = ", ".join(in_use[:8]) + (f" and {len(in_use) - 8} more" if len(in_use) > 8 else "")
                raise Invalid(f"{self._label} is still in use: {names}; drop the arrays made from it, then seal")
            self._drop()
        return expect(self._loan.confirm(), Sealed).version

    def check(self) -> None:
        """Raise ``Invalid``: there is nothing yet that a draft could be compared with."""
        raise Invalid(f"{self._label} was not published, so nothing says what it should hold; seal it first")

    def _digesting(self) -> Callable[[], Callable[[], None]]:
        """Return what computes the digests of the memory; that returns what publishes it with them."""
        if self._scratch:
            raise Unsupported(
                f"{self._label} is writable by its readers, so a digest would not tell what it holds; seal it without"
            )
        if self._loan.session.version < DIGESTS:
            raise Unsupported(f"{self._label}: the broker is too old to keep a digest; seal it without, or upgrade it")
        uuids = [replica.memory_device.uuid for replica in self.replicas]
        pieces = [span for replica in self.replicas for span in digests.spans(replica)]
        return partial(self._digested, uuids, pieces)

    def _digested(self, uuids: list[str], pieces: list[Span]) -> Callable[[], None]:
        try:
            found = digests.sealing(uuids, pieces, self.layout)
        except DriverError as error:
            raise devices.failure(error, f"computing the digest of {self._label}") from error
        return partial(self._loan.seal, found)

    def _release(self) -> None:
        if mapped := self._mapped:
            mapped.end()
        self._drop()

    def _drop(self) -> None:
        super()._drop()
        for replica in self.replicas:
            replica._drop()
