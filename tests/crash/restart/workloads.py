"""What workers do while the broker is killed: parts of scenes, each played in a process of its own.

Every part ends with pools that it holds; then it answers each ``check`` with what it has, after it looked at every
byte, and at any other word gives everything back and ends. Nothing that a part does may fail because of a kill, but for
what is done with memory that is not durable: that is begun anew.
"""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from threading import Thread

from cubroker.client import Broker, Draft, Pool, SharedEvent
from cubroker.client.loading.loader import load
from cubroker.client.synchronization import NameLock
from cubroker.client.transport.requests import Pending, Requests
from cubroker.protocol.errors import CubrokerError, DeviceFailure, Invalid, NotFound, Retired, TimedOut, Unavailable
from cubroker.protocol.messages import Reply, Request
from tests.brokers import eventually
from tests.checkpoints import write
from tests.crash.content import (
    BOTH,
    LAYOUT,
    LINKS,
    NBYTES,
    WAIT,
    Form,
    check,
    check_anew,
    content,
    fill,
    forge,
    seal_in_place,
    update,
)
from tests.crash.worker_pool import Channel
from tests.unit.client.conftest import session_of

DURABLE = Form("vmm", durable=True)
SPREAD = Form("vmm", BOTH, durable=True)
SHARDED = Form("vmm", BOTH, sharded=True, durable=True)
SCRATCH = Form("vmm", writable=True, durable=True)
TEAM = Form("multicast", BOTH, writable=True, durable=True)
TEAM_READ = Form("multicast", BOTH, durable=True)
PASSING_CHAIN = Form("vmm", chain=True)
CHAIN = Form("vmm", durable=True, chain=True)
CHAIN_SHARDS = Form("vmm", BOTH, sharded=True, durable=True, chain=True)
IPC = Form("ipc")
PASSING = Form("vmm")

LOST = (NotFound, Retired, DeviceFailure, Invalid)
"""What comes of using memory that goes meanwhile; and ``Unavailable``, if it says that."""


LOCK = 0
"""What stands for the version where a lock is told of."""


class Tally:
    """Counts the requests of this process, and how often each was answered."""

    def __init__(self) -> None:
        self.answers: dict[int, int] = {}
        post, numbers = Requests.post, count()  # several threads ask

        def counting(requests: Requests, body: Request, pending: Pending) -> None:
            number, settle = next(numbers), pending.settle
            self.answers[number] = 0

            def settled(reply: Reply | CubrokerError) -> None:
                self.answers[number] += 1
                settle(reply)

            pending.settle = settled
            post(requests, body, pending)

        Requests.post = counting  # type: ignore[method-assign]

    def check(self) -> None:
        """Wait until every request was answered, and check that none was twice."""
        eventually(lambda: 0 not in list(self.answers.values()), "the answers of what was asked")
        most = max(list(self.answers.values()))
        assert most == 1, f"answered {most} times"


class Workload:
    """A process that plays: its session, the pool of its scene, and what it holds at the end."""

    def __init__(self, line: Channel, directory: str, name: str) -> None:
        self.line = line
        self.directory = directory
        self.name = name
        self.tally = Tally()
        self.broker = Broker(directory, timeout=WAIT)
        self.held: list[Pool] = []
        self.events: list[SharedEvent] = []
        self.locks: list[NameLock] = []

    def keep(self, pool: Pool | Draft) -> Pool:
        assert isinstance(pool, Pool)
        check(pool)
        self.held.append(pool)
        return pool

    def publish(self, form: Form, name: str = "") -> int:
        with form.create(self.broker, name or self.name, WAIT) as draft:
            fill(draft)
            return draft.seal()

    def check_anew(self, pool: Pool) -> None:
        """Attach to the version once more and check that, unless it is retired, or lost by now."""
        try:
            check_anew(self.broker, pool)
        except (*LOST, Unavailable):
            states = {(each.name, each.version): each.state for each in self.broker.pools()}
            if states[pool.name, pool.version] not in ("retired", "lost"):
                raise

    def remain(self) -> None:
        """Tell what is held, as often as asked; then give it back."""
        while True:
            for pool in self.held:
                if not pool.lost:
                    check(pool)
                    self.check_anew(pool)
            eventually(lambda: session_of(self.broker).receiver.empty(), "the descriptors to be closed")
            self.tally.check()
            held = [[pool.name, pool.version] for pool in self.held]
            self.line.say(json.dumps(held + [[lock.name, LOCK] for lock in self.locks]))
            if self.line.hear() != "check":
                break
        for each in (*self.held, *self.locks):
            each.close()
        self.held.clear()
        self.broker.close()
        self.tally.check()


