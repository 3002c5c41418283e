"""Time for a worker to get the weights: ``attach()`` and a state dict of all tensors, in milliseconds.

The worker's CUDA context is up. The time is measured for one worker again and again, for fresh workers, which begin
with the import of cubroker, and for many at the same time. On a GPU it is compared with the same tensors through
torch's own CUDA IPC, as its multiprocessing queues use it: reduced and pickled in one process, rebuilt in another.
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import statistics
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from time import monotonic, perf_counter, sleep
from typing import TYPE_CHECKING

from benchmarks import model_weights
from benchmarks.harness import SHARES, Child, answer_of, questions, run_alone, serving, warm_up
from benchmarks.options import Plan
from benchmarks.report import Figure, median
from cubroker.client import Broker
from cubroker.protocol import Layout
from cubroker.server.hardening import python_command

if TYPE_CHECKING:
    import torch

POOL = "weights"
MARKED = "model.norm.weight"
"""The tensor whose bytes every worker checks."""

WARM = 3
"""Rounds that are not counted."""

ROOT = Path(__file__).parents[1]
STEPS = ("the import", "the connection", "the first attach()", "the state dict")
"""The steps of a fresh worker."""

TOGETHER = 0.1
"""Seconds from the call of many workers to the moment at which they begin."""


def measure(plan: Plan) -> Iterator[Figure]:
    tensors = model_weights.tensors(plan.nbytes)
    what = f"{len(tensors)} tensors, {model_weights.total(tensors) / 1e9:.2f} GB"
    whole: dict[str, float] = {}
    for share in SHARES:
        for figure in _through_cubroker(plan, tensors, what, share):
            whole.setdefault(share, figure.value)
            yield figure
    if plan.gpu:
        opened = _through_torch(tensors, max(3, plan.rounds // 10))
        both = median("torch CUDA IPC: both", map(sum, opened), "ms", what)
        yield median("torch CUDA IPC: export", (one for one, _ in opened), "ms", what)
        yield median("torch CUDA IPC: rebuild", (other for _, other in opened), "ms", what)
        yield both
        yield Figure("torch CUDA IPC ÷ attach, ipc", both.value / whole["ipc"], "", "of the medians")


def _through_cubroker(plan: Plan, tensors: model_weights.Tensors, what: str, share: str) -> Iterator[Figure]:
    with serving(plan.devices) as server, Broker(server.directory) as broker:
        with broker.create(POOL, Layout.pack(tensors), share=share) as draft:
            draft[MARKED].copy_from_bytes(_mark(draft[MARKED].nbytes))
            draft.seal()
        times: list[tuple[float, float]] = answer_of(attach_repeatedly, server.directory, plan.gpu, plan.rounds)
        yield median(f"{share}: attach() to a state dict of all tensors", map(sum, times), "ms", what)
        yield median(f"{share}: of which attach()", (attached for attached, _ in times), "ms")
        yield median(f"{share}: of which the state dict", (viewed for _, viewed in times), "ms")
        fresh = [_fresh(plan, server.directory) for _ in range(1 + max(3, plan.few))][1:]
        yield median(f"{share}: fresh worker, import of cubroker to a state dict", map(sum, fresh), "ms", what)
        for step, step_times in zip(STEPS, zip(*fresh, strict=True), strict=True):
            yield median(f"{share}: fresh worker, of which {step}", step_times, "ms")
        count = 32 if plan.gpu else 8
        crowd = _at_once(plan, server.directory, count)
        yield median(f"{share}: {count} workers at once, the last has its state dict", map(max, crowd), "ms", what)
        yield median(
            f"{share}: {count} workers at once, of which half have theirs", map(statistics.median, crowd), "ms"
        )


def _fresh(plan: Plan, directory: Path) -> list[float]:
    """Return the milliseconds of each step of a fresh worker."""
    command = python_command("benchmarks.fresh_worker", str(directory), POOL, plan.devices)
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}
    done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, check=True)
    times: list[float] = json.loads(done.stdout)
    return times


def _at_once(plan: Plan, directory: Path, count: int) -> list[list[float]]:
    """Return the milliseconds of each of many workers that attach at the same moment, in each round."""
    with ExitStack() as undo:
        workers = [undo.enter_context(Child(attach_together, directory, plan.gpu)) for _ in range(count)]
        for worker in workers:
            worker.answer()
        rounds = []
        for _ in range(WARM + max(3, plan.few)):
            begin = monotonic() + TOGETHER
            for worker in workers:
                worker.tell(begin)
            rounds.append([worker.answer() for worker in workers])
        return rounds[WARM:]


def attach_together(connection: Connection, directory: Path, gpu: bool) -> None:
    """In one of many workers: attach at each moment that is received, and send the milliseconds to a state dict."""
    from cubroker.integrations.torch import state_dict

    warm_up(gpu=gpu)
    with Broker(directory) as broker:
        connection.send("ready")
        for (begin,) in questions(connection):
            sleep(max(begin - monotonic(), 0.0))
            pool = broker.attach(POOL)
            tensors = state_dict(pool)
            took = (monotonic() - begin) * 1e3
            del tensors
            pool.close()
            connection.send(took)


def attach_repeatedly(connection: Connection, directory: Path, gpu: bool, rounds: int) -> None:
    """In a worker: send the milliseconds of attach and state dict in each round."""
    from cubroker.integrations.torch import state_dict

    warm_up(gpu=gpu)
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


def _through_torch(tensors: model_weights.Tensors, rounds: int) -> list[tuple[float, float]]:
    """Return milliseconds to export and to rebuild, per round."""
    with Child(export_by_torch, tensors) as owner, Child(rebuild_by_torch) as worker:
        times = []
        for _ in range(1 + rounds):
            export, data = owner.ask()
            times.append((export, worker.ask(data)))
        return times[1:]


def export_by_torch(connection: Connection, tensors: model_weights.Tensors) -> None:
    """In the process that owns the tensors: each answer is the milliseconds of the export, and the pickled tensors."""
    import torch
    import torch.multiprocessing  # registers its reductions with the pickler

    owned = {name: torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for name, _, shape in tensors}
    torch.cuda.synchronize()
    for _ in questions(connection):
        began = perf_counter()
        data = bytes(ForkingPickler.dumps(owned))
        connection.send(((perf_counter() - began) * 1e3, data))


def rebuild_by_torch(connection: Connection) -> None:
    """In a worker: each answer is the milliseconds from the pickled tensors to tensors."""
    import torch

    warm_up(gpu=True)
    for (data,) in questions(connection):
        began = perf_counter()
        tensors = pickle.loads(data)
        seconds = perf_counter() - began
        del tensors
        gc.collect()
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]  # the next round opens the memory again
        connection.send(seconds * 1e3)


if __name__ == "__main__":
    run_alone(measure)
