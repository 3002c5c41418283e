"""Copying a checkpoint into mapped memory: the read plan, the way of its chunks to the devices, and the threads.

The plan cuts the files into chunks: runs of bytes that one read and one copy per device bring over. Worker threads take
one chunk after the other. On host devices they read straight into the memory; on GPUs each has a ring of pinned
buffers, so that one is read into while the other is copied from. What the first device has goes on from device to
device where one can read the memory of the one before it.

An interrupt of the caller stops the work without ever reaching into it. Python delivers signals to the main thread
alone, and there even its own ``Thread.start``, ``Condition`` and executors can be left broken. So the caller starts all
work with one call into C, and then only waits.
"""

from __future__ import annotations

import ctypes
import os
import time
from _thread import start_new_thread
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, cycle, zip_longest
from threading import Thread
from typing import Any, Generic, ParamSpec, Protocol, TypeVar, cast

from cubroker.client.loading.checkpoint import Checkpoint, StoredTensor
from cubroker.client.pool import Replica
from cubroker.client.transport import zmq_preflight
from cubroker.client.transport.requests import Future
from cubroker.driver import Context, Event, Pinned
from cubroker.protocol import Layout
from cubroker.protocol.errors import Unavailable
from cubroker.protocol.layout import TensorSpec

CHUNK = 4 << 20
"""Bytes of a chunk's image. On an H200 with 16 cores 2 MiB gave half the rate, and 8 MiB three quarters of it: with
smaller ones Python's share of the work is the limit, with larger ones the rings outgrow the caches."""

MAX_BUFFERS = 1024
"""Buffers that one ``preadv`` takes (IOV_MAX on Linux)."""

RING_DEPTH = 2
"""Buffers of a pinned ring: one is read into while the other is copied from."""

P2P_PIECE = 64 << 20
"""Bytes of one copy between devices. While a piece goes on to the next device, the one after it arrives."""

MAX_THREADS = 12
"""More threads than this read no faster: 16 on 16 cores were slower by a sixth, since they all need the interpreter."""

REPORT_SECONDS = 0.1
"""Seconds between reports of progress."""

Progress = Callable[[int, int], None]
"""Called with the bytes done so far and the bytes there are."""

P = ParamSpec("P")
T = TypeVar("T")

_ZEROS = bytes(4096)


class Readable(Protocol):
    """What tensors are read from: a file, or an array that is read like one."""

    def read_into(self, buffers: list[memoryview], offset: int) -> None:
        """Fill ``buffers``, in order, with the bytes from ``offset`` on."""


@dataclass(frozen=True, slots=True)
class Target:
    """The allocations of a layout on one device."""

    context: Context
    #: where each allocation begins; None for those of a sharded layout that are on other devices
    pointers: tuple[int | None, ...]
    #: keeps them mapped while a thread writes
    hold: Callable[[], AbstractContextManager[object]] = nullcontext
    #: where the device reads the allocations of the target before it, if it can
    upstream: tuple[int, ...] | None = None


def target_of(replica: Replica) -> Target:
    """Return a draft's replica as a target."""
    views = dict(zip(replica.allocations, replica.allocation_views, strict=True))
    numbers = range(len(replica.layout.allocations))
    pointers = tuple(views[number].pointer if number in views else None for number in numbers)
    return Target(replica.context, pointers, next(iter(views.values())).hold, replica.upstream)


def copy_checkpoint(
    checkpoint: Checkpoint, layout: Layout, targets: Sequence[Target], progress: Progress | None = None
) -> float:
    """Copy every tensor of ``checkpoint`` to its place in ``layout``, on all targets; return the seconds it took.

    The layout has the tensors in the checkpoint's order. The seconds begin when the threads are there and their buffers
    pinned. When this returns or raises, no thread works any more and nothing more will be written.

    Raises:
        Invalid: a file became shorter, or cannot be read.
        Unavailable: threads have run out.
        DriverError: the driver refused.
    """
    tensors = zip(checkpoint.entries, layout.tensors, strict=True)
    return copy_files("cubroker-load", checkpoint.files, tensors, layout.allocations, targets, progress=progress)


