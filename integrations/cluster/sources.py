"""Which host a version is read from, and which piece of it next. Pure: told what happens, and asked what to do.

*Choice.* A host that fetches asks some of the hosts that it knows, and reads from those that have the version and the
fewest readers for their limit. A host that has as many readers as it may have is passed over, so copies spread by
themselves: the first few hosts read from the origin, the next from those, and so on. ``benchmarks/cluster.py``
simulates that for a thousand hosts with this code.

*Striping.* Pieces of the version go to whichever source has room for another, so each source brings as much as it can.
A source that is lost gives its pieces back. At the end, when nothing is left to begin, a source that waits reads once
more what a slower one has not brought: the first copy counts.

*Parts.* A source need not have the whole version: it may be a host that is fetching it, too, and says as it goes on
which runs of bytes it has. A source is asked first for what no other source has, and of that first for the share that
this host has among the source's readers; otherwise by chance. So hosts which read from one another come to hold
different parts, and a host that alone has all sends each byte about once.

*Trust.* What a source with a part passes on was not compared with any digest. An allocation that comes out wrong is
brought again by sources that have the whole version alone, and by one of them, so that whose bytes they are is known.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from random import Random
from typing import NamedTuple

WIDTH = 8
"""Sources that one fetch reads from at once, at most: as many as a host has readers, so that what goes in and what goes
out of a host are equal."""

ASKED = 8
"""Hosts that are asked at once what they have."""

DEPTH = 3
"""Pieces that are under way from one source: while one ends, the next two keep the link busy."""

PIECE = 16 << 20
"""Bytes of a piece, at most."""

UNIT = 1 << 20
"""Bytes of which a piece is a multiple, unless it is the last of an allocation."""

PIECES = 32
"""Pieces of a small version, so that several sources bring it."""

USELESS = 1.0
"""Seconds after which a source with a part is left for another host, if it has had nothing that is wanted."""

HURRY = 2.0
"""How many times as long a slower source has to need for the rest of a piece, before another one begins it again."""


class Candidate(NamedTuple):
    """A host that has a version."""

    peer: str
    #: How many hosts read from it now, and how many may at once.
    readers: int
    limit: int


def by_room(candidates: Iterable[Candidate], chance: Random) -> list[Candidate]:
    """Return the hosts that have room for a reader, those with the most of it first, and equal ones by chance.

    By chance, since many hosts that ask at once would otherwise all go to the same one.
    """
    roomy = [each for each in candidates if each.readers < each.limit]
    chance.shuffle(roomy)
    return sorted(roomy, key=lambda each: each.readers / each.limit)


class VersionPiece(NamedTuple):
    """A run of bytes of one allocation, on its way into one replica."""

    replica: int
    allocation: int
    offset: int
    nbytes: int


def piece_size(total: int) -> int:
    """Return how large the pieces of a version of so many bytes are."""
    return max(UNIT, min(PIECE, total // PIECES // UNIT * UNIT))


def cut(sizes: Sequence[int], replicas: Sequence[int], limit: int | None = None) -> Iterator[VersionPiece]:
    """Cut allocations into pieces of at most ``limit`` bytes.

    Args:
        sizes: bytes of each allocation.
        replicas: those that are read into, each of which has all allocations.
        limit: a multiple of the bytes that a digest takes at once; None: what :func:`piece_size` says.
    """
    limit = limit or piece_size(sum(sizes))
    for allocation, size in enumerate(sizes):
        for offset in range(0, size, limit):
            for replica in replicas:
                yield VersionPiece(replica, allocation, offset, min(limit, size - offset))


class Runs:
    """The runs of bytes that :func:`cut` makes of a version, for one replica.

    Args:
        sizes: bytes of each allocation.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.total = sum(sizes)
        #: Bytes of the largest.
        self.piece = piece_size(self.total)
        #: How many there are.
        self.count = 0
        #: The numbers of those that are smaller, and by how many bytes.
        self._short: list[tuple[int, int]] = []
        for size in sizes:
            self.count += -(-size // self.piece)
            if size % self.piece:
                self._short.append((self.count - 1, self.piece - size % self.piece))

    def nbytes(self, have: bytes) -> int:
        """Return how many bytes some of them have together, which are given as bits, lowest first."""
        known = self._short if have else []
        short = sum(less for number, less in known if number >> 3 < len(have) and have[number >> 3] >> (number & 7) & 1)
        return int.from_bytes(have, "little").bit_count() * self.piece - short


class _Source:
    def __init__(self, now: float, share: int) -> None:
        #: Whether it has the whole version, and not a part.
        self.whole = False
        #: The pieces that it has, as bits, and those that this side shall read from it before others.
        self.have = 0
        self.share = share
        #: Since when it has had nothing that is still to be begun.
        self.useless: float | None = None
        #: When each piece was begun.
        self.flying: dict[VersionPiece, float] = {}
        #: Bytes that it brought, the seconds in which it had something to bring, and since when that is so now.
        self.nbytes = 0
        self.busy = 0.0
        self.since = now
        #: When it last brought a piece, or began one while it had none.
        self.stirred = now

    def rate(self, now: float) -> float:
        """Bytes a second while it had something to bring; 0 if it has brought none."""
        return self.nbytes / max(self.busy + (now - self.since if self.flying else 0.0), 1e-6)

    def left(self, pieces: Iterable[VersionPiece], now: float) -> Iterator[tuple[VersionPiece, float]]:
        """Yield for each of the pieces that it is to bring the seconds until then.

        It is taken to go on as it did, or to stay silent for as long as it has been by now, whichever is longer.
        """
        rate, nbytes = self.rate(now), 0
        for piece in pieces:
            nbytes += piece.nbytes
            yield piece, max(nbytes / rate, now - self.stirred) if rate else float("inf")


class Striping:
    """The pieces of one version, and the sources that bring them. Times are seconds on any clock that only goes on.

    Args:
        pieces: as :func:`cut` returns them.
        depth: pieces under way from one source.
        chance: takes pieces by chance, as is good among hosts that read parts from one another; None: in their order.
    """

    def __init__(self, pieces: Iterable[VersionPiece], depth: int = DEPTH, chance: Random | None = None) -> None:
        #: All runs of the first replica, then all of the next; the first run is bit 0.
        self._pieces = sorted(pieces, key=lambda piece: piece.replica)
        self._numbers = {piece: number for number, piece in enumerate(self._pieces)}
        self._replicas = len({piece.replica for piece in self._pieces})
        self._all = (1 << len(self._pieces)) - 1
        self._todo = self._all
        self._depth = depth
        self._chance = chance
        self._sources: dict[int, _Source] = {}
        #: Which source brought each piece that is there; and these pieces as bits.
        self._brought: dict[VersionPiece, int] = {}
        self._there = 0
        #: Those that only sources with the whole version may bring.
        self._strict = 0
        #: Of allocations that are such, their pieces, and the source that brings them, once one has begun.
        self._wrong: dict[tuple[int, int], int] = {}
        self._sole: dict[tuple[int, int], int] = {}
        self._left: dict[tuple[int, int], int] = {}
        for piece in self._pieces:
            self._left[piece[:2]] = self._left.get(piece[:2], 0) + 1
        self.total = sum(piece.nbytes for piece in self._pieces)
        #: Bytes that are there; and the pieces that came from sources with a part.
        self.nbytes = 0
        self._parted = 0
        #: The sources that have ended a piece which another one brings or has brought, by replica and allocation: what
        #: they wrote there may be what is there now.
        self.late: dict[tuple[int, int], set[int]] = {}

    @property
    def finished(self) -> bool:
        """Whether every piece is there."""
        return self.nbytes == self.total

    @property
    def from_parts(self) -> int:
        """Bytes of the first replica that are there, and came from sources with a part."""
        runs = len(self._pieces) // max(1, self._replicas)
        return sum(piece.nbytes for number, piece in enumerate(self._pieces[:runs]) if self._parted >> number & 1)

    @property
    def sources(self) -> int:
        """How many there are."""
        return len(self._sources)

    @property
    def writing(self) -> set[int]:
        """The sources that have pieces under way."""
        return {number for number, source in self._sources.items() if source.flying}

    @property
    def have(self) -> int:
        """The runs of the first replica that are there, and that no source still writes, as :meth:`has` takes them."""
        runs = len(self._pieces) // max(1, self._replicas)
        writing = 0
        for piece in chain.from_iterable(source.flying for source in self._sources.values()):
            writing |= 1 << self._numbers[piece]
        return self._there & ~writing & (1 << runs) - 1

    def join(self, source: int, now: float, have: int | None = None, place: tuple[int, int] = (0, 1)) -> None:
        """Take a source into account, from now on.

        Args:
            source: its number.
            now: the time.
            have: the runs of bytes that it has, as :meth:`has` takes them; None: the whole version.
            place: this side's among those that read from the source, from 0 on, and how many places there are. Each
                place begins with runs of its own, so the readers of a source together read all of it soon.
        """
        share = sum(1 << number for number in range(place[0], len(self._pieces), place[1]))
        self._sources[source] = _Source(now, share)
        self.has(source, have)

    def has(self, source: int, have: int | None) -> None:
        """Note which runs of bytes a source has now; None: the whole version.

        Bit 0 is the first run that :func:`cut` makes, for any replica.
        """
        mine = self._sources[source]
        mine.whole, mine.have = have is None, self._all if have is None else self._spread(have)
        if not mine.whole:
            self._leave_to_others(source)

    def _leave_to_others(self, source: int) -> None:
        """Have another source bring what was wrong, and was this one's to bring again."""
        self._sole = {key: sole for key, sole in self._sole.items() if sole != source}

    def _spread(self, have: int) -> int:
        """Return the pieces, of all replicas, that runs of bytes are."""
        runs = len(self._pieces) // max(1, self._replicas)
        have &= (1 << runs) - 1
        return sum(have << replica * runs for replica in range(self._replicas))

    def begin(self, source: int, now: float) -> VersionPiece | None:
        """Return what a source shall bring next, which it has then begun; None: nothing for now."""
        mine = self._sources[source]
        if len(mine.flying) >= self._depth:
            return None
        wanted = self._todo & self._usable(source)
        for flying in mine.flying:  # one may be to be begun again already
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

    def _usable(self, source: int) -> int:
        """Return the pieces that a source has and may bring."""
        mine = self._sources[source]
        if not mine.whole:
            return mine.have & ~self._strict
        others = 0
        for key, sole in self._sole.items():
            others |= self._wrong[key] if sole != source else 0
        return mine.have & ~others

    def _next(self, mine: _Source, wanted: int) -> VersionPiece:
        """Take one of these pieces: one that no other source has, if there is any, of its share if possible."""
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

    def _late(self, source: int, now: float) -> VersionPiece | None:
        """Return a piece that slower sources have begun, and that one which has nothing to do would bring sooner."""
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

    def end(self, source: int, piece: VersionPiece, now: float) -> bool:
        """Note that a source has brought a piece; returns whether with that all of its allocation is there."""
        mine, bit = self._sources[source], 1 << self._numbers[piece]
        del mine.flying[piece]
        mine.nbytes += piece.nbytes
        mine.stirred = now
        if not mine.flying:
            mine.busy += now - mine.since
        known = bit & self._strict & ~self._there  # to be wrong, perhaps since it was begun
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

    def lose(self, source: int) -> None:
        """Take a source out; what it has not brought is to be brought by others."""
        mine = self._sources.pop(source)
        self._leave_to_others(source)
        for piece in mine.flying:
            self._abandon(source, piece)

    def _abandon(self, source: int, piece: VersionPiece) -> None:
        """Have a piece begun that a source does not bring, unless it is there or another one brings it."""
        if piece in self._brought or any(piece in other.flying for other in self._sources.values()):
            self.late.setdefault(piece[:2], set()).add(source)
        else:
            self._todo |= 1 << self._numbers[piece]

    def again(self, replica: int, allocation: int) -> set[int]:
        """Have an allocation brought once more, by a source with the whole version; returns those that have written it.

        Some of these may still write it.
        """
        key = replica, allocation
        wrong = [piece for piece in self._brought if piece[:2] == key]
        wrote = {self._brought.pop(piece) for piece in wrong} | self.late.pop(key, set())
        wrote |= {number for number, each in self._sources.items() if any(piece[:2] == key for piece in each.flying)}
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

    def silent(self, source: int, now: float) -> float:
        """Return for how many seconds a source that has begun pieces has brought none."""
        mine = self._sources[source]
        return now - mine.stirred if mine.flying else 0.0

    def useless(self, source: int, now: float) -> float:
        """Return for how many seconds a source has had nothing that is still to be begun, while there is something.

        Of one that has not joined, or has gone, 0.
        """
        mine = self._sources.get(source)
        return 0.0 if mine is None or mine.useless is None else now - mine.useless


def _lowest(bits: int) -> int:
    return (bits & -bits).bit_length() - 1
