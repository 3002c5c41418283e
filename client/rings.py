"""How the bytes of a chunk reach the devices: straight into host memory, or through pinned rings to GPUs."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import cycle
from typing import Protocol

from cubroker.client.checkpoint import File
from cubroker.client.chunks import Chunk
from cubroker.driver import Context, Event, Pinned

CHUNK = 4 << 20
"""Bytes of a chunk's image. On an H200 with 16 cores 2 MiB gave half the rate, and 8 MiB three quarters of it: with
smaller ones Python's share of the work is the limit, with larger ones the rings outgrow the caches."""

DEPTH = 2
"""Buffers of a ring: one is read into while the other is copied from."""


@dataclass(frozen=True, slots=True)
class Target:
    """What one device has of the allocations: where each begins, and what keeps them there while a thread writes.

    Of a sharded layout ``pointers`` has None for those on other devices. ``upstream`` is where the device reads the
    allocations of the target before it, if it can.
    """

    context: Context
    pointers: tuple[int | None, ...]
    hold: Callable[[], AbstractContextManager[object]] = nullcontext
    upstream: tuple[int, ...] | None = None


class Sink(Protocol):
    """One thread's way of bringing chunks to every target."""

    def thread(self) -> AbstractContextManager[None]:
        """Keep the targets mapped, and let the calling thread :meth:`put`; the calls are faster within."""

    def put(self, file: File, chunk: Chunk) -> None:
        """Read ``chunk`` from ``file`` and bring it to all targets that have its allocation; copies may go on."""

    def finish(self) -> None:
        """Return when everything that was put is there."""

    def close(self) -> None:
        """Wait for what is under way and give back what the sink holds."""


class Direct:
    """Targets in host memory: the file is read straight into the first, and copied from there to the others."""

    def __init__(self, targets: Sequence[Target]) -> None:
        self._targets = targets

    def thread(self) -> AbstractContextManager[None]:
        """Keep the memory there."""
        return held(self._targets)

    def put(self, file: File, chunk: Chunk) -> None:
        """Read the chunk into its place; the gaps are zero since the memory was made."""
        pointers = (target.pointers[chunk.allocation] for target in self._targets)
        first, *others = (pointer + chunk.start for pointer in pointers if pointer is not None)
        chunk.read(file, at_address(first, chunk.span))
        for other in others:
            ctypes.memmove(other, first, chunk.span)

    def finish(self) -> None:
        """Nothing is ever under way."""

    def close(self) -> None:
        """Nothing is held."""


@dataclass(frozen=True, slots=True)
class _Slot:
    """A pinned buffer, and for each target an event that marks the end of the last copy out of it."""

    buffer: Pinned
    copies: tuple[Event, ...]

    def wait(self) -> None:
        for copy in self.copies:
            copy.wait()


class Ring:
    """Targets on GPUs: pinned buffers that are images of chunks, read into and copied from in turn."""

    def __init__(self, targets: Sequence[Target], nbytes: int = CHUNK, depth: int = DEPTH) -> None:
        """Pin ``depth`` buffers of ``nbytes`` bytes, which is what takes time here."""
        self._targets = targets
        with ExitStack() as undo:
            self._slots = [_slot(undo, targets, nbytes) for _ in range(depth)]
            self._streams = [(target, undo.enter_context(target.context.stream())) for target in targets]
            self._undo = undo.pop_all()
        self._turn = cycle(self._slots)

    @contextmanager
    def thread(self) -> Iterator[None]:
        """Make the context current for a whole run of :meth:`put`, which is about half of its driver calls."""
        with held(self._targets), self._targets[0].context.current():
            yield

    def put(self, file: File, chunk: Chunk) -> None:
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
def held(targets: Sequence[Target]) -> Iterator[None]:
    """Keep what is written into mapped. Each thread does so for itself: nothing interrupts it, unlike its caller."""
    with ExitStack() as holds:
        for target in targets:
            holds.enter_context(target.hold())
        yield


def _slot(undo: ExitStack, targets: Sequence[Target], nbytes: int) -> _Slot:
    buffer = undo.enter_context(targets[0].context.pin(nbytes))
    return _Slot(buffer, tuple(undo.enter_context(target.context.event()) for target in targets))


def at_address(pointer: int, nbytes: int) -> memoryview:
    """Return host memory as writable bytes. The caller sees to it that the memory outlives them."""
    return memoryview((ctypes.c_ubyte * nbytes).from_address(pointer)).cast("B")
