from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from cubroker import driver
from cubroker.client import chain, chunks, filling, rings
from cubroker.client.checkpoint import Checkpoint
from cubroker.client.rings import Ring, Target
from cubroker.driver import DriverError, Stream
from cubroker.protocol import Layout
from cubroker.protocol.errors import Invalid
from tests import checkpoints
from tests.brokers import eventually

TENSORS = checkpoints.filled(
    (
        *checkpoints.EVERY_DTYPE,
        *checkpoints.ODD_SHAPES,
        ("large", "F32", (700, 1001)),
        *((f"small.{n}", "U8", (n % 5,)) for n in range(3000)),
    )
)


@dataclass
class Memory:
    """Memory of host devices for one layout, and what has come to be in it."""

    layout: Layout
    targets: list[Target]

    def images(self) -> list[list[bytes]]:
        return [
            [target.context.read(p, size) for p, size in zip(target.pointers, self.layout.allocations, strict=True)]
            for target in self.targets
        ]

    def expected(self, tensors: checkpoints.Tensors) -> list[bytes]:
        images = [bytearray(size) for size in self.layout.allocations]
        for spec in self.layout.tensors:
            images[spec.allocation][spec.offset : spec.offset + spec.nbytes] = tensors[spec.name][2]
        return [bytes(image) for image in images]


@pytest.fixture
def memory() -> Iterator[Callable[..., Memory]]:
    made = driver.load("host:4@64MiB")

    def lend(checkpoint: Checkpoint, slab: int | None = None, devices: int = 2) -> Memory:
        layout = Layout.pack(((e.name, e.dtype, e.shape) for e in checkpoint.entries), slab=slab)
        contexts = [made.context(index) for index in range(devices)]
        targets = [Target(context, tuple(map(context.allocate, layout.allocations))) for context in contexts]
        for target in targets:
            for pointer, size in zip(target.pointers, layout.allocations, strict=True):
                target.context.clear(pointer, size)
        return Memory(layout, targets)

    yield lend
    made.close()


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filling, "CHUNK", 10_000)


def dirty_ring(targets: Sequence[Target]) -> Ring:
    """Make a ring whose buffers hold what somebody else might have left in them."""
    ring = Ring(targets, 10_000, 3)
    for slot in ring._slots:
        slot.buffer.view[:] = b"\xff" * 10_000
    return ring


@pytest.mark.parametrize("slab", [None, 65536])
@pytest.mark.parametrize("sink", [rings.Direct, dirty_ring])
@pytest.mark.usefixtures("small_chunks")
def test_every_byte_reaches_every_device_and_gaps_are_zero(
    tmp_path: Path, memory: Callable[..., Memory], monkeypatch: pytest.MonkeyPatch, sink: object, slab: int | None
) -> None:
    monkeypatch.setattr(filling, "_sink", sink)
    names = list(TENSORS)
    shards = [{name: TENSORS[name] for name in part} for part in (names[:20], names[20:200], names[200:])]
    with Checkpoint.open(checkpoints.write_sharded(tmp_path, shards)) as checkpoint:
        lent = memory(checkpoint, slab)
        filling.fill(checkpoint, lent.layout, lent.targets)
        assert lent.images() == [lent.expected(TENSORS)] * 2


@pytest.mark.parametrize("sink", [rings.Direct, dirty_ring])
@pytest.mark.usefixtures("small_chunks")
def test_bytes_go_on_from_device_to_device_in_pieces(
    tmp_path: Path, memory: Callable[..., Memory], monkeypatch: pytest.MonkeyPatch, sink: object
) -> None:
    monkeypatch.setattr(filling, "_sink", sink)
    monkeypatch.setattr(chain, "PIECE", 100_000)
    copies: list[int] = []
    copy = Stream.copy

    def noting(stream: Stream, pointer: int, source: int, nbytes: int) -> None:
        copies.append(nbytes)
        copy(stream, pointer, source, nbytes)

    monkeypatch.setattr(Stream, "copy", noting)
    with Checkpoint.open(checkpoints.write(tmp_path / "m.safetensors", TENSORS)) as checkpoint:
        lent = memory(checkpoint, 65536, devices=4)
        first, second, third, fourth = lent.targets
        second = dataclasses.replace(second, upstream=first.pointers)
        third = dataclasses.replace(third, upstream=second.pointers)  # and the fourth reads nobody's
        filling.fill(checkpoint, lent.layout, [first, second, third, fourth])
        assert lent.images() == [lent.expected(TENSORS)] * 4
    assert sum(copies) == 2 * lent.layout.nbytes
    assert max(copies) == 100_000


