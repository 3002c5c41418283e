"""A broker that is started again whenever it ends, with what it stored; its process is forked, and so quick to come."""

from __future__ import annotations

import json
import select
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Self

from tests.brokers import PATIENCE, eventually
from tests.crash.restart.steps import Counter
from tests.crash.worker_pool import Worker, WorkerPool
from tests.stores import ROOM, FdStore

DEVICES = "host:2@64MiB"
BUDGET = "62MiB"
SERVES = "cubroker: serving on "


class RestartingBroker:
    """Keeps a broker running, until it is closed.

    Attributes:
        directory: where it serves.
        counter: says at which step it is killed.
        fdstore: what it stored.
        starts: how many there were.
    """

    def __init__(self, place: Path, worker_pool: WorkerPool, devices: str = DEVICES, budget: str = BUDGET) -> None:
        self.directory = place / "run"
        self.counter = Counter(place / "steps")
        self.fdstore = FdStore(place / "notify")
        self.starts = 0
        self._nursery = worker_pool
        self._settings = devices, budget
        self._log = place / "log"
        self._closing = Event()
        self._failure: BaseException | None = None
        self._lock = Lock()  # of the process that is current, which the thread closes once it has ended
        self._worker = self._start()
        self._thread = Thread(target=self._keep, name="supervised")
        self._thread.start()

    @classmethod
    @contextmanager
    def rising(cls, worker_pool: WorkerPool) -> Iterator[Self]:
        """Have one on a fresh directory that serves, and end it afterwards."""
        with tempfile.TemporaryDirectory(prefix="cubroker-") as place:
            supervised = cls(Path(place), worker_pool)
            try:
                supervised.served(0)
                yield supervised
            finally:
                supervised.close()

    @property
    def pid(self) -> int:
        return self._worker.pid

    def log(self) -> str:
        """All that every broker wrote."""
        return self._log.read_text()

    def kill(self) -> None:
        """Kill it now."""
        with self._lock:
            self._worker.kill()

    def served(self, before: int) -> None:
        """Wait until more than so many brokers have served."""
        eventually(lambda: self._failure or self.log().count(SERVES) > before, "the next broker to serve")
        if self._failure:
            raise self._failure

    @property
    def serving(self) -> int:
        """How many brokers have served."""
        return self.log().count(SERVES)

    def stored(self) -> dict[str, int]:
        """How many descriptors there are of each name, once the store has acted upon all that was sent."""
        self.fdstore.settle()
        return {name: len(descriptors) for name, descriptors in self.fdstore.stored.items()}

    def close(self) -> None:
        """End it for good."""
        self._closing.set()
        with self._lock:
            self._worker.close()
        self._thread.join(PATIENCE)
        self.fdstore.close()

    def _start(self) -> Worker:
        directory, notify = str(self.directory), str(self.fdstore.path)
        arguments = directory, *self._settings, notify, ROOM, str(self.counter.last.with_suffix(""))
        worker = self._nursery.worker("tests.crash.restart.steps:serve", *arguments)
        stored = [(name, each) for name, descriptors in self.fdstore.stored.items() for each in descriptors]
        with self._log.open("ab") as log:
            worker.tell(json.dumps([name for name, _ in stored]), [log.fileno(), *(each for _, each in stored)])
        self.starts += 1
        return worker

    def _keep(self) -> None:
        try:
            while True:
                select.select([self._worker.pidfd], [], [])
                if self._closing.is_set():
                    return
                self.fdstore.settle()
                before, self._worker = self._worker, self._start()
                with self._lock:
                    before.close()
        except BaseException as error:  # for whoever waits for it
            self._failure = error
            raise
