"""What is closed by one thread while another one uses it."""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cubroker.client import Broker, Pool, SharedTensor, fork_guard
from cubroker.client.loading import loader
from cubroker.client.loading.checkpoint import CheckpointFile
from cubroker.client.loading.threads import posix_aio
from cubroker.client.memory.lease import acquire
from cubroker.client.synchronization import LockRef, NameLock
from cubroker.client.transport.requests import Future, Steps
from cubroker.protocol.errors import Invalid, TimedOut, Unavailable, Unsupported
from cubroker.protocol.messages import ListPools
from tests import checkpoints
from tests.brokers import PATIENCE, BrokerProcess, eventually
from tests.unit.client.conftest import LAYOUT, impatient, leases, publish, session_of

pytestmark = pytest.mark.usefixtures("share")


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool


def test_closing_a_broker_unmaps_nothing_under_the_threads_that_load(
    client: Broker, name: str, tmp_path: Path, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = checkpoints.write(tmp_path / "m.safetensors", checkpoints.filled([("x", "U8", (1 << 20,))]))
    reading, closed = threading.Event(), threading.Event()
    read_into = CheckpointFile.read_into

    def pausing(file: CheckpointFile, buffers: list[memoryview], offset: int) -> None:
        reading.set()
        assert closed.wait(PATIENCE)
        read_into(file, buffers, offset)  # EFAULT if the memory is gone by now

    monkeypatch.setattr(posix_aio, "usable", False)
    monkeypatch.setattr(CheckpointFile, "read_into", pausing)
    with Broker(client.directory) as broker:
        loading = threads.submit(loader.load, broker, name, path, devices=(0, 1))
        assert reading.wait(PATIENCE)
        broker.close()
        assert [info.state for info in client.pools()] == ["draft"]
        closed.set()
        with pytest.raises(Invalid, match=f"draft of pool '{name}' version 1 is closed in this process"):
            loading.result(PATIENCE)
    eventually(lambda: not client.pools(), "the end of the draft")


def test_held_memory_outlives_its_draft(client: Broker, name: str) -> None:
    draft = client.create(name, LAYOUT)
    tensor = draft["weight"]
    with tensor.hold() as pointer:
        assert pointer == tensor.pointer
        with pytest.raises(Invalid, match="still in use: weight"):
            draft.seal()
        draft.close()
        assert tensor.tobytes() == bytes(128)
    del tensor
    eventually(lambda: not client.pools(), "the end of the draft")


def test_a_closed_broker_is_of_no_use_though_arrays_keep_its_connection(
    client: Broker, name: str, threads: ThreadPoolExecutor
) -> None:
    publish(client, name)
    broker = Broker(client.directory)
    array = broker.attach(name)["weight"].numpy()
    watch = broker.watch(name)
    assert next(watch) == 1
    following = threads.submit(next, watch)
    waiting = threads.submit(broker.attach, "never", wait=PATIENCE)
    eventually(lambda: broker.requests.waiting(), "the request")
    broker.close()
    told = [repr(call.exception(PATIENCE)) for call in (following, waiting)]
    assert told == [
        "Unavailable('this Broker was closed')",
        "Unavailable('this Broker was closed while it waited')",
    ]
    calls: list[Callable[[], object]] = [
        broker.pools,
        lambda: broker.watch(name),
        lambda: broker.retire(name),
        lambda: broker.attach(name),
    ]
    for call in calls:
        with pytest.raises(Unavailable, match="this Broker is closed; open another"):
            call()
    assert array.shape == (4, 8)


def test_a_pool_a_lock_and_a_watch_need_no_other_reference_to_their_broker(client: Broker, name: str) -> None:
    publish(client, name)
    before = len(client.clients())
    pool, lock = Broker(client.directory).attach(name), Broker(client.directory).lock(name)
    watch = Broker(client.directory).watch(name)
    gc.collect()
    with pytest.raises(Unsupported, match="sealed without a digest"):
        pool.check()
    with pytest.raises(TimedOut):
        client.lock(name, timeout=0)
    assert next(watch) == 1
    publish(client, name)
    assert next(watch) == 2
    lock.close()
    watch.close()
    del pool
    eventually(lambda: len(client.clients()) == before, "the end of all three sessions")


def test_a_pool_that_comes_while_its_broker_is_closed_is_closed_too(
    client: Broker, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(client, name)
    broker = Broker(client.directory)

    def closing(*args: Any) -> Steps[object]:
        lent = yield from acquire(*args)
        broker.close()  # as another thread may, between the lease and the Pool
        return lent

    monkeypatch.setattr("cubroker.client.broker.acquire", closing)
    with pytest.raises(Unavailable, match="this Broker is closed; open another"):
        broker.attach(name)
    eventually(lambda: leases(client, name) == 0, "the end of the lease")


@pytest.mark.parametrize("ask", [Broker.attach, Broker.lock])
def test_a_close_waits_for_its_end_though_what_brought_the_thing_is_still_busy(
    client: Broker, name: str, ask: Callable[[Broker, str], Pool | NameLock], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that is preempted after it has woken the caller must not have a reference of its own."""
    publish(client, name)
    busy, go_on, take = list[Future[Any]](), threading.Event(), Future.take

    def pausing(future: Future[Any], box: list[Any]) -> None:
        brought = isinstance(box[0], tuple | LockRef)
        take(future, box)
        if brought and not busy:
            busy.append(future)
            assert go_on.wait(PATIENCE)

    monkeypatch.setattr(Future, "take", pausing)
    thing = ask(client, name)
    eventually(lambda: busy, "the thread to pause")
    try:
        assert thing.let_go()
    finally:
        go_on.set()
    thing.close()
    eventually(lambda: not leases(client, name), "the lease to fall")


def test_closing_many_pools_waits_for_a_stopped_broker_once(
    broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = Broker(broker.directory)
    publish(client, "pool")
    pools = [client.attach("pool") for _ in range(4)]
    asked: list[Pool] = []
    confirm = Pool.confirming
    monkeypatch.setattr(Pool, "confirming", lambda pool: (asked.append(pool), confirm(pool))[1])
    broker.process.send_signal(signal.SIGSTOP)
    try:
        with impatient(client, 0.2), pytest.raises(TimedOut, match=r"has not confirmed the end of lease \d+ in 0.2 s"):
            client.close()
    finally:
        broker.process.send_signal(signal.SIGCONT)
    assert len(asked) == 1
    assert all(pool.closed for pool in pools)
    with Broker(broker.directory) as other:
        eventually(lambda: leases(other, "pool") == 0, "the end of the leases")


@pytest.mark.parametrize("thread", ["connection", "cleanup"])
@pytest.mark.parametrize("what", ["pool", "broker", "draft", "request"])
def test_a_finalizer_that_runs_on_the_sessions_own_thread_does_not_wait_for_itself(
    client: Broker, name: str, thread: str, what: str
) -> None:
    publish(client, name)
    broker = Broker(client.directory, timeout=PATIENCE)
    told: list[str] = []

    class Engine:
        def __init__(self) -> None:
            self.cycle = self
            self.uses = {
                "pool": broker.attach(name).close,
                "draft": broker.create(f"{name}-draft", LAYOUT).close,
                "broker": broker.close,
                "request": broker.pools,
            }

        def __del__(self) -> None:
            try:
                self.uses[what]()
            except Unavailable as error:
                told.append(error.message)
            told.append(threading.current_thread().name)

    collected = threading.Event()

    def collect() -> None:
        gc.collect()
        collected.set()

    gc.disable()  # the collector runs in whichever thread makes objects; here, in the one that is meant
    try:
        Engine()
        if thread == "cleanup":
            session_of(broker).cleanup.put(collect)
        else:
            broker.requests.send(ListPools(), lambda _: collect())
        assert collected.wait(PATIENCE / 4)
    finally:
        gc.enable()
    assert told.pop() == f"cubroker-{thread}"
    assert told == (
        ["called by a finalizer on a session's own thread, which cannot wait for the answer"]
        if what == "request"
        else []
    )
    broker.close()
    eventually(lambda: [info.leases for info in client.pools()] == [0], "the end of the lease and of the draft")


def test_finalizers_on_the_threads_of_two_sessions_do_not_wait_for_each_other(client: Broker, name: str) -> None:
    publish(client, name)
    both = threading.Barrier(2)
    told: list[str] = []

    def close(pool: Pool) -> None:
        both.wait(PATIENCE)
        try:
            pool.close()
            told.append("closed")
        except TimedOut as error:
            told.append(error.message)

    with Broker(client.directory) as one, Broker(client.directory) as other:
        pools = other.attach(name), one.attach(name)
        for broker, pool in zip((one, other), pools, strict=True):
            session_of(broker).cleanup.put(partial(close, pool))
        eventually(lambda: len(told) == 2, "both pools to be closed")
    assert told == ["closed", "closed"]
    eventually(lambda: leases(client, name) == 0, "the end of the leases")


def test_a_pool_may_be_closed_in_the_middle_of_being_closed_or_used(client: Broker, name: str) -> None:
    """As a finalizer or a signal handler does that comes in between."""
    publish(client, name)
    draft = client.create(name, LAYOUT)
    for pool, tensor in ((client.attach(name), None), (draft, draft["weight"])):
        with pool._closing:
            pool.close()
        pool.close()
        if tensor is not None:
            with pytest.raises(Invalid, match="was given back, and its tensors with it"):
                tensor.numpy()
    assert leases(client, name) == 0
    draft = client.create(name, LAYOUT)
    tensor, mapped = draft["weight"], draft._mapped
    assert mapped is not None
    with mapped._lock:
        draft.close()
        with pytest.raises(Invalid, match="was given back, and its tensors with it"):
            tensor.__dlpack__()
    del mapped, tensor
    eventually(lambda: len(client.pools()) == 1, "the end of the draft")


def test_a_finalizer_in_the_middle_of_a_driver_call_or_of_a_fork_waits_for_nothing(client: Broker, name: str) -> None:
    publish(client, name)
    module: Any = client.driver.context(0).calls.module
    for lock in (module.lock, fork_guard.fork_lock):
        pool = client.attach(name)
        with lock:
            pool.close()
            with pytest.raises(
                Unavailable, match="called by a finalizer or a signal handler while this thread is inside a"
            ):
                client.pools()
        eventually(lambda: leases(client, name) == 0, "the end of the lease")


def test_a_finalizer_that_the_collector_calls_finds_the_memory_given_back(client: Broker, name: str) -> None:
    publish(client, name)
    kept: list[SharedTensor] = []
    told: list[str] = []

    class Engine:
        def __init__(self, pool: Pool) -> None:
            self.cycle = self
            self.pool = pool
            self.weight = pool["weight"]

        def __del__(self) -> None:
            kept.append(self.weight)
            for use in (self.weight.numpy, self.weight.tobytes, lambda: self.pool["bias"]):
                try:
                    use()
                except Invalid as error:
                    told.append(error.message)

    Engine(client.attach(name))
    gc.collect()
    eventually(lambda: leases(client, name) == 0, "the end of the lease")
    assert told == [f"pool {name!r} version 1 was given back, and its tensors with it"] * 3
    with pytest.raises(Invalid, match="was given back"):
        kept.pop().__dlpack__()