def test_chunks_keep_to_their_limits_and_files_take_turns(tmp_path: Path) -> None:
    names = list(TENSORS)
    index = checkpoints.write_sharded(tmp_path, [{n: TENSORS[n] for n in part} for part in (names[:29], names[29:])])
    with Checkpoint.open(index) as checkpoint:
        layout = Layout.pack((e.name, e.dtype, e.shape) for e in checkpoint.entries)
        plan = chunks.plan(zip(checkpoint.entries, layout.tensors, strict=True), 500_000)
    assert max(chunk.span for chunk in plan) <= 500_000
    assert max(len(chunk.pieces) for chunk in plan) == chunks.MAX_PIECES
    assert sum(chunk.nbytes for chunk in plan) == checkpoint.nbytes
    assert [chunk.file for chunk in plan[:4]] == [0, 1, 0, 1]


def test_a_gap_of_any_size_is_cleared() -> None:
    chunk = chunks.Chunk(0, 0, 0, 0, [(5, 2), (10_000, 1), (10_001, 1)])
    image = memoryview(bytearray(b"\xff" * 10_003))
    chunk.clear_gaps(image)
    kept = {5, 6, 10_000, 10_001, 10_002}
    assert bytes(image) == bytes(255 if place in kept else 0 for place in range(len(image)))


@pytest.mark.usefixtures("small_chunks")
def test_progress_rises_to_the_whole_and_comes_from_the_calling_thread(
    tmp_path: Path, memory: Callable[..., Memory]
) -> None:
    seen: list[tuple[int, int, int]] = []
    with Checkpoint.open(checkpoints.write(tmp_path / "m.safetensors", TENSORS)) as checkpoint:
        lent = memory(checkpoint)
        seconds = filling.fill(
            checkpoint, lent.layout, lent.targets, lambda done, total: seen.append((done, total, threading.get_ident()))
        )
    assert seconds > 0
    assert seen == sorted(seen)
    assert seen[-1][:2] == (checkpoint.nbytes, checkpoint.nbytes)
    assert {thread for _, _, thread in seen} == {threading.get_ident()}


@pytest.mark.parametrize("sink", [rings.Direct, dirty_ring])
@pytest.mark.usefixtures("small_chunks")
def test_a_file_that_ends_early_stops_all_threads(
    tmp_path: Path, memory: Callable[..., Memory], monkeypatch: pytest.MonkeyPatch, sink: object
) -> None:
    monkeypatch.setattr(filling, "_sink", sink)
    path = checkpoints.write(tmp_path / "m.safetensors", TENSORS)
    with Checkpoint.open(path) as checkpoint:
        lent = memory(checkpoint)
        os.truncate(path, checkpoint.entries[-1].offset - 1000)
        with pytest.raises(Invalid, match=f"cannot load {path}: it ended at byte"):
            filling.fill(checkpoint, lent.layout, lent.targets)
    eventually(lambda: not [each for each in threading.enumerate() if each.name.startswith("cubroker-load")], "the end")


def test_a_ring_that_cannot_be_pinned_leaves_nothing(
    tmp_path: Path, memory: Callable[..., Memory], monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[Ring] = []
    calls = iter(range(100))

    class Counted(Ring):
        def __init__(self, targets: Sequence[Target]) -> None:
            if next(calls):
                raise DriverError("cuMemHostAlloc", 2, "CUDA_ERROR_OUT_OF_MEMORY")
            super().__init__(targets, 10_000)

        def close(self) -> None:
            super().close()
            closed.append(self)

    monkeypatch.setattr(filling, "CHUNK", 10_000)
    monkeypatch.setattr(filling, "_sink", Counted)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(4))
    with Checkpoint.open(checkpoints.write(tmp_path / "m.safetensors", TENSORS)) as checkpoint:
        lent = memory(checkpoint)
        with pytest.raises(DriverError, match="cuMemHostAlloc"):
            filling.fill(checkpoint, lent.layout, lent.targets)
    assert len(closed) == 1
