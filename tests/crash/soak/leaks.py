"""Do the same thing very often, and see what is left of it: ``python -m tests.crash.soak leaks --scale 1``.

After each deed the broker, its gateway and the client have no more descriptors, and the client no more threads, than
at the beginning; the broker has the same on its books; and in the second half of the times no process has grown by
more than TOLERANCE.
"""

from __future__ import annotations

import argparse
import operator
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from threading import active_count

from msgspec.structs import replace

from cubroker.client import Broker
from cubroker.client.transport.requests import Future, Pending
from cubroker.protocol import CubrokerError, Layout
from cubroker.protocol.errors import OverBudget, TimedOut
from cubroker.protocol.messages import Attach, Reply
from tests.brokers import BrokerProcess, eventually, serving
from tests.crash.content import SHARES
from tests.crash.worker_pool import Channel, WorkerPool
from tests.unit.server.processes import descriptors, gateway_of, gateways, resident

HERE = "tests.crash.soak.leaks"
POOL, MAPPED, SPREAD, SCRATCH, DRAFT = "pool", "mapped", "spread", "scratch", "draft"
"""Pools that are there throughout: one of each share kind, one that is sharded, one that readers may write; and those
that come and go."""

LAYOUT = Layout.pack([("a", "U8", (1 << 20,)), ("b", "U8", (1 << 20,))], slab=1 << 20)
PLAN = {"a": 0, "b": 1}
TOO_LARGE = Layout.pack([("a", "U8", (1 << 30,))])

TOLERANCE = 2 << 20
"""Bytes that a process may grow by in the second half of a subject: the noise of its allocators."""

PROCESSES = ("broker", "gateway", "client")


class Scene:
    """A broker, a client of it in this process with pools to attach to, and a worker_pool for other clients."""

    def __init__(self, process: BrokerProcess, client: Broker, worker_pool: WorkerPool) -> None:
        self.process = process
        self.client = client
        self.worker_pool = worker_pool
        client.create(POOL, LAYOUT, share="ipc").seal()
        client.create(MAPPED, LAYOUT, share="vmm").seal()
        client.create(SPREAD, LAYOUT, share="vmm", devices=(0, 1), plan=PLAN).seal()
        client.create(SCRATCH, LAYOUT, writable=True).seal()
        self.scratch = client.attach(SCRATCH)
        self.sleeper = client.attach(MAPPED)  # last, as after every sleep
        self.scratch.event("first").close()  # what the first one opens stays open
        self._books = self._reported()
        self._at_first = self._counts()

    def pids(self) -> tuple[int, int, int]:
        return self.process.pid, gateway_of(self.process.pid), os.getpid()

    def settles(self) -> None:
        """Wait until nothing is held that was not held at the beginning; what is under way may take its time."""
        eventually(lambda: self._reported() == self._books, f"books like {self._books}")
        eventually(lambda: all(map(operator.le, self._counts(), self._at_first)), f"no more than {self._at_first}")

    def _reported(self) -> object:
        """What the broker tells, but for since when: a pool that woke has another lease."""
        clients = []
        for each in self.client.clients():
            leases = tuple(replace(lease, held_since=None) for lease in each.leases)
            clients.append(replace(each, leases=leases, mapped_beyond_leases=each.mapped_beyond_leases or 0))
        return self.client.pools(), self.client.devices(), clients

    def _counts(self) -> tuple[int, ...]:
        """Descriptors of every process, and threads of this one."""
        return (*(descriptors(pid) for pid in self.pids()), active_count())

    def resident(self) -> tuple[int, ...]:
        return tuple(resident(pid) for pid in self.pids())


# -- what is done very often ------------------------------------------------------------------------


def attach_and_close(scene: Scene) -> None:
    scene.client.attach(POOL).close()


def attach_by_descriptor_and_close(scene: Scene) -> None:
    scene.client.attach(MAPPED).close()


def attach_to_a_peer_and_close(scene: Scene) -> None:
    for name in (POOL, MAPPED):
        scene.client.attach(name, device=1, peer=True).close()


def attach_to_shards_and_close(scene: Scene) -> None:
    scene.client.attach(SPREAD).close()


def sleep_and_wake(scene: Scene) -> None:
    scene.sleeper.sleep()
    scene.sleeper.wake()


def make_and_record_an_event(scene: Scene) -> None:
    with scene.scratch.event("full") as event:
        event.record()


def begin_a_session(scene: Scene) -> None:
    Broker(scene.client.directory).close()


def create_and_discard(scene: Scene) -> None:
    for share in (*SHARES, "multicast"):
        scene.client.create(DRAFT, LAYOUT, share=share, devices=(0, 1)).close()


def publish_and_retire(scene: Scene) -> None:
    for share in SHARES:
        scene.client.create(DRAFT, LAYOUT, share=share, devices=(0, 1), plan=PLAN).seal()
        scene.client.retire(DRAFT)


