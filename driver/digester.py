"""The digests of :mod:`cubroker.driver.digest`, computed by a device over memory that it reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from cubroker.driver.digest import PIECE, SIZE, Sums, add, finish, sums
from cubroker.driver.kernel import Kernel

if TYPE_CHECKING:
    from cubroker.driver.context import Context

_ENTRY = b"cubroker_digest"
_THREADS = 256
_BLOCKS = 1024
"""Blocks of a launch at most. An H200 runs 1,056 at once; more read no faster, and leave more sums to add up."""

_SHARE = 16
"""Pieces that each thread of a launch has about, while there are fewer blocks: less is not worth a block."""


class Digester:
    """Digests memory for one context; closed with it. See :meth:`Context.digests`.

    The sums come back through pinned host memory: a full device has no other to give.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._kernel = Kernel(context, "digest.ptx", _ENTRY)

    def digests(self, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        """Return the digest of each range of bytes, all of them under way at once."""
        for pointer, nbytes in ranges:
            if pointer % PIECE or nbytes < 0:
                raise ValueError(f"{nbytes} bytes at {pointer:#x}; a range begins at a multiple of {PIECE}")
        blocks = [_blocks(nbytes // PIECE) for _, nbytes in ranges]
        with self._context.current(), self._context.pin(SIZE * max(1, sum(blocks))) as pinned:
            self._launch(ranges, blocks, pinned.pointer)
            with pinned.view.cast("Q") as stored:
                found = list(_totals(stored, blocks))
        return [self._finished(*each, total) for each, total in zip(ranges, found, strict=True)]

    def close(self) -> None:
        """Unload the kernel; to be called once."""
        self._kernel.close()

    def _launch(self, ranges: Sequence[tuple[int, int]], blocks: Sequence[int], target: int) -> None:
        """Have the sums of each block stored, one after the other; done when it returns, however it does."""
        copies = self._context.copies()
        try:
            for (pointer, nbytes), count in zip(ranges, blocks, strict=True):
                if count:
                    self._kernel.launch(copies, count, _THREADS, pointer, nbytes // PIECE, target)
                target += SIZE * count
        finally:
            copies.synchronize()

    def _finished(self, pointer: int, nbytes: int, total: Sums) -> bytes:
        """Add the last bytes, which are no whole piece, and return the digest."""
        whole = nbytes - nbytes % PIECE
        rest = self._context.read(pointer + whole, nbytes - whole) if whole < nbytes else b""
        return finish(add(total, sums(rest, whole // PIECE)) if rest else total, nbytes)


def _blocks(pieces: int) -> int:
    return min(_BLOCKS, -(-pieces // (_THREADS * _SHARE)))


def _totals(stored: memoryview, blocks: Sequence[int]) -> Iterator[Sums]:
    """Yield the sums of each launch, of which every block has stored two."""
    start = 0
    for count in blocks:
        end = start + 2 * count
        yield add(*zip(stored[start:end:2], stored[start + 1 : end : 2], strict=True))
        start = end
