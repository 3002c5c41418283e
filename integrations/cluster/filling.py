"""A draft's memory while sources fill it: which piece comes from which source, and whether all came as it was."""

from __future__ import annotations

import time
from collections.abc import Callable
from queue import SimpleQueue
from random import Random
from threading import Condition, Lock, Thread
from typing import NamedTuple, TypeAlias

from cubroker.client import Draft, digests
from cubroker.client.loading.background_reads import at_address
from cubroker.integrations.cluster.engine import MemoryRegion
from cubroker.integrations.cluster.messages import ExportedVersion
from cubroker.integrations.cluster.sources import Striping, VersionPiece, cut
from cubroker.protocol.errors import CubrokerError, Unavailable


class Whole(NamedTuple):
    """An allocation of a replica has the digest that it should have."""

    replica: int
    allocation: int


class Wrong(NamedTuple):
    """It has another one."""

    replica: int
    allocation: int


class FillingFailed(NamedTuple):
    """This side cannot go on."""

    error: CubrokerError


Filled: TypeAlias = Whole | Wrong | FillingFailed
"""What happens to memory that is filled."""


class Filling:
    """A draft's memory while sources fill it. Any thread may call it.

    The replicas that are read into are those that have no upstream; the others are copied from device to device later.
    """

    def __init__(
        self, draft: Draft, opened: ExportedVersion, patience: float, report: Callable[[Filled], object]
    ) -> None:
        #: Seconds after which a source that brings nothing of what it began is given up.
        self.patience = patience
        self._opened = opened
        self._report = report
        self._lock = Lock()
        #: Notified when a source has ended a piece, or itself.
        self._ended = Condition(self._lock)
        self._over = False
        #: Of the first device that is read into.
        self.context = draft.replicas[0].context
        self._host = self.context.host
        self._replicas = {
            number: replica for number, replica in enumerate(draft.replicas) if number == 0 or not replica.upstream
        }
        self._views = {
            number: [
                MemoryRegion(view.pointer, view.nbytes, None if self._host else view.memory_device.index)
                for view in replica.allocation_views
            ]
            for number, replica in self._replicas.items()
        }
        self._ranges = {number: replica.digest_ranges() for number, replica in self._replicas.items()}
        sizes = [place.nbytes for place in opened.places]
        self._striping = Striping(cut(sizes, list(self._replicas)), chance=Random())  # noqa: S311  # any order will do
        self._sums = {
            (each, number): digests.PartialDigest() for each in self._replicas for number in range(len(sizes))
        }
        self._checks: SimpleQueue[tuple[VersionPiece, bool] | None] = SimpleQueue()
        self._checker = Thread(target=self._check, name="cubroker-digests", daemon=True)
        self._checker.start()

    @property
    def regions(self) -> list[MemoryRegion]:
        """All of the memory that is read into."""
        return [region for regions in self._views.values() for region in regions]

    @property
    def allocations(self) -> int:
        """How many allocations are to become whole, on all replicas that are read into."""
        return len(self._sums)

    @property
    def progress(self) -> tuple[int, int]:
        """Bytes that are there, and bytes in all."""
        return self._striping.nbytes, self._striping.total

    @property
    def have(self) -> int:
        """See :attr:`Striping.have`."""
        with self._lock:
            return self._striping.have

    @property
    def from_parts(self) -> int:
        """See :attr:`Striping.from_parts`."""
        return self._striping.from_parts

    def local(self, piece: VersionPiece) -> MemoryRegion:
        """Return where a piece goes."""
        region = self._views[piece.replica][piece.allocation]
        return MemoryRegion(region.pointer + piece.offset, piece.nbytes, region.device)

    def join(self, source: int, have: int | None, place: tuple[int, int]) -> bool:
        """See :meth:`Striping.join`; returns False, and the source must not read, if it comes too late."""
        with self._lock:
            if not self._over:
                self._striping.join(source, time.monotonic(), have, place)
            return not self._over

    def has(self, source: int, have: int | None) -> None:
        """See :meth:`Striping.has`."""
        with self._lock:
            self._striping.has(source, have)

    def end_joining(self) -> None:
        """Let no source join from now on."""
        with self._lock:
            self._over = True

    def begin(self, source: int) -> VersionPiece | None:
        """See :meth:`Striping.begin`."""
        with self._lock:
            return self._striping.begin(source, time.monotonic())

    def end(self, source: int, piece: VersionPiece) -> None:
        """Note that a piece is there."""
        with self._lock:
            before = self._striping.nbytes
            whole = self._striping.end(source, piece, time.monotonic())
            if self._striping.nbytes > before:  # else another source was faster
                self._checks.put((piece, whole))
            self._ended.notify_all()

    def lose(self, source: int) -> None:
        """See :meth:`Striping.lose`."""
        with self._lock:
            self._striping.lose(source)
            self._ended.notify_all()

    def silent(self, source: int) -> float:
        """See :meth:`Striping.silent`."""
        with self._lock:
            return self._striping.silent(source, time.monotonic())

    def useless(self, source: int) -> float:
        """See :meth:`Striping.useless`; 0 for a source that has not joined, or has gone."""
        with self._lock:
            return self._striping.useless(source, time.monotonic())

    def again(self, wrong: Wrong) -> set[int]:
        """See :meth:`Striping.again`."""
        self._sums[wrong] = digests.PartialDigest()
        with self._lock:
            return self._striping.again(*wrong)

    @property
    def writing(self) -> set[int]:
        """See :attr:`Striping.writing`."""
        with self._lock:
            return self._striping.writing

    def wait(self, limit: float) -> bool:
        """Wait up to ``limit`` seconds until no source writes; returns whether that is so."""
        with self._ended:
            return self._ended.wait_for(lambda: not self._striping.writing, limit)

    def overwritten(self) -> list[Wrong]:
        """Compare once more, while no source writes, what two sources have brought; returns what is not as it was.

        A piece that one source did not bring in time was read from another one. Its first copy was compared, and the
        second may have come after that.
        """
        found = []
        for key in [*self._striping.late]:
            if self._digest(*key) == self._opened.places[key[1]].digest:
                del self._striping.late[key]
            else:
                found.append(Wrong(*key))
        return found

    def close(self) -> None:
        """End the thread that computes digests."""
        self._checks.put(None)
        self._checker.join()

    def _check(self) -> None:
        error: CubrokerError | None = Unavailable("the thread that computes digests failed; its log says why")
        try:
            while check := self._checks.get():
                piece, whole = check
                if self._host:
                    self._sums[piece[:2]].add(at_address(self.local(piece).pointer, piece.nbytes), piece.offset)
                if whole:
                    self._compare(*piece[:2])
            error = None
        except CubrokerError as failure:
            error = failure
        finally:
            if error:
                self._report(FillingFailed(error))

    def _compare(self, replica: int, allocation: int) -> None:
        place = self._opened.places[allocation]
        if self._host:
            found = self._sums[replica, allocation].finish(place.nbytes)
        else:
            found = self._digest(replica, allocation)
        kind = Whole if found == place.digest else Wrong
        self._report(kind(replica, allocation))

    def _digest(self, replica: int, allocation: int) -> bytes:
        (found,) = digests.compute("what was fetched", [self._ranges[replica][allocation]]).values()
        return found
