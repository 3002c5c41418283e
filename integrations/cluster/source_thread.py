"""A host that a fetch reads from, and the thread that speaks with it and reads its memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import NamedTuple, TypeAlias

from cubroker.integrations.cluster import messages
from cubroker.integrations.cluster.connection import CONNECT, PeerAddress, PeerConnection
from cubroker.integrations.cluster.engine import Engine, MemoryRegion, Read, open_engine
from cubroker.integrations.cluster.filling import Filling
from cubroker.integrations.cluster.messages import NEWS, Available, ExportedVersion, Going, Offers, Open, Progress
from cubroker.integrations.cluster.sources import DEPTH, Runs, VersionPiece
from cubroker.protocol.errors import CubrokerError, Invalid, Unavailable

BEAT = 2.0
"""Seconds between two words to each source: how far this side is."""

OPENING = 150.0
"""Seconds that a source has to open a version: it may have to compute the digest of a large one."""

TURN = 8
"""Messages of a source that are heard before what is under way is looked at again."""

BURST = 100
"""Messages about its part that a source may send beyond two for each ``NEWS`` seconds: they arrive in bursts."""

PAUSES = (0.0002, 0.002)
"""Seconds between two looks at reads that are under way: the shortest pause, which doubles up to the longest."""


class Answered(NamedTuple):
    """A host says what it has."""

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
"""What a source reports."""


class SourceReader:
    """A host, and the thread that speaks with it and reads from it. It reports by events."""

    def __init__(
        self,
        number: int,
        address: PeerAddress,
        certificates: Path,
        report: Callable[[Reported], object],
        own: bytes = b"",
    ) -> None:
        self.number = number
        self.address = address
        self.opened: ExportedVersion | None = None
        #: The runs that it has, as bits; None: the whole version.
        self.have: int | None = None
        #: When it had all prepared here to read from there; and whether its engine may write by now.
        self.told = inf
        self.writing = False
        #: Whether its engine is closed, and so writes no more.
        self.closed = False
        #: Whether a piece has come from it.
        self.brought = False
        self._certificates = certificates
        self._own = own
        self._report = report
        self._orders: SimpleQueue[Open | Filling | None] = SimpleQueue()
        self._leave = Event()
        self._engine: Engine | None = None
        #: Answers to :class:`Progress` that have not come.
        self._owed = 0
        #: How many runs the version has; how many :class:`Available` have come, and since when they may.
        self._runs = 0
        self._heard = 0
        self._began = 0.0
        self._thread = Thread(target=self._run, name=f"cubroker-source-{number}", daemon=True)
        self._thread.start()

    @property
    def whole(self) -> bool:
        """Whether it has opened the version and has all of it."""
        return self.opened is not None and self.have is None

    # -- on the main thread ------------------------------------------------------------------------

    def open(self, request: Open) -> None:
        """Have it open a version: :class:`Ready` comes of that, or :class:`Lost`."""
        self._orders.put(request)

    def read(self, filling: Filling) -> None:
        """Have it bring what is to be filled, until it is told to leave or is :class:`Lost`."""
        self._orders.put(filling)

    def leave(self) -> None:
        """Have it end, without a word."""
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
        """Return the next order; say meanwhile that this side lives, if the source waits for that."""
        while True:
            try:
                return self._orders.get(timeout=BEAT)
            except Empty:
                if self.opened:
                    self._tell(connection, 0)

    def _tell(self, connection: PeerConnection, nbytes: int) -> None:
        """Say how far this side is, and wait for the answer."""
        self._say(connection, nbytes)
        deadline = time.monotonic() + CONNECT
        while self._owed:
            self._take(connection.hear_any(max(0.0, deadline - time.monotonic())))

    def _say(self, connection: PeerConnection, nbytes: int) -> None:
        connection.say(Progress(nbytes))
        self._owed += 1

    def _take(self, message: messages.Reply) -> None:
        """Take what the source says."""
        if isinstance(message, Available):
            self._heard += 1
            if self._heard > BURST + 2 * (time.monotonic() - self._began) / NEWS:
                raise Invalid(f"the exporter at {self.address} says what it has more often than it may")
            self.have = messages.from_runs(message.runs, self._runs)
        else:
            messages.expect(message, Going)
            self._owed -= 1

    def _bring(self, connection: PeerConnection, filling: Filling) -> None:
        assert self.opened is not None
        assert self._engine is not None
        with filling.context.current():
            with self._telling(connection):  # both take long: as there is memory, as the system tries to connect
                self._engine.register(filling.regions)
                self.told = time.monotonic()  # not before: how long that takes says nothing of the source
                self._engine.connect(self.opened.metadata)
            self.writing = filling.join(self.number, self.have, (self.opened.slot, self.opened.slots))
            if not self.writing:
                return
            try:
                nbytes = self._read(connection, self._engine, filling)
            finally:
                self._engine.close()  # before others read the same pieces
                self.closed = True
                filling.lose(self.number)
        self._tell(connection, nbytes)

    @contextmanager
    def _telling(self, connection: PeerConnection) -> Iterator[None]:
        """Say within a ``with`` block now and then that this side lives, whatever its thread does."""
        over, errors = Event(), list[CubrokerError]()

        def tell() -> None:
            try:
                while not over.wait(BEAT):
                    self._tell(connection, 0)
            except CubrokerError as error:
                errors.append(error)

        thread = Thread(target=tell, name=f"cubroker-source-{self.number}-beat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
        for error in errors:
            raise error

    def _read(self, connection: PeerConnection, engine: Engine, filling: Filling) -> int:
        """Bring pieces until there is no more to do; return how many bytes.

        Pieces are begun one after the other, a part of a piece's time apart. The engine serves those that are under way
        by turns: begun together they would end together, and the link would be idle until the next ones begin.
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
                filling.end(self.number, each[0])
            for _ in range(TURN):
                if not connection.pending():
                    break
                self._take(connection.hear_any())
            if have != self.have:
                have = self.have
                filling.has(self.number, have)
            now = time.monotonic()
            if (not flying or now >= due) and (piece := filling.begin(self.number)) is not None:
                flying.append((piece, engine.read(filling.local(piece), self._remote(piece))))
                due = now + (now - began) * piece.nbytes / nbytes / DEPTH if nbytes else inf
            if filling.silent(self.number) > filling.patience:
                raise Unavailable(f"{self.address} has brought nothing for {filling.patience:g} s")
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
