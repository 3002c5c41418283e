"""Device memory of one more worker beyond its own CUDA context, and resident memory of broker and gateway, in MB."""

from __future__ import annotations

import re
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks import model_weights
from benchmarks.harness import Child, first_context, questions, run_alone, serving, warm_up
from benchmarks.options import Plan
from benchmarks.report import Figure
from cubroker.client import Broker
from cubroker.protocol import Layout

POOL = "weights"
WORKERS = 2


def measure(plan: Plan) -> list[Figure]:
    layout = Layout.pack(model_weights.tensors(plan.nbytes))
    note = f"free memory of the device before and after, context up; the pool has {layout.nbytes / 1e9:.2f} GB"
    with serving(plan.devices) as server:
        figures = [
            Figure("broker at rest", _resident(server.pid), "MB", "resident, nothing published yet"),
            Figure("gateway at rest", _resident(_gateway(server.pid)), "MB", "resident"),
        ]
        with Broker(server.directory) as broker, broker.create(POOL, layout, share="ipc") as draft:
            draft.seal()
        with ExitStack() as undo:
            for number in range(1, WORKERS + 1):
                worker = undo.enter_context(Child(attach_and_weigh, server.directory, plan.devices))
                cost: float = worker.answer()
                figures.append(Figure(f"device memory for worker {number}", cost, "MB", note))
    return figures


def attach_and_weigh(connection: Connection, directory: Path, devices: str) -> None:
    """In a worker: send the device's megabytes that an attach and its state dict took, then hold them."""
    from cubroker.integrations.torch import state_dict

    context = first_context(devices)
    warm_up(gpu=not context.host)
    with Broker(directory) as broker:
        before, _ = context.memory()
        pool = broker.attach(POOL)
        tensors = state_dict(pool)
        after, _ = context.memory()
        connection.send((before - after) / 1e6)
        for _ in questions(connection):  # none arrives; this waits for the parent
            pass
        del tensors
        pool.close()


def _resident(pid: int) -> float:
    """Return the resident megabytes of a process."""
    return _status(Path(f"/proc/{pid}"), "VmRSS") * 1024 / 1e6


def _gateway(broker: int) -> int:
    """Return the process id of a broker's gateway."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(FileNotFoundError, ProcessLookupError):  # the process has ended
            if (
                _status(process, "PPid") == broker
                and b"cubroker.server.transport.gateway" in (process / "cmdline").read_bytes()
            ):
                return int(process.name)
    raise RuntimeError(f"broker {broker} has no gateway")


def _status(process: Path, field: str) -> int:
    """Return a number of a process's status; 0 if it lacks the field, as kernel threads do."""
    found = re.search(rf"^{field}:\s+(\d+)", (process / "status").read_text(), re.MULTILINE)
    return int(found[1]) if found else 0


if __name__ == "__main__":
    run_alone(measure)
