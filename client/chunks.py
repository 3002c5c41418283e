"""Cutting a checkpoint into chunks: runs of bytes that one read and one copy per device bring over."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain, zip_longest

from cubroker.client.checkpoint import Entry, File
from cubroker.protocol.layout import TensorSpec

MAX_PIECES = 1024
"""Buffers that one ``preadv`` takes (IOV_MAX on Linux)."""

_ZEROS = bytes(4096)


@dataclass(slots=True)
class Chunk:
    """A run of bytes of one file, and the run of one allocation, its *image*, that they fill.

    The bytes follow each other without holes in the file; in the image there are gaps between tensors,
    which begin at multiples of 256 there and anywhere in the file.

    Attributes:
        file: index of the file in its checkpoint.
        offset: where the bytes begin in the file.
        allocation: index of the allocation in its layout.
        start: where the image begins in the allocation.
        pieces: ``(place in the image, bytes)`` of each tensor, or part of one, in the order of both runs.
    """

    file: int
    offset: int
    allocation: int
    start: int
    pieces: list[tuple[int, int]] = field(default_factory=list)
    nbytes: int = 0

    @property
    def span(self) -> int:
        """Bytes of the image, gaps included."""
        place, count = self.pieces[-1]
        return place + count

    def continues(self, entry: Entry, spec: TensorSpec, done: int) -> bool:
        """Whether the tensor's bytes from ``done`` on are the next ones both in the file and in the allocation."""
        return (
            (self.file, self.allocation) == (entry.file, spec.allocation)
            and self.offset + self.nbytes == entry.offset + done
            and self.start + self.span <= spec.offset + done
        )

    def add(self, place: int, count: int) -> None:
        """Append ``count`` bytes, which go to ``place`` of the image."""
        self.pieces.append((place, count))
        self.nbytes += count

    def read(self, file: File, image: memoryview) -> None:
        """Read the bytes into their places in ``image``; what lies between them stays as it is."""
        file.read_into([image[place : place + count] for place, count in self.pieces], self.offset)

    def clear_gaps(self, image: memoryview) -> None:
        """Set what lies between the pieces to zero."""
        end = 0
        for place, count in self.pieces:
            for gap in range(end, place, len(_ZEROS)):
                image[gap : min(place, gap + len(_ZEROS))] = _ZEROS[: place - gap]
            end = place + count


def plan(tensors: Iterable[tuple[Entry, TensorSpec]], limit: int) -> list[Chunk]:
    """Cut tensors into chunks whose images have at most ``limit`` bytes.

    Tensors that follow each other both in their file and in their allocation share chunks. Chunks
    of different files take turns, so that threads that take one after the other read all files at once.
    """
    files: dict[int, list[Chunk]] = {}
    for entry, spec in tensors:
        chunks = files.setdefault(entry.file, [])
        done = 0
        while done < entry.nbytes:
            if not (chunks and _fits(chunks[-1], entry, spec, done, limit)):
                chunks.append(Chunk(entry.file, entry.offset + done, spec.allocation, spec.offset + done))
            place = spec.offset + done - chunks[-1].start
            count = min(entry.nbytes - done, limit - place)
            chunks[-1].add(place, count)
            done += count
    return [chunk for chunk in chain.from_iterable(zip_longest(*files.values())) if chunk]


def _fits(chunk: Chunk, entry: Entry, spec: TensorSpec, done: int, limit: int) -> bool:
    return (
        chunk.continues(entry, spec, done)
        and spec.offset + done - chunk.start < limit
        and len(chunk.pieces) < MAX_PIECES
    )
