from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from cubroker.client import Broker
from cubroker.protocol.status import ClientInfo
from tests.brokers import eventually, serving
from tests.crash.consistency import lives, settles
from tests.crash.content import LAYOUT, fill
from tests.crash.worker_pool import Worker, WorkerPool

LIVES = "tests.crash.kills.process_lifecycles"


@pytest.fixture(scope="module")
def worker_pool() -> Iterator[WorkerPool]:
    with WorkerPool(LIVES) as worker_pool:
        yield worker_pool


@pytest.fixture(scope="module")
def observer() -> Iterator[Broker]:
    with serving() as process, Broker(process.directory) as broker:
        with broker.create("pool", LAYOUT) as draft:
            fill(draft)
            draft.seal()
        yield broker


def start(worker_pool: WorkerPool, observer: Broker, life: str) -> Worker:
    return worker_pool.worker(f"{LIVES}:{life}", str(observer.directory), "pool")


def sessions(observer: Broker, pid: int) -> list[ClientInfo]:
    return [client for client in observer.clients() if client.pid == pid]


@pytest.mark.slow
def test_exec_ends_the_connection_and_no_lease_until_the_process_ends(
    worker_pool: WorkerPool, observer: Broker
) -> None:
    """Nobody tells the broker of an exec: it cannot know that nothing is mapped any more, so it waits for the end."""
    with start(worker_pool, observer, "become_another_program") as worker:
        worker.expect("attached")
        worker.tell("go on")
        worker.expect("another program")
        eventually(lambda: sessions(observer, worker.pid)[0].state == "detached", "the end of the connection")
        before, after = sessions(observer, worker.pid)
        assert sorted((lease.pool, lease.version) for lease in before.leases) == [("pool", 1), ("pool-draft", 1)]
        assert (after.state, after.leases) == ("connected", ())
        worker.kill()
        settles(observer, [os.getpid()])
    assert [(pool.name, pool.leases) for pool in observer.pools()] == [("pool", 0)]


@pytest.mark.slow
def test_a_lease_outlives_the_main_thread_of_its_holder(worker_pool: WorkerPool, observer: Broker) -> None:
    with start(worker_pool, observer, "end_the_main_thread") as worker:
        worker.expect("attached")
        main = Path(f"/proc/{worker.pid}/task/{worker.pid}/stat")
        eventually(lambda: main.read_text().rpartition(")")[2].split()[0] == "Z", "the end of the main thread")
        worker.tell("check")
        worker.expect("right")
        assert [len(session.leases) for session in sessions(observer, worker.pid)] == [1]
        worker.kill()
        settles(observer, [os.getpid()])


def test_an_heir_of_every_descriptor_keeps_no_lease(worker_pool: WorkerPool, observer: Broker) -> None:
    with start(worker_pool, observer, "leave_an_heir") as worker:
        heir = int(worker.hear())
        assert [len(session.leases) for session in sessions(observer, worker.pid)] == [2]
        worker.kill()
        settles(observer, [os.getpid()])
        assert lives(heir)
    eventually(lambda: not lives(heir), "the end of the heir, which reads the line of this test")
    assert [(pool.name, pool.leases) for pool in observer.pools()] == [("pool", 0)]


def test_programs_that_a_holder_starts_inherit_nothing_and_disturb_nothing(
    worker_pool: WorkerPool, observer: Broker
) -> None:
    with start(worker_pool, observer, "start_other_programs") as worker:
        worker.expect("[] right")
        eventually(lambda: len(observer.clients()) == 2, "the end of the other program's session")
        assert [len(session.leases) for session in sessions(observer, worker.pid)] == [2]
        worker.tell("go on")
        assert worker.hear().startswith("sealed")
        worker.tell("go on")
        worker.wait()
        settles(observer, [os.getpid()])


@pytest.mark.slow
def test_a_holder_may_start_workers_by_spawn_and_forkserver(worker_pool: WorkerPool, observer: Broker) -> None:
    (before,) = {pool.version for pool in observer.pools()}
    with start(worker_pool, observer, "start_workers") as worker:
        worker.expect("right")
        worker.expect("right")
        worker.expect(f"sealed {before + 1}")
        assert [len(session.leases) for session in sessions(observer, worker.pid)] == [1]
        worker.tell("go on")
        worker.wait()
        settles(observer, [os.getpid()])
