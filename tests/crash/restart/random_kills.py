"""Brokers killed or stopped at any moment under load: ``python -m tests.crash.restart.random_kills``.

It is the real ``cubroker keep`` that keeps what is stored, notices a broker that is stopped (SIGSTOP), and starts the
next one, which may have stood by. Workers that do anything are killed as well, gateways, and processes that stand by;
all workers are halted now and then, and asked what
they hold. Before some of these halts a gateway is stopped, which its broker has to replace.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from bisect import bisect
from collections import Counter as Count
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from math import inf
from pathlib import Path
from typing import Self

from cubroker.client import Broker, Pool
from cubroker.protocol.errors import NotFound, Retired
from tests.brokers import PATIENCE, eventually
from tests.crash import end_in_order
from tests.crash.consistency import settles
from tests.crash.content import check, update
from tests.crash.restart.workloads import CHAIN, SHARDED
from tests.crash.worker_pool import Worker, WorkerPool
from tests.forkserver import end_with_parent
from tests.unit.server.processes import alive, descriptors, gateway_of, gateways, open_files

WORKERS = "tests.crash.restart.random_workload"
COMPANY = {"company": CHAIN, "spread": SHARDED}
PIECES = 5
"""Allocations of the company."""

CREW = 3
"""Workers at any time."""

LULL = 10
"""Kills between two halts."""

LONGEST = 0.5
"""Seconds that a broker serves, at most."""

STOP = 50
"""Kills between two gateways that are stopped."""

EARLY = 0.2
"""How many of the brokers are killed while they start."""

STANDING = 0.3
"""How many of the brokers are killed once the next one stands by."""

WATCHDOG = 2.0
"""Seconds after which the keeper replaces a stopped broker that serves."""

START_TIMEOUT = 20.0
"""Seconds after which the keeper replaces a stopped broker that does not serve yet."""

STOPPED = {"broker": 0.05}
"""How many of the processes of each kind are stopped in place of being killed; their parents have to notice."""


@dataclass
class RandomKills:
    """A kept broker, its workers, and when it was killed.

    Attributes:
        kills: moments at which a broker was killed.
        stops: moments at which a broker was stopped instead.
        stopped: how many processes of each kind are stopped instead of killed, from 0 to 1.
        early: how many brokers had not served yet.
        standing: how many of them were struck while the next one stood by.
        asked: requests of workers that lived to say so.
        long: of each of them, when long requests began and ended.
    """

    keeper: subprocess.Popen[bytes]
    log: Path
    worker_pool: WorkerPool
    observer: Broker
    company: list[Pool]
    chance: random.Random
    crew: list[Worker] = field(default_factory=list)
    kills: list[float] = field(default_factory=list)
    stops: list[float] = field(default_factory=list)
    stopped: dict[str, float] = field(default_factory=lambda: dict(STOPPED))
    early: int = 0
    standing: int = 0
    asked: int = 0
    long: list[list[tuple[float, float]]] = field(default_factory=list)
    workers: int = 0
    gateways: int = 0
    stopped_gateways: int = 0

    @classmethod
    @contextmanager
    def begin(cls, seed: int) -> Iterator[Self]:
        """Start everything, and end it afterwards."""
        with tempfile.TemporaryDirectory(prefix="cubroker-") as place, WorkerPool(WORKERS) as worker_pool:
            directory, log = Path(place) / "run", Path(place) / "log"
            serve = [sys.executable, "-m", "cubroker.server", str(directory), "--devices", "host:2@64MiB"]
            with log.open("wb") as file:
                limits = ["--watchdog", str(WATCHDOG), "--start-timeout", str(START_TIMEOUT)]
                keep = [sys.executable, "-m", "cubroker.cli", "keep", "--pause", "0", *limits, "--", *serve]
                keeper = subprocess.Popen(
                    keep,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                    preexec_fn=partial(end_with_parent, signal.SIGTERM),  # which ends its broker as well
                )
            try:
                eventually(lambda: "cubroker: serving on" in log.read_text(), "the broker to serve")
                with Broker(directory, timeout=PATIENCE) as observer:
                    for name, form in COMPANY.items():
                        form.publish(observer, name)
                        if form.chain:
                            update(observer, name, ["first"], name)
                    yield cls(
                        keeper,
                        log,
                        worker_pool,
                        observer,
                        [observer.attach(name) for name in COMPANY],
                        random.Random(seed),
                    )
            finally:
                keeper.terminate()
                keeper.wait(PATIENCE)

    @property
    def broker(self) -> int:
        """The broker's process; 0 while there is none."""
        return next(iter(self._children()), 0)

    def _children(self) -> list[int]:
        """The keeper's children, in the order of their start: the broker, and then the process that stands by."""
        children = Path(f"/proc/{self.keeper.pid}/task/{self.keeper.pid}/children")
        return [int(child) for child in children.read_text().split()]

    # -- blows -----------------------------------------------------------------------------------------

    def blow(self, kills: int, report: Callable[[str], None], end: float = inf) -> None:
        """Kill or stop so many brokers, and others in between; none once a moment has come."""
        while len(self.crew) < CREW:
            self._hire()
        for number in range(1, kills + 1):
            if time.monotonic() >= end:
                break
            if number > 1 and self.chance.random() < EARLY:
                self.early += 1
            else:
                self.observer.devices()
                if number % 5 == 0:
                    self._kill_worker()
                if number % 7 == 0:
                    self._strike_gateway()
                if self.chance.random() < STANDING:
                    eventually(self._stands_by, "the next broker to stand by")
                    self.standing += 1
                    if number % 3 == 0:
                        self._kill_standby()
            self._wait(self.chance.uniform(0, LONGEST))
            self._strike_broker(self._choose("broker"))
            if number % STOP == 0:
                self._stop_gateway()
            if number % LULL == 0:
                self.halt()
                report(f"{number} kills")
        self._stop_gateway()
        self.halt()

    def _wait(self, seconds: float) -> None:
        """Return after so long; fails if a worker has something to say, which it has only if it failed."""
        for worker in select.select(self.crew, [], [], seconds)[0]:
            raise AssertionError(f"worker {worker.pid} said {worker.hear()!r}")

    def _choose(self, kind: str) -> signal.Signals:
        """Return how a process of a kind is struck next."""
        return signal.SIGSTOP if self.chance.random() < self.stopped.get(kind, 0.0) else signal.SIGKILL

    def _strike_broker(self, number: signal.Signals) -> None:
        broker = 0

        def there() -> int:
            nonlocal broker
            broker = self.broker
            return broker

        eventually(there, "the next broker")
        strike(broker, self.keeper.pid, number)
        (self.kills if number is signal.SIGKILL else self.stops).append(time.monotonic())
        eventually(lambda: self.broker not in (0, broker), "the next broker")

    def _stands_by(self) -> bool:
        """Whether the last that the keeper has said of any start is that a process stands by."""
        said = re.findall("^cubroker keep: process [0-9]+ stands by|starts again", self.log.read_text(), re.MULTILINE)
        return bool(said) and said[-1] != "starts again"

    def _kill_standby(self) -> None:
        for waiting in self._children()[1:]:
            strike(waiting, self.keeper.pid, signal.SIGKILL)

    def _kill_worker(self) -> None:
        self.crew.pop(self.chance.randrange(len(self.crew))).close()
        self.workers += 1
        self._hire()

    def _strike_gateway(self) -> None:
        number = self._choose("gateway")
        if broker := self.broker:
            for gateway in gateways(broker):
                if strike(gateway, broker, number):
                    self.gateways += number is signal.SIGKILL
                    self.stopped_gateways += number is signal.SIGSTOP

    def _stop_gateway(self) -> None:
        """Have a gateway hang. The broker replaces it, and until then nobody is answered."""
        self.observer.devices()
        stopped = gateway_of(self.broker)
        os.kill(stopped, signal.SIGSTOP)
        self.observer.devices()
        assert not alive(stopped)
        self.stopped_gateways += 1

    def _hire(self) -> None:
        seed = self.chance.getrandbits(32)
        worker = self.worker_pool.worker(f"{WORKERS}:work", str(self.observer.directory), seed)
        worker.expect("there")
        self.crew.append(worker)

    # -- lulls -----------------------------------------------------------------------------------------

    def halt(self) -> None:
        """Have everybody say what it holds, and compare that with what the broker says."""
        for worker in self.crew:
            worker.tell("halt")
        held = {worker.pid: self._hear(worker) for worker in self.crew}
        held[os.getpid()] = Count((pool.name, pool.version) for pool in self.company)

        def known() -> dict[int, Count[tuple[str, int]]]:
            found: dict[int, Count[tuple[str, int]]] = {}
            for client in self.observer.clients():
                found.setdefault(client.pid, Count()).update((each.pool, each.version) for each in client.leases)
            return found

        try:
            eventually(lambda: known() == held, "the leases to be those of the workers")
        except AssertionError as error:
            error.add_note(f"the broker says {known()}, and the workers {held}")
            raise
        settles(self.observer, list(held))
        for pool in self.company:
            check(pool)
        self._check_log()
        for worker in self.crew:
            worker.tell("go on")

    def _hear(self, worker: Worker) -> Count[tuple[str, int]]:
        """Take note of what a worker did since it was asked last, and return what it holds."""
        held, asked, answered, long = json.loads(worker.hear())
        assert asked == answered, f"{asked} requests, {answered} answers"
        self.asked += asked
        self.long.append([(began, ended) for began, ended in long])
        return Count((name, version) for name, version in held)

    def calm(self) -> None:
        """Have everybody end, and check that nothing is left."""
        for worker in self.crew:
            worker.tell("end")
        for worker in self.crew:
            assert not self._hear(worker)
        while self.crew:
            self.crew.pop().close()
        for pool in self.observer.pools():
            if pool.name not in COMPANY and pool.state == "current":
                with suppress(NotFound, Retired):
                    self.observer.retire(pool.name, pool.version)
        settles(self.observer, [os.getpid()])
        eventually(lambda: {pool.name for pool in self.observer.pools()} == set(COMPANY), "the end of the other pools")
        settles(self.observer, [os.getpid()])
        needed = 3 + 2 + PIECES  # the journal, two sockets, the observer's session, the company
        eventually(lambda: self.stored() == needed, f"the store to have {needed} descriptors, not {self.stored()}")
        self._strike_broker(signal.SIGKILL)
        self.observer.devices()
        for pool in self.company:
            check(pool)
        eventually(lambda: memfds(self.broker) == 1 + PIECES, "the memory of the broker to be that of the company")
        self._check_log()

    def stored(self) -> int:
        """How many descriptors the keeper keeps: all that it has but standard ones, and those for its own work."""
        to_standby = max(len(self._children()) - 1, 0)
        return descriptors(self.keeper.pid) - self._own - to_standby

    _own: int = 0

    def begin_counting(self) -> None:
        """Note what the keeper has open beside what it keeps, once it has all that was sent, and starts nothing."""
        eventually(self._stands_by, "the next broker to stand by")
        eventually(lambda: memfds(self.keeper.pid) == 1 + PIECES, "the keeper to have the memory of the company")
        self._own = self.stored() - (3 + 2 + PIECES)

    def _check_log(self) -> None:
        log = self.log.read_text()
        assert "Traceback" not in log, log[log.index("Traceback") - 2000 :][:6000]
        assert "cannot be read" not in log


