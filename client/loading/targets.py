"""The targets of a copy: a layout's memory on each device, and copies from one to the next.

A device that can read the memory of the device before it copies everything from there, in pieces: each once all of its
chunks have arrived (:class:`PeerCopies`).
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Self

from cubroker.client.loading.read_plan import Chunk
from cubroker.client.pool import Replica
from cubroker.driver import Context, Event

P2P_PIECE = 64 << 20
"""Bytes of one copy between devices. While a piece is copied to the next device, the piece after it arrives. To pass on
each chunk by itself took half as long again on a machine with two H200, since the interpreter is the limit."""


@dataclass(frozen=True, slots=True)
class Target:
    """The allocations of a layout on one device."""

    context: Context
    #: where each allocation begins; None for those of a sharded layout that are on other devices
    pointers: tuple[int | None, ...]
    #: keeps them mapped while a thread writes
    hold: Callable[[], AbstractContextManager[object]] = nullcontext
    #: where the device reads the allocations of the target before it; None if it cannot
    upstream: tuple[int, ...] | None = None


def target_of(replica: Replica) -> Target:
    """Return a draft's replica as a target."""
    views = dict(zip(replica.allocations, replica.allocation_views, strict=True))
    numbers = range(len(replica.layout.allocations))
    pointers = tuple(views[number].pointer if number in views else None for number in numbers)
    return Target(replica.context, pointers, next(iter(views.values())).hold, replica.upstream)


def homes_of(targets: Sequence[Target]) -> tuple[int, ...]:
    """Return for each allocation the index of its target; nothing if an allocation is on more than one target."""
    homes = []
    for pointers in zip(*(target.pointers for target in targets), strict=True):
        owners = [number for number, pointer in enumerate(pointers) if pointer is not None]
        if len(owners) > 1:
            return ()
        homes.append(owners[0] if owners else 0)
    return tuple(homes)


def sources(targets: Sequence[Target]) -> Sequence[Target]:
    """Return the targets that files are read into."""
    return [target for target in targets if not target.upstream]


@contextmanager
def hold_all(targets: Sequence[Target]) -> Iterator[None]:
    """Keep all targets mapped. Each thread holds them itself: unlike the caller's thread, it is never interrupted."""
    with ExitStack() as holds:
        for target in targets:
            holds.enter_context(target.hold())
        yield


# -- from device to device -----------------------------------------------------------------------------


def copy_between_devices(targets: Sequence[Target], sizes: Sequence[int]) -> float:
    """Copy all allocations, of these ``sizes``, to each target with an ``upstream``; return the seconds it took."""
    if not any(target.upstream for target in targets):
        return 0.0
    began = time.perf_counter()
    with PeerCopies(targets, sizes) as copies:
        copies.finish()
    return time.perf_counter() - began


class PeerCopies:
    """Copies to each target with an ``upstream``, piece by piece.

    ::

        with PeerCopies(targets, sizes, chunks) as copies:
            copies.pass_on([chunk])     # copies a piece once all of its chunks have arrived
            copies.finish()

    Args:
        targets: where the memory is; they are kept mapped within the block.
        sizes: bytes of each allocation.
        chunks: the chunks that fill the targets without an upstream; empty if these targets are filled already.
    """

    def __init__(self, targets: Sequence[Target], sizes: Sequence[int], chunks: Iterable[Chunk] = ()) -> None:
        self._targets = targets
        self._sizes = sizes
        self._missing = Counter(chain.from_iterable(map(_pieces, chunks)))
        #: Pieces whose copies were not enqueued yet, in order.
        self._left = dict.fromkeys(
            (number, piece) for number, size in enumerate(sizes) for piece in range(-(-size // P2P_PIECE))
        )
        self._undo = ExitStack()
        self._copiers: list[_PeerCopier | None] = []

    def __enter__(self) -> Self:
        with ExitStack() as undo:
            undo.enter_context(hold_all(self._targets))
            self._copiers = [_PeerCopier(undo, target) if target.upstream else None for target in self._targets]
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()  # closing a stream waits for it
        self._targets = ()  # a traceback may keep this object, and would keep the draft's memory with it
        self._copiers = []

    def pass_on(self, arrived: list[Chunk]) -> None:
        """Remove chunks that have arrived from the list, and enqueue the copies of pieces that are now complete."""
        while arrived:
            for piece in _pieces(arrived.pop()):
                self._missing[piece] -= 1
                if not self._missing[piece]:
                    self._begin(piece)

    def finish(self) -> None:
        """Enqueue the copies of all pieces that are left, and wait until every copy is done."""
        for piece in [*self._left]:
            self._begin(piece)
        for copier in self._copiers:
            if copier:
                copier.stream.synchronize()

    def _begin(self, piece: tuple[int, int]) -> None:
        del self._left[piece]
        allocation, start = piece[0], piece[1] * P2P_PIECE
        size = min(P2P_PIECE, self._sizes[allocation] - start)
        before: Event | None = None
        for copier in self._copiers:
            before = copier.copy(allocation, start, size, before) if copier else None


def _pieces(chunk: Chunk) -> list[tuple[int, int]]:
    """Return the pieces that a chunk lies in, by allocation and number: one, or two if it lies across an edge."""
    first, last = chunk.start // P2P_PIECE, (chunk.start + chunk.span - 1) // P2P_PIECE
    return [(chunk.allocation, number) for number in range(first, last + 1)]


class _PeerCopier:
    """A device's stream of copies from the device before it, and the event that marks the end of the last."""

    def __init__(self, undo: ExitStack, target: Target) -> None:
        self.stream = undo.enter_context(target.context.stream())
        self._target = target
        self._copied = undo.enter_context(target.context.event())

    def copy(self, allocation: int, start: int, nbytes: int, before: Event | None) -> Event:
        """Enqueue the copy of one piece after the event ``before``; return the event that marks its end."""
        pointer, upstream = self._target.pointers[allocation], self._target.upstream
        assert upstream
        assert pointer is not None
        if before:
            self.stream.wait(before)
        self.stream.copy(pointer + start, upstream[allocation] + start, nbytes)
        self.stream.record(self._copied)
        return self._copied