def wait_and_cancel(scene: Scene) -> None:
    ended: Future[Reply | CubrokerError] = Future()
    requests = scene.client.requests
    waiting = Pending(ended.set)
    requests.post(Attach("nothing", 0, None, 3600.0), waiting)
    requests.cancel(waiting)
    assert isinstance(ended.result(60), CubrokerError)


def wait_in_vain(scene: Scene) -> None:
    try:
        scene.client.attach("nothing", wait=0.001)
    except TimedOut:
        return
    raise AssertionError("there is something")


def watch(scene: Scene) -> None:
    with scene.client.watch(POOL) as watching:
        assert next(watching) == 1


def follow(scene: Scene) -> None:
    with scene.client.follow(POOL) as following:
        assert next(following) == 1


def ask_for_too_much(scene: Scene) -> None:
    try:
        scene.client.create("large", TOO_LARGE)
    except OverBudget:
        return
    raise AssertionError("there was room")


def kill_a_worker(scene: Scene) -> None:
    with scene.worker_pool.worker(f"{HERE}:hold", str(scene.client.directory)) as worker:
        worker.expect("holding")


def hold(line: Channel, directory: str) -> None:
    """A worker with pools, one of them asleep, a draft, an event and a request that waits, until it is killed."""
    with Broker(directory) as broker, broker.create(f"{DRAFT}-{os.getpid()}", LAYOUT, share="vmm"):
        pools = [broker.attach(name) for name in (POOL, SCRATCH, SPREAD, MAPPED)]
        event = pools[1].event(str(os.getpid()))
        event.record()
        pools[-1].sleep()
        broker.requests.submit(Attach("nothing", 0, None, 3600.0))
        broker.pools()
        line.say("holding")
        line.hear()
        assert pools[-1].asleep


def kill_the_gateway(scene: Scene) -> None:
    gateway = gateway_of(scene.process.pid)
    with suppress(ProcessLookupError):
        os.kill(gateway, signal.SIGKILL)
    eventually(lambda: set(gateways(scene.process.pid)) - {gateway}, "another gateway")
    scene.client.pools()


Deed = Callable[[Scene], None]

DEEDS: dict[Deed, int] = {
    attach_and_close: 100_000,
    attach_by_descriptor_and_close: 100_000,
    attach_to_a_peer_and_close: 10_000,
    attach_to_shards_and_close: 10_000,
    sleep_and_wake: 100_000,
    make_and_record_an_event: 10_000,
    begin_a_session: 1000,
    create_and_discard: 1000,
    publish_and_retire: 1000,
    wait_and_cancel: 1000,
    wait_in_vain: 1000,
    watch: 1000,
    follow: 1000,
    ask_for_too_much: 1000,
    kill_a_worker: 1000,
    kill_the_gateway: 20,
}
"""How often each is done in the long form."""


# -- what is left of it -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Growth:
    """Bytes by which each process grew in the second half of ``count`` times; None for one that was replaced."""

    deed: str
    count: int
    seconds: float
    grown: tuple[int | None, ...]

    def __str__(self) -> str:
        sizes = [f"{name} {'replaced' if size is None else f'{size / 1024:+.0f} KiB'}" for name, size in self.named()]
        return f"{self.deed:30} {self.count:7} times in {self.seconds:6.1f} s; {', '.join(sizes)}"

    def named(self) -> Iterator[tuple[str, int | None]]:
        return zip(PROCESSES, self.grown, strict=True)

    def check(self) -> None:
        for name, size in self.named():
            assert size is None or size <= TOLERANCE, f"{name} has grown by {size} bytes: {self}"


def repeat(scene: Scene, deed: Deed, count: int) -> Growth:
    """Do something ``count`` times, after some to fill caches; nothing may be held that was not held before."""
    for _ in range(max(2, count // 10)):
        deed(scene)
    scene.settles()
    began = time.monotonic()
    for _ in range(count // 2):
        deed(scene)
    pids, middle = scene.pids(), scene.resident()
    for _ in range(count - count // 2):
        deed(scene)
    seconds = time.monotonic() - began
    scene.settles()
    sizes = zip(pids, scene.pids(), middle, scene.resident(), strict=True)
    grown = tuple(end - begin if pid == now else None for pid, now, begin, end in sizes)
    return Growth(deed.__name__.replace("_", " "), count, seconds, grown)


@contextmanager
def scene() -> Iterator[Scene]:
    with WorkerPool(HERE) as worker_pool, serving() as process, Broker(process.directory) as client:
        yield Scene(process, client, worker_pool)


def main(arguments: Sequence[str]) -> int:
    """Return 0; what leaks fails an assertion."""
    parser = argparse.ArgumentParser(prog="python -m tests.crash.soak leaks", description=__doc__)
    parser.add_argument("--scale", type=float, default=1.0, help="of the numbers of the long form")
    options = parser.parse_args(arguments)
    with scene() as stage:
        for deed, count in DEEDS.items():
            growth = repeat(stage, deed, max(2, round(count * options.scale)))
            print(growth, flush=True)
            growth.check()
    return 0
