"""Copying a checkpoint into mapped memory: the way of its chunks to the devices.

A thread for each device that gets a part takes one chunk of the plan after the other (:mod:`.read_plan`). On host
devices chunks are read straight into the memory; on GPUs the thread has a ring of pinned buffers, so that some are read
into while another is copied from. The reads themselves go on in threads of the C library (:mod:`.background_reads`).
What goes on from device to device is in :mod:`.targets`.

The buffers are parts of one region, which is pinned and filled while the broker allocates (:class:`FileCopy`), and
unpinned while the version is sealed. It is not kept for the next load: behind the allocation it costs no time, and a
process that has loaded once would hold 64 MiB for each of its GPUs, which no system can swap out, for good.
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
from typing import Protocol, Self

from cubroker.client.loading.background_reads import (
    ChunkRead,
    Readers,
    Reads,
    has_many_pieces,
    reads_in_c,
    reads_of,
)
from cubroker.client.loading.checkpoint import StoredTensor
from cubroker.client.loading.read_plan import Chunk, ChunkQueues, Readable, read_plan
from cubroker.client.loading.targets import PeerCopies, Target, copy_between_devices, hold_all, sources
from cubroker.client.loading.threads import Progress, SupervisedThread, WorkerThreads
from cubroker.client.transport.requests import PART, Future
from cubroker.driver import Context, DriverError, Event, Stream
from cubroker.driver.system_calls import make_room
from cubroker.protocol.layout import TensorSpec

log = logging.getLogger(__name__)

CHUNK = 16 << 20
"""Bytes of a chunk's image. Beside two H200 with 32 cores a load that was sharded over both came at 85 GB/s with 16 MiB
and rings of 4, at 75 with 8 MiB and rings of 6, and at 50 to 65 with 4 MiB, where Python's share of the work is the
limit. With 32 MiB the rings outgrow the caches: 55 GB/s."""

RING_DEPTH = 4
"""Buffers of a ring: three are read into while one is copied from."""

TURN = RING_DEPTH
"""Chunks of a file in a row. Chunks in a ring share their file's descriptors, and at each change of file a chunk needs
others; yet more than one file is read at once, as file systems with a server for each of them want it."""

ROOM = 112
"""Descriptors that a load adds, as a rule: CUDA some 40 with its first context, and the reads of each device 16, or 32
where they come to another file."""

PYTHON_READERS = 12 if len(os.sched_getaffinity(0)) > 16 else 8
"""Python threads that read what the C library does not, for any number of devices: they all need the interpreter.
Beside an H200 with 32 cores 12 read at 43 GB/s and 8 at 37; with 16 cores 8 read faster than 12."""


class FileCopy(SupervisedThread[float]):
    """A copy of tensors from files to their places on devices, made ready while the devices' memory is not there yet.

    ::

        with FileCopy(name, context) as copy:
            copy.begin()                          # a thread makes the context
            copy.plan(files, tensors, sizes)      # it plans the copy, and pins memory for GPUs
            seconds = copy.into(targets)          # once their memory is allocated and mapped

    When :meth:`into` returns or raises, no thread works any more and nothing more will be written; what was not begun,
    it begins. Leaving the block waits until the memory is unpinned.

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
        #: Passes chunks on to other devices, if it does so as they come.
        self._relay: Future[PeerCopies | None] = Future()
        self._relayed = False
        self._started = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def begin(self) -> None:
        """Start to make the copy ready; raises ``Unavailable`` if threads have run out."""
        self._started = True
        super().begin()

    def plan(
        self,
        files: Sequence[Readable],
        tensors: Iterable[tuple[StoredTensor, TensorSpec]],
        sizes: Sequence[int],
        homes: Sequence[Hashable] = (),
    ) -> None:
        """Say what is to be copied.

        Args:
            files: what the tensors are read from.
            tensors: where each is stored, and its place.
            sizes: bytes of each allocation.
            homes: for each allocation the device that it is on, by anything that tells it from the others; none if each
                of those that files are read into has all.
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

        They begin when the targets and the buffers are there. What the buffers take may have been read before.

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
            if not self._started:
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
        with WorkerThreads(1, self._name, self._todo) as room:
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
            raise RuntimeError(f"{self._name} has copied {done} of {self._total} bytes, and nothing says why")
        if self._besides:
            self._besides(sources(targets))
        if not self._relayed:
            seconds += copy_between_devices(targets, self._sizes)
        return seconds

    def _await(self, said: Future[None]) -> None:
        while not (self.dropped or said.wait(PART)):
            pass  # an interrupt may keep the caller from saying anything else than that it has gone

    def _copy_chunks(self) -> float:
        """Bring the chunks over; return the seconds from when both the targets and the buffers are there."""
        rings = len(self._counts)
        # The relay ends after the threads, which use it; and the readers when the rings have, which wait for them.
        with (
            ExitStack() as undo,
            WorkerThreads(rings + PYTHON_READERS, self._name, self._todo) as pool,
            ExitStack() as work,
        ):
            readers = Readers()
            pinning = pool.submit(self._make_staging, self._context(), reads_of(self._files, readers))
            chunks = self._cut()  # while memory is pinned, most of it without the interpreter
            if not reads_in_c(self._files) or any(map(has_many_pieces, chunks)):
                work.enter_context(readers.at_work(pool.submit, PYTHON_READERS))
            staging, staged = pinning.result(), time.perf_counter()
            self._todo.fill(chunks, self._homes)
            if self.dropped:  # looked at last: `stop` either clears what is there, or is seen here
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
        """Have chunks passed on to other devices as they come, if there are any, and nothing else comes besides."""
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
        """Copy what goes to one home. What the buffers take is read before there are targets."""
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
        """Leave nothing to do to the other threads, if one has failed."""
        if kind:
            self._todo.clear()

    def _read_next(self, writer: HostWriter | PinnedRing, home: int) -> bool:
        """Have a writer read one of the chunks that are left to do; False if it reads enough, or there are none."""
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


class Staging(Protocol):
    """What the threads of a copy read into."""

    def writer(self) -> HostWriter | PinnedRing:
        """Return one thread's way of bringing chunks to targets."""

    def close(self) -> None:
        """Give back what it holds; no writer is used any more."""


