"""The read plan: which bytes are read together, and in which order.

The plan cuts files into chunks: runs of bytes that one read and one copy per device bring over. Threads take them from
queues, one for each device that gets a part.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
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

    def read(self, file: Readable, image: memoryview) -> None:
        """Read the bytes into their places in ``image``; the gaps stay as they are."""
        file.read_into([image[place : place + count] for place, count in self.pieces], self.offset)

    def clear_gaps(self, image: memoryview) -> None:
        """Set the gaps between the pieces to zero."""
        end = 0
        for place, count in self.pieces:
            for gap in range(end, place, len(_ZEROS)):
                image[gap : min(place, gap + len(_ZEROS))] = _ZEROS[: place - gap]
            end = place + count


def read_plan(
    tensors: Iterable[tuple[StoredTensor, TensorSpec]],
    limit: int,
    *,
    in_turn: bool = True,
) -> list[Chunk]:
    """Cut tensors into chunks whose images have at most ``limit`` bytes.

    Tensors that follow each other both in their file and in their allocation share chunks. Chunks of different files
    take turns: threads that take one after the other read all files at once. Without ``in_turn`` files come one after
    the other.
    """
    lanes: dict[int, list[Chunk]] = {}
    for run in _runs(tensors):
        chunks = lanes.setdefault(run.file if in_turn else 0, [])
        done = 0
        if chunks and chunks[-1].takes(run, limit):
            place = run.start - chunks[-1].start
            done = min(run.nbytes, limit - place)
            chunks[-1].add(place, done)
        for begin in range(done, run.nbytes, limit):
            count = min(run.nbytes - begin, limit)
            chunks.append(Chunk(run.file, run.offset + begin, run.allocation, run.start + begin, [(0, count)], count))
    return [chunk for chunk in chain.from_iterable(zip_longest(*lanes.values())) if chunk]


class ChunkQueues:
    """Chunks that are left to do: a queue for each device that gets a part.

    Threads begin with different queues. A thread takes from one queue until that is empty, and then from the longest:
    for chunks of several devices by turns it would make another context current for each, which takes more driver calls
    than the rest, and in each of them a thread waits for the interpreter.
    """

    def __init__(self) -> None:
        self._queues: tuple[deque[Chunk], ...] = ()
        #: The queue that each thread takes from, by its number.
        self._chosen: dict[int, deque[Chunk]] = {}

    def fill(self, chunks: Iterable[Chunk], homes: Sequence[Hashable]) -> None:
        """Put chunks into the queues of their devices (``homes``, by allocation); without homes there is one queue."""
        queues: defaultdict[Hashable, deque[Chunk]] = defaultdict(deque)
        for chunk in chunks:
            queues[homes[chunk.allocation] if homes else None].append(chunk)
        self._chosen = {}
        self._queues = tuple(queues.values())

    def take(self, number: int) -> Chunk | None:
        """Return the next chunk for the thread with this number; None if there are no more."""
        if not self._queues:
            return None
        queue = self._chosen.get(number)
        if queue is None:
            queue = self._chosen[number] = self._queues[number % len(self._queues)]
        while True:
            try:
                return queue.popleft()
            except IndexError:
                queue = self._chosen[number] = max(self._queues, key=len)
                if not queue:
                    return None

    def clear(self) -> None:
        """Leave nothing to do."""
        for queue in self._queues:
            queue.clear()


class _Run(NamedTuple):
    """Bytes that lie in a row both in a file and in an allocation: one tensor's, or those of several."""

    file: int
    offset: int
    allocation: int
    start: int
    nbytes: int


def _runs(tensors: Iterable[tuple[StoredTensor, TensorSpec]]) -> Iterator[_Run]:
    """Join tensors whose bytes follow each other without a gap: as a rule nearly all of a file's."""
    last = _Run(0, 0, 0, 0, 0)
    for entry, spec in tensors:
        file, offset, allocation, start, nbytes = last
        if (
            offset + nbytes == entry.offset
            and start + nbytes == spec.offset
            and (file, allocation) == (entry.file, spec.allocation)
        ):
            last = _Run(file, offset, allocation, start, nbytes + entry.nbytes)
            continue
        if nbytes:
            yield last
        last = _Run(entry.file, entry.offset, spec.allocation, spec.offset, entry.nbytes)
    if last.nbytes:
        yield last
