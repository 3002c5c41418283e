"""Locks of names, on a real broker, between sessions and between processes."""

from __future__ import annotations

import asyncio
import gc
import os
import re
import signal
import subprocess

import pytest

from cubroker import aio
from cubroker.client import Broker
from cubroker.protocol import messages
from cubroker.protocol.errors import Invalid, TimedOut, Unavailable, Unsupported
from tests.brokers import BrokerProcess, eventually, serving
from tests.stores import storing
from tests.unit.client.conftest import begun, session_of
from tests.unit.client.scripts import start

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
    with pytest.raises(Unavailable, match="answered the request Lock with Done"):
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
