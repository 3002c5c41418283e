"""Verifying: whether a pool holds, byte for byte, what some safetensors files hold."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from cubroker.client.broker import Broker
from cubroker.client.checkpoint import Checkpoint, Entry, Paths
from cubroker.client.crew import Boss, Progress, work_off
from cubroker.client.devices import failure
from cubroker.client.filling import thread_count
from cubroker.client.pool import Pool
from cubroker.client.rings import CHUNK, at_address
from cubroker.driver import Context, DriverError
from cubroker.protocol import TensorSpec

_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


@dataclass(frozen=True, slots=True)
class Verified:
    """What :func:`verify` found.

    Attributes:
        name: the pool.
        version: the version that was compared.
        tensors: how many tensors both sides have in the same dtype and shape, and were compared.
        nbytes: bytes of these.
        differences: one line each; empty if the pool holds exactly what the files hold.
    """

    name: str
    version: int
    tensors: int
    nbytes: int
    differences: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Piece:
    """Bytes ``[done, done + count)`` of one tensor, in its file and in the pool."""

    entry: Entry
    spec: TensorSpec
    done: int
    count: int


def verify(
    broker: Broker,
    name: str,
    paths: Paths,
    *,
    version: int | None = None,
    device: int | str | None = None,
    progress: Progress | None = None,
) -> Verified:
    """Compare a version of pool ``name`` with a checkpoint, every byte of it.

    Args:
        broker: the session to work in.
        name: the pool.
        paths: what :meth:`Checkpoint.open` takes.
        version: by default the current one.
        device: which device's copy, or shard; by default the only copy, or all shards.
        progress: called by this thread, now and then, with bytes done and bytes in all.

    Raises:
        CubrokerError: of the files, as :meth:`Checkpoint.open` says; of the pool, as :meth:`Broker.attach` says.
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
        try:
            differences = [*_structural(checkpoint, specs), *_contents(checkpoint, pool, common, progress)]
        except DriverError as error:
            raise failure(error, f"reading pool {name!r}") from error
        checkpoint.check_unchanged()
        nbytes = sum(entry.nbytes for entry, _ in common)
        return Verified(name, pool.version, len(common), nbytes, tuple(differences))


def _structural(checkpoint: Checkpoint, specs: dict[str, TensorSpec]) -> Iterator[str]:
    """Yield what already the names, dtypes and shapes show."""
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


def _contents(
    checkpoint: Checkpoint, pool: Pool, common: list[tuple[Entry, TensorSpec]], progress: Progress | None
) -> list[str]:
    todo = deque(
        _Piece(entry, spec, done, min(CHUNK, entry.nbytes - done))
        for entry, spec in common
        for done in range(0, entry.nbytes, CHUNK)
    )
    total = sum(piece.count for piece in todo)
    comparer = _Comparer(checkpoint, pool, thread_count(len(todo)))
    report = (lambda: progress(sum(comparer.done), total)) if progress else None
    try:
        found = Boss("cubroker-verify", lambda: comparer.compare(todo)).result(todo.clear, report)
    finally:
        comparer.close()
    first = dict(sorted(found, reverse=True))
    return [
        f"tensor {entry.name!r} differs, first in byte {first[entry.name]} of its {entry.nbytes}"
        for entry, _ in common
        if entry.name in first
    ]


class _Comparer:
    """Compares pieces in ``count`` threads.

    Attributes:
        done: bytes that each of them has compared.
    """

    def __init__(self, checkpoint: Checkpoint, pool: Pool, count: int) -> None:
        self.done = [0] * count
        self._files = checkpoint.files
        # They keep the memory mapped, whoever closes the pool.
        self._slabs = dict(zip(pool.allocations, pool.slabs, strict=True))
        self._host = all(slab.context.host for slab in pool.slabs)

    def close(self) -> None:
        """Let the memory go; a traceback may keep this object for long."""
        self._slabs = {}

    def compare(self, todo: deque[_Piece]) -> list[tuple[str, int]]:
        """Return the tensor and its first differing byte, for every piece that is not as in the file."""
        found: list[tuple[str, int]] = []
        with ThreadPoolExecutor(len(self.done), "cubroker-verify") as crew:
            list(crew.map(lambda number: self._work(todo, number, found), range(len(self.done))))
        return found

    def _work(self, todo: deque[_Piece], number: int, found: list[tuple[str, int]]) -> None:
        ours, theirs = bytearray(CHUNK), bytearray(0 if self._host else CHUNK)

        def compare(piece: _Piece) -> None:
            with memoryview(ours)[: piece.count] as read:
                self._files[piece.entry.file].read_into([read], piece.entry.offset + piece.done)
                with self._held(piece, theirs) as held:
                    place = _first_difference(read, held)
            if place is not None:
                found.append((piece.entry.name, piece.done + place))
            self.done[number] += piece.count

        work_off(todo, compare)

    def _held(self, piece: _Piece, buffer: bytearray) -> memoryview:
        """Return the pool's bytes: themselves on a host device, a copy on a GPU."""
        context, pointer = self._find(piece)
        if context.host:
            return at_address(pointer, piece.count)
        held = memoryview(buffer)[: piece.count]
        context.read_into(pointer, held)
        return held

    def _find(self, piece: _Piece) -> tuple[Context, int]:
        slab = self._slabs[piece.spec.allocation]  # not in a frame that may fail, whose traceback would keep it
        return slab.context, slab.pointer + piece.spec.offset + piece.done


def _first_difference(one: memoryview, other: memoryview) -> int | None:
    """Return the first index at which two equally long buffers differ."""
    start, stop = 0, len(one)
    if not _differ(one, other, start, stop):
        return None
    while stop - start > 1:
        middle = (start + stop) // 2
        start, stop = (start, middle) if _differ(one, other, start, middle) else (middle, stop)
    return start


def _differ(one: memoryview, other: memoryview, start: int, stop: int) -> bool:
    return bool(_memcmp(_address(one, start), _address(other, start), stop - start))


def _address(view: memoryview, start: int) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(view, start))
