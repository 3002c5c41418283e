"""Time from a SIGKILL of the broker to its next answers, in milliseconds, and a comparison of every byte after it.

The pool is a durable ``vmm`` pool under ``cubroker keep``. In each round the broker is killed while the next one stands
by. A worker that holds the pool sends a request, and a fresh process attaches and compares every byte with what was
written. After each round the broker is killed once more, when no other one stands by. At the end the broker is killed
with no worker alive, and its successor is held back, so that for some seconds no process uses the devices.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from time import monotonic, sleep
from typing import TYPE_CHECKING

from benchmarks import model_weights
from benchmarks.harness import Child, RunningBroker, answer_of, first_context, questions, run_alone, serving, warm_up
from benchmarks.options import Plan
from benchmarks.report import Figure, median, nvidia_smi
from cubroker.client import Broker
from cubroker.protocol import Layout
from cubroker.protocol.paths import LOCK

if TYPE_CHECKING:
    import torch

POOL = "weights"
SEED = 1
AWAY = 8.0
"""Seconds without any process that uses the devices; less in runs of fewer rounds."""

PATIENCE = 60.0


@dataclass(frozen=True)
class Return:
    """A fresh worker's result: when it had the tensors, by the host's clock, and how many bytes differed."""

    there: float
    wrong: int


def measure(plan: Plan) -> list[Figure]:
    tensors = model_weights.tensors(plan.nbytes)
    nbytes = model_weights.total(tensors)
    served, attached, moved, wrong, grown = [], [], [], 0, []
    ended, ready, cold = [], [], []
    away = min(AWAY, float(plan.rounds))
    with serving(plan.devices, kept=True) as server:
        answer_of(publish, server.directory, tensors)
        with Child(hold, server.directory, plan.devices) as holder:
            before = holder.answer()
            for _ in range(plan.few):
                with Child(come_back, server.directory, plan.gpu) as fresh:
                    fresh.answer()
                    _stands_by(server)
                    killed = kill(broker := _pid(server.directory))
                    holder.tell("ask")
                    fresh.tell("attach")
                    served.append((holder.answer() - killed) * 1e3)
                    found: Return = fresh.answer()
                    attached.append((found.there - killed) * 1e3)
                    wrong += found.wrong
                    moved.append(_moved(_next(server.directory, broker)) / 1e6)
                    ended.append((_when(server, killed, "was killed") - killed) * 1e3)
                    ready.append((_when(server, killed, "is ready") - killed) * 1e3)
                _stands_by(server)
                killed = kill_both(server)
                cold.append((holder.ask("ask") - killed) * 1e3)
                grown.append((before - holder.ask("weigh")) / 1e6)
        users = _alone_for(away, server.directory, plan.gpu)
        with Child(come_back, server.directory, plan.gpu) as fresh:
            fresh.answer()
            wrong += (last := fresh.ask("attach")).wrong
            assert last.there
    what = f"durable vmm pool, {len(tensors)} tensors, {nbytes / 1e9:.2f} GB"
    note = f"processes with the GPU driver's library meanwhile: {users}"
    if plan.gpu:
        note += f"; persistence mode {nvidia_smi('persistence_mode').lower()}"
    return [
        median("SIGKILL to an answer for a worker that holds the pool", served, "ms", what),
        median("of which until the broker has ended", ended, "ms", "as its keeper hears of it"),
        median("of which until the next broker is ready", ready, "ms"),
        median("the same where no broker stood by", cold, "ms", "it was killed right before"),
        median("SIGKILL to a new worker's state dict", attached, "ms", "its CUDA context was up" if plan.gpu else ""),
        median("read and written by the new broker", moved, "MB", "by its process, files and sockets alike"),
        median("device memory taken since", grown, "MB", "free memory before the first kill and after each"),
        Figure(f"bytes that differed, {plan.few} times", wrong, "", f"each time {nbytes / 1e9:.2f} GB were compared"),
        Figure("seconds without any broker or worker, then the same", away, "s", note),
    ]


def kill(broker: int) -> float:
    """Kill the broker; return the time, by the monotonic clock."""
    when = monotonic()
    os.kill(broker, signal.SIGKILL)
    return when


def kill_both(server: RunningBroker) -> float:
    """Kill the process that stands by, and then the broker, before another one stands by; return when."""
    waiting = next(line for _, line in reversed(server.said) if "stands by" in line).split()[3]
    os.kill(int(waiting), signal.SIGKILL)
    return kill(_pid(server.directory))


def _stands_by(server: RunningBroker) -> None:
    """Wait until a process stands by for the broker that serves."""
    deadline = monotonic() + PATIENCE
    while not _ready_since(server.said):
        if monotonic() > deadline:
            raise RuntimeError("no process stands by for the next start")
        sleep(0.01)


def _ready_since(said: list[tuple[float, str]]) -> bool:
    """Whether the last line of a keeper about any start says that a process stands by."""
    news = [line for _, line in said if "stands by" in line or "starts" in line]
    return bool(news) and "stands by" in news[-1]


def _when(server: RunningBroker, since: float, what: str) -> float:
    """Wait until the keeper has logged ``what`` after ``since``; return when it did."""
    deadline = monotonic() + PATIENCE
    while not (found := [when for when, line in server.said if when > since and what in line]):
        if monotonic() > deadline:
            raise RuntimeError(f"the keeper does not say that it {what}")
        sleep(0.001)
    return found[0]


# -- workers ---------------------------------------------------------------------------------------------


def publish(connection: Connection, directory: Path, tensors: model_weights.Tensors) -> None:
    """In a worker: publish the pool, each tensor with its own random numbers."""
    from cubroker.integrations.torch import state_dict

    with Broker(directory) as broker, broker.create(POOL, Layout.pack(tensors), share="vmm", durable=True) as draft:
        filled = state_dict(draft)
        for (_, expected), tensor in zip(_numbers(filled), filled.values(), strict=True):
            _bits(tensor).copy_(expected)
        del filled, tensor
        draft.seal()
    connection.send("published")


def hold(connection: Connection, directory: Path, devices: str) -> None:
    """In a worker: hold the pool; send the time at which the broker answers, or the free memory of the device."""
    context = first_context(devices)
    with Broker(directory, timeout=PATIENCE) as broker, broker.attach(POOL):
        connection.send(context.memory()[0])
        for (what,) in questions(connection):
            if what == "ask":
                broker.pools()
                connection.send(monotonic())
            else:
                connection.send(context.memory()[0])


def come_back(connection: Connection, directory: Path, gpu: bool) -> None:
    """In a fresh worker: attach when told to, and compare every byte."""
    from cubroker.integrations.torch import state_dict

    warm_up(gpu=gpu)
    connection.send("ready")
    for _ in questions(connection):
        with Broker(directory, timeout=PATIENCE) as broker, broker.attach(POOL) as pool:
            tensors = state_dict(pool)
            there = monotonic()
            wrong = sum(
                2 * int((_bits(tensor) != expected).sum())
                for (_, expected), tensor in zip(_numbers(tensors), tensors.values(), strict=True)
            )
            tensors.clear()
            connection.send(Return(there, wrong))


def _numbers(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the content of each tensor: the same random numbers every time, from a generator of its device."""
    import torch

    generator = torch.Generator(next(iter(tensors.values())).device).manual_seed(SEED)
    for name, tensor in tensors.items():
        bits = torch.empty(tensor.shape, dtype=torch.int16, device=tensor.device)
        yield name, bits.random_(-(2**15), 2**15, generator=generator)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """View elements of two bytes as integers: a NaN does not even equal itself."""
    import torch

    return tensor.view(torch.int16)


