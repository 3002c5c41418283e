"""The plan of a copy: which bytes of which file go where, in chunks, and the memory that they go to, the targets.

The plan cuts files into chunks: runs of bytes that are read in parts and then copied as a whole, once per device.
Chunks wait in queues, one for each device that gets a part of the files. A device that can read the memory of the
device before it copies everything from there, in pieces: each once all of its chunks have arrived
(:class:`PeerCopies`).
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from typing import NamedTuple, Protocol, Self

from cubroker.client.loading.checkpoint import StoredTensor
from cubroker.client.pool import Replica
from cubroker.driver import Context, Event
from cubroker.protocol.layout import ALIGNMENT, TensorSpec

MAX_BUFFERS = 1024
"""Buffers that one ``preadv`` takes (IOV_MAX on Linux)."""

P2P_PIECE = 64 << 20
"""Bytes of one copy between devices. While a piece is copied to the next device, the piece after it arrives. To pass on
each chunk by itself took half as long again on a machine with two H200, since the interpreter is the limit."""

_ZEROS = bytes(4096)


# -- chunks --------------------------------------------------------------------------------------------


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


# -- targets -------------------------------------------------------------------------------------------


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
