"""Where a benchmark plays: a broker in a temporary directory, and child processes, all gone at the end."""

from __future__ import annotations

import multiprocessing
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread
from typing import IO, Any, Self

from cubroker.protocol.directory import LOCK
from cubroker.server import python

SHARES = ("ipc", "vmm")
"""The ways in which a pool can be shared."""

PATIENCE = 300.0
"""Seconds that a child may take for an answer."""

_spawn = multiprocessing.get_context("spawn")


@dataclass(frozen=True)
class Stage:
    """A broker that serves: where, and its process id."""

    directory: Path
    broker: int


@contextmanager
def serving(devices: str, *, kept: bool = False) -> Iterator[Stage]:
    """Start a broker on ``devices``; it is stopped at the end.

    One that is ``kept`` has a store, and the next is started at once, as after one that ran for a while.
    """
    with tempfile.TemporaryDirectory(prefix="cubroker-bench-") as directory:
        command = python.command("cubroker.server", directory, "--devices", devices)
        if kept:
            command = python.command("cubroker.cli", "keep", "--pause", "0", "--", *command)
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            _await_ready(process.stderr)
            listener = Thread(target=_pass_on, args=(process.stderr,))
            listener.start()
            try:
                yield Stage(Path(directory), int((Path(directory) / LOCK).read_text()))
            finally:
                process.terminate()
                listener.join()


def _await_ready(said: IO[str]) -> None:
    """Return when the broker serves."""
    before = []
    for line in said:
        if line.startswith("cubroker: serving"):
            return
        before.append(line)
    raise RuntimeError(f"the broker did not start:\n{''.join(before)}")


def _pass_on(said: IO[str]) -> None:
    """Print what the broker says, up to its end, unless it is mere information."""
    for line in said:
        if " INFO " not in line and not line.startswith(("cubroker keep: ", "cubroker: serving")):
            print(line, end="", file=sys.stderr)


@contextmanager
def room_for(size: int) -> Iterator[Path]:
    """A temporary folder in memory, if there is room, or else on disk, where the page cache holds what was written."""
    for place in (Path("/dev/shm"), Path(tempfile.gettempdir())):
        if place.is_dir() and shutil.disk_usage(place).free > size * 5 // 4:
            with tempfile.TemporaryDirectory(prefix="cubroker-bench-", dir=place) as folder:
                yield Path(folder)
            return
    raise RuntimeError(f"no room for a file of {size} bytes in /dev/shm or {tempfile.gettempdir()}; use --size")


@dataclass(frozen=True)
class _Failure:
    text: str


class Child:
    """A fresh process that runs ``function(connection, *arguments)``; ``with`` waits for its end.

    The function must stand in a module. Its arguments, questions and answers travel pickled.
    """

    def __init__(self, function: Callable[..., None], *arguments: Any) -> None:
        self._ours, theirs = _spawn.Pipe()
        self._process = _spawn.Process(target=_run, args=(theirs, function, arguments), daemon=True)
        self._process.start()
        theirs.close()

    def ask(self, *question: Any) -> Any:
        """Send a question and return the answer; raises ``RuntimeError`` if the child fails."""
        self.tell(*question)
        return self.answer()

    def tell(self, *question: Any) -> None:
        """Send a question."""
        self._ours.send(question)

    def answer(self) -> Any:
        """Return the next answer; raises ``RuntimeError`` if the child fails or takes too long."""
        if not self._ours.poll(PATIENCE):
            raise RuntimeError(f"a child has not answered for {PATIENCE:.0f} s")
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
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def questions(connection: Connection) -> Iterator[tuple[Any, ...]]:
    """In a child: the questions of the parent, until it wants no more."""
    while True:
        try:
            yield connection.recv()
        except (EOFError, ConnectionResetError):
            return


def _run(connection: Connection, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    try:
        function(connection, *arguments)
    except BaseException:
        with suppress(BrokenPipeError):  # the parent has failed before, and says so itself
            connection.send(_Failure(traceback.format_exc()))
        raise