# -- the broker ------------------------------------------------------------------------------------------


def _pid(directory: Path) -> int:
    return int((directory / LOCK).read_text())


def _next(directory: Path, before: int) -> int:
    """Return the process id of the broker that serves after ``before``."""
    if (broker := _pid(directory)) == before:
        raise RuntimeError(f"broker {before} was killed, and is still named by {directory / LOCK}")
    return broker


def _moved(pid: int) -> int:
    """Return the bytes that a process has read and written since it began."""
    lines = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
    return int(lines["rchar"]) + int(lines["wchar"])


def _alone_for(seconds: float, directory: Path, gpu: bool) -> int:
    """Kill the broker and delay its successor; return how many processes use a GPU in between.

    A process uses a GPU if it has the driver's library in memory; descriptors alone do not count.
    """
    broker = _pid(directory)
    keeper = _parent(broker)
    os.kill(keeper, signal.SIGSTOP)
    try:
        kill(broker)
        sleep(seconds)
        return len(_users()) if gpu else 0
    finally:
        os.kill(keeper, signal.SIGCONT)


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _users() -> list[int]:
    """Return the processes with the GPU driver's library in memory, as far as this user may see."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):  # it ended, or is another user's
            if "libcuda.so" in (process / "maps").read_text():
                found.append(int(process.name))
    return found


if __name__ == "__main__":
    run_alone(measure)
