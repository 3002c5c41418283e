"""Copying a checkpoint into memory that is already there: several threads, one progress, nothing left behind."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial

from cubroker.client.chain import spread
from cubroker.client.checkpoint import Checkpoint
from cubroker.client.chunks import Chunk, plan
from cubroker.client.crew import Boss, Progress, work_off
from cubroker.client.rings import CHUNK, Direct, Ring, Sink, Target
from cubroker.protocol import Layout

MAX_THREADS = 12
"""More threads than this read no faster: 16 on 16 cores were slower by a sixth, since they all need the interpreter."""


def fill(checkpoint: Checkpoint, layout: Layout, targets: Sequence[Target], progress: Progress | None = None) -> float:
    """Copy every tensor of ``checkpoint`` to its place in ``layout``, on all targets; return the seconds it took.

    The seconds begin when the threads are there and their buffers pinned. ``layout`` has the checkpoint's tensors in
    the checkpoint's order. When this returns or raises, no thread works any more and nothing more will be written.
    """
    todo = deque(plan(zip(checkpoint.entries, layout.tensors, strict=True), CHUNK))
    done = [0] * thread_count(len(todo))
    report = (lambda: progress(sum(done), checkpoint.nbytes)) if progress else None

    def work() -> float:
        seconds = _copy(checkpoint, todo, [target for target in targets if not target.upstream], done)
        if sum(done) == checkpoint.nbytes:  # else it was stopped
            seconds += spread(targets, layout.allocations)
        return seconds

    return Boss("cubroker-load", work).result(todo.clear, report)


def thread_count(pieces: int) -> int:
    """Return how many threads to share ``pieces`` pieces of work among."""
    return max(1, min(len(os.sched_getaffinity(0)), MAX_THREADS, pieces))


def _sink(targets: Sequence[Target]) -> Sink:
    return Direct(targets) if targets[0].context.host else Ring(targets)


def _copy(checkpoint: Checkpoint, todo: deque[Chunk], targets: Sequence[Target], done: list[int]) -> float:
    """Share the chunks among as many threads as ``done`` has counts of bytes; return the seconds."""
    with ExitStack() as undo, ThreadPoolExecutor(len(done), "cubroker-load") as crew:
        sinks = list(crew.map(lambda _: _made(undo, targets), done))
        began = time.perf_counter()
        list(crew.map(partial(_work, checkpoint, todo, done), range(len(done)), sinks))
        return time.perf_counter() - began


def _made(undo: ExitStack, targets: Sequence[Target]) -> Sink:
    sink = _sink(targets)
    undo.callback(sink.close)
    return sink


def _work(checkpoint: Checkpoint, todo: deque[Chunk], done: list[int], number: int, sink: Sink) -> None:
    """Bring chunks over until none is left; count their bytes, and call nobody, who would take the interpreter."""

    def put(chunk: Chunk) -> None:
        sink.put(checkpoint.files[chunk.file], chunk)
        done[number] += chunk.nbytes

    with sink.thread():
        work_off(todo, put)
        sink.finish()
