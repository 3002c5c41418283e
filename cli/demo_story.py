"""The demo's story, act by act, and the table at its end."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from cubroker.cli import table, text
from cubroker.cli.demo_stage import Child, Stage
from cubroker.cli.load import summary
from cubroker.client import Broker
from cubroker.client.loader import Loaded, load
from cubroker.protocol.errors import CubrokerError, TimedOut
from cubroker.protocol.infos import DeviceInfo

NAME = "demo"
WORKERS = 3

COMPARING = 600.0
"""Seconds that a worker may take to compare a checkpoint, which can be large."""

FALLING = 60.0
"""Seconds within which a lease of a dead process falls, and memory that nobody holds returns."""


@dataclass
class Story:
    """What happened so far: the workers that live, and the figures for the end."""

    stage: Stage
    broker: Broker
    paths: Sequence[Path]
    workers: list[Child] = field(default_factory=list)
    attached: list[float] = field(default_factory=list)

    def play(self) -> None:
        """Play all acts; raises ``CubrokerError`` at the first that does not go as it should."""
        first = self._load()
        self._attach()
        self._kill()
        self._publish(first)
        self._retire(first)
        self._table(first)

    def _load(self) -> Loaded:
        text.say("2. Weights are loaded, once.")
        loaded = load(self.broker, NAME, self.paths, devices=[self._device.uuid])
        self._tell(summary(loaded))
        return loaded

    def _attach(self) -> None:
        text.say(f"3. {WORKERS} workers attach, and compare every tensor with the file, byte for byte.")
        self.workers = [self.stage.worker(NAME, self._device.uuid, self.paths) for _ in range(WORKERS)]
        for worker in self.workers:
            self._attach_one(worker)

    def _attach_one(self, worker: Child) -> None:
        worker.ask("ready")
        answer = worker.ask("attach", 0.0)
        self.attached.append(answer["seconds"])
        took = text.duration(answer["seconds"])
        self._tell(f"pid {worker.pid}: {NAME}@{answer['version']} attached in {took}; {_compare(worker)}")

    def _kill(self) -> None:
        victim = self.workers.pop()
        text.say(f"4. SIGKILL for pid {victim.pid}, while it reads.")
        before = self._leases()
        victim.send("compare")
        start = time.perf_counter()
        victim.kill()
        self._until(lambda: self._leases() < before, "the lease of a killed worker to fall")
        fell = text.duration(time.perf_counter() - start)
        self._tell(f"the kernel told the broker; its lease fell within {fell}: {before} leases, now {self._leases()}")

    def _publish(self, first: Loaded) -> None:
        text.say(f"5. A second version is published beside {len(self.workers)} live readers.")
        loaded = load(self.broker, NAME, self.paths, devices=[self._device.uuid])
        self._tell(f"{_version(loaded)} is current; it took {text.duration(loaded.seconds)}")
        for worker in self.workers:
            self._tell(f"pid {worker.pid}: still reads {_version(first)}; {_compare(worker)}")
        newcomer = self.stage.worker(NAME, self._device.uuid, self.paths)
        self._attach_one(newcomer)
        self.workers.append(newcomer)

    def _retire(self, first: Loaded) -> None:
        text.say(f"6. {_version(first)} is retired.")
        before, free = self._device.allocated, self._free()
        retirement = self.broker.retire(NAME, first.version)
        self._tell(f"its readers keep it: {text.count(retirement.leases, 'lease')} to go")
        *readers, _ = self.workers
        for worker in readers:
            worker.ask("detach")
        self._until(lambda: self._device.allocated < before, f"the memory of {_version(first)} to return")
        after, gain = self._device.allocated, self._free() - free
        self._tell(f"the last reader let go: {text.size(before)} allocated, now {text.size(after)}")
        if not self.broker.driver.host:
            self._tell(f"the driver itself has {text.size(gain)} more to give")

    def _table(self, first: Loaded) -> None:
        took, each = f"{first.seconds:.2f}", f"{1e3 * median(self.attached):.1f}"
        rows = [
            ("seconds to load", f"{took}, once", f"{took}, in each"),
            ("milliseconds to attach", f"{each}, in each", "-"),
            ("memory held", f"{text.size(first.nbytes)}, once", f"{text.size(WORKERS * first.nbytes)}, a copy in each"),
        ]
        text.say("")
        titles = (f"FOR {WORKERS} WORKERS", "WITH CUBROKER", "WITHOUT")
        table.show([table.Column(title) for title in titles], rows)

    @property
    def _device(self) -> DeviceInfo:
        return self.broker.devices()[0]

    def _free(self) -> int:
        ours = next(device for device in self.broker.driver.devices if device.uuid == self._device.uuid)
        return self.broker.driver.context(ours.index).memory()[0]

    def _leases(self) -> int:
        return sum(pool.leases for pool in self.broker.pools() if pool.name == NAME)

    def _until(self, happened: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + FALLING
        while not happened():
            if time.monotonic() > deadline:
                raise TimedOut(f"waited {FALLING:.0f} s for {what}")
            time.sleep(0.002)

    def _tell(self, line: str) -> None:
        text.say(f"   {line}")


def _version(loaded: Loaded) -> str:
    return f"{loaded.name}@{loaded.version}"


def _compare(worker: Child) -> str:
    answer = worker.ask("compare", within=COMPARING)
    if answer["wrong"]:
        raise CubrokerError(f"pid {worker.pid} read other bytes than the file's in {', '.join(answer['wrong'][:3])}")
    return f"{answer['tensors']} of {answer['tensors']} equal"
