"""The harness of all benchmarks: a broker in a temporary directory, child processes, and a run of one benchmark."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread
from time import monotonic, perf_counter
from typing import IO, Any, Self

from benchmarks.options import Plan, parse
from benchmarks.report import Figure, publish
from cubroker import driver
from cubroker.driver import Context
from cubroker.protocol import Layout
from cubroker.protocol.paths import LOCK
from cubroker.server.hardening import python_command

SHARES = ("ipc", "vmm")
"""The share kinds that are compared."""

PATIENCE = 300.0
"""The most seconds until a child's answer."""

LEAVING = 10.0
"""Seconds that a child has to end."""

processes = multiprocessing.get_context("spawn")
"""How children are started: without state of this process, as workers have none of the broker's. Tests fork them."""


@dataclass(frozen=True)
class RunningBroker:
    """A broker process."""

    directory: Path
    pid: int
    #: The lines of its keeper's log since it first served, and when they were written, by the monotonic clock.
    said: list[tuple[float, str]]


@contextmanager
def serving(devices: str, *, kept: bool = False, before: tuple[str, ...] = ()) -> Iterator[RunningBroker]:
    """Start a broker on ``devices`` and stop it at the end.

    Args:
        devices: its devices.
        kept: whether it runs under ``cubroker keep``: with a store, and a killed broker is replaced without a pause.
        before: a module that runs the broker's module, and the arguments before that.
    """
    with tempfile.TemporaryDirectory(prefix="cubroker-bench-") as directory:
        command = python_command(*before, "cubroker.server", directory, "--devices", devices)
        if kept:
            command = python_command("cubroker.cli", "keep", "--pause", "0", "--", *command)
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            _await_ready(process.stderr)
            said: list[tuple[float, str]] = []
            listener = Thread(target=_hear, args=(process.stderr, said))
            listener.start()
            try:
                yield RunningBroker(Path(directory), int((Path(directory) / LOCK).read_text()), said)
            finally:
                process.terminate()
                listener.join()


def _await_ready(log: IO[str]) -> None:
    """Return when the broker serves."""
    before = []
    for line in log:
        if line.startswith("cubroker: serving"):
            return
        before.append(line)
    raise RuntimeError(f"the broker did not start:\n{''.join(before)}")


def _hear(log: IO[str], said: list[tuple[float, str]]) -> None:
    """Record the lines of the keeper, and print the broker's warnings and errors, until the log ends."""
    for line in log:
        if line.startswith("cubroker keep: "):
            said.append((monotonic(), line))
        if " INFO " not in line and not line.startswith(("cubroker keep: ", "cubroker: serving")):
            print(line, end="", file=sys.stderr)


@dataclass(frozen=True)
class _Failure:
    text: str


class Child:
    """A fresh process that runs ``function(connection, *arguments)``; ``with`` waits for its end.

    Function, arguments, questions and answers are pickled, so the function is a module's own.
    """

    def __init__(self, function: Callable[..., None], *arguments: Any) -> None:
        self._ours, theirs = processes.Pipe()
        self._process = processes.Process(target=_run, args=(theirs, function, arguments), daemon=True)
        self._process.start()
        theirs.close()

    def ask(self, *question: Any) -> Any:
        """Send a question and return the answer; raises ``RuntimeError`` if the child fails."""
        self.tell(*question)
        return self.answer()

    def tell(self, *question: Any) -> None:
        """Send a question."""
        self._ours.send(question)

    def answer(self, patience: float = PATIENCE) -> Any:
        """Return the next answer; raises ``RuntimeError`` if the child fails or takes more seconds than that."""
        if not self._ours.poll(patience):
            raise RuntimeError(f"a child has not answered for {patience:.0f} s")
        try:
            answer = self._ours.recv()
        except EOFError:
            raise RuntimeError("a child has ended without an answer") from None
        if isinstance(answer, _Failure):
            raise RuntimeError(f"a child failed:\n{answer.text}")
        return answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._ours.close()  # which ends the child's loop over `questions`
        self._process.join(LEAVING)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def questions(connection: Connection) -> Iterator[tuple[Any, ...]]:
    """In a child: yield the parent's questions, until it closes the connection."""
    while True:
        try:
            yield connection.recv()
        except (EOFError, ConnectionResetError):
            return


def answer_of(function: Callable[..., None], *arguments: Any, patience: float = PATIENCE) -> Any:
    """Return the one answer of a fresh process that runs ``function(connection, *arguments)``."""
    with Child(function, *arguments) as child:
        return child.answer(patience)


def beside_broker(devices: str, function: Callable[..., None], *arguments: Any) -> Any:
    """Return the answer of ``function(connection, directory, *arguments)``, with the directory of a fresh broker."""
    with serving(devices) as server:
        return answer_of(function, server.directory, *arguments)


def _run(connection: Connection, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    try:
        function(connection, *arguments)
    except BaseException:
        with suppress(BrokenPipeError):  # the parent failed before, and reports that itself
            connection.send(_Failure(traceback.format_exc()))
        raise


def seconds(call: Callable[[], object]) -> float:
    """Return how long a call takes."""
    began = perf_counter()
    call()
    return perf_counter() - began


def warm_up(*, gpu: bool) -> None:
    """In a worker with torch: bring its context up, and load kernels."""
    if gpu:
        import torch

        torch.ones(1, device="cuda").sum().item()


def first_context(devices: str) -> Context:
    opened = driver.load(devices)
    return opened.context(opened.devices[0].index)


def one_allocation(nbytes: int) -> Layout:
    """Return the layout of a pool with one tensor, ``x``."""
    return Layout.pack([("x", "U8", (nbytes,))])


def run(program: str, measures: Mapping[str, Callable[[Plan], Iterable[Figure]]]) -> None:
    """Parse the command line, run benchmarks one after the other, and publish their figures together.

    If a benchmark fails, or is interrupted, publish the figures that it and those before it have yielded.
    """
    plan = parse(program)
    results: dict[str, list[Figure]] = {}
    try:
        for name, measure in measures.items():
            began, results[name] = perf_counter(), []
            results[name].extend(measure(plan))
            print(f"{name}: {perf_counter() - began:.1f} s", file=sys.stderr)
    finally:
        status = publish(plan, results)
    if status:
        sys.exit(status)


def run_alone(measure: Callable[[Plan], Iterable[Figure]]) -> None:
    """Run one benchmark, under the module's name."""
    name = Path(sys.argv[0]).stem
    run(f"python -m benchmarks.{name}", {name: measure})
