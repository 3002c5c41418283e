"""Loads of checkpoints of other shapes: one small file, a hundred files, twenty shards, and files that are not cached.

Loads and pinned copies alternate in one process. The bound of files that are not cached is reading them past the page
cache, with the number of threads and the bytes at a time that are fastest here.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks import model_weights
from benchmarks.harness import beside_broker, run_alone, seconds
from benchmarks.load import POOL, Turn, of_bound, retire, take_turns
from benchmarks.options import Plan
from benchmarks.report import Figure, absent, rate, ratio
from cubroker import driver
from cubroker.client import Broker
from cubroker.client.loading.loader import load

ROUNDS = 5
COLD_ROUNDS = 3
SMALL_PART, COLD_PART = 8, 4
"""By what the plan's bytes are divided for the one file, and for the files that are not cached."""

FILES, SHARDS = 100, 20
DIRECT = tuple(product((8, 32), (1 << 20, 8 << 20)))
"""Threads, and bytes at a time, that files are read with past the page cache."""

_libc = ctypes.CDLL(None, use_errno=True)


def measure(plan: Plan) -> Iterator[Figure]:
    nbytes = _fitting(plan)
    less = "" if nbytes == plan.nbytes else f"not {plan.nbytes / 1e9:g}, for which there is no room; "
    shapes = (
        ("one file", nbytes // SMALL_PART, 1),
        (f"{FILES} files", nbytes, FILES),
        (f"{SHARDS} shards", nbytes, SHARDS),
    )
    for title, size, count in shapes:
        with checkpoint(size, count) as (paths, total):
            turns: list[Turn] = beside_broker(plan.devices, take_turns, plan.devices, paths, total, 1 + ROUNDS)[1:]
            note = f"{title} of {total / count / 1e9:.3g} GB in memory; {less}{paths[0].parents[1]}"
            yield rate(f"load of {title}: all of it", total, (turn.whole for turn in turns), note)
            yield of_bound(f"load of {title} ÷ pinned buffer: all of it", turns)
    yield from _cold(plan, nbytes // COLD_PART)


def _fitting(plan: Plan) -> int:
    """Return how large a checkpoint can be, up to the plan's size: in files, in the page cache and on the device."""
    device = driver.load(plan.devices).devices[0].total
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    disk = shutil.disk_usage(tempfile.gettempdir()).free
    # A pinned copy takes as much.
    return min(plan.nbytes, device * 9 // 20, disk * 2 // 3, memory // 2 if plan.gpu else memory // 4)


@contextmanager
def checkpoint(nbytes: int, files: int, *, on_disk: bool = False) -> Iterator[tuple[list[Path], int]]:
    """Yield the files of a checkpoint, and their bytes of tensors."""
    tensors = model_weights.tensors(nbytes)
    total = model_weights.total(tensors)
    places = [Path(tempfile.gettempdir())] if on_disk else model_weights.PLACES
    with model_weights.folder(total, places) as place:
        paths = []
        for number, part in enumerate(model_weights.parts(tensors, files)):
            paths.append(place / f"model-{number:05}-of-{files:05}.safetensors")
            model_weights.write_file(paths[-1], part)
        yield paths, total


# -- files that are not in the page cache ----------------------------------------------------------------


def _cold(plan: Plan, nbytes: int) -> list[Figure]:
    title = f"load of {SHARDS} shards that are not cached"
    with checkpoint(nbytes, SHARDS, on_disk=True) as (paths, total):
        drop(paths)
        if (left := cached(paths)) > 0.01:
            why = f"{left:.0%} of {paths[0].parent.parent} stays in the page cache: it is in memory, or another's"
            return [absent(f"{title}: all of it", why)]
        try:
            bound, how = _best_direct(paths, total)
        except OSError as error:
            why = f"{paths[0].parent.parent} cannot be read past the page cache: {error}"
            return [absent(f"{title}: all of it", why)]
        direct, took = zip(*beside_broker(plan.devices, load_cold, paths, how), strict=True)
    note = f"{how[0]} threads, {how[1] >> 20} MiB; at best {bound:.3g}"
    return [
        rate("reading past the page cache", total, direct, note),
        rate(f"{title}: all of it", total, took, f"{total / 1e9:.3g} GB, {paths[0].parents[1]}"),
        ratio(f"{title} ÷ reading past the page cache", direct, took, better="more"),
    ]


def load_cold(connection: Connection, directory: Path, paths: Sequence[Path], how: tuple[int, int]) -> None:
    """In a child: send the seconds of each reading past the page cache, and of the load after it."""
    pairs = []
    with Broker(directory) as broker:
        for _ in range(COLD_ROUNDS):
            drop(paths)
            direct = seconds(lambda: read_direct(paths, *how))
            drop(paths)
            pairs.append((direct, load(broker, POOL, paths).seconds))
            retire(broker, POOL)
    connection.send(pairs)


def _best_direct(paths: Sequence[Path], total: int) -> tuple[float, tuple[int, int]]:
    return max((total / seconds(lambda: read_direct(paths, *how)) / 1e9, how) for how in DIRECT)  # noqa: B023


def read_direct(paths: Sequence[Path], threads: int, block: int) -> None:
    """Read all files past the page cache."""
    pieces = [(path, at) for path in paths for at in range(0, path.stat().st_size, block)]
    files = {path: os.open(path, os.O_RDONLY | os.O_DIRECT) for path in paths}

    def read(number: int) -> None:
        with mmap.mmap(-1, block) as buffer:
            for path, at in pieces[number::threads]:
                os.preadv(files[path], [buffer], at)

    try:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(read, range(threads)))
    finally:
        for file in files.values():
            os.close(file)


def drop(paths: Sequence[Path]) -> None:
    """Drop files from the page cache."""
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cached(paths: Sequence[Path]) -> float:
    """Return the part of files that is in the page cache."""
    there = every = 0
    for path in paths:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, mmap.MAP_PRIVATE) as mapped:
            pages = -(-len(mapped) // mmap.PAGESIZE)
            found = (ctypes.c_ubyte * pages)()
            start = ctypes.c_char.from_buffer(mapped)
            try:
                if _libc.mincore(ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(len(mapped)), found):
                    raise OSError(ctypes.get_errno(), f"mincore of {path}")
            finally:
                del start
            there += sum(page & 1 for page in bytes(found))
            every += pages
    return there / every


if __name__ == "__main__":
    run_alone(measure)