def copy_files(
    name: str,
    files: Sequence[Readable],
    tensors: Iterable[tuple[StoredTensor, TensorSpec]],
    sizes: Sequence[int],
    targets: Sequence[Target],
    *,
    in_turn: bool = True,
    besides: Callable[[Sequence[Target]], None] | None = None,
    progress: Progress | None = None,
) -> float:
    """Copy tensors from files to their places on all targets; return the seconds, as :func:`copy_checkpoint` does.

    Args:
        name: of the threads.
        files: what the tensors are read from.
        tensors: where each is stored, and its place.
        sizes: bytes of each allocation.
        targets: the devices.
        in_turn: whether files take turns, rather than being read one after the other.
        besides: fills what is not in files, on the targets that have no upstream.
        progress: called by this thread, now and then, with bytes of files done and bytes in all.
    """
    todo = deque(read_plan(tensors, CHUNK, in_turn=in_turn))
    total = sum(chunk.nbytes for chunk in todo)
    sources = [target for target in targets if not target.upstream]

    def work(done: list[int]) -> float:
        seconds = _copy_chunks(name, files, todo, sources, done) if todo else 0.0
        if sum(done) == total:  # else it was stopped
            if besides:
                besides(sources)
            seconds += copy_between_devices(targets, sizes)
        return seconds

    return run_workers(name, todo, work, total, progress)


def _copy_chunks(
    name: str, files: Sequence[Readable], todo: deque[Chunk], targets: Sequence[Target], done: list[int]
) -> float:
    """Share the chunks among as many threads as ``done`` has counts of bytes; return the seconds."""

    def make(_: int) -> HostWriter | PinnedRing:
        writer = chunk_writer(targets)
        undo.callback(writer.close)
        return writer

    def work(number: int, writer: HostWriter | PinnedRing) -> None:
        def write(chunk: Chunk) -> None:
            writer.write(files[chunk.file], chunk)
            done[number] += chunk.nbytes  # to report them here would take the interpreter

        with writer.thread():
            drain(todo, write)
            writer.finish()

    with ExitStack() as undo, WorkerThreads(len(done), name, todo) as pool:
        writers = list(pool.map(make, done))
        began = time.perf_counter()
        list(pool.map(work, range(len(done)), writers))
        return time.perf_counter() - began


# -- the read plan -------------------------------------------------------------------------------------


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

    @property
    def span(self) -> int:
        """Bytes of the image, gaps included."""
        place, count = self.pieces[-1]
        return place + count

    def takes(self, entry: StoredTensor, spec: TensorSpec, done: int, limit: int) -> bool:
        """Whether the tensor's bytes from ``done`` on come next in both runs, and there is room for some of them."""
        return (
            (self.file, self.allocation) == (entry.file, spec.allocation)
            and self.offset + self.nbytes == entry.offset + done
            and self.start + self.span <= spec.offset + done < self.start + limit
            and len(self.pieces) < MAX_BUFFERS
        )

    def add(self, place: int, count: int) -> None:
        """Append ``count`` bytes, which go to ``place`` of the image."""
        self.pieces.append((place, count))
        self.nbytes += count

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


def read_plan(tensors: Iterable[tuple[StoredTensor, TensorSpec]], limit: int, *, in_turn: bool = True) -> list[Chunk]:
    """Cut tensors into chunks whose images have at most ``limit`` bytes.

    Tensors that follow each other both in their file and in their allocation share chunks. Chunks of different files
    take turns, so that threads that take one after the other read all files at once; or else come file by file.
    """
    files: dict[int, list[Chunk]] = {}
    for entry, spec in tensors:
        chunks = files.setdefault(entry.file, [])
        done = 0
        while done < entry.nbytes:
            if not (chunks and chunks[-1].takes(entry, spec, done, limit)):
                chunks.append(Chunk(entry.file, entry.offset + done, spec.allocation, spec.offset + done))
            place = spec.offset + done - chunks[-1].start
            count = min(entry.nbytes - done, limit - place)
            chunks[-1].add(place, count)
            done += count
    rounds = zip_longest(*files.values()) if in_turn else files.values()
    return [chunk for chunk in chain.from_iterable(rounds) if chunk]


# -- from files to devices -----------------------------------------------------------------------------


def chunk_writer(targets: Sequence[Target]) -> HostWriter | PinnedRing:
    """Return one thread's way of bringing chunks to every target: host devices or GPUs."""
    return HostWriter(targets) if targets[0].context.host else PinnedRing(targets)


