"""Copying a checkpoint into mapped memory, chunk by chunk.

Each device that gets a part of the files has a thread, which copies its chunks in the order of the plan
(:mod:`.read_plan`). On host devices chunks are read straight into the memory. For GPUs the thread has a ring of pinned
buffers: some are read into while another is copied from. Threads of the C library do the reads (:mod:`.threads`).

The buffers are parts of one region, which is pinned and filled while the broker allocates (:class:`FileCopy`), and
unpinned while the version is sealed. The region is not kept for the next load: pinning it during the allocation costs
no time, and kept it would permanently hold 64 MiB per GPU that the system cannot swap out.
"""

from __future__ import annotations

import ctypes
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import cycle
from typing import TypeAlias

from cubroker.client.loading.checkpoint import StoredTensor
from cubroker.client.loading.read_plan import (
    Chunk,
    ChunkQueues,
    PeerCopies,
    Readable,
    Target,
    copy_between_devices,
    hold_all,
    read_plan,
    sources,
)
from cubroker.client.loading.threads import (
    ChunkRead,
    Progress,
    Readers,
    Reads,
    SupervisedThread,
    WorkerThreads,
    has_many_pieces,
    reads_in_c,
    reads_of,
)
from cubroker.client.transport.requests import PART, Future
from cubroker.driver import Context, DriverError, Event, Stream
from cubroker.driver.system_calls import make_room
from cubroker.protocol.layout import TensorSpec

log = logging.getLogger(__name__)

CHUNK = 16 << 20
"""Bytes of a chunk's image. On a machine with two H200 and 32 cores, a load that was sharded over both ran at 85 GB/s
with 16 MiB and rings of 4, at 75 with 8 MiB and rings of 6, and at 50 to 65 with 4 MiB, limited by Python's share of
the work. With 32 MiB the rings outgrow the caches: 55 GB/s."""

RING_DEPTH = 4
"""Buffers of a ring: three are read into while one is copied from."""

TURN = RING_DEPTH
"""Chunks that the plan reads from one file before it changes to the next. Chunks in a ring share their file's
descriptors, and each change of file needs other descriptors. But file systems that have a server for each file are
faster if more than one file is read at the same time."""

ROOM = 112
"""Descriptors that a load usually opens: CUDA about 40 with its first context, and the reads of each device 16, or 32
when they change to another file."""

PYTHON_READERS = 12 if len(os.sched_getaffinity(0)) > 16 else 8
"""Python threads that read what the C library does not, for any number of devices: they all need the interpreter.
On a machine with an H200 and 32 cores, 12 read at 43 GB/s and 8 at 37; with 16 cores 8 read faster than 12."""


