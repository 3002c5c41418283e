"""What is done to a kept broker, and to its keeper, from outside: somebody serves again, with all that was held."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Self

import pytest

from cubroker.client import Broker, Pool
from tests import forkserver
from tests.brokers import DEVICES, PATIENCE, eventually
from tests.crash.content import Form, check
from tests.forkserver import CLI
from tests.integration.hostile.hostile_peers import HOSTILITY
from tests.unit.cli.processes import COMMAND, STREAMS, environment, kill_with_children, mute, serves

WATCHDOG = 1.0
"""Seconds after which a broker of these tests counts as hung."""

HANGING = """
import signal, time

def hang(*_):
    while True:
        time.sleep(1)

signal.signal(signal.SIGUSR2, hang)
"""
"""What has a Python hang in its main thread at SIGUSR2, and handle no other signal from then on."""


@pytest.fixture
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="cubroker-") as folder:
        yield Path(folder) / "run"


def serve(directory: Path) -> list[str]:
    return [*COMMAND, "serve", "--devices", DEVICES, "--directory", str(directory)]


def child(keeper: int) -> int:
    """Return the broker of a keeper; 0 while it has none."""
    children = Path(f"/proc/{keeper}/task/{keeper}/children").read_text().split()
    return int(children[0]) if children else 0


def next_child(keeper: int, before: int) -> int:
    """Wait for another broker than the one before."""
    found = [0]

    def look() -> bool:
        found[0] = child(keeper)
        return found[0] not in (0, before)

    eventually(look, "the next broker")
    return found[0]


class Kept:
    """A broker under ``cubroker keep``, and a client of it that holds a durable pool.

    Attributes:
        keeper: its process.
    """

    def __init__(self, keeper: subprocess.Popen[bytes], directory: Path, log: Path) -> None:
        self.keeper = keeper
        self.directory = directory
        self._log = log

    @classmethod
    @contextmanager
    def started(
        cls, directory: Path, options: Sequence[str], statuses: Sequence[int] = (0,), *, executed: bool = False
    ) -> Iterator[Self]:
        """Start both; at the end the keeper is told to end, and has to with one of ``statuses``.

        The broker is executed by its keeper, which is forked unless it is to be ``executed`` too.
        """
        log = directory.with_name("log")
        with log.open("wb") as file:
            command = [*COMMAND, "keep", "--pause", "0", *options, "--", *serve(directory)]
            (directory.parent / "sitecustomize.py").write_text(HANGING)
            environ = environment(PYTHONPATH=str(directory.parent))
            start = subprocess.Popen if executed else partial(forkserver.start, preload=CLI)
            keeper = start(command, env=environ, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
        with keeper:
            try:
                yield cls(keeper, directory, log)
                keeper.terminate()
                assert keeper.wait(PATIENCE) in statuses
                assert "Traceback" not in log.read_text()
            finally:
                kill_with_children(keeper)

    @contextmanager
    def holding(self) -> Iterator[Pool]:
        """Hold a durable pool, which is whole before and after."""
        serves(self.directory)
        with Broker(self.directory, timeout=PATIENCE) as client:
            Form("vmm", durable=True).publish(client, "held")
            with client.attach("held") as pool:
                check(pool)
                yield pool
                with client.attach("held") as again:  # a new broker knows it, and the lease
                    check(again)
                check(pool)
                (other,) = [each for each in client.clients() if each.pid == os.getpid()]
                assert [lease.pool for lease in other.leases] == ["held"]

    @property
    def broker(self) -> int:
        return next_child(self.keeper.pid, 0)

    def said(self) -> str:
        return self._log.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("kind", STREAMS)
def test_a_killed_broker_is_replaced_wherever_its_words_go(directory: Path, kind: str) -> None:
    with mute(kind, "keep", "--pause", "0", "--", *serve(directory)) as keeper:
        serves(directory)
        for _ in range(HOSTILITY):
            broker = next_child(keeper.pid, 0)
            os.kill(broker, signal.SIGKILL)
            next_child(keeper.pid, broker)
            serves(directory)
        keeper.terminate()
        assert keeper.wait(PATIENCE) == 0


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGUSR2], ids=["stopped", "hung"])
def test_a_silent_broker_is_replaced_and_nothing_is_lost(directory: Path, number: signal.Signals) -> None:
    with Kept.started(directory, ["--watchdog", str(WATCHDOG)]) as kept, kept.holding():
        for _ in range(HOSTILITY):
            broker = kept.broker
            os.kill(broker, number)
            next_child(kept.keeper.pid, broker)
            serves(directory)
            assert f"process {broker} gave no sign of life in time, and is aborted" in kept.said()


@pytest.mark.slow
def test_a_broker_that_is_stopped_before_it_is_ready_is_replaced(directory: Path) -> None:
    with Kept.started(directory, ["--start-timeout", "6"]) as kept, kept.holding():
        broker = kept.broker
        os.kill(broker, signal.SIGKILL)
        starting = next_child(kept.keeper.pid, broker)
        os.kill(starting, signal.SIGSTOP)
        next_child(kept.keeper.pid, starting)
        serves(directory)
        assert f"process {starting} is not ready after 6 s, and is aborted" in kept.said()


@pytest.mark.slow
def test_a_stopped_broker_ends_in_order_when_its_keeper_is_told_to(directory: Path) -> None:
    with Kept.started(directory, []) as kept:
        serves(directory)
        os.kill(kept.broker, signal.SIGSTOP)


@pytest.mark.slow
def test_a_hung_broker_holds_up_no_end(directory: Path) -> None:
    with Kept.started(directory, ["--stop-timeout", "1"], statuses=[128 + signal.SIGKILL]) as kept:
        serves(directory)
        os.kill(kept.broker, signal.SIGUSR2)
        kept.keeper.terminate()
        assert kept.keeper.wait(PATIENCE) == 128 + signal.SIGKILL
        assert "stored descriptors are dropped: ledger, own-" in kept.said().splitlines()[-1]


@pytest.mark.slow
def test_signals_at_any_moment_of_the_start_end_nothing(directory: Path) -> None:
    for _ in range(HOSTILITY):
        # The last one may restart the broker just before the end, and a broker that starts dies of SIGTERM.
        with Kept.started(directory, [], statuses=(0, 128 + signal.SIGTERM), executed=True) as kept:
            own_code(kept.keeper)
            while "is ready" not in kept.said():
                for number in (signal.SIGUSR1, signal.SIGHUP):
                    kept.keeper.send_signal(number)
                assert kept.keeper.poll() is None, kept.said()
            serves(directory)


@pytest.mark.slow
def test_a_broker_that_starts_ends_in_order_when_it_is_to_make_way(directory: Path) -> None:
    command = serve(directory)
    for _ in range(HOSTILITY):
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as broker:
            try:
                own_code(broker)
                broker.send_signal(signal.SIGUSR1)
                assert broker.wait(PATIENCE) == 0
            finally:
                broker.kill()


def own_code(process: subprocess.Popen[bytes]) -> None:
    """Wait for the first instruction that is not the interpreter's own: it keeps SIGUSR1 from ending the process."""

    def survives() -> bool:
        lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        masks = [int(line.split()[1], 16) for line in lines if line.startswith(("SigBlk", "SigCgt"))]
        return any(mask >> (signal.SIGUSR1 - 1) & 1 for mask in masks)

    eventually(survives, "SIGUSR1 to be blocked or handled")
