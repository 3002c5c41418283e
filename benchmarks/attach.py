"""How long a worker takes to have the weights: ``attach()`` and a state dict of all tensors.

The worker's CUDA context is up. Beside it, on a GPU: the same tensors handed over by torch's own
CUDA IPC, as its multiprocessing queues do it: reduced and pickled in one process, rebuilt in another.
"""

from __future__ import annotations

import gc
import pickle
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

from benchmarks import alone, weights
from benchmarks.plan import Plan
from benchmarks.report import Figure, median
from benchmarks.stage import SHARES, Child, questions, serving
from cubroker.client import Broker
from cubroker.protocol import Layout

if TYPE_CHECKING:
    import torch

POOL = "weights"
MARKED = "model.norm.weight"
"""This tensor gets bytes of its own, which every worker looks for."""

WARM = 3
"""Rounds before those that count."""


def measure(plan: Plan) -> list[Figure]:
    """Take the figures."""
    tensors = weights.tensors(plan.nbytes)
    what = f"{len(tensors)} tensors, {weights.total(tensors) / 1e9:.2f} GB"
    figures = [figure for share in SHARES for figure in _through_cubroker(plan, tensors, what, share)]
    if plan.gpu:
        whole, opened = figures[0].value, _through_torch(tensors, max(3, plan.rounds // 10))
        figures += [
            median("torch CUDA IPC: export", (one for one, _ in opened), "ms", what),
            median("torch CUDA IPC: rebuild", (other for _, other in opened), "ms", what),
            median("torch CUDA IPC: both", map(sum, opened), "ms", what),
        ]
        figures.append(Figure("torch CUDA IPC ÷ attach, ipc", figures[-1].value / whole, "", "of the medians"))
    return figures


def _through_cubroker(plan: Plan, tensors: weights.Tensors, what: str, share: str) -> list[Figure]:
    with serving(plan.devices) as stage, Broker(stage.directory) as broker:
        with broker.create(POOL, Layout.pack(tensors), share=share) as draft:
            draft[MARKED].copy_from_bytes(_mark(draft[MARKED].nbytes))
            draft.seal()
        with Child(attach_repeatedly, stage.directory, plan.gpu, plan.rounds) as worker:
            times: list[tuple[float, float]] = worker.answer()
    return [
        median(f"{share}: attach() to a state dict of all tensors", map(sum, times), "ms", what),
        median(f"{share}: of which attach()", (attached for attached, _ in times), "ms"),
        median(f"{share}: of which the state dict", (viewed for _, viewed in times), "ms"),
    ]


def attach_repeatedly(connection: Connection, directory: Path, gpu: bool, rounds: int) -> None:
    """In a worker: answer with the milliseconds that each round took, attach and state dict apart."""
    import torch

    from cubroker.client.torch import state_dict

    if gpu:
        torch.ones(1, device="cuda").sum().item()  # the context is up, and kernels are loaded
    times = []
    with Broker(directory) as broker:
        for _ in range(WARM + rounds):
            began = perf_counter()
            pool = broker.attach(POOL)
            attached = perf_counter()
            tensors = state_dict(pool)
            viewed = perf_counter()
            times.append(((attached - began) * 1e3, (viewed - attached) * 1e3))
            if len(times) == 1:
                _look_for_the_mark(tensors[MARKED])
            del tensors
            pool.close()
    connection.send(times[WARM:])


def _mark(nbytes: int) -> bytes:
    return (b"cubroker" * (nbytes // 8 + 1))[:nbytes]


def _look_for_the_mark(tensor: torch.Tensor) -> None:
    import torch

    found = bytes(tensor.cpu().view(torch.uint8).tolist())
    if found != _mark(len(found)):
        raise RuntimeError("the worker does not see what the writer wrote")


def _through_torch(tensors: weights.Tensors, rounds: int) -> list[tuple[float, float]]:
    """Return milliseconds to export and to rebuild, per round."""
    with Child(export_by_torch, tensors) as owner, Child(rebuild_by_torch) as worker:
        times = []
        for _ in range(1 + rounds):
            export, data = owner.ask()
            times.append((export, worker.ask(data)))
        return times[1:]


def export_by_torch(connection: Connection, tensors: weights.Tensors) -> None:
    """In the process that owns the tensors: each answer is the milliseconds it took, and the pickled tensors."""
    import torch
    import torch.multiprocessing  # which teaches the pickler about tensors

    owned = {name: torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for name, _, shape in tensors}
    torch.cuda.synchronize()
    for _ in questions(connection):
        began = perf_counter()
        data = bytes(ForkingPickler.dumps(owned))
        connection.send(((perf_counter() - began) * 1e3, data))


def rebuild_by_torch(connection: Connection) -> None:
    """In a worker: each answer is the milliseconds from the pickled tensors to tensors."""
    import torch

    torch.ones(1, device="cuda").sum().item()
    for (data,) in questions(connection):
        began = perf_counter()
        tensors = pickle.loads(data)
        seconds = perf_counter() - began
        del tensors
        gc.collect()
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]  # the next round opens the memory again
        connection.send(seconds * 1e3)


if __name__ == "__main__":
    alone.main(measure)
