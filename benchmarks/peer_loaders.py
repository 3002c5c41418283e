"""Other loaders of safetensors files to one GPU, each used as its documentation says, and their rates.

A loader is measured if it is installed. If it fails, its row says why, and the other loaders are still measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

from benchmarks.harness import answer_of, warm_up
from benchmarks.report import Figure, absent, median

ROUNDS = 5
PATIENCE = 60.0
"""The most seconds for all rounds of one loader."""

Tensors = dict[str, Any]


class Loader(NamedTuple):
    """Another loader."""

    #: Its name in the rows.
    title: str
    #: The package that contains it.
    package: str
    #: Yields the tensors of files, on the GPU.
    load: Callable[[Sequence[Path]], Any]


@contextmanager
def by_safetensors(paths: Sequence[Path]) -> Iterator[Tensors]:
    """Load with ``load_file``, file by file."""
    from safetensors.torch import load_file

    tensors: Tensors = {}
    for path in paths:
        tensors |= load_file(path, device="cuda:0")
    yield tensors


@contextmanager
def by_instanttensor(paths: Sequence[Path]) -> Iterator[Tensors]:
    """Load with ``instanttensor.safe_open``; files on a disk are in the page cache, so that its direct I/O is off."""
    import instanttensor

    options: dict[str, Any] = {}
    if not _in_tmpfs(paths[0]) and hasattr(instanttensor, "BackendPolicy"):
        options["backend"] = instanttensor.BackendPolicy.BUFFERED
    with instanttensor.safe_open([str(path) for path in paths], framework="pt", device=0, **options) as file:
        yield dict(file.tensors())


@contextmanager
def by_fastsafetensors(paths: Sequence[Path]) -> Iterator[Tensors]:
    """Load with ``SafeTensorsFileLoader``, through its pinned buffers."""
    from fastsafetensors import SafeTensorsFileLoader

    loader = SafeTensorsFileLoader(None, device="cuda:0", nogds=True)
    try:
        loader.add_filenames({0: [str(path) for path in paths]})
        buffers = loader.copy_files_to_device()
        try:
            yield {name: buffers.get_tensor(name) for name in loader.get_keys()}
        finally:
            buffers.close()
    finally:
        loader.close()


@contextmanager
def by_runai(paths: Sequence[Path]) -> Iterator[Tensors]:
    """Load with the Run:ai streamer; its tensors may be in its own buffer, so they are copied to be kept."""
    from runai_model_streamer import SafetensorsStreamer

    tensors: Tensors = {}
    with SafetensorsStreamer() as streamer:
        streamer.stream_files([str(path) for path in paths], device="cuda:0")
        for name, tensor in streamer.get_tensors():
            tensors[name] = tensor.clone() if tensor.is_cuda else tensor.to("cuda:0")
    yield tensors


LOADERS = (
    Loader('safetensors load_file(device="cuda")', "safetensors", by_safetensors),
    Loader("InstantTensor", "instanttensor", by_instanttensor),
    Loader("fastsafetensors", "fastsafetensors", by_fastsafetensors),
    Loader("Run:ai streamer", "runai_model_streamer", by_runai),
)


def measure_each(paths: Sequence[Path], size: int, expected: str) -> Iterator[tuple[str, Figure]]:
    """Yield the title of each loader, and its rate in GB/s; ``expected`` is the name of one of the tensors."""
    for number, (title, package, _) in enumerate(LOADERS):
        if find_spec(package) is None:
            yield title, absent(title, f"{package} is not installed")
            continue
        try:
            times = answer_of(load_by_turns, number, tuple(paths), expected, patience=PATIENCE)
        except RuntimeError as error:
            yield title, absent(title, f"failed: {_last_line(str(error))}")
            continue
        note = f"context up, kept as tensors; the first call {size / times[0] / 1e9:.3g}"
        yield title, median(title, [size / each / 1e9 for each in times[1:]], "GB/s", note)


def load_by_turns(connection: Connection, number: int, paths: Sequence[Path], expected: str) -> None:
    """In a child: send the seconds of each load by one of the loaders, the first one included."""
    import torch

    warm_up(gpu=True)
    times = []
    for _ in range(1 + ROUNDS):
        began = perf_counter()
        with LOADERS[number].load(paths) as tensors:
            torch.cuda.synchronize()
            times.append(perf_counter() - began)
            if not tensors[expected].is_cuda:
                raise RuntimeError(f"{expected} is not on the GPU")
            del tensors
    connection.send(times)


def _in_tmpfs(path: Path) -> bool:
    return path.is_relative_to("/dev/shm")


def _last_line(text: str) -> str:
    return text.strip().rpartition("\n")[2][:200].replace("|", "/")
