"""The hosts that a fetch reads from, each with its thread, and the draft's memory that they fill.

:class:`Filling` says which piece is read from which source, and checks the digests of what was read.
:class:`SourceReader` is a source: its thread exchanges messages with the host and reads its memory, piece by piece.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf
from pathlib import Path
from queue import Empty, SimpleQueue
from random import Random
from threading import Condition, Event, Lock, Thread
from typing import NamedTuple, TypeAlias

from cubroker.client import Draft, digests
from cubroker.client.loading.threads import at_address
from cubroker.integrations.cluster import messages
from cubroker.integrations.cluster.connection import CONNECT, PeerAddress, PeerConnection
from cubroker.integrations.cluster.messages import NEWS, Available, ExportedVersion, Going, Offers, Open, Progress
from cubroker.integrations.cluster.striping import DEPTH, Runs, Striping, VersionPiece, cut
from cubroker.integrations.cluster.transfer_engine import MemoryRegion, Read, TransferEngine, open_engine
from cubroker.protocol.errors import CubrokerError, Invalid, Unavailable

BEAT = 2.0
"""Seconds between two reports of this side's progress to each source."""

OPENING = 150.0
"""Seconds that a source has to open a version: it may have to compute the digest of a large one."""

TURN = 8
"""Messages of a source that are received before the reads under way are checked again."""

BURST = 100
"""Messages about its part that a source may send beyond two for each ``NEWS`` seconds: they arrive in bursts."""

PAUSES = (0.0002, 0.002)
"""Seconds between two checks of the reads under way: the shortest pause, which doubles up to the longest."""


# -- the memory ----------------------------------------------------------------------------------------


class Whole(NamedTuple):
    """An allocation of a replica has the digest that it should have."""

    replica: int
    allocation: int


class Wrong(NamedTuple):
    """An allocation of a replica has another digest."""

    replica: int
    allocation: int


class FillingFailed(NamedTuple):
    """This side cannot continue."""

    error: CubrokerError


Filled: TypeAlias = Whole | Wrong | FillingFailed
"""Events of the memory that is filled."""


class Filling:
    """A draft's memory while sources fill it. Any thread may call it.

    The replicas that are read into are those that have no upstream; the others are copied from device to device later.

    Attributes:
        lock: held while ``striping`` is used; notified when a source has delivered a piece, or has ended.
        striping: the pieces, and the sources that deliver them.
        patience: seconds after which a source that delivers none of the pieces it began is given up.
        context: that of the first device that is read into.
    """

    def __init__(
        self, draft: Draft, opened: ExportedVersion, patience: float, report: Callable[[Filled], object]
    ) -> None:
        self.lock = Condition(Lock())
        self.patience = patience
        self._opened = opened
        self._report = report
        self._over = False
        self.context = draft.replicas[0].context
        self._host = self.context.host
        replicas = {
            number: replica for number, replica in enumerate(draft.replicas) if number == 0 or not replica.upstream
        }
        self._views = {
            number: [
                MemoryRegion(view.pointer, view.nbytes, None if self._host else view.memory_device.index)
                for view in replica.allocation_views
            ]
            for number, replica in replicas.items()
        }
        self._ranges = {number: replica.digest_ranges() for number, replica in replicas.items()}
        sizes = [place.nbytes for place in opened.places]
        chance = Random()  # noqa: S311  # any order will do
        self.striping: Striping[SourceReader] = Striping(cut(sizes, list(replicas)), chance=chance)
        self._sums = {(each, number): digests.PartialDigest() for each in replicas for number in range(len(sizes))}
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
        return self.striping.nbytes, self.striping.total

    @property
    def have(self) -> int:
        """See :attr:`Striping.have`."""
        with self.lock:
            return self.striping.have

    def local(self, piece: VersionPiece) -> MemoryRegion:
        """Return the memory that a piece is read into."""
        region = self._views[piece.replica][piece.allocation]
        return MemoryRegion(region.pointer + piece.offset, piece.nbytes, region.device)

    def join(self, source: SourceReader, have: int | None, place: tuple[int, int]) -> bool:
        """See :meth:`Striping.join`; returns False after :meth:`end_joining`: then the source must not read."""
        with self.lock:
            if not self._over:
                self.striping.join(source, time.monotonic(), have, place)
            return not self._over

    def end_joining(self) -> None:
        """Let no source join from now on."""
        with self.lock:
            self._over = True

    def end(self, source: SourceReader, piece: VersionPiece) -> None:
        """Record that a piece is there."""
        with self.lock:
            before = self.striping.nbytes
            whole = self.striping.end(source, piece, time.monotonic())
            if self.striping.nbytes > before:  # else another source was faster
                self._checks.put((piece, whole))
            self.lock.notify_all()

    def lose(self, source: SourceReader) -> None:
        """See :meth:`Striping.lose`."""
        with self.lock:
            self.striping.lose(source)
            self.lock.notify_all()

    def again(self, wrong: Wrong) -> set[SourceReader]:
        """See :meth:`Striping.again`."""
        self._sums[wrong] = digests.PartialDigest()
        with self.lock:
            return self.striping.again(*wrong)

    def overwritten(self) -> list[Wrong]:
        """Compare allocations that two sources have written again, while no source writes; returns the wrong ones.

        A piece that one source did not deliver in time was read from another one. The digest of its first copy was
        compared, and the second copy may have been written after that.
        """
        found = []
        for key in [*self.striping.late]:
            if self._digest(*key) == self._opened.places[key[1]].digest:
                del self.striping.late[key]
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


