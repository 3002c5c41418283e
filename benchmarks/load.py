"""Rate of a load from the page cache to a device, in GB/s, compared with its bound and with safetensors.

The bound is the copy of a pinned buffer. Loads and pinned copies take turns in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter

from benchmarks import model_weights
from benchmarks.harness import answer_of, beside_broker, first_context, run_alone, seconds, warm_up
from benchmarks.options import Plan
from benchmarks.report import Figure, median
from cubroker.client import Broker
from cubroker.client.loading.loader import load

POOL = "weights"
ROUNDS = 5
PIECE = 1 << 30


def measure(plan: Plan) -> list[Figure]:
    """Measure."""
    tensors = model_weights.tensors(plan.nbytes)
    size = model_weights.total(tensors)
    with model_weights.in_memory(tensors) as path:
        pinned, whole, copying = beside_broker(plan.devices, take_turns, plan.devices, path, size)
        usual: list[float] = answer_of(load_by_safetensors, plan.gpu, path)
    where = f"{size / 1e9:.2f} GB file in memory, {path.parents[1]}"
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
    """In a child: send the seconds of each pinned copy, each load, and its copying part."""
    pinned, whole, copying = [], [], []
    with Broker(directory) as broker, _pinned_copy(devices, size) as copy:
        for _ in range(1 + ROUNDS):
            pinned.append(seconds(copy))
            loaded = load(broker, POOL, path, share="ipc")
            whole.append(loaded.seconds)
            copying.append(loaded.copy_seconds)
            if loaded.version == 1:
                model_weights.check(broker, POOL, path)
            broker.retire(POOL)
    connection.send((pinned[1:], whole[1:], copying[1:]))


@contextmanager
def _pinned_copy(devices: str, size: int) -> Iterator[Callable[[], None]]:
    """Yield a function that copies ``size`` bytes from pinned memory to the first device."""
    context = first_context(devices)
    pieces = [(offset, min(PIECE, size - offset)) for offset in range(0, size, PIECE)]
    pointer = context.allocate(size)
    with context.pin(min(PIECE, size)) as buffer, context.stream() as stream:
        buffer.view[:] = bytes(len(buffer.view))  # to have the pages in memory

        def copy() -> None:
            for offset, nbytes in pieces:
                stream.copy_in(pointer + offset, buffer.pointer, nbytes)
            stream.synchronize()

        yield copy
    context.free(pointer)


def load_by_safetensors(connection: Connection, gpu: bool, path: Path) -> None:
    """In a child: send the seconds of each load by safetensors itself."""
    import torch
    from safetensors.torch import load as load_bytes
    from safetensors.torch import load_file

    warm_up(gpu=gpu)
    times = []
    for _ in range(3):
        began = perf_counter()
        # On the host load_file maps the file and copies nothing, so read its bytes instead.
        tensors = load_file(path, device="cuda") if gpu else load_bytes(path.read_bytes())
        if gpu:
            torch.cuda.synchronize()
        times.append(perf_counter() - began)
        del tensors
    connection.send(times)


def _rates(size: int, seconds: list[float]) -> list[float]:
    return [size / one / 1e9 for one in seconds]


if __name__ == "__main__":
    run_alone(measure)
