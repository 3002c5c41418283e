"""A broker that is killed at one step after the other, under workers that must not notice, and what must be true then.

After every kill the next broker serves; leases are as the workers say, none lost and none doubled; every byte is as it
was written; every request was answered once. At the end of every scene nothing is left: no bytes on a device that no
version has, no descriptor in the store and no key in the journal that nobody needs, no memory open in the broker.
"""

from __future__ import annotations

import json
import os
from collections import Counter as Count
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Self

from cubroker.client import Broker, Pool
from cubroker.protocol.errors import NotFound, Retired
from tests.brokers import eventually
from tests.crash.consistency import settles
from tests.crash.content import Form, check, content, update
from tests.crash.restart.restarting_broker import RestartingBroker
from tests.crash.restart.workloads import CHAIN, CHAIN_SHARDS, DURABLE, LOCK, SCRATCH, SHARDED, TEAM, TEAM_READ
from tests.crash.worker_pool import Worker, WorkerPool
from tests.unit.server.processes import open_files

PARTS = "tests.crash.restart.workloads"

COMPANY = {"company": CHAIN, "spread": SHARDED, "team": TEAM}
"""Pools that the observer holds throughout; of a chain, an update of a version that is gone."""

DYING = ("die", "lock_and_die")
"""Parts that end by themselves."""

OURS = {"ledger": 1, "own-door": 1, "own-requests": 1}


@dataclass(frozen=True)
class Scene:
    """What several workers do at the same time with one name, under which a version of ``form`` is there before."""

    parts: tuple[str, ...]
    form: Form | None = None

    def __str__(self) -> str:
        return " + ".join(self.parts)


SCENES = (
    Scene(("read", "read_peer"), DURABLE),
    Scene(("write_one", "await_publication")),
    Scene(("write_spread",)),
    Scene(("write_shards",), SHARDED),
    Scene(("attach_or_create", "attach_or_create")),
    Scene(("discard", "read"), DURABLE),
    Scene(("write_for_readers", "read_draft", "read_draft")),
    Scene(("abandon", "read_draft")),
    Scene(("supersede", "read"), DURABLE),
    Scene(("produce", "consume"), SCRATCH),
    Scene(("watch", "write_twice")),
    Scene(("sleep", "sleep"), DURABLE),
    Scene(("switch", "read"), DURABLE),
    Scene(("come_and_go", "die", "hang_up"), DURABLE),
    Scene(("load_file", "load_file")),
    Scene(("give_up", "read"), DURABLE),
    Scene(("ipc", "passing")),
    Scene(("team",)),
    Scene(("switch_team",), TEAM_READ),
    Scene(("passing_chain",)),
    Scene(("update_twice", "read"), CHAIN),
    Scene(("update_once", "update_once"), CHAIN),
    Scene(("update_once",), CHAIN_SHARDS),
    Scene(("outlive_base",), CHAIN),
    Scene(("chain", "chain_reader")),
    Scene(("follow", "follow_switch", "update_to_three"), CHAIN),
    Scene(("seal_where_it_lies", "await_in_place")),
    Scene(("seal_shards_where_they_lie",)),
    Scene(("lock_turn", "lock_turn", "lock_keep")),
    Scene(("lock_and_die", "lock_turn")),
)

STANDING = Scene(
    (
        *("chain", "seal_where_it_lies", "lock_keep", "read", "sleep", "ipc", "passing", "passing_chain", "read_peer"),
        "chain_reader",
    ),
    DURABLE,
)
"""What there is when a broker is killed while it starts; the last one dies meanwhile."""