# -- a source ------------------------------------------------------------------------------------------


class Answered(NamedTuple):
    """A host has said what it offers."""

    source: SourceReader
    offers: Offers


class Ready(NamedTuple):
    """A host has opened the version."""

    source: SourceReader
    opened: ExportedVersion


class Lost(NamedTuple):
    """A host is gone, or has refused."""

    source: SourceReader
    error: CubrokerError


Reported: TypeAlias = Answered | Ready | Lost
"""Events of a source."""


class SourceReader:
    """A host, and the thread that exchanges messages with it and reads from it. It reports events."""

    def __init__(
        self,
        address: PeerAddress,
        certificates: Path,
        report: Callable[[Reported], object],
        own: bytes = b"",
    ) -> None:
        self.address = address
        self.opened: ExportedVersion | None = None
        #: The runs that it has, as bits; None: the whole version.
        self.have: int | None = None
        #: As :attr:`.connection.PeerConnection.identity`, once it has answered.
        self.identity: object = None
        #: When this side was ready to connect to it; and whether its engine may write now.
        self.told = inf
        self.writing = False
        #: Whether its engine is closed, and so writes no more.
        self.closed = False
        #: Whether it has delivered a piece.
        self.brought = False
        self._certificates = certificates
        self._own = own
        self._report = report
        self._orders: SimpleQueue[Open | Filling | None] = SimpleQueue()
        self._leave = Event()
        self._engine: TransferEngine | None = None
        #: Answers to :class:`Progress` that have not arrived.
        self._owed = 0
        #: How many runs the version has; how many :class:`Available` have arrived, and since when they may.
        self._runs = 0
        self._heard = 0
        self._began = 0.0
        self._thread = Thread(target=self._run, name=f"cubroker-source {address}", daemon=True)
        self._thread.start()

    @property
    def whole(self) -> bool:
        """Whether it has opened the version and has all of it."""
        return self.opened is not None and self.have is None

    # -- on the main thread ------------------------------------------------------------------------

    def open(self, request: Open) -> None:
        """Have it open a version; it reports :class:`Ready` or :class:`Lost`."""
        self._orders.put(request)

    def read(self, filling: Filling) -> None:
        """Have it deliver pieces, until it is told to leave or is :class:`Lost`."""
        self._orders.put(filling)

    def leave(self) -> None:
        """Have it end, without an event."""
        self._leave.set()
        self._orders.put(None)

    def join(self, limit: float) -> bool:
        """Wait up to ``limit`` seconds for its end; returns whether it has ended."""
        self._thread.join(limit)
        return not self._thread.is_alive()

    # -- on its thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        error: CubrokerError | None = Unavailable("a thread of the transfer failed; its log says why")
        try:
            with PeerConnection(self.address, self._certificates, self._own) as connection:
                self.identity = connection.identity
                self._report(Answered(self, connection.ask(messages.List(), Offers)))
                while isinstance(order := self._next(connection), Open):
                    connection.say(order)
                    self._engine = open_engine(order.engine)  # while the source opens it
                    opened = connection.hear(ExportedVersion, OPENING)
                    self._runs = Runs([place.nbytes for place in opened.places]).count
                    self.have, self.opened = messages.from_runs(opened.runs, self._runs), opened
                    self._began = time.monotonic()
                    self._report(Ready(self, opened))
                if isinstance(order, Filling):
                    self._bring(connection, order)
            error = None
        except CubrokerError as failure:
            error = failure
        finally:
            if self._engine:
                self._engine.close()
            if error and not self._leave.is_set():
                self._report(Lost(self, error))

    def _next(self, connection: PeerConnection) -> Open | Filling | None:
        """Return the next order; until then, tell a source that has opened the version that this side is alive."""
        while True:
            try:
                return self._orders.get(timeout=BEAT)
            except Empty:
                if self.opened:
                    self._tell(connection, 0)

    def _tell(self, connection: PeerConnection, nbytes: int) -> None:
        """Report this side's progress, and wait for the answer."""
        self._say(connection, nbytes)
        deadline = time.monotonic() + CONNECT
        while self._owed:
            self._take(connection.hear_any(max(0.0, deadline - time.monotonic())))

    def _say(self, connection: PeerConnection, nbytes: int) -> None:
        connection.say(Progress(nbytes))
        self._owed += 1

    def _take(self, message: messages.Reply) -> None:
        """Handle a message of the source."""
        if isinstance(message, Available):
            self._heard += 1
            if self._heard > BURST + 2 * (time.monotonic() - self._began) / NEWS:
                raise Invalid(f"the exporter at {self.address} reports what it has more often than it may")
            self.have = messages.from_runs(message.runs, self._runs)
        else:
            messages.expect(message, Going)
            self._owed -= 1

    def _bring(self, connection: PeerConnection, filling: Filling) -> None:
        assert self.opened is not None
        assert self._engine is not None
        with filling.context.current():
            with self._telling(connection):  # both can take long: with much memory, and if the peer does not answer
                self._engine.register(filling.regions)
                self.told = time.monotonic()  # not before: how long registering takes does not depend on the source
                self._engine.connect(self.opened.metadata)
            self.writing = filling.join(self, self.have, (self.opened.slot, self.opened.slots))
            if not self.writing:
                return
            try:
                nbytes = self._read(connection, self._engine, filling)
            finally:
                self._engine.close()  # before others read the same pieces
                self.closed = True
                filling.lose(self)
        self._tell(connection, nbytes)

    @contextmanager
    def _telling(self, connection: PeerConnection) -> Iterator[None]:
        """Report within a ``with`` block that this side is alive, every ``BEAT`` seconds, while its thread is busy."""
        over, errors = Event(), list[CubrokerError]()

        def tell() -> None:
            try:
                while not over.wait(BEAT):
                    self._tell(connection, 0)
            except CubrokerError as error:
                errors.append(error)

        thread = Thread(target=tell, name=f"{self._thread.name} beat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
        for error in errors:
            raise error

    def _read(self, connection: PeerConnection, engine: TransferEngine, filling: Filling) -> int:
        """Read pieces until the source is to leave; return how many bytes.

        Pieces are begun one after the other, a part of a piece's time apart. The engine serves the pieces under way
        alternately: pieces begun together would end together, and the link would be idle until the next ones begin.
        """
        flying: list[tuple[VersionPiece, Read]] = []
        began = now = time.monotonic()
        nbytes, beat, due, pause = 0, now + BEAT, now, PAUSES[0]
        have = self.have
        while not self._leave.is_set():
            before = len(flying), nbytes
            for each in [each for each in flying if each[1].done()]:
                flying.remove(each)
                nbytes += each[0].nbytes
                self.brought = True
                filling.end(self, each[0])
            for _ in range(TURN):
                if not connection.pending():
                    break
                self._take(connection.hear_any())
            now = time.monotonic()
            with filling.lock:
                if have != self.have:
                    have = self.have
                    filling.striping.has(self, have)
                piece = filling.striping.begin(self, now) if not flying or now >= due else None
                silent = filling.striping.silent(self, now)
            if piece:
                flying.append((piece, engine.read(filling.local(piece), self._remote(piece))))
                due = now + (now - began) * piece.nbytes / nbytes / DEPTH if nbytes else inf
            if silent > filling.patience:
                raise Unavailable(f"{self.address} has delivered nothing for {filling.patience:g} s")
            if self._owed and now > beat - BEAT + CONNECT:
                raise Unavailable(f"the exporter at {self.address} did not answer within {CONNECT:g} s")
            if now >= beat and not self._owed:
                self._say(connection, nbytes)
                beat = now + BEAT
            pause = PAUSES[0] if before != (len(flying), nbytes) else min(2 * pause, PAUSES[1])
            self._leave.wait(min(pause, max(PAUSES[0], due - now)))
        return nbytes

    def _remote(self, piece: VersionPiece) -> MemoryRegion:
        assert self.opened is not None
        place = self.opened.places[piece.allocation]
        return MemoryRegion(place.pointer + piece.offset, piece.nbytes, place.device)
