"""Copying a checkpoint into memory that is already there: several threads, one progress, nothing left behind."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from queue import Empty, SimpleQueue
from threading import Event

from cubroker.client.checkpoint import Checkpoint
from cubroker.client.chunks import Chunk, plan
from cubroker.client.crew import Crew
from cubroker.client.rings import CHUNK, Direct, Ring, Sink, Target
from cubroker.protocol import Layout

MAX_THREADS = 12
"""More threads than this read no faster: 16 on 16 cores were slower by a sixth, since they all need the interpreter."""

REPORT = 0.1
"""Seconds between reports of progress."""

Progress = Callable[[int, int], None]
"""Called with the bytes done so far and the bytes there are."""


def fill(checkpoint: Checkpoint, layout: Layout, targets: Sequence[Target], progress: Progress | None = None) -> float:
    """Copy every tensor of ``checkpoint`` to its place in ``layout``, on all targets; return the seconds it took.

    The seconds begin when the threads are there and their buffers pinned. ``layout`` has the checkpoint's tensors in
    the checkpoint's order. When this returns or raises, no thread is left and nothing more will be written.
    """
    todo = deque(plan(zip(checkpoint.entries, layout.tensors, strict=True), CHUNK))
    count = thread_count(len(todo))
    stop = Event()
    sinks: list[Sink] = []
    with ExitStack() as undo:
        crew = Crew(count, "cubroker-load")
        undo.callback(_close_all, sinks)
        undo.callback(crew.end)
        undo.callback(stop.set)
        for made in [crew.submit(_make, targets, sinks) for _ in range(count)]:
            made.result()
        began = time.perf_counter()
        done = [0] * count
        ended: SimpleQueue[Future[None]] = SimpleQueue()
        for number, sink in enumerate(sinks):
            crew.submit(_work, checkpoint, todo, sink, stop, done, number).add_done_callback(ended.put)
        _follow(ended, done, checkpoint.nbytes, progress)
        return time.perf_counter() - began


def thread_count(pieces: int) -> int:
    """Return how many threads to share ``pieces`` pieces of work among."""
    return max(1, min(len(os.sched_getaffinity(0)), MAX_THREADS, pieces))


def _sink(targets: Sequence[Target]) -> Sink:
    return Direct(targets) if targets[0].context.host else Ring(targets)


def _work(checkpoint: Checkpoint, todo: deque[Chunk], sink: Sink, stop: Event, done: list[int], number: int) -> None:
    """Bring chunks over until none is left, or ``stop`` is set; count their bytes in ``done[number]``."""
    with sink.thread():
        while not stop.is_set():
            try:
                chunk = todo.popleft()
            except IndexError:
                break
            sink.put(checkpoint.files[chunk.file], chunk)
            done[number] += chunk.nbytes
        sink.finish()


def _follow(ended: SimpleQueue[Future[None]], done: list[int], total: int, progress: Progress | None) -> None:
    """Report progress until every thread has ended; raise what the first of them to fail raised.

    The threads leave a count and do not call: a thread woken for each chunk takes the interpreter from them.
    """
    running = len(done)
    while running:
        with suppress(Empty):
            ended.get(timeout=REPORT if progress else None).result()
            running -= 1
        if progress:
            progress(sum(done), total)


def _make(targets: Sequence[Target], made: list[Sink]) -> None:
    """Make a sink and note it, which no interrupt can come between on a thread of a crew."""
    made.append(_sink(targets))


def _close_all(sinks: list[Sink]) -> None:
    with ExitStack() as undo:
        for sink in sinks:
            undo.callback(sink.close)
