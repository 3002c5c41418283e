"""What NVML tells of a process that keeps memory which the broker has freed, and what the broker makes of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from cubroker.client import Broker
from cubroker.protocol import Layout
from tests.brokers import eventually
from tests.gpu.sharing import SHARES, gpu_broker

GIB = 1 << 30
ROOT = Path(__file__).parents[2]


def beyond(broker: Broker, pid: int) -> int | None:
    """What the broker says of a process."""
    (client,) = (client for client in broker.clients() if client.pid == pid)
    return client.mapped_beyond_leases


@SHARES
def test_a_process_that_keeps_freed_memory_is_told_until_it_lets_go(share: str) -> None:
    with gpu_broker() as (process, broker):
        with broker.create("a", Layout.pack([("x", "U8", (GIB,))]), share=share) as draft:
            draft.seal()
        with broker.attach("a", device=0):  # and this process gives back what it had
            pass
        command = [sys.executable, "-m", "tests.gpu.late_unmapper", str(process.directory), "a"]
        with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as keeper:
            try:
                assert keeper.stdin
                assert keeper.stdout
                assert keeper.stdout.readline() == "kept\n"
                assert beyond(broker, keeper.pid) is None, "while the broker has the memory nothing can be seen"
                broker.retire("a")
                eventually(lambda: beyond(broker, keeper.pid) == GIB, "the memory to be counted to its keeper")
                assert beyond(broker, os.getpid()) is None
                print(file=keeper.stdin, flush=True)
                assert keeper.stdout.readline() == "let go\n"
                eventually(lambda: beyond(broker, keeper.pid) is None, "the memory to be let go of")
            finally:
                keeper.kill()