class HostWriter:
    """Writes to host memory: the file is read straight into the first target, and copied from there to the others."""

    def __init__(self, targets: Sequence[Target]) -> None:
        self._targets = targets

    def thread(self) -> AbstractContextManager[None]:
        """Keep the targets mapped, and let the calling thread :meth:`write`."""
        return hold_all(self._targets)

    def write(self, file: Readable, chunk: Chunk) -> None:
        """Read a chunk into its place on all targets that have it; the gaps are zero since the memory was made."""
        pointers = (target.pointers[chunk.allocation] for target in self._targets)
        first, *others = (pointer + chunk.start for pointer in pointers if pointer is not None)
        chunk.read(file, at_address(first, chunk.span))
        for other in others:
            ctypes.memmove(other, first, chunk.span)

    def finish(self) -> None:
        """Return at once: writes are complete when they return."""

    def close(self) -> None:
        """Release nothing: nothing is held."""


@dataclass(frozen=True, slots=True)
class _Slot:
    buffer: Pinned
    #: per target, the end of the last copy out of the buffer
    copies: tuple[Event, ...]

    def wait(self) -> None:
        for copy in self.copies:
            copy.wait()


class PinnedRing:
    """Writes to GPUs: pinned buffers that are images of chunks, read into and copied from in turn."""

    def __init__(self, targets: Sequence[Target], nbytes: int = CHUNK, depth: int = RING_DEPTH) -> None:
        """Pin ``depth`` buffers of ``nbytes`` bytes, which is what takes time here."""
        self._targets = targets
        self._slots: list[_Slot] = []
        with ExitStack() as undo:
            for _ in range(depth):
                buffer = undo.enter_context(targets[0].context.pin(nbytes))
                copies = tuple(undo.enter_context(target.context.event()) for target in targets)
                self._slots.append(_Slot(buffer, copies))
            self._streams = [(target, undo.enter_context(target.context.stream())) for target in targets]
            self._undo = undo.pop_all()
        self._turn = cycle(self._slots)

    @contextmanager
    def thread(self) -> Iterator[None]:
        """Make the context current for a whole run of :meth:`write`: that saves about half of its driver calls."""
        with hold_all(self._targets), self._targets[0].context.current():
            yield

    def write(self, file: Readable, chunk: Chunk) -> None:
        """Read the chunk into the next buffer once that is free, and start its copies."""
        slot = next(self._turn)
        slot.wait()
        chunk.clear_gaps(slot.buffer.view)
        chunk.read(file, slot.buffer.view)
        for (target, stream), copy in zip(self._streams, slot.copies, strict=True):
            if (pointer := target.pointers[chunk.allocation]) is not None:
                stream.copy_in(pointer + chunk.start, slot.buffer.pointer, chunk.span)
                stream.record(copy)

    def finish(self) -> None:
        """Return when every copy is done."""
        for slot in self._slots:
            slot.wait()

    def close(self) -> None:
        """Wait for the copies, then unpin the buffers."""
        with self._undo:
            self.finish()


@contextmanager
def hold_all(targets: Sequence[Target]) -> Iterator[None]:
    """Keep all targets mapped. Each thread does so for itself: unlike its caller, it is never interrupted."""
    with ExitStack() as holds:
        for target in targets:
            holds.enter_context(target.hold())
        yield


def at_address(pointer: int, nbytes: int) -> memoryview:
    """Return host memory as writable bytes; the caller keeps the memory mapped for as long as they are used."""
    return memoryview((ctypes.c_ubyte * nbytes).from_address(pointer)).cast("B")


# -- from device to device -----------------------------------------------------------------------------


def copy_between_devices(targets: Sequence[Target], sizes: Sequence[int]) -> float:
    """Copy all allocations, of these ``sizes``, to each target with an ``upstream``; return the seconds it took."""
    with ExitStack() as undo:
        undo.enter_context(hold_all(targets))
        copiers = [_PeerCopier(undo, target) if target.upstream else None for target in targets]
        began = time.perf_counter()
        for allocation, nbytes in enumerate(sizes):
            for start in range(0, nbytes, P2P_PIECE):
                before: Event | None = None
                for copier in copiers:
                    size = min(P2P_PIECE, nbytes - start)
                    before = copier.copy(allocation, start, size, before) if copier else None
        for copier in copiers:
            if copier:
                copier.stream.synchronize()
        return time.perf_counter() - began


