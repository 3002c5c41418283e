"""Kernels: copies and comparisons of many segments of memory by one device, in few launches; and digests of memory.

A copy by the driver takes as long to submit as a GPU takes for 20 MB, so that hundreds of tensors are submitted more
slowly than they are copied. A kernel takes up to ``ENTRIES`` segments in one launch. All segments are cut into chunks
of the same size, one for each block of threads, so that large and small ones are balanced. The table of the segments
is an argument of the kernel: it takes no memory of the device, and several threads can launch at once.

Digests show whether bytes have changed; :data:`ALGORITHM` has their definition.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from cubroker.driver.context import Kernel, Pinned, PrimaryContext, Stream

if TYPE_CHECKING:
    import numpy as np
    from _typeshed import ReadableBuffer
    from numpy.typing import NDArray

THREADS = 256  #: Of a block.


# -- copies and comparisons ----------------------------------------------------------------------------

Segment = tuple[int, int, int]
"""Of a copy the address that it goes to, the one that it comes from, and its bytes. Of a comparison two addresses, and
the bytes at each."""

ENTRIES = 170  #: Segments of a launch at most: arguments have 4,096 bytes in all on GPUs and drivers of any age.
CHUNK = 32 << 10  #: Bytes of a block of threads; of a copy each thread has eight loads of 16 bytes on their way.
MAX_BLOCKS = (1 << 31) - 1  #: Blocks of a launch at most.
FLAGS = 1 << 14  #: Segments that are compared at once at most: each has a flag of 32 bits in pinned host memory.

Table = ctypes.Array[ctypes.c_uint64]
_Table = ctypes.c_uint64 * (3 * ENTRIES)


class BatchedCopy(Kernel):
    """Copies segments for one context; closed with it. See :meth:`Context.copy_batch`."""

    SOURCE = "batched_copy.ptx", b"cubroker_batched_copy"

    def start(self, stream: Stream, segments: Iterable[Segment], base: int) -> None:
        """Start the copies in a stream of the context; targets are offsets from ``base``."""
        with self._context.current():
            for table, count, chunks in tables(joined(segments), base):
                self.launch(stream, chunks, THREADS, count, table)


class BatchedCompare(Kernel):
    """Compares segments for one context; closed with it. See :meth:`Context.differing`."""

    SOURCE = "batched_compare.ptx", b"cubroker_batched_compare"

    def __init__(self, context: PrimaryContext) -> None:
        super().__init__(context)
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


# -- digests on a device -------------------------------------------------------------------------------


ALGORITHM = "cubroker-128-1"
"""The name of this definition of digests, over the ``nbytes`` bytes of one allocation, in unsigned integers of 64 bits
that wrap:

- The bytes are pieces of two words, u[0] and v[0], u[1] and v[1] and so on, of eight bytes each, little-endian; the
  last piece is filled up with zero bytes.
- fold(x, n) is x XOR (x >> n).
- U = fold(P * (u[i] XOR (i + 1) * K), 29), V = fold(Q * (v[i] XOR U), 32), X[i] = fold(R * (U XOR V), 32), and
  Y[i] = X[i] XOR V.
- A is the sum of all X[i], and B that of all Y[i].
- The digest is fmix64(A XOR nbytes), then fmix64(B XOR nbytes), each as eight bytes, little-endian.

P = 0xff51afd7ed558ccd and Q = 0xc4ceb9fe1a85ec53 are the factors of MurmurHash3's finaliser, fmix64 (Austin Appleby,
public domain), R = 0x9fb21c651e98df25 is that of rrmxmx (Pelle Evensen), and K = 0x9e3779b97f4a7c15 is 2 ** 64 over the
golden ratio.

Every piece is mixed with its position and depends on no other piece, so any number of threads work on them in any
order. Three multiplications for sixteen bytes are few enough that memory limits the rate of a GPU. A fold by 32 costs
the least; with three of them the same high bits would cancel out, so the first is another one.

The mix of a piece is a bijection: a change within one piece always changes the digest. A change of several pieces, of
their order, or of the length goes unnoticed by chance alone, which 128 bits make small; there is no proof of how small.

