"""Verifying: whether a pool holds, byte for byte, what some safetensors files hold."""

from __future__ import annotations

import ctypes
import os
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from cubroker.client.broker import Broker
from cubroker.client.devices import DeviceId, doing
from cubroker.client.loading.checkpoint import Checkpoint, Paths, StoredTensor
from cubroker.client.loading.threads import Progress, SupervisedThread, WorkerThreads, at_address, drain
from cubroker.client.pool import Pool
from cubroker.driver import Context
from cubroker.driver.buffers import differ
from cubroker.protocol import TensorSpec

CHUNK = 4 << 20
"""The most bytes that a thread compares at a time."""

MAX_THREADS = 12
"""The most threads of a comparison. They all need the interpreter, and 16 on 16 cores were slower by a sixth."""


@dataclass(frozen=True, slots=True)
class Verified:
    """What :func:`verify` found."""

    #: the pool
    name: str
    #: the version that was compared
    version: int
    #: how many tensors were compared: both sides have them in the same dtype and shape
    tensors: int
    #: bytes of these
    nbytes: int
    #: one line each; empty if the pool holds exactly what the files hold
    differences: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Piece:
    """Bytes ``[done, done + count)`` of one tensor, in its file and in the pool."""

    entry: StoredTensor
    spec: TensorSpec
    done: int
    count: int


def verify(
    broker: Broker,
    name: str,
    paths: Paths,
    *,
    version: int | None = None,
    device: DeviceId | None = None,
    progress: Progress | None = None,
) -> Verified:
    """Compare a version of pool ``name`` with a checkpoint, every byte of it.

    Args:
        broker: the session to work in.
        name: the pool.
        paths: as :meth:`Checkpoint.open` takes them.
        version: by default the current one.
        device: which device's copy, or shard; by default the only copy, or all shards.
        progress: called by this thread, now and then, with bytes done and bytes in all.

    Raises:
        CubrokerError: about the files, as :meth:`Checkpoint.open` says; about the pool, as :meth:`Broker.attach` says.
    """
    with Checkpoint.open(paths) as checkpoint, broker.attach(name, version=version, device=device) as pool:
        specs = {spec.name: spec for spec in pool.layout.tensors}
        common = [
            (entry, spec)
            for entry in checkpoint.entries
            if (spec := specs.get(entry.name))
            and (spec.dtype, spec.shape) == (entry.dtype, entry.shape)
            and entry.name in pool
        ]
        with doing(f"reading pool {name!r}"):
            differences = [*_compare_layouts(checkpoint, specs), *_compare_bytes(checkpoint, pool, common, progress)]
        checkpoint.check_unchanged()
        nbytes = sum(entry.nbytes for entry, _ in common)
        return Verified(name, pool.version, len(common), nbytes, tuple(differences))


def _compare_layouts(checkpoint: Checkpoint, specs: dict[str, TensorSpec]) -> Iterator[str]:
    """Yield the differences in names, dtypes and shapes."""
    for entry in checkpoint.entries:
        if (spec := specs.get(entry.name)) is None:
            yield f"tensor {entry.name!r} is in the files and not in the pool"
        elif (spec.dtype, spec.shape) != (entry.dtype, entry.shape):
            yield (
                f"tensor {entry.name!r} is {entry.dtype} {list(entry.shape)} in the files"
                f" and {spec.dtype} {list(spec.shape)} in the pool"
            )
    stored = {entry.name for entry in checkpoint.entries}
    for name in specs:
        if name not in stored:
            yield f"tensor {name!r} is in the pool and not in the files"


def _compare_bytes(
    checkpoint: Checkpoint, pool: Pool, common: list[tuple[StoredTensor, TensorSpec]], progress: Progress | None
) -> list[str]:
    todo = deque(
        _Piece(entry, spec, done, min(CHUNK, entry.nbytes - done))
        for entry, spec in common
        for done in range(0, entry.nbytes, CHUNK)
    )
    comparison = _Comparison(checkpoint, pool, todo)
    total = sum(entry.nbytes for entry, _ in common)
    with comparison:
        comparison.begin()
        found = comparison.result((lambda: progress(sum(comparison.done), total)) if progress else None)
    first = dict(sorted(found, reverse=True))
    return [
        f"tensor {entry.name!r} differs, first in byte {first[entry.name]} of its {entry.nbytes}"
        for entry, _ in common
        if entry.name in first
    ]


class _Comparison(SupervisedThread[list[tuple[str, int]]]):
    """Compares pieces of a pool's memory with pieces of files, on several threads."""

    def __init__(self, checkpoint: Checkpoint, pool: Pool, todo: deque[_Piece]) -> None:
        super().__init__("cubroker-verify")
        #: Bytes that each thread has compared.
        self.done = [0] * max(1, min(len(os.sched_getaffinity(0)), MAX_THREADS, len(todo)))
        self._files = checkpoint.files
        self._todo = todo
        self._found: list[tuple[str, int]] = []
        # The views keep the memory mapped if another thread closes the pool.
        self._views = dict(zip(pool.allocations, pool.allocation_views, strict=True))
        self._host = all(view.context.host for view in self._views.values())

    def end(self) -> None:
        """See :class:`SupervisedThread`; release the memory: a traceback may keep this object for long."""
        try:
            super().end()
        finally:
            self._views = {}

    def work(self) -> list[tuple[str, int]]:
        """Return the tensor and its first differing byte, for every piece that differs from its file."""
        with WorkerThreads(len(self.done), self._name, self.stop) as pool:
            list(pool.map(self._compare, range(len(self.done))))
        return self._found

    def stop(self) -> None:
        """See :class:`SupervisedThread`."""
        self._todo.clear()

    def _compare(self, number: int) -> None:
        file_buffer, pool_buffer = bytearray(CHUNK), bytearray(0 if self._host else CHUNK)

        def compare(piece: _Piece) -> None:
            with memoryview(file_buffer)[: piece.count] as stored:
                self._files[piece.entry.file].read_into([stored], piece.entry.offset + piece.done)
                with self._read(piece, pool_buffer) as held:
                    place = _first_difference(stored, held)
            if place is not None:
                self._found.append((piece.entry.name, piece.done + place))
            self.done[number] += piece.count

        drain(self._todo, compare)

    def _read(self, piece: _Piece, buffer: bytearray) -> memoryview:
        """Return the pool's bytes: the memory itself on a host device, a copy on a GPU."""
        context, pointer = self._locate(piece)
        if context.host:
            return at_address(pointer, piece.count)
        held = memoryview(buffer)[: piece.count]
        context.read_into(pointer, held)
        return held

    def _locate(self, piece: _Piece) -> tuple[Context, int]:
        view = self._views[piece.spec.allocation]  # not in a frame that may fail: its traceback would keep the view
        return view.context, view.pointer + piece.spec.offset + piece.done


def _first_difference(one: memoryview, other: memoryview) -> int | None:
    """Return the first index at which two equally long buffers differ."""
    first, second = (ctypes.addressof(ctypes.c_char.from_buffer(view)) for view in (one, other))
    start, stop = 0, len(one)
    if not differ(first, second, stop):
        return None
    while stop - start > 1:
        middle = (start + stop) // 2
        before = differ(first + start, second + start, middle - start)
        start, stop = (start, middle) if before else (middle, stop)
    return start
