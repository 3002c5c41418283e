"""Ratios that hold on any machine, however slow: a load beside reading the same file without cubroker.

Both sides of a pair follow each other, and the median of several pairs counts: other work on the same cores comes and
goes. The floors are far below what was measured, so that they fail for a mistake and not for a busy machine.
"""

from __future__ import annotations

import mmap
import os
import statistics
from pathlib import Path
from time import perf_counter

from benchmarks import model_weights
from benchmarks.harness import seconds
from cubroker.client import Broker
from cubroker.client.loading.copy import CHUNK
from cubroker.client.loading.loader import load
from tests.brokers import serving

PAIRS = 7
NBYTES = 64 << 20

FLOOR = 0.2
"""Of the rate of plain reading. On two shared cores the medians were 0.78 to 0.95, the least value 0.53."""

SHARDED_FLOOR = 0.25
"""Of a load to one device, for one that is sharded over two. On two shared cores the medians were 1 to 1.14."""


def read_plainly(path: Path) -> None:
    """Read a file into fresh shared memory, in one thread."""
    size = path.stat().st_size
    descriptor = os.open(path, os.O_RDONLY)
    with mmap.mmap(-1, size) as memory, memoryview(memory) as view:
        for start in range(0, size, CHUNK):
            with view[start : start + CHUNK] as part:
                os.preadv(descriptor, [part], start)
    os.close(descriptor)


def test_a_load_keeps_to_a_part_of_the_rate_of_plain_reading() -> None:
    tensors = model_weights.tensors(NBYTES)
    whole: list[float] = []
    sharded: list[float] = []
    with (
        model_weights.in_memory(tensors) as path,
        serving("host:2@512MiB") as server,
        Broker(server.directory) as broker,
    ):
        halves = model_weights.parts(tensors, 2)
        plan = {name: device for device, half in enumerate(halves) for name, _, _ in half}
        load(broker, "weights", path)
        for _ in range(PAIRS):
            plain = seconds(lambda: read_plainly(path))
            began = perf_counter()
            load(broker, "weights", path)
            loaded = perf_counter() - began
            whole.append(plain / loaded)
            sharded.append(loaded / seconds(lambda: load(broker, "weights", path, plan=plan)))
    assert statistics.median(whole) > FLOOR, whole
    assert statistics.median(sharded) > SHARDED_FLOOR, sharded
