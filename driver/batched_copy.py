"""Copies and comparisons of many segments of memory by one device, in few launches.

A copy by the driver takes as long to submit as a GPU takes for 20 MB, so that hundreds of tensors are submitted more
slowly than they are copied. A kernel takes up to ``ENTRIES`` segments in one launch. All segments are cut into chunks
of the same size, one for each block of threads, so that large and small ones are balanced. The table of the segments
is an argument of the kernel: it takes no memory of the device, and several threads can launch at once.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

from cubroker.driver.context import Kernel, Pinned, PrimaryContext, Stream

Segment = tuple[int, int, int]
"""Of a copy the address that it goes to, the one that it comes from, and its bytes. Of a comparison two addresses, and
the bytes at each."""

ENTRIES = 170  #: Segments of a launch at most: arguments have 4,096 bytes in all on GPUs and drivers of any age.
CHUNK = 32 << 10  #: Bytes of a block of threads; of a copy each thread has eight loads of 16 bytes on their way.

THREADS = 256

MAX_BLOCKS = (1 << 31) - 1  #: Blocks of a launch at most.
FLAGS = 1 << 14  #: Segments that are compared at once at most: each has a flag of 32 bits in pinned host memory.

Table = ctypes.Array[ctypes.c_uint64]

_Table = ctypes.c_uint64 * (3 * ENTRIES)


class BatchedCopy(Kernel):
    """Copies segments for one context; closed with it. See :meth:`Context.copy_batch`."""

    def __init__(self, context: PrimaryContext) -> None:
        super().__init__(context, "batched_copy.ptx", b"cubroker_batched_copy")

    def start(self, stream: Stream, segments: Iterable[Segment], base: int) -> None:
        """Start the copies in a stream of the context; targets are offsets from ``base``."""
        with self._context.current():
            for table, count, chunks in tables(joined(segments), base):
                self.launch(stream, chunks, THREADS, count, table)


class BatchedCompare(Kernel):
    """Compares segments for one context; closed with it. See :meth:`Context.differing`."""

    def __init__(self, context: PrimaryContext) -> None:
        super().__init__(context, "batched_compare.ptx", b"cubroker_batched_compare")
        #: Pinned memory for flags, which takes longer to allocate than hundreds of tensors to compare.
        self._spare: deque[Pinned] = deque()

    def differing(self, segments: Sequence[Segment]) -> list[bool]:
        """Return whether the two ends of each segment differ."""
        found: list[bool] = []
        with self._context.current():
            try:
                pinned = self._spare.pop()
            except IndexError:  # another thread compares
                pinned = self._context.pin(4 * FLAGS)
            try:
                for start in range(0, len(segments), FLAGS):
                    found += self._compared(segments[start : start + FLAGS], pinned)
            finally:
                self._spare.append(pinned)
        return found

    def close(self) -> None:
        """Unload it, and free the flags; to be called once."""
        super().close()
        while self._spare:
            self._spare.pop().close()

    def _compared(self, segments: Sequence[Segment], pinned: Pinned) -> list[bool]:
        """Compare up to ``FLAGS`` segments; no launch runs any more when it returns or raises."""
        view = pinned.view[: 4 * len(segments)]
        view[:] = bytes(len(view))
        copies, flags = self._context.copies(), pinned.pointer
        try:
            for table, count, chunks in tables(segments):
                if chunks:
                    self.launch(copies, chunks, THREADS, count, flags, table)
                flags += 4 * count
        finally:
            copies.synchronize()
        with view, view.cast("I") as words:
            return list(map(bool, words))


def tables(segments: Iterable[Segment], base: int = 0) -> Iterator[tuple[Table, int, int]]:
    """Yield the kernels' tables of up to ``ENTRIES`` segments, the entries of each, and its chunks.

    The segments lie in a row, each from a multiple of ``CHUNK`` on. An entry is both addresses, less the place in the
    row where the segment begins (modulo 2 ** 64), and the place where it ends. First addresses are offsets from
    ``base``. An empty segment has no chunk.
    """
    words: list[int] = []
    start = 0
    for first, second, nbytes in segments:
        words += (base + first - start, second - start, start + nbytes)
        start = (start + nbytes + CHUNK - 1) & -CHUNK
        if len(words) == 3 * ENTRIES:
            yield _Table(*words), ENTRIES, _blocks(start)
            words, start = [], 0
    if words:
        yield _Table(*words), len(words) // 3, _blocks(start)


def _blocks(end: int) -> int:
    blocks = end // CHUNK
    if blocks > MAX_BLOCKS:  # 64 TiB
        raise ValueError(f"{end} bytes at once; the most are {MAX_BLOCKS * CHUNK}")
    return blocks


def joined(segments: Iterable[Segment]) -> Iterator[Segment]:
    """Yield the segments, of which those that adjoin the one before them at both ends are one with it."""
    target = source = nbytes = 0
    for to, at, count in segments:
        if nbytes and to == target + nbytes and at == source + nbytes:
            nbytes += count
        elif count:
            if nbytes:
                yield target, source, nbytes
            target, source, nbytes = to, at, count
    if nbytes:
        yield target, source, nbytes