class FileCopy(SupervisedThread[float]):
    """A copy of tensors from files to their places on devices, made ready while the devices' memory is allocated.

    ::

        with FileCopy(name, context) as copy:
            copy.begin()                          # a thread makes the context
            copy.plan(files, tensors, sizes)      # it plans the copy, and pins memory for GPUs
            seconds = copy.into(targets)          # once their memory is allocated and mapped

    :meth:`into` starts the copy if :meth:`begin` was not called. When it returns or raises, no thread works any more
    and nothing more will be written. Leaving the block waits until the memory is unpinned.

    Args:
        name: of the threads.
        context: makes or returns the context that memory is pinned in; called on the thread.
        progress: called by :meth:`into`, now and then, with bytes of files done and bytes in all.
        besides: fills what is not in files, on the targets that have no upstream.
    """

    def __init__(
        self,
        name: str,
        context: Callable[[], Context],
        *,
        progress: Progress | None = None,
        besides: Callable[[Sequence[Target]], None] | None = None,
    ) -> None:
        super().__init__(name)
        self._context = context
        self._progress = progress
        self._besides = besides
        self._sizes: Sequence[int] = ()
        self._files: Sequence[Readable] = ()
        self._homes: Sequence[int] = ()
        self._cut: Callable[[], list[Chunk]] = list
        self._total = 0
        #: bytes that are done, by home
        self._counts = [0]
        self._todo = ChunkQueues()
        self._staging: Staging | None = None
        self._targets: Sequence[Target] = ()
        self._planned: Future[None] = Future()
        self._given: Future[None] = Future()
        self._given_at = 0.0
        #: What copies to further devices while chunks arrive; None if nothing does.
        self._relay: Future[PeerCopies | None] = Future()
        self._relayed = False

    def plan(
        self,
        files: Sequence[Readable],
        tensors: Iterable[tuple[StoredTensor, TensorSpec]],
        sizes: Sequence[int],
        homes: Sequence[Hashable] = (),
    ) -> None:
        """Set what is to be copied.

        Args:
            files: what the tensors are read from.
            tensors: where each is stored, and its place.
            sizes: bytes of each allocation.
            homes: for each allocation a key of the device that it is on; empty if each device that files are read into
                has all allocations.
        """
        stored = tuple(tensors)
        self._files, self._sizes = files, sizes
        numbers = {home: number for number, home in enumerate(dict.fromkeys(homes))}
        self._homes = [numbers[home] for home in homes]
        self._cut = lambda: read_plan(stored, CHUNK, TURN)
        self._total = sum(entry.nbytes for entry, _ in stored)
        self._counts = [0] * max(len(numbers), 1)
        self._planned.set(None)

    def into(self, targets: Sequence[Target]) -> float:
        """Copy everything to the targets; return the seconds it took.

        They count from when both the targets and the buffers are ready; chunks may be in the buffers by then.

        Raises:
            Invalid: a file became shorter, or cannot be read.
            Unavailable: threads have run out.
            DriverError: the driver refused.
        """
        progress = self._progress
        self._targets = targets
        self._given_at = time.perf_counter()
        self._given.set(None)
        try:
            self.begin()
            return self.result((lambda: progress(sum(self._counts), self._total)) if progress else None)
        finally:
            self.drop()

    # -- in the caller's thread, at any time -------------------------------------------------------

    def stop(self) -> None:
        """See :class:`SupervisedThread`."""
        self._todo.clear()
        self._planned.set(None)
        self._given.set(None)

    # -- in the thread -----------------------------------------------------------------------------

    def work(self) -> float:
        """See :class:`SupervisedThread`."""
        with WorkerThreads(1, self._name, self._todo.clear) as room:
            if not self._planned.done():
                room.submit(make_room, ROOM)
                self._context()
            self._await(self._planned)
            seconds = self._copy_chunks() if self._total and not self.dropped else 0.0
        self._await(self._given)
        targets, self._targets = self._targets, ()  # to hold them would keep the draft from being sealed
        if self.dropped:
            return seconds
        if (done := sum(self._counts)) != self._total:
            raise RuntimeError(f"{self._name} has copied {done} of {self._total} bytes, without an error")
        if self._besides:
            self._besides(sources(targets))
        if not self._relayed:
            seconds += copy_between_devices(targets, self._sizes)
        return seconds

    def _await(self, said: Future[None]) -> None:
        while not (self.dropped or said.wait(PART)):
            pass  # polls `dropped`, since an interrupt may keep the caller from setting the future

    def _copy_chunks(self) -> float:
        """Copy the chunks; return the seconds since both the targets and the buffers were ready."""
        rings = len(self._counts)
        # The relay ends after the threads, which use it; the readers end after the rings, which wait for them.
        with (
            ExitStack() as undo,
            WorkerThreads(rings + PYTHON_READERS, self._name, self._todo.clear) as pool,
            ExitStack() as work,
        ):
            readers = Readers()
            pinning = pool.submit(self._make_staging, self._context(), reads_of(self._files, readers))
            chunks = self._cut()  # while the other thread pins memory, mostly without the interpreter lock
            if not reads_in_c(self._files) or any(map(has_many_pieces, chunks)):
                work.enter_context(readers.at_work(pool.submit, PYTHON_READERS))
            staging, staged = pinning.result(), time.perf_counter()
            self._todo.fill(chunks, self._homes)
            if self.dropped:  # read after `fill`: either `stop` clears the chunks, or they are cleared here
                self._todo.clear()
            try:
                copying = []
                for home in range(rings):
                    copying.append(pool.submit(self._copy_some, staging, home))
                    work.callback(wait, copying[-1:])
                self._await(self._given)
                relay = self._start_relay(undo, chunks)
            except BaseException:
                self._todo.clear()
                raise
            finally:
                self._relay.set(None)  # if there was an error, the threads end
            for ring in copying:
                ring.result()
            if relay and not self.dropped:
                relay.finish()
                self._relayed = True
        return time.perf_counter() - max(self._given_at, staged)

    def _start_relay(self, undo: ExitStack, chunks: Sequence[Chunk]) -> PeerCopies | None:
        """Start to copy to further devices while chunks arrive, if there are such devices and no ``besides``."""
        if self._besides or not any(target.upstream for target in self._targets):
            return None
        relay = undo.enter_context(PeerCopies(self._targets, self._sizes, chunks))
        self._relay.set(relay)
        return relay

    def _make_staging(self, context: Context, make_reads: Callable[[], Reads]) -> Staging:
        depth = min(RING_DEPTH, -(-self._total // CHUNK))
        # Set here, so that :meth:`clean` finds it in any case.
        self._staging = make_staging(context, len(self._counts), depth, make_reads)
        return self._staging

    def _copy_some(self, staging: Staging, home: int) -> None:
        """Copy the chunks of one home. The buffers are filled before there are targets."""
        with ExitStack() as undo:
            undo.push(self._fail)
            writer = staging.writer()
            undo.callback(writer.finish)
            while writer.staged and self._read_next(writer, home):
                pass
            relay = self._relay.result()
            if not self.dropped:
                with writer.towards(sources(self._targets)):
                    while self._read_next(writer, home):
                        pass
                    while writer.reading:
                        self._counts[home] += writer.send()  # to report it here would take the interpreter
                        self._read_next(writer, home)
                        if relay:
                            relay.pass_on(writer.arrived)
                if relay:
                    relay.pass_on(writer.arrived)

    def _fail(self, kind: type[BaseException] | None, *_: object) -> None:
        """Clear the queues if this thread has failed, so that the other threads end."""
        if kind:
            self._todo.clear()

    def _read_next(self, writer: HostWriter | PinnedRing, home: int) -> bool:
        """Have a writer read the next chunk; return False if the writer is busy, or no chunk is left."""
        chunk = None if writer.busy else self._todo.take(home)
        if chunk is None:
            return False
        writer.read(self._files[chunk.file], chunk)
        return True

    def clean(self) -> None:
        """See :class:`SupervisedThread`."""
        if self._staging:
            try:
                self._staging.close()
            except DriverError as error:  # the context is ruined, which the copy has reported
                log.warning("%s cannot give back what it held: %s", self._name, error)


Staging: TypeAlias = "DirectStaging | PinnedStaging"
"""What the threads of a copy read into."""


def make_staging(context: Context, rings: int, depth: int, make_reads: Callable[[], Reads]) -> Staging:
    """Return the staging for ``rings`` threads: rings of pinned memory for GPUs, no memory for host devices."""
    return DirectStaging(depth, make_reads) if context.host else PinnedStaging(context, rings, depth, make_reads)


class DirectStaging:
    """Staging without memory: files are read straight into host devices."""

    def __init__(self, depth: int, make_reads: Callable[[], Reads]) -> None:
        self._depth = depth
        self._make_reads = make_reads
        self._writers: list[HostWriter] = []

    def writer(self) -> HostWriter:
        """Return the writer of one thread, which brings chunks to targets."""
        self._writers.append(HostWriter(self._depth, self._make_reads()))
        return self._writers[-1]

    def close(self) -> None:
        """Release what it holds; no writer is used any more."""
        while self._writers:
            self._writers.pop().close()


class PinnedStaging:
    """One region of pinned memory, which is faster to pin than many, cut into a ring of buffers for each thread."""

    def __init__(self, context: Context, rings: int, depth: int, make_reads: Callable[[], Reads]) -> None:
        """Pin the memory, which is what takes time here."""
        self._context = context
        self._pinned = context.pin_huge(rings * depth * CHUNK)
        starts = range(0, self._pinned.nbytes, CHUNK)
        buffers = [(self._pinned.pointer + start, self._pinned.view[start : start + CHUNK]) for start in starts]
        self._rings = [
            PinnedRing(buffers[first : first + depth], make_reads()) for first in range(0, len(buffers), depth)
        ]
        self._idle = [*self._rings]

    def writer(self) -> PinnedRing:
        """See :class:`DirectStaging`."""
        ring = self._idle.pop()
        ring.lane(self._context)  # before there are targets
        return ring

    def close(self) -> None:
        """See :class:`DirectStaging`."""
        self._idle.clear()
        with ExitStack() as undo:
            undo.callback(self._pinned.close)
            while self._rings:
                undo.callback(self._rings.pop().close)


class HostWriter:
    """Writes to host memory: chunks are read straight into the first target, and copied from there to the others."""

    staged = False
    """Whether chunks can be read before there are targets."""

    def __init__(self, depth: int, reads: Reads) -> None:
        self._depth = depth
        self._reads = reads
        self._targets: Sequence[Target] = ()
        self._begun: deque[tuple[Chunk, ChunkRead]] = deque()
        #: Chunks that are on the targets and were not passed on to further devices yet.
        self.arrived: list[Chunk] = []

    @property
    def reading(self) -> bool:
        """Whether a chunk is being read, or was read and not sent."""
        return bool(self._begun)

    @property
    def busy(self) -> bool:
        """Whether a chunk has to be sent before the next one is read."""
        return len(self._begun) == self._depth

    @contextmanager
    def towards(self, targets: Sequence[Target]) -> Iterator[None]:
        """Keep the targets mapped, and let the calling thread write to them; every read ends before the block does."""
        self._targets = targets
        with hold_all(targets), ExitStack() as undo:
            undo.callback(self.finish)
            yield
        self._targets = ()

    def read(self, file: Readable, chunk: Chunk) -> None:
        """Start to read a chunk into its place on the first target that has it.

        The gaps are zero since the memory was allocated.
        """
        self._begun.append((chunk, self._reads.start(file, chunk, self._places(chunk)[0])))

    def send(self) -> int:
        """Wait for the oldest chunk that was not sent, copy it to all targets, and return its number of bytes."""
        chunk, read = self._begun[0]
        read.wait()
        self._begun.popleft()
        first, *others = self._places(chunk)
        for other in others:
            ctypes.memmove(other, first, chunk.span)
        self.arrived.append(chunk)
        return chunk.nbytes

    def finish(self) -> None:
        """Wait until no read is in progress."""
        for _, read in self._begun:
            read.finish()

    def close(self) -> None:
        """Release what the reads share."""
        self._reads.close()

    def _places(self, chunk: Chunk) -> list[int]:
        pointers = (target.pointers[chunk.allocation] for target in self._targets)
        return [pointer + chunk.start for pointer in pointers if pointer is not None]


@dataclass(slots=True)
class _Slot:
    """A buffer of a ring."""

    number: int
    pointer: int
    view: memoryview
    #: the chunk that is in it, or is being read into it, and the read; None if that chunk was sent
    filling: tuple[Chunk, ChunkRead] | None = None
    #: the chunk that was sent from it, until it is known to be on the targets
    sent: Chunk | None = None
    #: events that mark the ends of the copies that read the buffer
    readers: list[Event] = field(default_factory=list)

    def wait(self) -> None:
        """Wait until no copy reads the buffer."""
        while self.readers:
            self.readers.pop().wait()


@dataclass(frozen=True, slots=True)
class _Lane:
    """A ring's stream and events on one device."""

    context: Context
    stream: Stream
    #: for each buffer the event that marks the end of the last copy from it
    copied: list[Event]
    undo: ExitStack

    def close(self) -> None:
        """Destroy the stream and the events; nothing uses them any more."""
        with self.context.current():
            self.undo.close()


class PinnedRing:
    """Writes to GPUs: pinned buffers that are images of chunks, read into and copied from in turn."""

    staged = True
    """See :class:`HostWriter`."""

    def __init__(self, buffers: Sequence[tuple[int, memoryview]], reads: Reads) -> None:
        self._reads = reads
        self._slots = [_Slot(number, pointer, view) for number, (pointer, view) in enumerate(buffers)]
        self._next_read, self._next_sent = cycle(self._slots), cycle(self._slots)
        #: how many slots are filled, or being filled
        self._filled = 0
        self._targets: Sequence[Target] = ()
        self._lanes: dict[Context, _Lane] = {}
        #: Leaves the context that stays current; and whether one was entered.
        self._inside = ExitStack()
        self._entered = False
        #: See :class:`HostWriter`.
        self.arrived: list[Chunk] = []

    @property
    def reading(self) -> bool:
        """See :class:`HostWriter`."""
        return bool(self._filled)

    @property
    def busy(self) -> bool:
        """See :class:`HostWriter`. If there are several buffers, one is not read into: it is copied from."""
        return self._filled >= max(len(self._slots) - 1, 1)

    def lane(self, context: Context) -> _Lane:
        """Return the lane to a device; it is made once."""
        if context not in self._lanes:
            with context.current(), ExitStack() as undo:
                stream = undo.enter_context(context.stream())
                # A wait for one spins, but not for long: the copy runs while the other buffers are read into.
                copied = [undo.enter_context(context.event(spin=True)) for _ in self._slots]
                self._lanes[context] = _Lane(context, stream, copied, undo.pop_all())
        return self._lanes[context]

    @contextmanager
    def towards(self, targets: Sequence[Target]) -> Iterator[None]:
        """Keep the targets mapped, and let the calling thread write to them; every copy is done when the block is left.

        Once a chunk was sent, the context of its first device stays current: that saves about half of the driver calls.
        """
        with ExitStack() as undo:
            undo.enter_context(hold_all(targets))
            self._inside = undo.enter_context(ExitStack())
            undo.callback(self._wait)
            self._targets = targets
            yield
        self._targets, self._entered = (), False
        self.arrived += [slot.sent for slot in self._slots if slot.sent]

    def _wait(self) -> None:
        with ExitStack() as undo:
            for lane in self._lanes.values():
                undo.callback(lane.stream.synchronize)

    def read(self, file: Readable, chunk: Chunk) -> None:
        """Start to read a chunk into the next buffer, once that is free."""
        slot = next(self._next_read)
        slot.wait()
        if slot.sent:
            self.arrived.append(slot.sent)
            slot.sent = None
        if chunk.has_gaps:
            chunk.clear_gaps(slot.view)
        slot.filling = chunk, self._reads.start(file, chunk, slot.pointer)
        self._filled += 1

    def send(self) -> int:
        """Wait for the oldest chunk that was not sent, enqueue its copies, and return its number of bytes."""
        slot = next(self._next_sent)
        assert slot.filling
        chunk, read = slot.filling
        read.wait()
        for target in self._targets:
            if (pointer := target.pointers[chunk.allocation]) is not None:
                if not self._entered:
                    self._inside.enter_context(target.context.current())
                    self._entered = True
                lane = self.lane(target.context)
                copied = lane.copied[slot.number]
                lane.stream.copy_in(pointer + chunk.start, slot.pointer, chunk.span, copied)
                slot.readers.append(copied)
        if not slot.readers:
            raise RuntimeError(f"no target has allocation {chunk.allocation}, which a chunk was read for")
        slot.filling, slot.sent = None, chunk
        self._filled -= 1
        return chunk.nbytes

    def finish(self) -> None:
        """Wait until no read is in progress."""
        for slot in self._slots:
            if slot.filling:
                slot.filling[1].finish()

    def close(self) -> None:
        """Destroy its streams and events, and drop the buffers; all reads and copies are finished."""
        self._slots.clear()
        self._next_read = self._next_sent = cycle(())
        with ExitStack() as undo:
            undo.callback(self._reads.close)
            while self._lanes:
                undo.callback(self._lanes.popitem()[1].close)
