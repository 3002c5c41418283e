"""What one more worker costs on the device beyond its own CUDA context, and what broker and gateway take at rest."""

from __future__ import annotations

import re
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks import alone, weights
from benchmarks.plan import Plan
from benchmarks.report import Figure
from benchmarks.stage import Child, questions, serving
from cubroker import driver
from cubroker.client import Broker
from cubroker.protocol import Layout

POOL = "weights"
WORKERS = 2


def measure(plan: Plan) -> list[Figure]:
    """Take the figures."""
    layout = Layout.pack(weights.tensors(plan.nbytes))
    note = f"free memory of the device before and after, context up; the pool has {layout.nbytes / 1e9:.2f} GB"
    with serving(plan.devices) as stage:
        figures = [
            Figure("broker at rest", _resident(stage.broker), "MB", "resident, nothing published yet"),
            Figure("gateway at rest", _resident(_gateway(stage.broker)), "MB", "resident"),
        ]
        with Broker(stage.directory) as broker, broker.create(POOL, layout, share="ipc") as draft:
            draft.seal()
        with ExitStack() as undo:
            for number in range(1, WORKERS + 1):
                worker = undo.enter_context(Child(attach_and_weigh, stage.directory, plan.devices))
                cost: float = worker.answer()
                figures.append(Figure(f"device memory for worker {number}", cost, "MB", note))
    return figures


def attach_and_weigh(connection: Connection, directory: Path, devices: str) -> None:
    """In a worker: answer with the device's megabytes that an attach and its state dict took, then hold them."""
    import torch

    from cubroker.client.torch import state_dict

    opened = driver.load(devices)
    context = opened.context(opened.devices[0].index)
    if not context.host:
        torch.ones(1, device="cuda").sum().item()
    with Broker(directory) as broker:
        before, _ = context.memory()
        pool = broker.attach(POOL)
        tensors = state_dict(pool)
        after, _ = context.memory()
        connection.send((before - after) / 1e6)
        for _ in questions(connection):  # none comes: until the parent has what it wants
            pass
        del tensors
        pool.close()


def _resident(pid: int) -> float:
    """Megabytes of a process that are in memory."""
    return _status(Path(f"/proc/{pid}"), "VmRSS") * 1024 / 1e6


def _gateway(broker: int) -> int:
    """The broker's child that runs the gateway."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            if _status(process, "PPid") == broker and b"cubroker.server.gateway" in (process / "cmdline").read_bytes():
                return int(process.name)
    raise RuntimeError(f"broker {broker} has no gateway")


def _status(process: Path, field: str) -> int:
    """A number out of a process's status; 0 if it has none, as kernel threads have no memory."""
    found = re.search(rf"^{field}:\s+(\d+)", (process / "status").read_text(), re.MULTILINE)
    return int(found[1]) if found else 0


if __name__ == "__main__":
    alone.main(measure)