A digest shows accidents, and writers that do not know of it. It is not cryptographic: an attacker can make other bytes
that have the same digest. Against such a writer compare with files, which ``cubroker verify NAME PATH...`` does.
"""

SIZE = 16  #: Bytes of a digest.
PIECE = 16  #: Bytes of a piece.

Sums = tuple[int, int]  #: A and B, or the part of them that some of the pieces contribute.

_BLOCKS = 1024
"""Blocks of a launch at most. An H200 runs 1,056 at once; more read no faster, and leave more sums to add up."""

_SHARE = 16  #: Pieces that each thread of a smaller launch has about: fewer are not worth a block.


class Digester(Kernel):
    """Digests memory for one context; closed with it. See :meth:`Context.digests`.

    The sums come back through pinned host memory: a full device has no memory to give.
    """

    SOURCE = "digest.ptx", b"cubroker_digest"

    def digests(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return the digest of each range of bytes; all launches run at once."""
        for pointer, nbytes in ranges:
            if pointer % PIECE or nbytes < 0:
                raise ValueError(f"{nbytes} bytes at {pointer:#x}; a range begins at a multiple of {PIECE}")
        blocks = [min(_BLOCKS, -(-(nbytes // PIECE) // (THREADS * _SHARE))) for _, nbytes in ranges]
        with self._context.current(), self._context.pin(SIZE * max(1, sum(blocks))) as pinned:
            self._launch(ranges, blocks, pinned.pointer)
            with pinned.view.cast("Q") as stored:
                found = list(_totals(stored, blocks))
        return [self._finished(*each, total) for each, total in zip(ranges, found, strict=True)]

    def _launch(self, ranges: Sequence[tuple[int, int]], blocks: Sequence[int], target: int) -> None:
        """Have the sums of all blocks stored side by side; no launch runs any more when it returns or raises."""
        copies = self._context.copies()
        try:
            for (pointer, nbytes), count in zip(ranges, blocks, strict=True):
                if count:
                    self.launch(copies, count, THREADS, pointer, nbytes // PIECE, target)
                target += SIZE * count
        finally:
            copies.synchronize()

    def _finished(self, pointer: int, nbytes: int, total: Sums) -> bytes:
        """Add the last bytes, which fill no piece, and return the digest."""
        whole = nbytes - nbytes % PIECE
        rest = self._context.read(pointer + whole, nbytes - whole) if whole < nbytes else b""
        return finish(add(total, sums(rest, whole // PIECE)) if rest else total, nbytes)


def _totals(stored: memoryview, blocks: Sequence[int]) -> Iterator[Sums]:
    """Yield the sums of each launch, of which every block has stored two."""
    start = 0
    for count in blocks:
        end = start + 2 * count
        yield add(*zip(stored[start:end:2], stored[start + 1 : end : 2], strict=True))
        start = end


# -- digests in host memory ----------------------------------------------------------------------------

_STEP = 1 << 12  #: Pieces that numpy works on at once: they stay in a core's cache.

_MASK = (1 << 64) - 1
_K, _P, _Q, _R = 0x9E3779B97F4A7C15, 0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53, 0x9FB21C651E98DF25


def digest(data: ReadableBuffer) -> bytes:
    """Return the digest of bytes in host memory."""
    with memoryview(data) as view:
        return finish(sums(view), view.nbytes)


def sums(data: ReadableBuffer, first: int = 0) -> Sums:
    """Return what bytes in host memory, from piece number ``first`` on, add to A and B."""
    import numpy as np

    given = np.frombuffer(memoryview(data), np.uint8)
    rest = given.size % PIECE
    pieces = given[: given.size - rest].view("<u8")
    last = np.zeros(PIECE, np.uint8)
    last[:rest] = given[given.size - rest :]
    end = _sums(last.view("<u8"), first + pieces.size // 2) if rest else (0, 0)
    return add(_sums(pieces, first), end)


def add(*parts: Sums) -> Sums:
    """Return the sums of all pieces of several parts."""
    return sum(a for a, _ in parts) & _MASK, sum(b for _, b in parts) & _MASK


def finish(total: Sums, nbytes: int) -> bytes:
    """Return the digest of ``nbytes`` bytes with these sums."""
    return b"".join(_fmix64(value ^ nbytes).to_bytes(8, "little") for value in total)


def _fmix64(value: int) -> int:
    value ^= value >> 33
    value = value * _P & _MASK
    value ^= value >> 33
    value = value * _Q & _MASK
    return value ^ value >> 33


def _sums(words: NDArray[np.uint64], first: int) -> Sums:
    import numpy as np

    count = words.size // 2
    keys = np.arange(1, min(_STEP, count) + 1, dtype=np.uint64) * np.uint64(_K)
    values, others, spare = (np.empty_like(keys) for _ in range(3))
    found_a = found_b = 0
    for start in range(0, count, _STEP):
        chunk = words[2 * start : 2 * (start + _STEP)]
        n = chunk.size // 2
        u, v, room = values[:n], others[:n], spare[:n]
        np.add(keys[:n], np.uint64((first + start) * _K & _MASK), out=u)
        np.bitwise_xor(u, chunk[::2], out=u)
        _mix(u, _P, 29, room)
        np.bitwise_xor(u, chunk[1::2], out=v)
        _mix(v, _Q, 32, room)
        np.bitwise_xor(u, v, out=u)
        _mix(u, _R, 32, room)
        np.bitwise_xor(u, v, out=v)
        found_a += int(u.sum(dtype=np.uint64))
        found_b += int(v.sum(dtype=np.uint64))
    return found_a & _MASK, found_b & _MASK


def _mix(values: NDArray[np.uint64], factor: int, shift: int, spare: NDArray[np.uint64]) -> None:
    """Multiply and fold values in place; ``spare`` is scratch memory of the same size."""
    import numpy as np

    np.multiply(values, np.uint64(factor), out=values)
    np.right_shift(values, np.uint64(shift), out=spare)
    np.bitwise_xor(values, spare, out=values)
