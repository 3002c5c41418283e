"""Striping: which piece of a version is read next, from which of several sources.

Pure: the caller reports what happens, and asks what to do.

*Choice.* A host that fetches asks some of the hosts that it knows, and reads from those that have the version and the
fewest readers relative to their limit. A host that has reached its limit is passed over, so copies spread without
coordination: the first few hosts read from the origin, the next from those, and so on. ``benchmarks/cluster.py``
simulates that for a thousand hosts with this code.

*Striping.* A source that can read another piece is given one, so each source delivers as many as it can. If a source is
lost, its pieces are given to others. At the end, when no piece is left to begin, an idle source reads a piece again
that a slower one has not delivered yet: the first copy counts.

*Parts.* A source need not have the whole version: it may be a host that is fetching it, too, and that reports which
runs of bytes it has. A source is first asked for pieces that no other source has. Among these, those of this host's
share of the source's readers come first; the rest is random. So hosts that read from one another hold different parts,
and a host that alone has the whole version sends each byte about once.

*Trust.* Bytes from a source with a part have not been compared with a digest. An allocation with a wrong digest is read
again from a single source that has the whole version, so that the origin of its bytes is known.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from random import Random
from typing import Generic, NamedTuple, TypeVar

WIDTH = 8
"""The most sources that one fetch reads from at the same time: as many as a host has readers, so that a host receives
as much as it sends."""

ASKED = 8
"""Hosts that are asked at the same time what they offer."""

DEPTH = 3
"""Pieces that are under way from one source: while one ends, the next two keep the link busy."""

PIECE = 16 << 20
"""Bytes of a piece, at most."""

UNIT = 1 << 20
"""Bytes of which a piece is a multiple, unless it is the last of an allocation."""

PIECES = 32
"""Pieces of a small version, so that several sources bring it."""

USELESS = 1.0
"""Seconds without any wanted piece after which a source with a part is left for another host."""

HURRY = 2.0
"""An idle source reads a piece again if the slower source needs more than this many times as long for it."""


Host = TypeVar("Host")
Source = TypeVar("Source")


def by_room(readers: Mapping[Host, tuple[int, int]], chance: Random) -> list[Host]:
    """Return the hosts that have room for a reader, those with the most room first, equal ones in random order.

    Without the random order, many hosts that ask at the same time would all choose the same one.

    Args:
        readers: how many hosts read from each host now, and how many may read at the same time.
        chance: decides the order of equal ones.
    """
    roomy = [host for host, (now, limit) in readers.items() if now < limit]
    chance.shuffle(roomy)
    return sorted(roomy, key=lambda host: readers[host][0] / readers[host][1])


class VersionPiece(NamedTuple):
    """A run of bytes of one allocation, on its way into one replica."""

    replica: int
    allocation: int
    offset: int
    nbytes: int


def piece_size(total: int) -> int:
    """Return the size, in bytes, of the pieces of a version of ``total`` bytes."""
    return max(UNIT, min(PIECE, total // PIECES // UNIT * UNIT))


def cut(sizes: Sequence[int], replicas: Sequence[int], limit: int | None = None) -> Iterator[VersionPiece]:
    """Cut allocations into pieces of at most ``limit`` bytes.

    Args:
        sizes: bytes of each allocation.
        replicas: the replicas that are read into, each of which has all allocations.
        limit: a multiple of the bytes that a digest processes at a time; None: the result of :func:`piece_size`.
    """
    limit = limit or piece_size(sum(sizes))
    for allocation, size in enumerate(sizes):
        for offset in range(0, size, limit):
            for replica in replicas:
                yield VersionPiece(replica, allocation, offset, min(limit, size - offset))


class Runs:
    """The runs of bytes that :func:`cut` makes of allocations of these sizes, for one replica."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.total = sum(sizes)
        #: Bytes of the largest run.
        self.piece = piece_size(self.total)
        #: The number of runs.
        self.count = 0
        #: The numbers of the smaller runs, and by how many bytes they are smaller.
        self._short: list[tuple[int, int]] = []
        for size in sizes:
            self.count += -(-size // self.piece)
            if size % self.piece:
                self._short.append((self.count - 1, self.piece - size % self.piece))

    def nbytes(self, have: bytes) -> int:
        """Return how many bytes some runs have together, which are given as bits, lowest first."""
        known = self._short if have else []
        short = sum(less for number, less in known if number >> 3 < len(have) and have[number >> 3] >> (number & 7) & 1)
        return int.from_bytes(have, "little").bit_count() * self.piece - short


class _Source:
    def __init__(self, now: float, share: int) -> None:
        #: Whether it has the whole version, and not a part.
        self.whole = False
        #: The pieces that it has, as bits, and those that this side reads from it before others.
        self.have = 0
        self.share = share
        #: Since when it has had none of the pieces that are still to be begun.
        self.useless: float | None = None
        #: When each piece was begun.
        self.flying: dict[VersionPiece, float] = {}
        #: Bytes that it delivered, the seconds for which it had pieces under way, and since when it has some now.
        self.nbytes = 0
        self.busy = 0.0
        self.since = now
        #: When it last delivered a piece, or began one while it had none under way.
        self.stirred = now

    def rate(self, now: float) -> float:
        """Return its bytes a second while it had pieces under way; 0 if it has delivered none."""
        return self.nbytes / max(self.busy + (now - self.since if self.flying else 0.0), 1e-6)

    def left(self, pieces: Iterable[VersionPiece], now: float) -> Iterator[tuple[VersionPiece, float]]:
        """Yield each of these pieces, which it delivers in this order, and an estimate of the seconds until then.

        The estimate assumes that it keeps its rate, or stays silent again for as long as it has been silent now,
        whichever is longer.
        """
        rate, nbytes = self.rate(now), 0
        for piece in pieces:
            nbytes += piece.nbytes
            yield piece, max(nbytes / rate, now - self.stirred) if rate else float("inf")


class Striping(Generic[Source]):
    """The pieces of one version, and the sources that deliver them. Times are seconds of any monotonic clock.

    Args:
        pieces: as :func:`cut` returns them.
        depth: pieces under way from one source.
        chance: picks pieces at random, for hosts that read parts from one another; None: pieces are taken in order.
    """

    def __init__(self, pieces: Iterable[VersionPiece], depth: int = DEPTH, chance: Random | None = None) -> None:
        #: All runs of the first replica, then all of the next; the first run is bit 0.
        self._pieces = sorted(pieces, key=lambda piece: piece.replica)
        self._numbers = {piece: number for number, piece in enumerate(self._pieces)}
        self._replicas = len({piece.replica for piece in self._pieces})
        #: The pieces of one replica.
        self._runs = len(self._pieces) // max(1, self._replicas)
        self._all = (1 << len(self._pieces)) - 1
        self._todo = self._all
        self._depth = depth
        self._chance = chance
        self._sources: dict[Source, _Source] = {}
        #: Which source delivered each piece that is there; and these pieces as bits.
        self._brought: dict[VersionPiece, Source] = {}
        self._there = 0
        #: The pieces, as bits, that only sources with the whole version may deliver.
        self._strict = 0
        #: For each allocation with such pieces: the pieces, and the one source that delivers them, once it has begun.
        self._wrong: dict[tuple[int, int], int] = {}
        self._sole: dict[tuple[int, int], Source] = {}
        #: How many pieces of each allocation are not there.
        self._left = Counter(piece[:2] for piece in self._pieces)
        self.total = sum(piece.nbytes for piece in self._pieces)
        #: Bytes that are there; and the pieces, as bits, that came from sources with a part.
        self.nbytes = 0
        self._parted = 0
        #: By replica and allocation: the sources that delivered a piece late, or were lost with it, while another one
        #: delivers or has delivered it. What they wrote may be what is there now.
        self.late: dict[tuple[int, int], set[Source]] = {}

    @property
    def finished(self) -> bool:
        """Whether every piece is there."""
        return self.nbytes == self.total

    @property
    def from_parts(self) -> int:
        """Bytes of the first replica that are there, and came from sources with a part."""
        return sum(
            piece.nbytes for number, piece in enumerate(self._pieces[: self._runs]) if self._parted >> number & 1
        )

    @property
    def writing(self) -> set[Source]:
        """The sources that have pieces under way."""
        return {source for source, each in self._sources.items() if each.flying}

    @property
    def have(self) -> int:
        """The runs of the first replica that are there and that no source still writes, as in :meth:`has`."""
        writing = 0
        for piece in chain.from_iterable(source.flying for source in self._sources.values()):
            writing |= 1 << self._numbers[piece]
        return self._there & ~writing & (1 << self._runs) - 1

    def join(self, source: Source, now: float, have: int | None = None, place: tuple[int, int] = (0, 1)) -> None:
        """Add a source.

        Args:
            source: anything that stands for it.
            now: the time.
            have: the runs of bytes that it has, as in :meth:`has`; None: the whole version.
            place: this side's slot among the source's readers, from 0 on, and how many slots the source has. Each slot
                begins with different runs, so the readers of a source together soon have read all of it.
        """
        share = sum(1 << number for number in range(place[0], len(self._pieces), place[1]))
        self._sources[source] = _Source(now, share)
        self.has(source, have)

    def has(self, source: Source, have: int | None) -> None:
        """Record which runs of bytes a source has now; None: the whole version.

        Bit 0 is the first run that :func:`cut` makes, for any replica.
        """
        mine = self._sources[source]
        mine.whole, mine.have = have is None, self._all if have is None else self._spread(have)
        if not mine.whole:
            self._leave_to_others(source)

    def _leave_to_others(self, source: Source) -> None:
        """Let another source deliver the wrong allocations that this one was to deliver again."""
        self._sole = {key: sole for key, sole in self._sole.items() if sole != source}

    def _spread(self, have: int) -> int:
        """Return the pieces, of all replicas, that consist of these runs of bytes."""
        have &= (1 << self._runs) - 1
        return sum(have << replica * self._runs for replica in range(self._replicas))

    def begin(self, source: Source, now: float) -> VersionPiece | None:
        """Return the next piece for a source, which counts as begun from now on; None: nothing for now."""
        mine = self._sources[source]
        if len(mine.flying) >= self._depth:
            return None
        wanted = self._todo & self._usable(source)
        for flying in mine.flying:  # a piece under way may already have to be read again
            wanted &= ~(1 << self._numbers[flying])
        piece = self._next(mine, wanted) if wanted else None
        if piece is None and not self._todo:
            piece = self._late(source, now)
        if piece is not None:
            if piece[:2] in self._wrong:
                self._sole.setdefault(piece[:2], source)
            if not mine.flying:
                mine.since = mine.stirred = now
            mine.flying[piece] = now
        if piece is not None or mine.flying or not self._todo:
            mine.useless = None
        elif mine.useless is None:
            mine.useless = now
        return piece

    def _usable(self, source: Source) -> int:
        """Return the pieces that a source has and may deliver."""
        mine = self._sources[source]
        if not mine.whole:
            return mine.have & ~self._strict
        return mine.have & ~sum(self._wrong[key] for key, sole in self._sole.items() if sole != source)

    def _next(self, mine: _Source, wanted: int) -> VersionPiece:
        """Take one of the wanted pieces: if possible one that no other source has, and of these one of its share."""
        others = 0
        for other in self._sources.values():
            if other is not mine:
                others |= other.have
        rare = wanted & ~others
        wanted = rare & mine.share or rare or wanted
        start = self._chance.randrange(len(self._pieces)) if self._chance else 0
        number = _lowest(wanted >> start << start or wanted)
        self._todo ^= 1 << number
        return self._pieces[number]

    def _late(self, source: Source, now: float) -> VersionPiece | None:
        """Return a piece that slower sources have begun and that this source, if it is idle, would deliver sooner."""
        mine = self._sources[source]
        rate = mine.rate(now)
        if mine.flying or not rate:
            return None
        left: dict[VersionPiece, float] = {}
        for other in self._sources.values():
            for piece, seconds in other.left([each for each in other.flying if each not in self._brought], now):
                left[piece] = min(seconds, left.get(piece, float("inf")))
        usable = self._usable(source)
        known = [piece for piece in left if usable >> self._numbers[piece] & 1]
        last = max(reversed(known), key=lambda piece: left[piece], default=None)
        return last if last and left[last] > HURRY * last.nbytes / rate else None

    def end(self, source: Source, piece: VersionPiece, now: float) -> bool:
        """Record that a source has delivered a piece; returns whether that completes the piece's allocation."""
        mine, bit = self._sources[source], 1 << self._numbers[piece]
        del mine.flying[piece]
        mine.nbytes += piece.nbytes
        mine.stirred = now
        if not mine.flying:
            mine.busy += now - mine.since
        known = bit & self._strict & ~self._there  # known to be wrong, perhaps only since it was begun
        if (known and self._sole.get(piece[:2]) != source) or piece in self._brought:
            self._abandon(source, piece)
            return False
        self._brought[piece] = source
        self._there |= bit
        self._todo &= ~bit
        self.nbytes += piece.nbytes
        self._parted |= 0 if mine.whole else bit
        self._left[piece[:2]] -= 1
        return not self._left[piece[:2]]

    def lose(self, source: Source) -> None:
        """Remove a source; other sources deliver the pieces that it has not delivered."""
        mine = self._sources.pop(source)
        self._leave_to_others(source)
        for piece in mine.flying:
            self._abandon(source, piece)

    def _abandon(self, source: Source, piece: VersionPiece) -> None:
        """Have a piece begun again that a source does not deliver, unless it is there or another source delivers it."""
        if piece in self._brought or any(piece in other.flying for other in self._sources.values()):
            self.late.setdefault(piece[:2], set()).add(source)
        else:
            self._todo |= 1 << self._numbers[piece]

    def again(self, replica: int, allocation: int) -> set[Source]:
        """Have an allocation read again from a source with the whole version; returns the sources that have written it.

        Some of these sources may still write it.
        """
        key = replica, allocation
        wrong = [piece for piece in self._brought if piece[:2] == key]
        wrote = {self._brought.pop(piece) for piece in wrong} | self.late.pop(key, set())
        wrote |= {source for source, each in self._sources.items() if any(piece[:2] == key for piece in each.flying)}
        bits = sum(1 << self._numbers[piece] for piece in wrong)
        self._there &= ~bits
        self._parted &= ~bits
        self._todo |= bits
        self._strict |= bits
        self._wrong[key] = bits
        self._sole.pop(key, None)
        self._left[key] = len(wrong)
        self.nbytes -= sum(piece.nbytes for piece in wrong)
        return wrote

    def silent(self, source: Source, now: float) -> float:
        """Return for how many seconds a source that has begun pieces has delivered none."""
        mine = self._sources[source]
        return now - mine.stirred if mine.flying else 0.0

    def useless(self, source: Source, now: float) -> float:
        """Return for how many seconds a source has had none of the pieces that are still to be begun.

        0 if there is no such piece, or if the source has not joined, or has gone.
        """
        mine = self._sources.get(source)
        return 0.0 if mine is None or mine.useless is None else now - mine.useless


def _lowest(bits: int) -> int:
    return (bits & -bits).bit_length() - 1