def play(line: Channel, directory: str, part: str, name: str) -> None:
    """Play a part, and stay until told to go."""
    logging.disable(logging.WARNING)  # that what is lost is lost is no news here
    actor = Workload(line, directory, name)
    PARTS[part](actor)
    actor.remain()


def read(part: Workload) -> None:
    """Attach and close, and attach again."""
    for _ in range(2):
        with part.broker.attach(part.name) as pool:
            check(pool)
    part.keep(part.broker.attach(part.name))


def read_peer(part: Workload) -> None:
    """Use the memory of one device on the other."""
    part.keep(part.broker.attach(part.name, device=1, peer=True))


def write_one(part: Workload) -> None:
    part.publish(DURABLE)


def write_spread(part: Workload) -> None:
    part.publish(SPREAD)
    part.keep(part.broker.attach(part.name, device=1))


def write_shards(part: Workload) -> None:
    part.publish(SHARDED)
    part.keep(part.broker.attach(part.name))


def await_publication(part: Workload) -> None:
    """Stand in line for a version that is not there yet."""
    part.keep(part.broker.attach(part.name, wait=WAIT))


def attach_or_create(part: Workload) -> None:
    """Be the first, or wait for who is."""
    made = part.broker.attach_or_create(part.name, LAYOUT, share="vmm", durable=True, wait=WAIT)
    with made:
        if isinstance(made, Draft):
            fill(made)
            made.seal()
    part.keep(part.broker.attach(part.name))


def discard(part: Workload) -> None:
    with DURABLE.create(part.broker, part.name, WAIT) as draft:
        fill(draft)
    with DURABLE.create(part.broker, part.name, WAIT) as draft:
        draft["first"].copy_from(content(draft.name, draft.version, "first"))


def write_for_readers(part: Workload) -> None:
    """Publish what another process has attached to before."""
    with _lent_draft(part) as draft:
        draft.seal()


def abandon(part: Workload) -> None:
    """Give up what another process has attached to."""
    with _lent_draft(part):
        pass


@contextmanager
def _lent_draft(part: Workload) -> Iterator[Draft]:
    name = f"{part.name}-draft"
    with DURABLE.create(part.broker, name, WAIT) as draft:
        fill(draft)
        eventually(lambda: [pool.leases for pool in part.broker.pools() if pool.name == name] > [1], "a reader")
        yield draft


def read_draft(part: Workload) -> None:
    """Attach to a draft, and keep it when its writer has sealed it or given it up."""
    pool = part.broker.attach(f"{part.name}-draft", version=1, unsealed=True, wait=WAIT)
    there = (pool.name, 1, "draft")
    eventually(lambda: there not in [(p.name, p.version, p.state) for p in part.broker.pools()], "the writer's end")
    part.keep(pool)


def supersede(part: Workload) -> None:
    """Hold a version, publish the next and retire the one that is held."""
    before = part.keep(part.broker.attach(part.name))
    part.publish(DURABLE)
    part.keep(part.broker.attach(part.name))
    part.broker.retire(part.name, before.version)


def produce(part: Workload) -> None:
    """Tell others what was written, and wait for their answer; one event ends at once, the others with the pool."""
    pool = part.keep(part.broker.attach(part.name))
    with pool.event("spare") as spare:
        spare.record()
    full = pool.event("full")
    pool["first"].copy_from(content(pool.name, pool.version, "first"))
    full.record()
    empty = pool.open_event("empty", wait=WAIT)
    empty.wait()
    part.events += full, empty


def consume(part: Workload) -> None:
    pool = part.keep(part.broker.attach(part.name))
    full = pool.open_event("full", wait=WAIT)
    full.wait()
    check(pool)
    empty = pool.event("empty")
    empty.record()
    part.events += full, empty


def watch(part: Workload) -> None:
    """Follow a pool until its second version."""
    with part.broker.watch(part.name) as versions:
        seen = [next(versions) or 0]
        while seen[-1] < 2:
            seen.append(next(versions) or 0)
        assert seen == sorted(set(seen)), seen
    part.keep(part.broker.attach(part.name))


def write_twice(part: Workload) -> None:
    assert [part.publish(DURABLE), part.publish(DURABLE)] == [1, 2]


def sleep(part: Workload) -> None:
    pool = part.keep(part.broker.attach(part.name))
    pool.sleep()
    pool.wake()
    check(pool)


