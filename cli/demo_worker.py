"""One worker of the demo: a process that attaches, compares what it got with the files, and lets go.

It is asked by lines of JSON on standard input, a list with the question and its arguments, and answers each
with one line of JSON on standard output. It ends when its input does.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter

from cubroker.client import Broker, Pool
from cubroker.client.checkpoint import Checkpoint
from cubroker.protocol.errors import CubrokerError


class Worker:
    """The answers; its name, the device's UUID and the paths are those of the command line."""

    def __init__(self, broker: Broker, name: str, device: str, paths: Sequence[str]) -> None:
        self._broker = broker
        self._name = name
        self._device = device
        self._paths = paths
        self._pool: Pool | None = None
        # The context is up before any clock runs: a worker that computes has one anyway.
        for known in broker.driver.devices:
            if known.uuid == device:
                broker.driver.context(known.index)

    def ready(self) -> dict[str, object]:
        """Say which process this is."""
        return {"pid": os.getpid()}

    def attach(self, wait: float) -> dict[str, object]:
        """Attach to the current version, waiting ``wait`` seconds for one, and say how long that took."""
        start = perf_counter()
        self._pool = self._broker.attach(self._name, device=self._device, wait=wait)
        return {"version": self._pool.version, "seconds": perf_counter() - start}

    def compare(self) -> dict[str, object]:
        """Compare every tensor of the files with the attached pool, byte for byte."""
        assert self._pool is not None
        with Checkpoint.open(self._paths) as checkpoint:
            wrong = [name for name, data in _contents(checkpoint) if self._pool[name].tobytes() != data]
            return {"tensors": len(checkpoint.entries), "wrong": wrong}

    def detach(self) -> dict[str, object]:
        """Close the pool: unmap it, then give the lease back."""
        if self._pool is not None:
            self._pool.close()
        return {}


def _contents(checkpoint: Checkpoint) -> Iterator[tuple[str, bytearray]]:
    """Yield every tensor's name and its bytes in the file."""
    for entry in checkpoint.entries:
        data = bytearray(entry.nbytes)
        checkpoint.files[entry.file].read_into([memoryview(data)] if data else [], entry.offset)
        yield entry.name, data


@contextmanager
def _told() -> Iterator[None]:
    """Turn a failure into an answer, so that the demo can say what it was."""
    try:
        yield
    except CubrokerError as error:
        _answer({"error": error.message})


def _answer(answer: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Answer until standard input ends."""
    directory, name, device, *paths = sys.argv[1:]
    with _told(), Broker(directory) as broker:
        worker = Worker(broker, name, device, paths)
        for line in sys.stdin:
            question, *arguments = json.loads(line)
            with _told():
                _answer(getattr(worker, question)(*arguments))


if __name__ == "__main__":
    main()
