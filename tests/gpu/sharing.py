"""What the tests of sharing GPU memory have in common: brokers on GPUs, and workers in other processes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cubroker.client import Broker
from tests.brokers import PATIENCE, BrokerProcess, eventually, serving


class Worker:
    """A ``tests.gpu.worker`` that has the pool attached and has answered."""

    def __init__(self, broker: BrokerProcess, what: str, name: str, *model: str) -> None:
        command = [sys.executable, "-m", "tests.gpu.worker", str(broker.directory), what, name, *model]
        root = Path(__file__).parents[2]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root)

    def answer(self) -> Any:
        """Return what it printed; it has the pool attached by then, and goes on holding it."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the worker ended before it answered"
        return json.loads(line)

    def kill(self) -> None:
        """End it with SIGKILL."""
        self.process.kill()
        self.process.communicate(timeout=PATIENCE)


@contextmanager
def worker(broker: BrokerProcess, what: str, name: str, *model: str) -> Iterator[Worker]:
    """Start a worker, and end it with the block."""
    started = Worker(broker, what, name, *model)
    try:
        yield started
    finally:
        started.kill()


@contextmanager
def gpu_broker() -> Iterator[tuple[BrokerProcess, Broker]]:
    """Start a broker on the GPUs and open a session with it; at the end no memory may still be on loan."""
    with serving("cuda") as process, Broker(process.directory) as broker:
        yield process, broker
        for info in broker.pools():
            broker.retire(info.name, info.version)
        eventually(lambda: not any(d.allocated or d.promised for d in broker.devices()), "all memory to be free")
