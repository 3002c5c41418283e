"""Copies of many segments of memory by one device, in few launches.

A copy by the driver takes as long to submit as a GPU takes for 20 MB, so that hundreds of tensors are submitted more
slowly than they are copied. A kernel copies up to ``ENTRIES`` segments in one launch. All segments are cut into chunks
of the same size, one for each block of threads, so that large and small ones are balanced. The table of the segments
is an argument of the kernel: it takes no memory of the device, and several threads can launch at once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from itertools import islice

from cubroker.driver.buffers import round_up
from cubroker.driver.context import Kernel, PrimaryContext, Stream

Segment = tuple[int, int, int]
"""A copy: the address that it goes to, the address that it comes from, and its bytes."""

ENTRIES = 170
"""Segments of a launch at most: arguments have 4,096 bytes in all on GPUs and drivers of any age."""

CHUNK = 32 << 10
"""Bytes that a block of threads copies: each thread has eight loads of 16 bytes on their way at once."""

THREADS = 256

MAX_BLOCKS = (1 << 31) - 1
"""Blocks of a launch at most."""

_Table = ctypes.c_uint64 * (3 * ENTRIES)


class BatchedCopy:
    """Copies segments for one context; closed with it. See :meth:`Context.copy_batch`."""

    def __init__(self, context: PrimaryContext) -> None:
        self._context = context
        self._kernel = Kernel(context, "batched_copy.ptx", b"cubroker_batched_copy")

    def start(self, stream: Stream, segments: Iterable[Segment]) -> None:
        """Start the copies in a stream of the context."""
        left = joined(segments)
        with self._context.current():
            while batch := list(islice(left, ENTRIES)):
                self._launch(stream, batch)

    def close(self) -> None:
        """Unload the kernel; to be called once."""
        self._kernel.close()

    def _launch(self, stream: Stream, segments: list[Segment]) -> None:
        table, start = table_of(segments)
        blocks = start // CHUNK
        if blocks > MAX_BLOCKS:  # 64 TiB
            raise ValueError(f"{blocks * CHUNK} bytes to copy at once; the most are {MAX_BLOCKS * CHUNK}")
        self._kernel.launch(stream, blocks, THREADS, len(segments), table)


def table_of(segments: list[Segment]) -> tuple[ctypes.Array[ctypes.c_uint64], int]:
    """Return the kernel's table of segments that are not empty, and the bytes of all chunks.

    The segments lie in a row, each from a multiple of ``CHUNK`` on. An entry is the target and the source, both less
    the place in the row where the segment begins (modulo 2 ** 64), and the place where it ends.
    """
    words: list[int] = []
    start = 0
    for target, source, nbytes in segments:
        words += (target - start, source - start, start + nbytes)
        start = round_up(start + nbytes, CHUNK)
    return _Table(*words), start


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