def make_staging(context: Context, rings: int, depth: int, make_reads: Callable[[], Reads]) -> Staging:
    """Return what so many threads read into: host devices themselves, or rings of pinned memory on the way to GPUs."""
    return DirectStaging(depth, make_reads) if context.host else PinnedStaging(context, rings, depth, make_reads)


class DirectStaging:
    """No memory: files are read into host devices."""

    def __init__(self, depth: int, make_reads: Callable[[], Reads]) -> None:
        self._depth = depth
        self._make_reads = make_reads
        self._writers: list[HostWriter] = []

    def writer(self) -> HostWriter:
        """See :class:`Staging`."""
        self._writers.append(HostWriter(self._depth, self._make_reads()))
        return self._writers[-1]

    def close(self) -> None:
        """See :class:`Staging`."""
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
        """See :class:`Staging`."""
        ring = self._idle.pop()
        ring.lane(self._context)  # before there are targets
        return ring

    def close(self) -> None:
        """See :class:`Staging`."""
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
        #: Chunks that are on the targets, and that nothing was done about yet.
        self.arrived: list[Chunk] = []

    @property
    def reading(self) -> bool:
        """Whether a chunk is being read, or was read and not sent."""
        return bool(self._begun)

    @property
    def busy(self) -> bool:
        """Whether one has to be sent before the next one is read."""
        return len(self._begun) == self._depth

    @contextmanager
    def towards(self, targets: Sequence[Target]) -> Iterator[None]:
        """Keep the targets mapped, and let the calling thread write to them; nothing does when the block is left."""
        self._targets = targets
        with hold_all(targets), ExitStack() as undo:
            undo.callback(self.finish)
            yield
        self._targets = ()

    def read(self, file: Readable, chunk: Chunk) -> None:
        """Start to read a chunk into its place on the first target that has it.

        The gaps are zero since the memory was made.
        """
        self._begun.append((chunk, self._reads.start(file, chunk, self._places(chunk)[0])))

    def send(self) -> int:
        """Return the bytes of the chunk that was read first of those not sent, once all targets have it."""
        chunk, read = self._begun[0]
        read.wait()
        self._begun.popleft()
        first, *others = self._places(chunk)
        for other in others:
            ctypes.memmove(other, first, chunk.span)
        self.arrived.append(chunk)
        return chunk.nbytes

    def finish(self) -> None:
        """Return when nothing is read any more."""
        for _, read in self._begun:
            read.finish()

    def close(self) -> None:
        """Give back what the reads share."""
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
    #: what it is filled with, or being filled, and how; nothing if that was sent
    filling: tuple[Chunk, ChunkRead] | None = None
    #: what was sent from it, unless that is known to be there
    sent: Chunk | None = None
    #: the ends of copies that read the buffer
    readers: list[Event] = field(default_factory=list)

    def wait(self) -> None:
        """Return when nothing reads the buffer."""
        while self.readers:
            self.readers.pop().wait()


@dataclass(frozen=True, slots=True)
class _Lane:
    """A ring's way to one device."""

    context: Context
    stream: Stream
    #: the end of the last copy from each buffer
    copied: list[Event]
    undo: ExitStack

    def close(self) -> None:
        """Give the stream and the events back; nothing uses them any more."""
        with self.context.current():
            self.undo.close()


class PinnedRing:
    """Writes to GPUs: pinned buffers that are images of chunks, read into and copied from in turn."""

    staged = True
    """As of a :class:`HostWriter`."""

    def __init__(self, buffers: Sequence[tuple[int, memoryview]], reads: Reads) -> None:
        self._reads = reads
        self._slots = [_Slot(number, pointer, view) for number, (pointer, view) in enumerate(buffers)]
        self._next_read, self._next_sent = cycle(self._slots), cycle(self._slots)
        #: how many slots are filled, or being filled
        self._filled = 0
        self._targets: Sequence[Target] = ()
        self._lanes: dict[Context, _Lane] = {}
        #: What leaves the context that stays current, and whether one was entered.
        self._inside = ExitStack()
        self._entered = False
        #: As of a :class:`HostWriter`.
        self.arrived: list[Chunk] = []

    @property
    def reading(self) -> bool:
        """As of a :class:`HostWriter`."""
        return bool(self._filled)

    @property
    def busy(self) -> bool:
        """As of a :class:`HostWriter`. One of several buffers is left to be copied from."""
        return self._filled >= max(len(self._slots) - 1, 1)

    def lane(self, context: Context) -> _Lane:
        """Return the way to a device; it is made once."""
        if context not in self._lanes:
            with context.current(), ExitStack() as undo:
                stream = undo.enter_context(context.stream())
                # They spin, and not for long: the other buffers are read into meanwhile.
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
        """Start the copies of the chunk that was read first of those not sent, once it is read; return its bytes."""
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
        """Return when nothing is read any more."""
        for slot in self._slots:
            if slot.filling:
                slot.filling[1].finish()

    def close(self) -> None:
        """Give back what the devices have for it, and let the buffers go; it is finished."""
        self._slots.clear()
        self._next_read = self._next_sent = cycle(())
        with ExitStack() as undo:
            undo.callback(self._reads.close)
            while self._lanes:
                undo.callback(self._lanes.popitem()[1].close)
