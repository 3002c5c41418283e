"""How processes wait for each other: locks of names, between sessions and processes; scratch pools and their events."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import pytest

from cubroker import aio
from cubroker.client import Broker, Pool
from cubroker.client.synchronization import EventHandle, EventRef, OwnedEvent
from cubroker.client.transport.requests import Steps
from cubroker.driver import DriverError
from cubroker.driver import Event as DriverEvent
from cubroker.protocol import Layout, messages
from cubroker.protocol.errors import DeviceFailure, Exists, Invalid, NotFound, TimedOut, Unavailable, Unsupported
from cubroker.protocol.messages import Done
from tests.brokers import PATIENCE, BrokerProcess, eventually, serving
from tests.stores import storing
from tests.unit.client.conftest import LAYOUT, begun, impatient, leases, publish, session_of
from tests.unit.client.scripts import start
from tests.unit.server.processes import all_closed, files

# -- locks ---------------------------------------------------------------------------------------------

HOLD = "lock = Broker(directory).lock(sys.argv[2]); print('held', flush=True); sys.stdin.read()"


def held(broker: Broker) -> dict[int, tuple[str, ...]]:
    return {client.session: client.locks for client in broker.clients() if client.locks}


def read(worker: subprocess.Popen[str]) -> str:
    assert worker.stdout is not None
    return worker.stdout.readline().strip()


def test_one_session_has_a_lock_at_a_time(client: Broker, lender: BrokerProcess, name: str) -> None:
    with Broker(lender.directory) as other:
        with client.lock(name, timeout=0) as lock:
            assert (lock.name, lock.closed, lock.lost) == (name, False, "")
            assert held(client) == {client.session: (name,)}
            with pytest.raises(TimedOut, match=rf"session {client.session} .* has the lock of {name}"):
                other.lock(name, timeout=0)
            with pytest.raises(TimedOut, match=r"waited 0\.01 s in vain"):
                client.lock(name, timeout=0.01)  # not twice, either
            with pytest.raises(Invalid, match="'' cannot name a lock"):
                client.lock("")
            waiting = begun(lambda: other.lock(name))
            eventually(lambda: client.look().waiters, "the second to wait")
        assert lock.closed
        lock.close()
        with waiting.result() as second:
            assert held(client) == {other.session: (name,)}
            assert repr(second) == f"<NameLock of {name!r}, held>"
        assert repr(second) == f"<NameLock of {name!r}, given back>"
        assert not held(client)


@pytest.mark.slow
def test_a_lock_that_is_dropped_goes_back_and_a_closed_broker_keeps_none(
    client: Broker, lender: BrokerProcess, name: str
) -> None:
    client.lock(name)
    gc.collect()
    eventually(lambda: not held(client), "the lock to go back")
    with Broker(lender.directory) as other:
        kept = other.lock(name)
    assert kept.closed
    with client.lock(name, timeout=0):
        pass


def test_a_broker_that_is_closed_ends_the_wait_for_a_lock(client: Broker, lender: BrokerProcess, name: str) -> None:
    other = Broker(lender.directory)
    with client.lock(name):
        waiting = begun(lambda: other.lock(name))
        eventually(lambda: client.look().waiters, "the second to wait")
        other.close()
        with pytest.raises(Unavailable, match="closed while it waited"):
            waiting.result()
        eventually(lambda: not client.look().waiters, "the end of the wait")


def test_arguments_and_old_brokers_are_refused(client: Broker, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for timeout in (-1, None):
        with pytest.raises(Invalid, match=f"a timeout of {timeout} seconds; it can be 0 to 604800"):
            client.lock(name, timeout=timeout)
    with pytest.raises(Invalid, match="-bad"):
        client.lock("-bad")
    monkeypatch.setattr(session_of(client), "version", messages.LOCKS - 1)
    with pytest.raises(Unsupported, match="too old to have locks"):
        client.lock(name)


def test_an_answer_that_is_none_is_an_error(client: Broker, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client.requests, "post", lambda _, pending: pending.end(messages.Done()))
    with pytest.raises(Unavailable, match="answered with Done instead of Locked"):
        client.lock(name)


def test_a_process_that_is_killed_hands_its_lock_over(client: Broker, lender: BrokerProcess, name: str) -> None:
    with start(lender, HOLD, name) as first, start(lender, HOLD, name) as second:
        holders = {worker.pid: worker for worker in (first, second)}
        eventually(lambda: len(held(client)) == 1 and client.look().waiters, "one to hold and one to wait")
        (holder,) = (each.pid for each in client.clients() if each.locks)
        assert read(holders[holder]) == "held"
        os.kill(holder, signal.SIGKILL)
        (other,) = (worker for pid, worker in holders.items() if pid != holder)
        assert read(other) == "held"
        assert [each.pid for each in client.clients() if each.locks] == [other.pid]
        other.communicate("")
    eventually(lambda: not held(client), "the end of both")


def test_a_lock_outlives_a_broker_with_a_store() -> None:
    with storing() as kept, Broker(kept.directory) as broker, Broker(kept.directory) as other:
        with broker.lock("a") as lock:
            waiting = begun(lambda: other.lock("a"))
            eventually(lambda: broker.look().waiters, "the second to wait")
            kept.restart()
            assert held(broker) == {broker.session: ("a",)}
            assert not lock.lost
            assert not waiting.done()
        waiting.result().close()
        assert not held(broker)


def test_a_lock_ends_with_a_broker_without_a_store() -> None:
    with serving() as process, Broker(process.directory) as broker, broker.lock("a") as lock:
        process.kill()
        eventually(lambda: lock.lost, "the loss")
        assert re.search("held", repr(lock)) is None
        process.start()
        with Broker(process.directory) as other, other.lock("a", timeout=0):
            pass


def test_tasks_take_turns(client: Broker, lender: BrokerProcess, name: str) -> None:
    inside, most = 0, 0

    async def turn(broker: aio.Broker) -> None:
        nonlocal inside, most
        async with await broker.lock(name) as lock:
            assert (lock.name, lock.closed, lock.lost) == (name, False, "")
            inside, most = inside + 1, max(most, inside + 1)
            await asyncio.sleep(0)
            inside -= 1
        assert lock.closed
        assert "given back" in repr(lock)

    async def main() -> None:
        async with aio.Broker(lender.directory) as broker:
            await asyncio.gather(*(turn(broker) for _ in range(20)))
            task = asyncio.create_task(broker.lock(name))
            async with await broker.lock(name + "b"):
                (await task).blocking.close()
            async with await broker.lock(name):
                task = asyncio.create_task(broker.lock(name))
                while not (await broker.look()).waiters:
                    await asyncio.sleep(0)
                task.cancel()
                while (await broker.look()).waiters:
                    await asyncio.sleep(0)

    asyncio.run(main())
    assert most == 1


# -- events --------------------------------------------------------------------------------------------

SCRATCH = Layout.pack([("x", "U8", (4096,)), ("y", "F32", (16,))])

PRODUCER = """
broker = Broker(directory)
pool = broker.attach(sys.argv[2])
event = pool.event("ready")
print("made", flush=True)
for line in sys.stdin:
    match line.split():
        case ["record"]:
            print(event.record(), flush=True)
        case ["write", value]:
            pool["x"].copy_from(bytes([int(value)]) * 4096)
            print(event.record(), flush=True)
        case ["close"]:
            event.close()
            print("closed", flush=True)
        case ["give-back"]:
            pool.close()
            print("closed", flush=True)
        case ["leave"]:
            broker.close()
            print("left", flush=True)
