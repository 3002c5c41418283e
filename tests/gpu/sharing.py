"""What the tests of sharing GPU memory have in common: brokers on GPUs, and workers in other processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from cubroker.client import Broker
from cubroker.protocol.errors import NotFound, Retired
from tests.brokers import PATIENCE, BrokerProcess, eventually, serving

SHARES = pytest.mark.parametrize("share", ["ipc", "vmm"])
"""For tests of what holds however pools are shared."""


class Worker:
    """A ``tests.gpu.worker``, which attaches to a pool and holds it."""

    def __init__(self, broker: BrokerProcess, environment: Mapping[str, str], attach: dict[str, object]) -> None:
        command = [sys.executable, "-m", "tests.gpu.worker", str(broker.directory), json.dumps(attach)]
        root = Path(__file__).parents[2]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=root,
            env=os.environ | environment,
        )

    def tell(self, what: str, *arguments: object) -> None:
        """Have it do something; see ``tests.gpu.worker.User``."""
        assert self.process.stdin is not None
        print(json.dumps([what, *arguments]), file=self.process.stdin, flush=True)

    def answer(self) -> Any:
        """Return what came of it; it has the pool attached by then, and goes on holding it."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the worker ended before it answered"
        return json.loads(line)

    def ask(self, what: str, *arguments: object) -> Any:
        """Have it do something and return what came of it."""
        self.tell(what, *arguments)
        return self.answer()

    def kill(self) -> None:
        """End it with SIGKILL."""
        self.process.kill()
        self.process.communicate(timeout=PATIENCE)


@contextmanager
def worker(
    broker: BrokerProcess,
    what: str,
    name: str,
    *arguments: object,
    environment: Mapping[str, str] | None = None,
    **attach: object,
) -> Iterator[Worker]:
    """Start a worker that attaches to pool ``name`` and does ``what`` first; end it with the block."""
    started = Worker(broker, environment or {}, {"name": name, **attach})
    try:
        started.tell(what, *arguments)
        yield started
    finally:
        started.kill()


@contextmanager
def gpu_broker() -> Iterator[tuple[BrokerProcess, Broker]]:
    """Start a broker on the GPUs and open a session with it; at the end no memory may still be on loan."""
    with serving("cuda") as process, Broker(process.directory) as broker:
        yield process, broker
        for info in broker.pools():
            with suppress(NotFound, Retired):  # a draft, or a lease that falls by now
                broker.retire(info.name, info.version)
        # The traceback of a test that failed may hold tensors, and the time limit would hide what failed.
        eventually(lambda: not any(d.allocated or d.promised for d in broker.devices()), "all memory to be free", 15.0)