def switch(part: Workload) -> None:
    """Go on to the next version, and from a sleep to the one after."""
    pool = part.keep(part.broker.attach(part.name))
    part.publish(DURABLE)
    pool.switch()
    check(pool)
    pool.sleep()
    part.publish(DURABLE)
    pool.switch()


def switch_team(part: Workload) -> None:
    pool = part.keep(part.broker.attach(part.name, device=0))
    part.publish(TEAM_READ)
    pool.switch()


def update_once(part: Workload) -> None:
    """Publish an update of what is current; others may do the same."""
    version = update(part.broker, part.name, ["second"], part.name, WAIT)
    with suppress(Retired):  # it is superseded by another
        part.keep(part.broker.attach(part.name, version=version))


def update_twice(part: Workload) -> None:
    """Hold a version and two updates, and retire the one that both share with."""
    first = part.keep(part.broker.attach(part.name))
    for tensor, base in (("second", first), ("first", part.name)):
        update(part.broker, part.name, [tensor], base, WAIT)
        part.keep(part.broker.attach(part.name))
        with suppress(Retired):
            part.broker.retire(part.name, first.version)


def update_to_three(part: Workload) -> None:
    for _ in range(2):
        update(part.broker, part.name, ["second"], part.name, WAIT)


def outlive_base(part: Workload) -> None:
    """Give up the last lease on a base that is retired, when the draft has what it shares with it."""
    base = part.broker.attach(part.name)
    part.broker.retire(part.name)
    update(part.broker, part.name, ["second"], base, WAIT, meanwhile=base.close)
    part.keep(part.broker.attach(part.name))


def chain(part: Workload) -> None:
    """Make a chain of versions, and close all but the last two, the oldest first."""
    name = f"{part.name}-chain"
    part.publish(CHAIN, name)
    held = forge(part.broker, name)
    while len(held) > 2:
        held.pop(0).close()
        for pool in held:
            check_anew(part.broker, pool)
    part.held += held


def chain_reader(part: Workload) -> None:
    """Attach to the versions of a chain while it is made, and close some in any order."""
    name, held = f"{part.name}-chain", list[Pool]()
    for version in range(1, LINKS + 1):
        with suppress(Retired):
            held.append(part.broker.attach(name, version=version, wait=WAIT))
            check(held[-1])
    random.Random(part.name).shuffle(held)
    while len(held) > 2:
        held.pop().close()
    part.held += held


def follow(part: Workload) -> None:
    """Follow a pool until its third version."""
    with part.broker.follow(part.name, timeout=WAIT) as versions:
        seen = [next(versions)]
        while seen[-1] < 3:
            seen.append(next(versions))
        assert seen == sorted(set(seen)), seen
    part.keep(part.broker.attach(part.name))


def follow_switch(part: Workload) -> None:
    """Take each version in place, until the third."""
    pool = part.keep(part.broker.attach(part.name))  # the second, if its writer was faster
    with pool.follow(switch=True, timeout=WAIT) as versions:
        while pool.version < 3:
            next(versions)
            check(pool)


def seal_where_it_lies(part: Workload) -> None:
    part.held.append(seal_in_place(part.broker, f"{part.name}-in-place", CHAIN, WAIT))


def seal_shards_where_they_lie(part: Workload) -> None:
    part.held.append(seal_in_place(part.broker, f"{part.name}-in-place", SHARDED, WAIT))


def await_in_place(part: Workload) -> None:
    part.keep(part.broker.attach(f"{part.name}-in-place", wait=WAIT))


def lock_turn(part: Workload) -> None:
    """Publish under the lock of the name, which nobody else has meanwhile."""
    mark = Path(part.directory).parent / f"{part.name}.locked"
    with part.broker.lock(part.name, timeout=WAIT):
        mark.touch(exist_ok=False)
        part.publish(DURABLE)
        mark.unlink()
    part.keep(part.broker.attach(part.name))


def lock_keep(part: Workload) -> None:
    """Take a lock twice, and keep it."""
    name = f"{part.name}-kept"
    part.broker.lock(name, timeout=WAIT).close()
    part.locks.append(part.broker.lock(name, timeout=WAIT))


def lock_and_die(part: Workload) -> None:
    """End with the lock of the name, while another waits for it, or after the other had it."""
    held = part.broker.lock(part.name, timeout=WAIT)

    def awaited() -> bool:
        view = part.broker.look()
        return any(waiter.pool == part.name for waiter in view.waiters) or part.name in {p.name for p in view.pools}

    eventually(awaited, "another to wait")
    assert held
    os.kill(os.getpid(), signal.SIGKILL)


