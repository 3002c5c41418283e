"""Seconds of ``cubroker load`` from exec to exit, and of a load that fails immediately: its cost without copying."""

from __future__ import annotations

import subprocess
from pathlib import Path
from time import perf_counter

from benchmarks import model_weights
from benchmarks.harness import run_alone, serving
from benchmarks.load import POOL, retire
from benchmarks.options import Plan
from benchmarks.report import Figure, median
from cubroker.client import Broker
from cubroker.server.hardening import python_command

ROUNDS = 5


def measure(plan: Plan) -> list[Figure]:
    tensors = model_weights.tensors(plan.nbytes)
    what = f"{model_weights.total(tensors) / 1e9:.2f} GB file in memory"
    with model_weights.in_memory(tensors) as path, serving(plan.devices) as server, Broker(server.directory) as broker:
        times = [_load(broker, server.directory, path) for _ in range(1 + ROUNDS)]
        failing = [_run(server.directory, path.with_name("missing"), status=1) for _ in range(ROUNDS)]
    return [
        Figure("cubroker load: exec to exit, the first of a broker", times[0], "s", what),
        median("cubroker load: exec to exit", times[1:], "s", what),
        median("cubroker load of a missing file: exec to exit", failing, "s", "start, imports, connecting, exit"),
    ]


def _load(broker: Broker, directory: Path, path: Path) -> float:
    took = _run(directory, path)
    retire(broker, POOL)
    return took


def _run(directory: Path, path: Path, *, status: int = 0) -> float:
    command = python_command("cubroker", "--directory", str(directory), "load", POOL, str(path))
    began = perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    took = perf_counter() - began
    if done.returncode != status:
        raise RuntimeError(f"cubroker load ended with {done.returncode}: {done.stderr}")
    return took


if __name__ == "__main__":
    run_alone(measure)
