"""The read plan: which bytes are read together, and in which order.

The plan cuts files into chunks: runs of bytes that are read in parts and then copied as a whole, once per device.
Chunks wait in queues, one for each device that gets a part of the files.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from typing import NamedTuple, Protocol

from cubroker.client.loading.checkpoint import StoredTensor
from cubroker.protocol.layout import ALIGNMENT, TensorSpec

MAX_BUFFERS = 1024
"""Buffers that one ``preadv`` takes (IOV_MAX on Linux)."""

_ZEROS = bytes(4096)


class Readable(Protocol):
    """What tensors are read from: a file, or an array that is read like one."""

    @property
    def descriptor(self) -> int | None:
        """The file descriptor; None for an array. A copy reads either files alone or arrays alone."""

    def read_into(self, buffers: list[memoryview], offset: int) -> None:
        """Fill ``buffers``, in order, with the bytes from ``offset`` on."""


@dataclass(slots=True)
class Chunk:
    """A run of bytes of one file, and the run of one allocation, its *image*, that they fill.

    The bytes follow each other without holes in the file. In the image there are gaps between tensors, which begin at
    multiples of 256 there and anywhere in the file.
    """

    #: index of the file in its checkpoint
    file: int
    #: where the bytes begin in the file
    offset: int
    #: index of the allocation in its layout
    allocation: int
    #: where the image begins in the allocation
    start: int
    #: ``(place in the image, bytes)`` of each tensor, or part of one, in the order of both runs
    pieces: list[tuple[int, int]] = field(default_factory=list)
    nbytes: int = 0
    #: bytes of the image, gaps included
    span: int = field(init=False)

    def __post_init__(self) -> None:
        self.span = sum(self.pieces[-1]) if self.pieces else 0

    @property
    def has_gaps(self) -> bool:
        """Whether there are bytes of the image that are not read."""
        return self.span > self.nbytes

    def takes(self, run: _Run, limit: int) -> bool:
        """Whether a run's bytes come next in both the file and the image, and there is room for some of them.

        A gap as wide as the alignment of tensors may hold a tensor of another file.
        """
        return (
            (self.file, self.allocation) == (run.file, run.allocation)
            and self.offset + self.nbytes == run.offset
            and self.start + self.span <= run.start < min(self.start + self.span + ALIGNMENT, self.start + limit)
            and len(self.pieces) < MAX_BUFFERS
        )

    def add(self, place: int, count: int) -> None:
        """Append ``count`` bytes, which go to ``place`` of the image."""
        self.pieces.append((place, count))
        self.nbytes += count
        self.span = place + count

    def parts(self, limit: int) -> Iterator[tuple[int, list[tuple[int, int]]]]:
        """Yield parts of at most ``limit`` bytes: where each begins in the file, and its pieces of the image."""
        begin, room = self.offset, limit
        part: list[tuple[int, int]] = []
        for place, count in self.pieces:
            while count:
                taken = min(count, room)
                part.append((place, taken))
                place, count, room = place + taken, count - taken, room - taken
                if not room:
                    yield begin, part
                    begin, room, part = begin + limit, limit, []
        if part:
            yield begin, part

    def clear_gaps(self, image: memoryview) -> None:
        """Set the gaps between the pieces to zero."""
        end = 0
        for place, count in self.pieces:
            for gap in range(end, place, len(_ZEROS)):
                image[gap : min(place, gap + len(_ZEROS))] = _ZEROS[: place - gap]
            end = place + count


def read_plan(tensors: Iterable[tuple[StoredTensor, TensorSpec]], limit: int, turn: int = 1) -> list[Chunk]:
    """Cut tensors into chunks whose images have at most ``limit`` bytes.

    Tensors that follow each other both in their file and in their allocation share chunks. The plan alternates between
    the files, with ``turn`` chunks of each; the last turn of a file includes its remaining chunks, too.
    """
    lanes: dict[int, list[Chunk]] = {}
    for run in _runs(tensors):
        chunks = lanes.setdefault(run.file, [])
        done = 0
        if chunks and chunks[-1].takes(run, limit):
            place = run.start - chunks[-1].start
            done = min(run.nbytes, limit - place)
            chunks[-1].add(place, done)
        for begin in range(done, run.nbytes, limit):
            count = min(run.nbytes - begin, limit)
            chunks.append(Chunk(run.file, run.offset + begin, run.allocation, run.start + begin, [(0, count)], count))
    turns = [[*_turns(lane, turn)] for lane in lanes.values()]
    return [*chain.from_iterable(chain.from_iterable(zip_longest(*turns, fillvalue=[])))]


def _turns(chunks: list[Chunk], turn: int) -> Iterator[list[Chunk]]:
    last = max(len(chunks) // turn - 1, 0) * turn
    for first in range(0, last, turn):
        yield chunks[first : first + turn]
    yield chunks[last:]


class ChunkQueues:
    """Chunks that are left to do: a queue for each device that gets a part of the files."""

    def __init__(self) -> None:
        self._queues: dict[int, deque[Chunk]] = {}

    def fill(self, chunks: Iterable[Chunk], homes: Sequence[int]) -> None:
        """Put chunks into the queues of their devices (``homes``, by allocation); without homes there is queue 0."""
        queues: defaultdict[int, deque[Chunk]] = defaultdict(deque)
        for chunk in chunks:
            queues[homes[chunk.allocation] if homes else 0].append(chunk)
        self._queues = queues

    def take(self, home: int) -> Chunk | None:
        """Return the next chunk for a device; None if there are no more."""
        try:
            return self._queues[home].popleft()
        except (KeyError, IndexError):
            return None

    def clear(self) -> None:
        """Drop all chunks."""
        self._queues = {}


class _Run(NamedTuple):
    """Bytes that are contiguous both in a file and in an allocation, of one tensor or of several."""

    file: int
    offset: int
    allocation: int
    start: int
    nbytes: int


def _runs(tensors: Iterable[tuple[StoredTensor, TensorSpec]]) -> Iterator[_Run]:
    """Join tensors whose bytes follow each other without a gap: as a rule nearly all tensors of a file."""
    file = offset = allocation = start = nbytes = 0  # of the run that grows
    for entry, spec in tensors:
        if (
            offset + nbytes == entry.offset
            and start + nbytes == spec.offset
            and file == entry.file
            and allocation == spec.allocation
        ):
            nbytes += entry.nbytes
            continue
        if nbytes:
            yield _Run(file, offset, allocation, start, nbytes)
        file, offset, nbytes = entry.file, entry.offset, entry.nbytes
        allocation, start = spec.allocation, spec.offset
    if nbytes:
        yield _Run(file, offset, allocation, start, nbytes)
