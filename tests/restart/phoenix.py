"""A broker that is started again whenever it ends, with what it stored; its process is forked, and so quick to come."""

from __future__ import annotations

import json
import select
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Self

from tests.brokers import PATIENCE, eventually
from tests.kills.nursery import Nursery, Worker
from tests.restart.steps import Counter
from tests.stores import ROOM, Warehouse

DEVICES = "host:2@32MiB"
BUDGET = "30MiB"
SERVES = "cubroker: serving on "


class Phoenix:
    """Keeps a broker running, until it is closed.

    Attributes:
        directory: where it serves.
        counter: says at which step it is killed.
        warehouse: what it stored.
        starts: how many there were.
    """

    def __init__(self, place: Path, nursery: Nursery, devices: str = DEVICES, budget: str = BUDGET) -> None:
        self.directory = place / "run"
        self.counter = Counter(place / "steps")
        self.warehouse = Warehouse(place / "notify")
        self.starts = 0
        self._nursery = nursery
        self._settings = devices, budget
        self._log = place / "log"
        self._closing = Event()
        self._failure: BaseException | None = None
        self._worker = self._start()
        self._thread = Thread(target=self._keep, name="phoenix")
        self._thread.start()

    @classmethod
    @contextmanager
    def rising(cls, nursery: Nursery) -> Iterator[Self]:
        """Have one on a fresh directory that serves, and end it afterwards."""
        with tempfile.TemporaryDirectory(prefix="cubroker-") as place:
            phoenix = cls(Path(place), nursery)
            try:
                phoenix.served(0)
                yield phoenix
            finally:
                phoenix.close()

    @property
    def pid(self) -> int:
        return self._worker.pid

    def log(self) -> str:
        """All that every broker wrote."""
        return self._log.read_text()

    def kill(self) -> None:
        """Kill it now."""
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
        self.warehouse.settle()
        return {name: len(descriptors) for name, descriptors in self.warehouse.stored.items()}

    def close(self) -> None:
        """End it for good."""
        self._closing.set()
        self._worker.close()
        self._thread.join(PATIENCE)
        self.warehouse.close()

    def _start(self) -> Worker:
        directory, notify = str(self.directory), str(self.warehouse.path)
        arguments = directory, *self._settings, notify, ROOM, str(self.counter.last.with_suffix(""))
        worker = self._nursery.worker("tests.restart.steps:serve", *arguments)
        stored = [(name, each) for name, descriptors in self.warehouse.stored.items() for each in descriptors]
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
                self.warehouse.settle()
                before, self._worker = self._worker, self._start()
                before.close()
        except BaseException as error:  # for whoever waits for it
            self._failure = error
            raise
