"""One broker, workers that are killed, and what must be true after every one of them."""

from __future__ import annotations

import operator
import os
import random
import select
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Self

from cubroker.client import Broker, Draft, Pool
from cubroker.client.synchronization import NameLock
from cubroker.protocol import Layout
from cubroker.protocol.errors import NotFound
from tests.brokers import PATIENCE, BrokerProcess, eventually, serving
from tests.crash.consistency import settles
from tests.crash.content import BOTH, SHARES, TEAM, Form, check, check_anew, fill, forge, update
from tests.crash.kills.kill_points import Point
from tests.crash.kills.workloads import ANSWER, CHAINED, IN_LINE, LOCKS, SCRATCH, UPDATES
from tests.crash.worker_pool import Worker, WorkerPool
from tests.unit.server.processes import descriptors, gateway_of

DEVICES = "host:2@64MiB"
BUDGET = "62MiB"
BALLAST = Layout.pack([("ballast", "U8", (56 << 20,))])
"""Leaves 4 MiB of device 1, room for ``LAYOUT`` once: 2 MiB are the company's."""

SCENES = "tests.crash.kills.workloads"
COMPANY = {"company": Form("ipc", chain=True), "spread-company": Form("vmm", BOTH, sharded=True)}
"""Pools that are there throughout; of a chain, an update of a version that is gone."""

BUSY = ("busy-0", "busy-1", "busy-2")


