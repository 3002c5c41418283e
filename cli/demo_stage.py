"""The demo's stage: a temporary directory and child processes, all of them gone when it closes."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic
from types import FrameType, TracebackType
from typing import Any, Self

from cubroker.protocol.errors import CubrokerError, TimedOut, Unavailable
from cubroker.server import python

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

PATIENCE = 60.0
"""Seconds that a child may take for an answer, if nothing else is said."""


class Interrupts:
    """Turns signals into ``SystemExit``, and holds them back where one would lose track of a child or a directory.

    They are held from the beginning, until the first :meth:`held` block is done.
    """

    def __init__(self) -> None:
        self._holding = True
        self._pending: int | None = None
        # What was ignored, as nohup and shells in the background have it, stays ignored.
        chosen = [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        self._before = {number: signal.signal(number, self._handle) for number in chosen}

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep signals until the block is done."""
        self._holding = True
        try:
            yield
        finally:
            self._holding = False
        if self._pending is not None:
            raise SystemExit(128 + self._pending)

    def hold(self) -> None:
        """Keep signals from now on: the demo is ending anyway."""
        self._holding = True

    def restore(self) -> None:
        """Give the signals back to whoever had them."""
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _: FrameType | None) -> None:
        if not self._holding:
            raise SystemExit(128 + number)
        self._pending = number


class Child:
    """One child process that answers on its standard output, a line at a time."""

    def __init__(self, module: str, arguments: Sequence[str], log: Path) -> None:
        self._log = log
        self._role = log.stem
        self._buffer = bytearray()
        with log.open("wb") as errors:
            # A session of its own: Ctrl-C reaches the demo alone, which then ends its children in the right order.
            self._process = subprocess.Popen(  # noqa: S603
                python.command(module, *arguments),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                bufsize=0,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def ask(self, question: str, *arguments: object, within: float = PATIENCE) -> dict[str, Any]:
        """Send a question and return the answer.

        Raises:
            CubrokerError: the child could not do it, in its own words.
            TimedOut: no answer within ``within`` seconds.
            Unavailable: the child has ended.
        """
        self.send(question, *arguments)
        answer: dict[str, Any] = json.loads(self.line(within))
        if "error" in answer:
            raise CubrokerError(f"{self._role}: {answer['error']}")
        return answer

    def send(self, question: str, *arguments: object) -> None:
        """Send a question whose answer nobody waits for."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps([question, *arguments]).encode() + b"\n")
        except BrokenPipeError:
            raise self._ended() from None

    def line(self, within: float = PATIENCE) -> str:
        """Return the next line of the child's output; raises as :meth:`ask` does."""
        assert self._process.stdout is not None
        deadline = monotonic() + within
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, deadline - monotonic()))
            if not ready:
                raise TimedOut(f"{self._role} (pid {self.pid}) has not answered for {within:.0f} s")
            piece = os.read(self._process.stdout.fileno(), 1 << 16)
            if not piece:
                raise self._ended()
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.decode()

    def kill(self) -> None:
        """Kill the process with SIGKILL and wait for its end."""
        self._process.kill()
        self._process.wait(PATIENCE)

    def leave(self) -> None:
        """Close the child's input and give it 10 s to end of itself."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._wait(10)

    def terminate(self) -> None:
        """Send SIGTERM and give the child 10 s."""
        self._process.terminate()
        self._wait(10)

    def close(self) -> None:
        """Kill the child and its own children, if it has not ended, and let go of its pipes."""
        if self._process.poll() is None:
            # It was not waited for, so the group is still its own.
            os.killpg(self.pid, signal.SIGKILL)
            self._wait(PATIENCE)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def _wait(self, seconds: float) -> None:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)

    def _ended(self) -> Unavailable:
        self._wait(PATIENCE)
        last = self._log.read_text(errors="replace").strip().splitlines()[-1:]
        said = "".join(last) or "it said nothing"
        return Unavailable(f"{self._role} has ended with status {self._process.returncode}: {said}")


class Stage:
    """Where the demo plays: :meth:`broker` and :meth:`worker` start its processes."""

    def __init__(self) -> None:
        self._interrupts = Interrupts()
        self._broker: Child | None = None
        self._workers: list[Child] = []
        self.directory = Path(tempfile.mkdtemp(prefix="cubroker-"))

    def broker(self, devices: str) -> None:
        """Start the broker in the directory and wait until it serves."""
        arguments = ["serve", "--directory", str(self.directory), "--devices", devices]
        with self._interrupts.held():
            self._broker = Child("cubroker.cli", arguments, self.directory / "broker.log")
        self._broker.line()

    def worker(self, name: str, device: str, paths: Sequence[Path]) -> Child:
        """Start a worker for pool ``name`` on the device with that UUID; it may still be starting up."""
        arguments = [str(self.directory), name, device, *map(str, paths)]
        with self._interrupts.held():
            log = self.directory / f"worker {len(self._workers) + 1}.log"
            self._workers.append(Child("cubroker.cli.demo_worker", arguments, log))
        return self._workers[-1]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._interrupts.hold()
        for worker in self._workers:
            if kind is None:
                worker.leave()
            worker.close()
        if self._broker is not None:
            self._broker.terminate()
            self._broker.close()
        shutil.rmtree(self.directory, ignore_errors=True)
        self._interrupts.restore()