class _PeerCopier:
    """A device's stream of copies from the device before it, and the event that marks the end of the last."""

    def __init__(self, undo: ExitStack, target: Target) -> None:
        self.stream = undo.enter_context(target.context.stream())
        self._target = target
        self._copied = undo.enter_context(target.context.event())

    def copy(self, allocation: int, start: int, nbytes: int, before: Event | None) -> Event:
        """Start the copy of one piece, to be made after ``before``; return its end."""
        pointer, upstream = self._target.pointers[allocation], self._target.upstream
        assert upstream
        assert pointer is not None
        if before:
            self.stream.wait(before)
        self.stream.copy(pointer + start, upstream[allocation] + start, nbytes)
        self.stream.record(self._copied)
        return self._copied


# -- threads -------------------------------------------------------------------------------------------


def run_workers(
    name: str, todo: deque[Any], work: Callable[[list[int]], T], total: int, progress: Progress | None
) -> T:
    """Run ``work(done)`` on a thread of its own and return its result; an interrupt or error of the caller ends it.

    Args:
        name: of the thread.
        todo: what is left to do; the work ends when it is empty.
        work: does it with as many threads as ``done`` has numbers; each counts there the bytes that it has done.
        total: bytes in all.
        progress: called by this thread, now and then, with bytes done and bytes in all.
    """
    done = [0] * max(1, min(len(os.sched_getaffinity(0)), MAX_THREADS, len(todo)))
    report = (lambda: progress(sum(done), total)) if progress else None
    return SupervisedThread(name, partial(work, done)).result(todo.clear, report)


def drain(todo: deque[T], do: Callable[[T], None]) -> None:
    """Call ``do`` with one item after the other until none is left; an error leaves none to other threads either."""
    try:
        while True:
            try:
                item = todo.popleft()
            except IndexError:
                break
            do(item)
    finally:
        todo.clear()


class WorkerThreads(ThreadPoolExecutor):
    """The threads that share what is left ``todo``. If one of them cannot start, nothing is left to the others."""

    def __init__(self, count: int, name: str, todo: deque[Any]) -> None:
        super().__init__(count, name)
        self._name = name
        self._todo = todo

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> futures.Future[T]:
        """Have a thread call ``fn``; raises ``Unavailable`` if there is none."""
        try:
            return super().submit(fn, *args, **kwargs)
        except RuntimeError as error:
            self._todo.clear()
            raise _no_thread(self._name, error) from error


def _no_thread(name: str, error: RuntimeError) -> Unavailable:
    return Unavailable(f"{name} has no threads to work in: {error}; {zmq_preflight.thread_limits()}")


class SupervisedThread(Generic[T]):
    """A thread for ``work``, which may use objects that an interrupt could break."""

    def __init__(self, name: str, work: Callable[[], T]) -> None:
        self._name = name
        self._work = work
        self._begun = False
        self._dropped = False
        self._over: Future[None] = Future()
        self._value: T | None = None
        self._error: BaseException | None = None

    def result(self, stop: Callable[[], object], report: Callable[[], None] | None = None) -> T:
        """Run the work; return its value, or raise its error, or ``Unavailable`` if threads have run out.

        Args:
            stop: makes the work end early; called if this thread is interrupted or ``report`` fails. Its end is
                waited for.
            report: called by this thread, now and then, and at last when the work is done.
        """
        try:
            try:
                start_new_thread(self._start, ())
            except RuntimeError as error:
                raise _no_thread(self._name, error) from error
            while not self._over.wait(REPORT_SECONDS if report else None):
                if report:
                    report()
        finally:
            self._dropped = True
            stop()
            self._await()
        if self._error:
            try:
                raise self._error
            finally:
                self._error = None  # its traceback refers to this object
        if report:
            report()
        return cast(T, self._value)

    def _await(self) -> None:
        """Return when the work is over; an interrupt of this wait is raised only then."""
        interrupted = False
        while self._begun and not self._over.done():
            try:
                self._over.wait()
            except KeyboardInterrupt:
                interrupted = True
        if interrupted:
            raise KeyboardInterrupt

    def _start(self) -> None:
        try:
            Thread(target=self._run, name=self._name, daemon=False).start()
        except RuntimeError as error:
            self._error = _no_thread(self._name, error)
            self._over.set(None)

    def _run(self) -> None:
        self._begun = True
        try:
            if not self._dropped:  # whichever of this and `result` comes last sees the other's first line
                self._value = self._work()
        except BaseException as error:  # noqa: BLE001  the caller raises it
            self._error = error
        self._over.set(None)