"""


class Producer:
    """A process that has made the event ``ready`` on a pool."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        assert self.hear() == "made"

    def hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ask(self, what: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(what + "\n")
        self.process.stdin.flush()
        return self.hear()


@contextmanager
def producing(broker: BrokerProcess, name: str) -> Iterator[Producer]:
    process = start(broker, PRODUCER, name)
    try:
        yield Producer(process)
    finally:
        process.kill()
        process.communicate()


def waiting(client: Broker) -> int:
    """How many requests of a session wait at the broker."""
    return [waiter.session for waiter in client.look().waiters].count(client.session)


def scratch(broker: Broker, name: str, layout: Layout = SCRATCH, devices: tuple[int, ...] = (0,)) -> None:
    with broker.create(name, layout, devices=devices, writable=True) as draft:
        draft.seal()


@pytest.fixture
def pool(client: Broker, name: str, share: str) -> Iterator[Pool]:
    """A pool whose readers may write, shared in each way."""
    scratch(client, name)
    with client.attach(name) as pool:
        yield pool


@pytest.fixture
def producer(lender: BrokerProcess, pool: Pool) -> Iterator[Producer]:
    with producing(lender, pool.name) as producer:
        yield producer


def test_readers_of_a_writable_pool_write_what_all_of_them_see(client: Broker, pool: Pool) -> None:
    (info,) = client.pools()
    assert (info.writable, info.state, pool.writable) == (True, "current", True)
    assert not pool["x"].readonly
    with client.attach(pool.name) as other:
        other["x"].copy_from(bytes(range(256)) * 16)
        assert pool["x"].tobytes() == bytes(range(256)) * 16
        array = np.from_dlpack(other["y"])
        array[3] = 1.5
        pool["y"].numpy()[4] = 2.5
        assert array.flags.writeable
        assert array[3:5].tolist() == [1.5, 2.5] == pool["y"].numpy()[3:5].tolist()
        del array
    pool.context.write(pool["x"].pointer, b"\7")
    assert pool["x"].tobytes()[0] == 7


def test_a_published_pool_is_read_only_unless_it_says_otherwise(client: Broker, name: str) -> None:
    publish(client, name, LAYOUT)
    with client.attach(name) as pool:
        assert pool["weight"].readonly
        assert not pool.writable
        with pytest.raises(Invalid, match="was published"):
            pool["weight"].copy_from_bytes(bytes(128))
        with pytest.raises(Invalid, match=r"is read-only, and events are made on writable pools"):
            pool.event("ready")
        with pytest.raises(Invalid, match="writable=True"):
            pool.open_event("ready")


def test_generations_are_handed_over_with_their_bytes(pool: Pool, producer: Producer) -> None:
    with pool.open_event("ready", wait=5) as event, pool.context.stream() as stream:
        assert (event.name, event.mine, event.device, event.pool) == ("ready", False, pool.device, pool)
        for value in range(1, 40):
            assert producer.ask(f"write {value}") == str(value)
            assert event.wait(stream if value % 2 else None) == value
            assert pool["x"].tobytes() == bytes([value]) * 4096
        assert event.wait(stream.handle, after=3) == 39
        with pytest.raises(TimedOut, match=r"event 'ready' of .*@1 is at generation 39; session \d+ \(pid"):
            event.wait(timeout=0.0)
        with pytest.raises(TimedOut, match=r"waited 0\.05 s in vain"):
            event.wait(timeout=0.05)
        with pytest.raises(Invalid, match="recorded only by the process that made it"):
            event.record()


CONSUMER = """
from cubroker.protocol.errors import Unavailable
with Broker(directory) as broker, broker.attach(sys.argv[2]) as pool:
    taken = pool.event(sys.argv[3])
    print("made", flush=True)
    ready = pool.open_event("ready", wait=60)
    for value in range(1, int(sys.argv[4]) + 1):
        assert ready.wait(timeout=60) == value
        assert pool["x"].tobytes() == bytes([value]) * 4096, value
        assert taken.record() == value
    try:
        ready.wait(timeout=60)  # its own event has to stay until the last record was taken note of
    except Unavailable as error:
        print("right" if "closed it" in str(error) else error, flush=True)
"""


@pytest.mark.slow
def test_two_consumers_hand_back_what_they_took(client: Broker, lender: BrokerProcess, pool: Pool) -> None:
    rounds = 60
    names = ("one", "two")
    consumers = [start(lender, CONSUMER, pool.name, taken, str(rounds)) for taken in names]
    try:
        taken = [pool.open_event(name, wait=60) for name in names]
        with pool.event("ready") as ready:
            for value in range(1, rounds + 1):
                pool["x"].copy_from(bytes([value]) * 4096)
                assert ready.record() == value
                assert [event.wait(timeout=60) for event in taken] == [value, value]
        for consumer in consumers:
            out, err = consumer.communicate(timeout=PATIENCE)
            assert (out.split(), err) == (["made", "right"], "")
    finally:
        for consumer in consumers:
            consumer.kill()
            consumer.communicate()


@pytest.mark.parametrize(
    ("end", "how"),
    [
        ("kill", "has ended"),
        ("close", "closed it"),
        ("give-back", "closed it"),
        ("leave", "closed it"),
    ],
)
def test_the_end_of_a_producer_wakes_whoever_waits(
    client: Broker, pool: Pool, producer: Producer, end: str, how: str
) -> None:
    event = pool.open_event("ready")
    assert producer.ask("record") == "1"
    assert event.wait() == 1
    waits = [begun(lambda: event.wait(timeout=3600)) for _ in range(3)]
    eventually(lambda: waiting(client) == 3, "the waits to be under way")
    if end == "kill":
        producer.process.kill()
    else:
        producer.ask(end)
    said = rf"event 'ready' of .*@1 ended at generation 1: session \d+ \(pid {producer.process.pid}, uid \d+\) {how}"
    for wait in waits:
        with pytest.raises(Unavailable, match=said):
            wait.result(PATIENCE)
    with pytest.raises(Unavailable, match=said):
        event.wait()
    event.close()
    with pytest.raises(NotFound, match="has no event 'ready'; it has none"):
        pool.open_event("ready")
    with pool.event("ready") as own:
        assert own.record() == 1


def test_a_stopped_producer_keeps_its_event_and_whoever_waits_waits_on(pool: Pool, producer: Producer) -> None:
    with pool.open_event("ready") as event:
        os.kill(producer.process.pid, signal.SIGSTOP)
        with pytest.raises(TimedOut, match="is at generation 0"):
            event.wait(timeout=0.3)
        wait = begun(lambda: event.wait(timeout=60))
        os.kill(producer.process.pid, signal.SIGCONT)
        producer.ask("record")
        assert wait.result(PATIENCE) == 1


def test_who_opens_may_be_there_before_the_maker(lender: BrokerProcess, pool: Pool) -> None:
    wait = begun(lambda: pool.open_event("ready", wait=60).wait(timeout=60))
    with pytest.raises(TimedOut, match=r"waited 0\.05 s in vain: .*@1 has no event 'never'"):
        pool.open_event("never", wait=0.05)
    with producing(lender, pool.name) as producer:
        assert producer.ask("record") == "1"
        assert wait.result(PATIENCE) == 1


def test_many_waits_are_under_way_at_once(pool: Pool, producer: Producer) -> None:
    with pool.open_event("ready") as event:
        first = [begun(lambda: event.wait(after=0, timeout=60)) for _ in range(10)]
        second = [begun(lambda: event.wait(after=1, timeout=60)) for _ in range(10)]
        producer.ask("record")
        assert {wait.result(PATIENCE) for wait in first} <= {1, 2}
        producer.ask("record")
        assert {wait.result(PATIENCE) for wait in second} == {2}


def test_names_are_unique_and_free_again(client: Broker, pool: Pool) -> None:
    event = pool.event("ready")
    with pytest.raises(Exists, match=r"event 'ready' of .* exists: session"):
        pool.event("ready")
    for ask in (pool.event, pool.open_event):
        with pytest.raises(Invalid, match="'-bad' cannot name an event"):
            ask("-bad")
    event.close()
    event.close()
    assert event.closed
    with pytest.raises(Invalid, match="is closed in this process; make or open it again"):
        event.record()
    with pytest.raises(Invalid, match="is closed in this process"):
        event.wait()
    with pool.event("ready") as again, client.attach(pool.name) as other:
        assert [again.record(), again.record(), again.wait()] == [1, 2, 2]
        with pytest.raises(DeviceFailure, match="which another process has to have made"):
            other.open_event("ready")
    assert repr(again) == f"<SharedEvent 'ready' of '{pool.name}' version 1, closed>"


def test_numbers_that_make_no_sense_are_refused(pool: Pool) -> None:
    with pool.event("ready") as event:
        generations: tuple[Any, ...] = (-1, 1 << 60, "3", 1.0)
        for generation in generations:
            with pytest.raises(Invalid, match=f"a generation after {generation!r}: generations are 0 to"):
                event.wait(after=generation)
        streams: tuple[Any, ...] = ("3", -1, 1 << 64, object(), 1.0)
        for stream in streams:
            for call in (event.record, event.wait):  # before it waits
                with pytest.raises(Invalid, match="is no stream: pass a Stream, or a handle"):
                    call(stream)
        limits: tuple[Any, ...] = (-1.0, float("nan"), None, "3")
        for limit in limits:
            with pytest.raises(Invalid, match=f"a timeout of {limit!r} seconds; it can be 0 to 604800"):
                event.wait(timeout=limit)
        with pytest.raises(DeviceFailure, match="recording event 'ready'"):
            event.record(12345)
        assert event.record() == 1, "what failed was not told"
        with pytest.raises(DeviceFailure, match="waiting for event 'ready'"):
            event.wait(12345)
        assert event.wait() == 1


@pytest.mark.slow
def test_an_event_that_is_dropped_is_closed(client: Broker, pool: Pool) -> None:
    pool.event("first").close()  # whatever is opened once per process is open
    before = files(os.getpid())
    event = pool.event("ready")
    assert "mine" in repr(event)
    assert files(os.getpid()) - before
    del event
    gc.collect()

    def free() -> bool:
        with suppress(Exists):
            pool.event("ready").close()
            return True
        return False

    eventually(free, "the name to be free")
    all_closed(os.getpid(), before)


@pytest.mark.slow
def test_a_finalizer_that_the_collector_calls_finds_the_event_closed(pool: Pool) -> None:
    told: list[str] = []

    class Engine:
        def __init__(self) -> None:
            self.cycle = self
            self.event = pool.event("ready")

        def __del__(self) -> None:
            try:
                self.event.record()
            except Invalid as error:
                told.append(error.message)

    Engine()
    gc.collect()
    assert told == [f"event 'ready' of pool {pool.name!r} version 1 is closed in this process; make or open it again"]


@pytest.mark.slow
def test_events_keep_their_pool_and_end_when_it_is_closed(client: Broker, name: str, share: str) -> None:
    scratch(client, name)
    event = client.attach(name).event("ready")
    gc.collect()
    assert event.record() == 1
    wait = begun(lambda: event.wait(after=1, timeout=3600))
    opening = begun(lambda: event.pool.open_event("never", wait=3600))
    eventually(lambda: waiting(client) == 2, "the waits to be under way")
    event.pool.close()
    with pytest.raises(Unavailable, match="was closed in this process while it waited"):
        wait.result(PATIENCE)
    with pytest.raises(Unavailable, match="was closed while it waited for an event"):
        opening.result(PATIENCE)
    assert event.closed
    eventually(lambda: leases(client, name) == 0, "the end of the lease")
    with pytest.raises(Invalid, match="is closed in this process"):
        event.pool.event("ready")


def test_closing_the_broker_ends_its_events_and_waits(lender: BrokerProcess, pool: Pool, producer: Producer) -> None:
    with Broker(lender.directory) as broker:
        mine = broker.attach(pool.name)
        event, own = mine.open_event("ready"), mine.event("own")
        wait = begun(lambda: event.wait(timeout=3600))
        eventually(broker.requests.waiting, "the wait to be under way")
    assert isinstance(wait.exception(PATIENCE), Unavailable)
    assert event.closed
    assert own.closed
    with pytest.raises(NotFound, match=r"it has 'ready'; wait"):
        pool.open_event("own")


def test_a_pool_that_falls_asleep_closes_its_events_and_can_have_new_ones(client: Broker, name: str) -> None:
    with client.create(name, SCRATCH, share="vmm", writable=True) as draft:
        with pytest.raises(Invalid, match="seal it"):
            draft.event("ready")
        with pytest.raises(Invalid, match="cannot sleep; seal it first"):
            draft.sleep()
        draft.seal()
    with client.attach(name) as pool:
        event = pool.event("ready")
        pool.sleep()
        assert event.closed
        with pytest.raises(Invalid, match="is asleep"):
            pool.event("ready")
        pool.wake()
        pool["x"].copy_from(bytes(4096))
        with pool.event("ready") as event:
            assert event.record() == 1


@pytest.mark.parametrize("woken", [False, True])
def test_an_event_that_comes_while_its_pool_falls_asleep_is_closed(
    client: Broker, name: str, monkeypatch: pytest.MonkeyPatch, woken: bool
) -> None:
    with client.create(name, SCRATCH, share="vmm", writable=True) as draft:
        draft.seal()
    with client.attach(name) as pool:
        obtain = EventHandle.obtain

        def interfered(handle: EventHandle) -> Steps[EventRef]:
            held = yield from obtain(handle)
            pool.sleep()
            if woken:
                pool.wake()
            return held

        monkeypatch.setattr(EventHandle, "obtain", interfered)
        with pool.event("full") as event, pytest.raises(Invalid, match="is closed in this process"):
            event.record()


def test_a_sharded_pool_has_events_of_each_device(client: Broker, lender: BrokerProcess, name: str) -> None:
    plan = {"x": 0, "y": 1}
    layout = Layout.pack([("x", "U8", (8,)), ("y", "U8", (8,))], groups=plan)
    with client.create(name, layout, devices=(0, 1), plan=plan, writable=True) as draft:
        draft.seal()
    with client.attach(name) as pool:
        with pytest.raises(Invalid, match="is spread over devices 0, 1"):
            pool.event("ready")
        with pool.event("ready", device=1) as event:
            assert event.device == client.driver.devices[1]
            assert event.record() == 1
        with (
            client.attach(name, device=0) as shard,
            pytest.raises(Invalid, match=r"is not used on device 1 \(.*\) here"),
        ):
            shard.event("ready", device=1)


def test_a_forked_child_cannot_use_an_event_and_harms_none(lender: BrokerProcess, pool: Pool) -> None:
    process = start(
        lender,
        """
        import warnings
        warnings.simplefilter("ignore", DeprecationWarning)
        from cubroker.protocol.errors import Invalid
        with Broker(directory) as broker, broker.attach(sys.argv[2]) as pool, pool.event("ready") as event:
            event.record()
            if (child := os.fork()) == 0:
                for use in (event.record, event.wait, event.close, lambda: pool.event("other")):
                    try:
                        use()
                    except Invalid as error:
                        print("belongs to process" in str(error), flush=True)
                del event, pool
                os._exit(0)
            os.waitpid(child, 0)
            print(event.record(), event.wait())
        """,
        pool.name,
    )
    out, err = process.communicate(timeout=PATIENCE)
    assert (out.split(), err) == (["True"] * 4 + ["2", "2"], "")


def test_threads_share_an_event(pool: Pool) -> None:
    with pool.event("ready") as event:
        found: list[int] = []
        threads = [threading.Thread(target=lambda: found.extend(event.record() for _ in range(20))) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(found) == list(range(1, 121))
        assert event.wait() == 120


def test_a_thread_waits_for_the_work_itself_within_its_time_limit(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work on host devices is always done, so its end is played here."""
    looks = iter([False] * 20 + [True])
    with pool.event("ready") as event, monkeypatch.context() as patch:
        assert event.record() == 1
        patch.setattr(DriverEvent, "done", lambda event: next(looks))
        assert event.wait(timeout=60) == 1
        assert next(looks, None) is None
        patch.setattr(DriverEvent, "done", lambda event: False)
        with pytest.raises(TimedOut, match="was recorded as generation 1, but the work before it goes on"):
            event.wait(after=0, timeout=0.02)


def test_an_event_that_the_driver_does_not_close_ends_all_the_same_and_is_closed_when_it_can_be(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    closing, refused, closed = DriverEvent.close, list[DriverEvent](), threading.Semaphore(0)

    def close(event: DriverEvent) -> None:
        if refused.count(event) < 2:
            refused.append(event)
            raise DriverError("cuEventDestroy", 999, "CUDA_ERROR_UNKNOWN", "played")
        closing(event)
        closed.release()

    with pool.event("ready"), monkeypatch.context() as patch:
        patch.setattr(DriverEvent, "close", close)
        pool.event("other").close()
        pool.event("other").close()
        assert all(closed.acquire(timeout=PATIENCE) for _ in range(2))
    assert len(refused) == 4
    assert caplog.text.count("closing event 'other'") == 2
    assert caplog.text.count("tries again until it succeeds") == 2


def test_an_event_that_nobody_waits_for_any_more_is_not_made(
    client: Broker, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = session_of(client)
    unwanted = OwnedEvent(session, pool.context, "event 'never'", pool.lease, "never")
    unwanted.abandon(Unavailable("nobody waits"))
    unwanted.begin()
    with pytest.raises(NotFound, match="it has none"):
        pool.open_event("never")
    strange = OwnedEvent(session, pool.context, "event 'strange'", pool.lease, "strange")
    future = strange.future
    assert future is not None
    with monkeypatch.context() as patch:
        patch.setattr(session.requests, "send", lambda body, settle: settle(Done()))
        session.cleanup.put(strange.begin)
        with pytest.raises(Unavailable, match="answered with Done instead of EventShared"):
            future.result(60)


def test_an_event_is_closed_though_the_broker_is_silent(name: str) -> None:
    with serving() as process, Broker(process.directory) as broker:
        scratch(broker, name)
        with broker.attach(name) as pool:
            event = pool.event("ready")
            os.kill(process.pid, signal.SIGSTOP)
            try:
                with impatient(broker, 0.2), pytest.raises(TimedOut, match="not confirmed the end of event 'ready'"):
                    event.close()
                assert event.closed
            finally:
                os.kill(process.pid, signal.SIGCONT)