@dataclass
class Campaign:
    """The broker, the observer (this process, a client too), and what it holds.

    Attributes:
        kills: how many there were, by label.
    """

    supervised: RestartingBroker
    worker_pool: WorkerPool
    observer: Broker
    company: list[Pool]
    kills: Count[str] = field(default_factory=Count)
    plays: int = 0
    _files: int = 0

    @classmethod
    @contextmanager
    def begin(cls) -> Iterator[Self]:
        """Start everything, and end it afterwards."""
        with (
            WorkerPool("tests.crash.restart.steps") as brokers,
            WorkerPool(PARTS, "cubroker.client.loading.loader") as worker_pool,
            RestartingBroker.rising(brokers) as supervised,
            Broker(supervised.directory, timeout=600) as observer,
            ExitStack() as stack,
        ):
            for name, form in COMPANY.items():
                form.publish(observer, name)
                if form.chain:
                    update(observer, name, ["first"], name)
            company = [
                stack.enter_context(observer.attach(name, device=0 if name != "spread" else None)) for name in COMPANY
            ]
            campaign = cls(supervised, worker_pool, observer, company)
            campaign.restart()
            campaign.settle_anew()
            yield campaign

    def restart(self) -> None:
        """Kill the broker now, and wait for the next one."""
        served = self.supervised.serving
        self.supervised.kill()
        self.supervised.served(served)

    def settle_anew(self) -> None:
        """Note how much memory a broker has open that has just gone on."""
        self.observer.devices()
        eventually(
            lambda: "" not in [pool.how for pool in self.observer.pools() if pool.share == "multicast"], "the team"
        )
        self._files = self._memfds()
        self.settle()

    # -- one play --------------------------------------------------------------------------------------

    def count(self, scene: Scene) -> int:
        """Return how many steps the broker takes in a scene; other times it may be some more, or fewer."""
        return self._play(scene, 0)

    def kill_at(self, scene: Scene, step: int) -> bool:
        """Play a scene, and have the broker killed at a step; False if it took fewer than that."""
        starts = self.supervised.starts
        self._play(scene, step)
        if self.supervised.starts == starts:
            return False
        self.kills[self.supervised.counter.last.read_text()] += 1
        return True

    def _play(self, scene: Scene, step: int) -> int:
        """Play a scene; return how many steps there were until it was over, or until the kill."""
        name, counter = self._set(scene), self.supervised.counter
        counter.set(step)
        with self._workers(scene.parts, name) as workers:
            held = self._held(scene.parts, workers)
            steps, left = counter.reached, counter.pause()
            self._check(workers, held)
            counter.set(left)
            self._end(workers, held)
            steps += counter.reached
            counter.pause()
        self.settle()
        return steps

    def kill_restoring(self, step: int) -> bool:
        """Kill a broker, and a worker, and the next broker at a step of its start; False if it serves before that."""
        name, starts = self._set(STANDING), self.supervised.starts
        with self._workers(STANDING.parts, name) as workers:
            held = self._held(STANDING.parts, workers)
            self._check(workers, held)
            self.supervised.counter.set(step)
            served = self.supervised.serving
            self.supervised.kill()
            victim = workers.pop()
            victim.kill()
            del held[victim.pid]
            self.supervised.served(served)
            self.observer.devices()
            self.supervised.counter.pause()
            self._check(workers, held)
            self._end(workers, held)
        self.settle()
        if self.supervised.starts == starts + 1:
            return False
        self.kills[f"{self.supervised.counter.last.read_text()} while it starts"] += 1
        return True

    def _set(self, scene: Scene) -> str:
        """Publish what a scene begins with; return under which name."""
        self.plays += 1
        name = f"pool-{self.plays}"
        if scene.form:
            scene.form.publish(self.observer, name)
        return name

    def _held(self, parts: Sequence[str], workers: Sequence[Worker]) -> dict[int, str]:
        """Return what each worker says that it has, by process; nothing of those that die."""
        return {worker.pid: worker.hear() for part, worker in zip(parts, workers, strict=True) if part not in DYING}

    def _check(self, workers: Sequence[Worker], held: dict[int, str]) -> None:
        """Check that everybody has what it had before, in its own eyes and the broker's."""
        self._check_leases(held)
        for worker in workers:
            if worker.pid in held:
                worker.tell("check")
                assert worker.hear() == held[worker.pid]

    def _end(self, workers: Sequence[Worker], held: dict[int, str]) -> None:
        """Have everybody give back what it has, and retire what was published."""
        for worker in workers:
            if worker.pid in held:
                worker.tell("end")
        for worker in workers:
            worker.wait()
        self._retire()

    @contextmanager
    def _workers(self, parts: Sequence[str], name: str) -> Iterator[list[Worker]]:
        with ExitStack() as stack:
            directory = str(self.supervised.directory)
            yield [
                stack.enter_context(self.worker_pool.worker(f"{PARTS}:play", directory, part, name)) for part in parts
            ]

    # -- what must be true -----------------------------------------------------------------------------

    def _check_leases(self, held: dict[int, str]) -> None:
        """Compare what workers say that they hold with what the broker says."""
        expected = {pid: Count(map(tuple, json.loads(said))) for pid, said in held.items()}

        def known() -> dict[int, Count[tuple[str, int]]]:
            found: dict[int, Count[tuple[str, int]]] = {}
            for client in self.observer.clients():
                if client.pid != os.getpid():
                    has = found.setdefault(client.pid, Count())
                    has.update((each.pool, each.version) for each in client.leases)
                    has.update((name, LOCK) for name in client.locks)
            return found

        try:
            eventually(lambda: known() == expected, "leases and locks to be those of the workers")
        except AssertionError as error:
            error.add_note(f"the broker says {known()}, and the workers {expected}")
            raise

    def _retire(self) -> None:
        """Retire what was published."""
        for pool in self.observer.pools():
            if pool.name not in COMPANY and pool.state == "current":
                try:
                    self.observer.retire(pool.name, pool.version)
                except (NotFound, Retired):  # it was lost, or retired by the request that was on its way
                    continue

    def settle(self) -> None:
        """Wait until nothing is left but the company, and check that, byte by byte."""
        settles(self.observer, [os.getpid()])
        for pool in self.company:
            assert not pool.lost
            if pool.share == "multicast":
                pool.broadcast(content(pool.name, pool.version, "first"), "first")
            check(pool)
            with self.observer.attach(pool.name, device=0 if pool.name != "spread" else None) as again:
                check(again)
        eventually(
            lambda: {pool.name for pool in self.observer.pools()} == set(COMPANY), f"the end of {self.observer.pools()}"
        )
        settles(self.observer, [os.getpid()])
        self._settle_store()
        self._settle_memory()
        log = self.supervised.log()
        assert "Traceback" not in log, log[log.index("Traceback") - 2000 :]

    def _settle_store(self) -> None:
        expected = OURS | {f"s{self.observer.session}": 2}
        stored: dict[str, int] = {}

        def only() -> bool:
            stored.clear()
            stored.update(self.supervised.stored())
            memory = [name for name in stored if name.startswith("m")]
            rest = {name: count for name, count in stored.items() if name not in memory}
            return rest == expected and len(memory) == self._pieces() and all(stored[name] == 1 for name in memory)

        try:
            eventually(only, "the store to have what is needed")
        except AssertionError as error:
            error.add_note(f"it has {stored}, and {expected} and {self._pieces()} allocations are needed")
            raise
        journal = Count(key.split(b"/")[0] for key in self.supervised.fdstore.journal())
        assert journal[b"k"] == journal[b"r"] == 1, journal
        assert not journal[b"s"], journal
        assert not journal[b"d"], journal

    def _settle_memory(self) -> None:
        """The broker has as much memory open as its company has, and the journal."""
        try:
            eventually(lambda: self._memfds() <= self._files, "the memory of the dead to be closed")
        except AssertionError as error:
            error.add_note(f"the broker has {self._memfds()} open, and had {self._files}")
            raise

    def _memfds(self) -> int:
        found = 0
        for entry in open_files(self.supervised.pid):
            try:
                found += entry.readlink().name.startswith("memfd:")
            except FileNotFoundError:
                continue
        return found

    def _pieces(self) -> int:
        """Allocations of the company."""
        return 3 + 2 + 4
