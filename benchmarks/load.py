"""Rate of a load from the page cache to a device, in GB/s, compared with its bound and with other loaders.

The bound is the copy of a pinned buffer. Loads and pinned copies alternate in several processes, one process after the
other. The first load of a broker, and the first of each process after it, are distinguished from those that follow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median as middle
from time import perf_counter, sleep
from typing import NamedTuple

from benchmarks import model_weights, peer_loaders
from benchmarks.harness import answer_of, first_context, run_alone, seconds, serving
from benchmarks.options import Plan
from benchmarks.report import Figure, median, rate
from cubroker.client import Broker
from cubroker.client.loading.loader import load
from cubroker.protocol.messages import AUTO, IPC

POOL = "weights"
BROKERS = 3
"""Brokers, one after the other. Beside each of them one process loads once, and then another one several times."""

LATER = 3
"""Loads of the second process after its first."""

PIECE = 1 << 30

SCRUBBING = 0.3
"""Seconds that the driver may take to scrub 8 GB of freed memory. Copies are slower during that time: a pinned copy of
8 GB took 164 ms right after the memory was freed, and otherwise 145."""


class Turn(NamedTuple):
    """Seconds of one pinned copy and of the load after it."""

    pinned: float
    whole: float
    #: The part of the load that read and copied.
    copying: float


class Turns(NamedTuple):
    """The turns of several processes."""

    #: with the first load of a broker, and of a process
    of_broker: list[Turn]
    #: with the first load of another process
    firsts: list[Turn]
    later: list[Turn]


def measure(plan: Plan) -> Iterator[Figure]:
    tensors = model_weights.tensors(plan.nbytes)
    size = model_weights.total(tensors)
    with model_weights.in_memory(tensors) as path:
        turns = _turns(plan, path, size, AUTO)
        yield from _of_turns(turns, size, f"{size / 1e9:.2f} GB file in memory, {path.parents[1]}")
        yield of_bound("ipc: load ÷ pinned buffer: all of it", _turns(plan, path, size, IPC).later, PAIRS)
        others = _others(plan, path, size, tensors[0][0])
    yield from others.values()
    for title, other in others.items():
        if other.value:
            ours = size / middle(turn.whole for turn in turns.later) / 1e9
            yield Figure(f"load ÷ {title}: all of it", ours / other.value, "", "of the medians", better="more")


def _of_turns(turns: Turns, size: int, where: str) -> Iterator[Figure]:
    of_broker, firsts, later = turns
    whole, note = [turn.whole for turn in later], "with pinning, clearing, sealing"
    yield rate("pinned host buffer to device", size, (turn.pinned for turn in of_broker + firsts + later))
    yield rate("load: reading and copying", size, (turn.copying for turn in later), where)
    yield rate("load: all of it, to the published version", size, whole, note)
    yield median("load: all of it", whole, "s")
    yield median("load: all of it, first call of a process", (turn.whole for turn in firsts), "s", "the context is up")
    title = "load ÷ pinned buffer"
    yield median(f"{title}: reading and copying", (turn.pinned / turn.copying for turn in later), "", PAIRS, "more")
    yield of_bound(f"{title}: all of it", later, PAIRS)
    yield of_bound(f"{title}: all of it, first call of a process", firsts, PAIRS)
    yield of_bound(f"{title}: all of it, first load of a broker", of_broker, "also the first call of a process")


def of_bound(what: str, turns: Sequence[Turn], note: str = "") -> Figure:
    """Return which part of the pinned copy's rate whole loads have."""
    return median(what, (turn.pinned / turn.whole for turn in turns), "", note, "more")


PAIRS = "of each load and the copy before it"


def _turns(plan: Plan, path: Path, size: int, share: str) -> Turns:
    turns = Turns([], [], [])
    for number in range(BROKERS):
        with serving(plan.devices) as server:
            loads = partial(answer_of, take_turns, server.directory, plan.devices, path, size)
            turns.of_broker.extend(loads(1, share, number == 0))
            first, *later = loads(1 + LATER, share, False)
            turns.firsts.append(first)
            turns.later.extend(later)
    return turns


def _others(plan: Plan, path: Path, size: int, expected: str) -> dict[str, Figure]:
    if plan.gpu:
        return dict(peer_loaders.measure_each([path], size, expected))
    times: list[float] = answer_of(load_bytes_by_safetensors, path)
    return {"safetensors": rate("safetensors load(bytes of the file)", size, times)}


def take_turns(
    connection: Connection,
    directory: Path,
    devices: str,
    paths: Path | Sequence[Path],
    size: int,
    count: int,
    share: str = AUTO,
    check: bool = True,
) -> None:
    """In a child: send each turn; the first one has the process's first load, which is checked."""
    turns = []
    with Broker(directory) as broker, pinned_copy(devices, size) as copy:
        copy()
        for number in range(count):
            pinned = seconds(copy)
            loaded = load(broker, POOL, paths, share=share)
            turns.append(Turn(pinned, loaded.seconds, loaded.copy_seconds))
            if check and not number:
                model_weights.check(broker, POOL, paths)
            retire(broker, POOL)
    connection.send(turns)


def retire(broker: Broker, pool: str) -> None:
    """Take a pool out of service; return when its memory is free, and freeing it slows the next step no more."""
    broker.retire(pool)
    while broker.pools():
        sleep(0.001)
    if not broker.driver.host:
        sleep(SCRUBBING)


@contextmanager
def pinned_copy(devices: str, size: int) -> Iterator[Callable[[], None]]:
    """Yield a function that copies ``size`` bytes from pinned memory to the first device."""
    context = first_context(devices)
    pieces = [(offset, min(PIECE, size - offset)) for offset in range(0, size, PIECE)]
    pointer = context.allocate(size)
    with context.pin(min(PIECE, size)) as buffer, context.stream() as stream:
        buffer.view[:] = bytes(len(buffer.view))  # so that its pages are in memory

        def copy() -> None:
            for offset, nbytes in pieces:
                stream.copy_in(pointer + offset, buffer.pointer, nbytes)
            stream.synchronize()

        yield copy
    context.free(pointer)


def load_bytes_by_safetensors(connection: Connection, path: Path) -> None:
    """In a child: send the seconds of each load into host memory by safetensors itself.

    Its ``load_file`` for host memory maps the file and copies nothing, so the bytes are read instead.
    """
    from safetensors.torch import load as load_bytes

    times = []
    for _ in range(3):
        began = perf_counter()
        tensors = load_bytes(path.read_bytes())
        times.append(perf_counter() - began)
        del tensors
    connection.send(times)


if __name__ == "__main__":
    run_alone(measure)