@dataclass
class Campaign:
    """The broker, the observer (this process, a client too), and two readers who live through everything.

    They hold pools of either kind, and after every kill nothing is left of the victim anywhere: no session or lease,
    no bytes on a device that no version has, no descriptor more in the broker, its gateway or the readers.

    Attributes:
        delays: seconds from each kill to the end of the victim's leases, where it had any.
        kills: how many there were.
    """

    process: BrokerProcess
    worker_pool: WorkerPool
    observer: Broker
    readers: tuple[Worker, ...]
    kills: int = 0
    delays: list[float] = field(default_factory=list)
    _books: list[int] = field(default_factory=list)
    _files: list[int] = field(default_factory=list)

    @classmethod
    @contextmanager
    def begin(cls) -> Iterator[Self]:
        """Start everything, and end it afterwards."""
        with (
            serving(DEVICES, BUDGET) as process,
            WorkerPool(SCENES) as worker_pool,
            Broker(process.directory) as observer,
        ):
            for name, form in COMPANY.items():
                form.publish(observer, name)
                if form.chain:
                    update(observer, name, ["first"], name)
            readers = [worker_pool.worker(f"{SCENES}:keep_reading", str(process.directory), name) for name in COMPANY]
            try:
                for reader in readers:
                    reader.expect("right")
                campaign = cls(process, worker_pool, observer, tuple(readers))
                campaign.begin_counting()
                yield campaign
            finally:
                for reader in readers:
                    reader.close()

    def begin_counting(self) -> None:
        """Note what there is of bytes and descriptors, once all is open that is opened once and kept."""
        for form in (*(Form(share, BOTH) for share in SHARES), TEAM):
            form.create(self.observer, "first").close()
        settles(self.observer, self._pids())
        self._books = self._allocated()
        self._files = self._descriptors()

    # -- at a point ----------------------------------------------------------------------------------

    def kill_at(self, point: Point) -> None:
        """Kill a worker at a point, and check that all is well for everybody else."""
        name = f"pool-{self.kills}"
        if point.obstacle in ("", "turn", "room", "retirement", "lock"):
            point.form.publish(self.observer, name)
        with ExitStack() as stack:
            chain = forge(self.observer, name) if point.scene == "leave_chain" else []
            if point.obstacle == "room":
                stack.enter_context(self.observer.create("ballast", BALLAST, devices=(1,)))
            if point.scene in SCRATCH:
                pool = stack.enter_context(self.observer.attach(name))
                stack.enter_context(pool.event(ANSWER)).record()
            self._play(point, name, self._obstruct(point, name))
        self._check_current(name, whole=point.scene in CHAINED)
        self._leave(chain)
        if point.scene in LOCKS:
            self.observer.lock(name, timeout=0).close()
        self._settle()

    def _leave(self, chain: list[Pool]) -> None:
        """Close versions of a chain, the oldest first or in any order; after each, the others are whole."""
        if self.kills % 2:
            random.Random(self.kills).shuffle(chain)
        while chain:
            chain.pop(0).close()
            for pool in chain:
                check_anew(self.observer, pool)
            settles(self.observer, self._pids())

    def _play(self, point: Point, name: str, obstacle: Draft | NameLock | None) -> None:
        with self._scene(point, name) as victim:
            if obstacle:
                victim.expect(IN_LINE)
            if obstacle and point.granted:
                self._let_go(point, obstacle, name)
                obstacle = None
            if point.label != IN_LINE:
                victim.expect(point.label)
            with self._successor(point, name) as successor:
                self._kill(victim)
                if obstacle:
                    self._let_go(point, obstacle, name)
                assert successor.hear().startswith("sealed")
                successor.wait()

    def _scene(self, point: Point, name: str) -> Worker:
        directory = str(self.process.directory)
        return self.worker_pool.worker(f"{SCENES}:play", directory, point.scene, name, point.share, point.label)

    def _successor(self, point: Point, name: str) -> Worker:
        """Start the next writer, who stands behind the victim in whatever line that stands in.

        If it is no update, it is of the other share kind.
        """
        share = "vmm" if point.share == "ipc" else "ipc"
        scene, args = "succeed", (name, share, 0, point.form.sharded)
        if point.obstacle == "room":  # elsewhere it would wait behind the victim's name, and not for room
            args = (f"{name}-next", share, 1, False)
        elif point.scene in LOCKS:
            scene = "succeed_with_lock"
        elif point.scene in UPDATES and self._has_current(name):
            scene = "succeed_with_update"
        successor = self.worker_pool.worker(f"{SCENES}:{scene}", str(self.process.directory), *args)
        try:
            successor.expect(IN_LINE)
        except BaseException:
            successor.close()
            raise
        return successor

    def _has_current(self, name: str) -> bool:
        return any((pool.name, pool.state) == (name, "current") for pool in self.observer.pools())

    def _obstruct(self, point: Point, name: str) -> Draft | NameLock | None:
        """Put something into the victim's way; with ballast, a draft on device 1 takes the last room there."""
        if point.obstacle == "lock":
            return self.observer.lock(name, timeout=0)
        if point.obstacle == "room":
            return Form(point.share, (1,)).create(self.observer, "filler")
        return point.form.create(self.observer, name) if point.obstacle else None

    def _let_go(self, point: Point, obstacle: Draft | NameLock, name: str) -> None:
        if isinstance(obstacle, Draft) and point.obstacle == "publication":
            fill(obstacle)
            obstacle.seal()
            return
        if point.obstacle == "retirement":
            self.observer.retire(name)
        obstacle.close()

    def _check_current(self, name: str, *, whole: bool = False) -> None:
        """Check a pool from one device or the other: what it has itself, or what it reaches on its peer; or all."""
        device = None if whole else self.kills % 2
        with self.observer.attach(name, device=device, peer=device is not None) as pool:
            check(pool)

    # -- at any moment -------------------------------------------------------------------------------

    def kill_at_any_moment(self, count: int, chance: random.Random, company: int = 5) -> None:
        """Kill ``count`` workers of ``company`` that do anything, each at a random moment; then the rest."""
        workers = [self._busy(chance) for _ in range(min(company, count))]
        try:
            for number in range(count):
                self._let_work(workers, chance.uniform(0.0, 0.04))
                victim = workers.pop(chance.randrange(len(workers)))
                with victim:
                    self._kill(victim)
                if number + len(workers) + 1 < count:
                    workers.append(self._busy(chance))
        finally:
            for worker in workers:
                worker.close()
        for name in BUSY:
            try:
                self._check_current(name)
            except NotFound:
                continue  # retired, or never published
        self._settle()

    def _busy(self, chance: random.Random) -> Worker:
        seed = chance.getrandbits(32)
        return self.worker_pool.worker(f"{SCENES}:do_anything", str(self.process.directory), " ".join(BUSY), seed)

    def _let_work(self, workers: list[Worker], seconds: float) -> None:
        """Return after ``seconds``; fails if a worker has something to say, which they have only when they fail."""
        for worker in select.select(workers, [], [], seconds)[0]:
            raise AssertionError(f"worker {worker.pid} said {worker.hear()!r}")

    # -- the end of one ------------------------------------------------------------------------------

    def _kill(self, victim: Worker) -> None:
        """Kill a worker, and note how long its leases outlived it."""
        held = self._leases(victim.pid)
        moment = victim.kill()
        self.kills += 1
        while self._leases(victim.pid) is not None:  # each time a request and its answer
            assert time.monotonic() < moment + PATIENCE, f"the session of dead process {victim.pid} is still there"
        if held:
            self.delays.append(time.monotonic() - moment)
        for reader in self.readers:
            reader.tell("check")
        for reader in self.readers:
            reader.expect("right")

    def _leases(self, pid: int) -> int | None:
        """Return how many leases a process has; None if it has no session."""
        leases = [len(client.leases) for client in self.observer.clients() if client.pid == pid]
        return sum(leases) if leases else None

    def _settle(self) -> None:
        """Retire what was published, and wait until nothing is left of it anywhere."""
        settles(self.observer, self._pids())
        for pool in self.observer.pools():
            if pool.name not in COMPANY and pool.state == "current":
                self.observer.retire(pool.name, pool.version)
        settles(self.observer, self._pids())
        left = [pool.name for pool in self.observer.pools() if pool.name not in COMPANY]
        assert not left, f"{left} are left over"
        allocated = self._allocated()
        assert allocated == self._books, f"{allocated} bytes are allocated; the company has {self._books}"
        self._settle_descriptors()

    def _settle_descriptors(self) -> None:
        try:
            eventually(
                lambda: all(map(operator.le, self._descriptors(), self._files)),
                "the descriptors of the dead to be closed",
            )
        except AssertionError as error:
            error.add_note(f"broker, gateway and readers have {self._descriptors()} descriptors, and had {self._files}")
            raise

    def _pids(self) -> list[int]:
        """Whose sessions there are when nobody else's are: the observer's and the readers'."""
        return [os.getpid(), *(reader.pid for reader in self.readers)]

    def _allocated(self) -> list[int]:
        return [device.allocated for device in self.observer.devices()]

    def _descriptors(self) -> list[int]:
        broker = self.process.pid
        return [descriptors(pid) for pid in (broker, gateway_of(broker), *(reader.pid for reader in self.readers))]
