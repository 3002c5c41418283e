"""How fast a checkpoint that the page cache holds gets onto a device, beside what bounds it and what is usual.

The bound is the copy of a pinned buffer. Loads and pinned copies take turns in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter

from benchmarks import alone, weights
from benchmarks.plan import Plan
from benchmarks.report import Figure, median
from benchmarks.stage import Child, room_for, serving
from cubroker import driver
from cubroker.client import Broker
from cubroker.client.loader import load
from cubroker.client.verify import verify

POOL = "weights"
ROUNDS = 5
PIECE = 1 << 30


def measure(plan: Plan) -> list[Figure]:
    """Take the figures."""
    tensors = weights.tensors(plan.nbytes)
    size = weights.total(tensors)
    with room_for(size) as folder:
        path = folder / "model.safetensors"
        weights.write_file(path, tensors)
        with serving(plan.devices) as stage, Child(take_turns, stage.directory, plan.devices, path, size) as child:
            pinned, whole, copying = child.answer()
        with Child(load_by_safetensors, plan.gpu, path) as child:
            usual: list[float] = child.answer()
    where = f"{size / 1e9:.2f} GB file in memory, {folder.parent}"
    figures = [
        median("pinned host buffer to device", _rates(size, pinned), "GB/s"),
        median("load: reading and copying", _rates(size, copying), "GB/s", where),
        median(
            "load: all of it, to the published version", _rates(size, whole), "GB/s", "with pinning, clearing, sealing"
        ),
        median("load: all of it", whole, "s"),
        median(_USUAL[plan.gpu], _rates(size, usual), "GB/s"),
    ]
    bound, copied, loaded, _, other = (figure.value for figure in figures)
    return [
        *figures,
        Figure("load ÷ pinned buffer: reading and copying", copied / bound, "", "of the medians"),
        Figure("load ÷ pinned buffer: all of it", loaded / bound, "", "of the medians"),
        Figure("load ÷ safetensors: all of it", loaded / other, "", "of the medians"),
    ]


_USUAL = {True: 'safetensors load_file(device="cuda")', False: "safetensors load(bytes of the file)"}


def take_turns(connection: Connection, directory: Path, devices: str, path: Path, size: int) -> None:
    """In a child: answer with the seconds of each pinned copy, of each load, and of its copying part."""
    pinned, whole, copying = [], [], []
    with Broker(directory) as broker, _pinned_copy(devices, size) as copy:
        for _ in range(1 + ROUNDS):
            pinned.append(copy())
            loaded = load(broker, POOL, path, share="ipc")
            whole.append(loaded.seconds)
            copying.append(loaded.copy_seconds)
            if loaded.version == 1:
                _check(broker, path)
            broker.retire(POOL)
    connection.send((pinned[1:], whole[1:], copying[1:]))


def _check(broker: Broker, path: Path) -> None:
    verified = verify(broker, POOL, path)
    if verified.differences:
        raise RuntimeError(f"the pool differs from the file: {verified.differences[:3]}")


@contextmanager
def _pinned_copy(devices: str, size: int) -> Iterator[Callable[[], float]]:
    """Yield a function that copies ``size`` bytes from pinned memory to the first device, and returns the seconds."""
    opened = driver.load(devices)
    context = opened.context(opened.devices[0].index)
    pieces = [(offset, min(PIECE, size - offset)) for offset in range(0, size, PIECE)]
    pointer = context.allocate(size)
    with context.pin(min(PIECE, size)) as buffer, context.stream() as stream:
        buffer.view[:] = bytes(len(buffer.view))  # so that the pages are there

        def copy() -> float:
            began = perf_counter()
            for offset, nbytes in pieces:
                stream.copy_in(pointer + offset, buffer.pointer, nbytes)
            stream.synchronize()
            return perf_counter() - began

        yield copy
    context.free(pointer)


def load_by_safetensors(connection: Connection, gpu: bool, path: Path) -> None:
    """In a child: answer with the seconds of each load by safetensors itself."""
    import torch
    from safetensors.torch import load as load_bytes
    from safetensors.torch import load_file

    if gpu:
        torch.ones(1, device="cuda").sum().item()
    times = []
    for _ in range(3):
        began = perf_counter()
        # On the host load_file maps the file and copies nothing, so the copy there is the read.
        tensors = load_file(path, device="cuda") if gpu else load_bytes(path.read_bytes())
        if gpu:
            torch.cuda.synchronize()
        times.append(perf_counter() - began)
        del tensors
    connection.send(times)


def _rates(size: int, seconds: list[float]) -> list[float]:
    return [size / one / 1e9 for one in seconds]


if __name__ == "__main__":
    alone.main(measure)
