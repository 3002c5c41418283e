"""The read plan: chunks and their queues."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from cubroker.client.loading.checkpoint import Checkpoint, StoredTensor
from cubroker.client.loading.read_plan import MAX_BUFFERS, Chunk, ChunkQueues, read_plan
from cubroker.protocol import Layout
from tests import checkpoints


def test_chunks_keep_to_their_limits_and_files_take_turns(tmp_path: Path) -> None:
    names = list(checkpoints.VARIED)
    index = checkpoints.write_sharded(
        tmp_path, [{n: checkpoints.VARIED[n] for n in part} for part in (names[:29], names[29:])]
    )
    with Checkpoint.open(index) as checkpoint:
        layout = Layout.pack((e.name, e.dtype, e.shape) for e in checkpoint.entries)
        stored = list(zip(checkpoint.entries, layout.tensors, strict=True))
        plan = read_plan(stored, 500_000)
        threes = [(file, len([*run])) for file, run in groupby(chunk.file for chunk in read_plan(stored, 10_000, 3))]
    assert max(chunk.span for chunk in plan) <= 500_000
    assert max(len(chunk.pieces) for chunk in plan) == MAX_BUFFERS
    assert sum(chunk.nbytes for chunk in plan) == checkpoint.nbytes
    assert [chunk.file for chunk in plan[:4]] == [0, 1, 0, 1]
    assert threes[:4] == [(0, 3), (1, 3), (0, 3), (1, 3)]
    assert min(count for _, count in threes) >= 3, "the rest is no turn of its own"
    assert sum(count for _, count in threes) == len(read_plan(stored, 10_000))


def test_tensors_without_gaps_between_them_are_read_as_one_run() -> None:
    counts = [64, 0, 128, 7, 128]  # of 4 bytes each; the one of 28 bytes leaves a gap in memory
    layout = Layout.pack((str(number), "F32", (count,)) for number, count in enumerate(counts))
    starts = [100 + 4 * sum(counts[:number]) for number in range(len(counts))]
    stored = [
        (StoredTensor(spec.name, spec.dtype, spec.shape, start, 4 * count, 0), spec)
        for spec, start, count in zip(layout.tensors, starts, counts, strict=True)
    ]
    (whole,) = read_plan(stored, 1 << 20)
    assert whole.pieces == [(0, 4 * (64 + 128 + 7)), (layout.tensors[4].offset, 4 * 128)]
    assert whole.has_gaps
    assert [(chunk.start, chunk.pieces) for chunk in read_plan(stored[:3], 512)] == [
        (0, [(0, 512)]),
        (512, [(0, 256)]),
    ]


def test_what_another_file_has_between_two_tensors_is_no_gap() -> None:
    layout = Layout.pack((name, "U8", (200,)) for name in ("a", "other", "b"))
    starts = {"a": (100, 0), "b": (300, 0), "other": (100, 1)}
    specs = {spec.name: spec for spec in layout.tensors}
    stored = [(StoredTensor(name, "U8", (200,), at, 200, file), specs[name]) for name, (at, file) in starts.items()]
    assert [(chunk.file, chunk.start, chunk.span) for chunk in read_plan(stored, 1024)] == [
        (0, 0, 200),
        (1, 256, 200),
        (0, 512, 200),
    ]


def test_a_gap_of_any_size_is_cleared() -> None:
    chunk = Chunk(0, 0, 0, 0, [(5, 2), (10_000, 1), (10_001, 1)])
    image = memoryview(bytearray(b"\xff" * 10_003))
    chunk.clear_gaps(image)
    kept = {5, 6, 10_000, 10_001, 10_002}
    assert bytes(image) == bytes(255 if place in kept else 0 for place in range(len(image)))


def test_each_device_of_a_sharded_layout_has_a_queue_of_its_own(tmp_path: Path) -> None:
    tensors = checkpoints.filled([(f"layer.{n}", "U8", (1000,)) for n in range(8)])
    with Checkpoint.open(checkpoints.write(tmp_path / "m.safetensors", tensors)) as checkpoint:
        places = {name: "first" if number < 3 else "second" for number, name in enumerate(tensors)}
        layout = Layout.pack(((e.name, e.dtype, e.shape) for e in checkpoint.entries), groups=places)
        stored = list(zip(checkpoint.entries, layout.tensors, strict=True))
        homes = [("first", "second").index(home) for home in layout.spread(places)]
        plan = read_plan(stored, 1000)
    assert sum(chunk.nbytes for chunk in plan) == 8000
    queues = ChunkQueues()
    queues.fill(plan, homes)
    taken = [queues.take(home) for home in (0, 1, 1, 0, 0, 0, 1, 1, 1, 1)]
    assert [chunk and homes[chunk.allocation] for chunk in taken] == [0, 1, 1, 0, 0, None, 1, 1, 1, None]
    queues.fill(plan, ())
    assert [queues.take(0) for _ in plan] == plan
    queues.fill(plan, homes)
    queues.clear()
    assert queues.take(0) is None


def test_parts_have_all_bytes_of_a_chunk_in_order() -> None:
    chunk = Chunk(0, 100, 0, 0, [(0, 5), (10, 20), (256, 3), (300, 1)], 29)
    for limit in (1, 4, 7, 29, 1000):
        parts = [*chunk.parts(limit)]
        assert [offset for offset, _ in parts] == [*range(100, 129, limit)]
        assert all(sum(count for _, count in pieces) == limit for _, pieces in parts[:-1])
        places = [place + byte for _, pieces in parts for place, count in pieces for byte in range(count)]
        assert places == [*range(5), *range(10, 30), 256, 257, 258, 300]