def come_and_go(part: Workload) -> None:
    """Open and close sessions beside the own one."""
    for _ in range(2):
        with Broker(part.directory, timeout=WAIT) as another, another.attach(part.name) as pool:
            check(pool)
    part.keep(part.broker.attach(part.name))


def hang_up(part: Workload) -> None:
    """Lose the connection of a session, but not the lease, which ends with this process."""
    part.broker.attach(part.name).close()
    another = Broker(part.directory, timeout=WAIT)
    part.held.append(another.attach(part.name))
    another._session._connection._channel.shutdown(socket.SHUT_RDWR)


def die(part: Workload) -> None:
    """End in the middle, with a lease, a draft and a request that waits."""
    part.keep(part.broker.attach(part.name))
    draft = DURABLE.create(part.broker, f"{part.name}-draft")
    Thread(target=lambda: part.broker.attach(f"{part.name}-never", wait=WAIT), daemon=True).start()
    part.broker.devices()
    assert draft
    os.kill(os.getpid(), signal.SIGKILL)


def load_file(part: Workload) -> None:
    """Load what others may be loading at the same time."""
    shape = ("U8", (NBYTES,))
    tensors = {name: (*shape, content(part.name, 1, name)) for name in ("first", "second")}
    path = Path(part.directory).parent / f"{part.name}-{os.getpid()}.safetensors"
    try:
        loaded = load(
            part.broker,
            part.name,
            write(path, tensors),
            share="vmm",
            durable=True,
            if_absent=True,
            wait=WAIT,
            slab=NBYTES,
        )
    finally:
        path.unlink()
    assert loaded.version == 1
    part.keep(part.broker.attach(part.name))


def give_up(part: Workload) -> None:
    """Wait in vain, once by the broker's time and once by one's own."""
    with suppress(TimedOut):
        part.broker.attach(f"{part.name}-never", wait=0.05)
    with Broker(part.directory, timeout=WAIT) as another:
        thread = Thread(target=_wait_in_vain, args=(another, f"{part.name}-never"))
        thread.start()
        while not another.requests.waiting():
            another.devices()
    thread.join()


def _wait_in_vain(broker: Broker, name: str) -> None:
    with suppress(Unavailable):  # the Broker is closed meanwhile
        broker.attach(name, wait=WAIT)


def team(part: Workload) -> None:
    """Write all replicas at once, as a writer and as a reader."""
    with TEAM.create(part.broker, part.name, WAIT) as draft:
        for name in draft:
            draft.broadcast(content(draft.name, draft.version, name), name)
        draft.seal()
    pool = part.keep(part.broker.attach(part.name, device=1))
    pool.broadcast(content(pool.name, pool.version, "first"), "first")
    check(pool)


@contextmanager
def losing(*refusals: type[CubrokerError]) -> Iterator[None]:
    """Bear ``refusals``, and what comes of memory that was lost."""
    try:
        yield
    except Unavailable as error:
        if "lost" not in error.message:
            raise
    except (*LOST, *refusals):
        pass


def passing(part: Workload, form: Form) -> None:
    """Publish and hold memory that goes with the broker; begin anew until it was there for long enough."""
    name = f"{part.name}-passing"
    while not part.held:
        with losing():
            version = part.publish(form, name)
            pool = part.broker.attach(name, version=version)
            check(pool)
            part.held.append(pool)


def passing_chain(part: Workload) -> None:
    """The same of versions that share memory, the first of which has ended."""
    name = f"{part.name}-passing-chain"
    while not part.held:
        with losing():
            base = part.publish(PASSING_CHAIN, name)
            version = update(part.broker, name, ["first"], base)
            pool = part.broker.attach(name, version=version)
            check(pool)
            part.held.append(pool)


PARTS: dict[str, Callable[[Workload], None]] = {
    **{
        part.__name__: part
        for part in (
            read,
            read_peer,
            write_one,
            write_spread,
            write_shards,
            await_publication,
            attach_or_create,
            discard,
            write_for_readers,
            abandon,
            read_draft,
            supersede,
            produce,
            consume,
            watch,
            write_twice,
            sleep,
            switch,
            come_and_go,
            hang_up,
            die,
            load_file,
            give_up,
            team,
            switch_team,
            passing_chain,
            update_once,
            update_twice,
            update_to_three,
            outlive_base,
            chain,
            chain_reader,
            follow,
            follow_switch,
            seal_where_it_lies,
            seal_shards_where_they_lie,
            await_in_place,
            lock_turn,
            lock_keep,
            lock_and_die,
        )
    },
    "ipc": lambda part: passing(part, IPC),
    "passing": lambda part: passing(part, PASSING),
}
