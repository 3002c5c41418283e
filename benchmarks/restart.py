"""How long the weights are out of reach when the broker is killed, and that they are the same afterwards.

A durable ``vmm`` pool under ``cubroker keep``. In each round the broker gets SIGKILL; a worker that holds the pool
asks again and again, and a fresh process attaches and compares every byte with what was written. At last nobody
is left that uses the devices: the broker is killed with no worker alive, and the next one held back for a while.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from time import monotonic, sleep
from typing import TYPE_CHECKING

from benchmarks import alone, weights
from benchmarks.plan import Plan
from benchmarks.report import Figure, median
from benchmarks.stage import Child, questions, serving
from cubroker import driver
from cubroker.client import Broker
from cubroker.protocol import Layout
from cubroker.protocol.directory import LOCK

if TYPE_CHECKING:
    import torch

POOL = "weights"
ROUNDS = 5
SEED = 1
AWAY = 8.0
"""Seconds without any process that uses the devices."""

PATIENCE = 60.0


@dataclass(frozen=True)
class Return:
    """What a fresh worker found: when it had the tensors, by the host's clock, and how many bytes differed."""

    there: float
    wrong: int


def measure(plan: Plan) -> list[Figure]:
    """Take the figures."""
    tensors = weights.tensors(plan.nbytes)
    nbytes = weights.total(tensors)
    served, attached, moved, wrong, grown = [], [], [], 0, []
    with serving(plan.devices, kept=True) as stage:
        with Child(publish, stage.directory, plan.gpu, tensors) as worker:
            worker.answer()
        with Child(hold, stage.directory, plan.devices) as holder:
            before = holder.answer()
            for _ in range(ROUNDS):
                with Child(come_back, stage.directory, plan.gpu) as fresh:
                    fresh.answer()
                    killed = kill(broker := _pid(stage.directory))
                    holder.tell("ask")
                    fresh.tell("attach")
                    served.append((holder.answer() - killed) * 1e3)
                    found: Return = fresh.answer()
                    attached.append((found.there - killed) * 1e3)
                    wrong += found.wrong
                    moved.append(_moved(_next(stage.directory, broker)) / 1e6)
                grown.append((before - holder.ask("weigh")) / 1e6)
        users = _alone_for(AWAY, stage.directory, plan.gpu)
        with Child(come_back, stage.directory, plan.gpu) as fresh:
            fresh.answer()
            wrong += (last := fresh.ask("attach")).wrong
            assert last.there
    what = f"durable vmm pool, {len(tensors)} tensors, {nbytes / 1e9:.2f} GB"
    note = f"processes with the GPU driver's library meanwhile: {users}{_persistence() if plan.gpu else ''}"
    return [
        median("SIGKILL to an answer for a worker that holds the pool", served, "ms", what),
        median("SIGKILL to a new worker's state dict", attached, "ms", "its CUDA context was up" if plan.gpu else ""),
        median("read and written by the new broker", moved, "MB", "by its process, whatever it was"),
        median("device memory taken since", grown, "MB", "free memory before the first kill and after each"),
        Figure(f"bytes that differed, {ROUNDS} times", wrong, "", f"each time {nbytes / 1e9:.2f} GB were compared"),
        Figure("seconds without any broker or worker, then the same", AWAY, "s", note),
    ]


def kill(broker: int) -> float:
    """Kill the broker; return when, by the clock of all processes."""
    when = monotonic()
    os.kill(broker, signal.SIGKILL)
    return when


# -- workers ---------------------------------------------------------------------------------------------


def publish(connection: Connection, directory: Path, gpu: bool, tensors: weights.Tensors) -> None:
    """In a worker: publish the pool, each tensor filled with numbers of its own."""
    from cubroker.client.torch import state_dict

    with Broker(directory) as broker, broker.create(POOL, Layout.pack(tensors), share="vmm", durable=True) as draft:
        filled = state_dict(draft)
        for (_, expected), tensor in zip(_numbers(filled), filled.values(), strict=True):
            _bits(tensor).copy_(expected)
        del filled, tensor
        draft.seal()
    connection.send("published")


def hold(connection: Connection, directory: Path, devices: str) -> None:
    """In a worker: hold the pool; say when the broker answers, and how much memory the device has."""
    opened = driver.load(devices)
    context = opened.context(opened.devices[0].index)
    with Broker(directory, timeout=PATIENCE) as broker, broker.attach(POOL):
        connection.send(context.memory()[0])
        for (what,) in questions(connection):
            if what == "ask":
                broker.pools()
                connection.send(monotonic())
            else:
                connection.send(context.memory()[0])


def come_back(connection: Connection, directory: Path, gpu: bool) -> None:
    """In a fresh worker: attach when told to, and compare everything."""
    import torch

    from cubroker.client.torch import state_dict

    if gpu:
        torch.ones(1, device="cuda").sum().item()
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
    """What each tensor is filled with: the same numbers every time, from a generator of its device."""
    import torch

    generator = torch.Generator(next(iter(tensors.values())).device).manual_seed(SEED)
    for name, tensor in tensors.items():
        bits = torch.empty(tensor.shape, dtype=torch.int16, device=tensor.device)
        yield name, bits.random_(-(2**15), 2**15, generator=generator)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Two bytes each as numbers: what is no number equals nothing, itself included."""
    import torch

    return tensor.view(torch.int16)


# -- the broker ------------------------------------------------------------------------------------------


def _pid(directory: Path) -> int:
    return int((directory / LOCK).read_text())


def _next(directory: Path, before: int) -> int:
    """The broker that came after ``before``, and serves."""
    if (broker := _pid(directory)) == before:
        raise RuntimeError(f"broker {before} was killed, and is still named by {directory / LOCK}")
    return broker


def _moved(pid: int) -> int:
    """Bytes that a process has read and written since it began."""
    lines = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
    return int(lines["rchar"]) + int(lines["wchar"])


def _alone_for(seconds: float, directory: Path, gpu: bool) -> int:
    """Kill the broker and let the next one begin so much later; return how many processes used a GPU then.

    Those that merely hold descriptors are not counted: whoever uses a GPU has its driver's library in memory.
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
    """Processes that have the GPU driver's library in their memory, as far as this user may look."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):  # it ended meanwhile, or is another's
            if "libcuda.so" in (process / "maps").read_text():
                found.append(int(process.name))
    return found


def _persistence() -> str:
    if not (program := shutil.which("nvidia-smi")):
        return ""
    query = [program, "--query-gpu=persistence_mode", "--format=csv,noheader"]
    mode = subprocess.run(query, stdout=subprocess.PIPE, text=True, check=False).stdout.partition("\n")[0]
    return f"; persistence mode {mode.lower()}"


if __name__ == "__main__":
    alone.main(measure)