def strike(pid: int, parent: int, number: signal.Signals) -> bool:
    """Send a signal to a process, if it is there and the child that it is thought to be; return whether it is."""
    assert pid > 0  # 0 is everybody in this group
    with suppress(ProcessLookupError, FileNotFoundError):
        pidfd = os.pidfd_open(pid)
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            if int(fields[1]) == parent:
                signal.pidfd_send_signal(pidfd, number)
                return True
        finally:
            os.close(pidfd)
    return False


def memfds(pid: int) -> int:
    """How many memfds a process has open."""
    found = 0
    for entry in open_files(pid):
        with suppress(FileNotFoundError):
            found += entry.readlink().name.startswith("memfd:")
    return found


def stalls(campaign: RandomKills) -> dict[str, list[float]]:
    """Return how long requests took that were under way when brokers were killed or stopped, by what happened."""
    found: dict[str, list[float]] = {"a kill": [], "a stop": [], "several of them": []}
    for began, ended in itertools.chain(*campaign.long):
        kills, stops = (bisect(moments, ended) - bisect(moments, began) for moments in (campaign.kills, campaign.stops))
        if kills + stops:
            what = "several of them" if kills + stops > 1 else "a kill" if kills else "a stop"
            found[what].append(ended - began)
    return {what: sorted(seconds) for what, seconds in found.items()}


def main() -> int:
    """Return 0; what is found ends it with a traceback."""
    parser = argparse.ArgumentParser(prog="python -m tests.crash.restart.random_kills", description=__doc__)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=inf, help="begin no kill after so long")
    options = parser.parse_args()
    end_in_order()
    began = time.monotonic()
    with RandomKills.begin(options.seed) as campaign:
        campaign.begin_counting()
        try:
            campaign.blow(
                options.kills,
                lambda text: print(f"{text}, {time.monotonic() - began:.0f} s", file=sys.stderr),
                began + options.seconds,
            )
            campaign.calm()
        except BaseException:
            print(f"seed {options.seed}; the log ends with\n{campaign.log.read_text()[-6000:]}", file=sys.stderr)
            raise
        report(campaign, time.monotonic() - began)
    return 0


def report(campaign: RandomKills, seconds: float) -> None:
    """Say what was done, and how long others waited."""
    print(
        f"{len(campaign.kills)} brokers killed and {len(campaign.stops)} stopped"
        f" ({campaign.early} of them while they started, {campaign.standing} while the next one stood by),"
        f" {campaign.workers} workers and {campaign.gateways} gateways killed,"
        f" {campaign.stopped_gateways} gateways stopped"
        f" in {seconds:.0f} s: nothing found; {campaign.asked} requests of {CREW} workers answered once each"
    )
    for what, found in stalls(campaign).items():
        if found:
            p50, p95 = (found[int(len(found) * share)] for share in (0.5, 0.95))
            print(f"{len(found)} requests across {what}: p50 {p50:.3f} s, p95 {p95:.3f} s, most {found[-1]:.3f} s")


if __name__ == "__main__":
    sys.exit(main())
