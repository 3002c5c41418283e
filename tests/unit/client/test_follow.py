"""A pool is followed from version to version, from broker to broker, by threads and by tasks."""

from __future__ import annotations

import asyncio
import gc
import inspect
import os
import re
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

from cubroker.client import Broker, Follow, Pool
from cubroker.client import follow as follow_module
from cubroker.client.transport.connection import Shortage
from cubroker.client.transport.requests import Future
from cubroker.protocol import wire
from cubroker.protocol.errors import Invalid, OverQuota, TimedOut, Unavailable, Unsupported
from cubroker.protocol.messages import Found, Welcome
from cubroker.protocol.paths import SESSION_SOCKET
from tests.brokers import PATIENCE, BrokerProcess, eventually
from tests.faults import fail_nth
from tests.stores import storing
from tests.unit.client.conftest import LAYOUT, begun, content, publish, session_of
from tests.unit.client.kept import keeping
from tests.unit.client.scripts import run
from tests.unit.client.test_owners import STRANGER, needs_root
from tests.unit.server.configured import configured
from tests.unit.server.processes import files
from tests.unit.server.visitor import visiting

T = TypeVar("T")

PAGE = Path(__file__).parents[3] / "docs" / "live-weights.md"


def threads() -> list[threading.Thread]:
    """Those that follow."""
    return [each for each in threading.enumerate() if each.name == "cubroker-follow"]


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """No thread follows any more after a test."""
    yield
    eventually(lambda: not threads(), "the end of the threads")


def known(follow: Follow) -> follow_module.Told:
    """What the thread of a follow has found out, which hides it: to read it there takes it from who reads next."""
    return follow._follower.told


def told(follow: Follow, version: int) -> None:
    """Return when a follow knows which version is current."""
    eventually(lambda: known(follow).version == version, f"the news of version {version}")


def misses_its_broker(follow: Follow) -> bool:
    """Whether a follow says that the broker is gone, when it is asked for a version that cannot be there."""
    with pytest.raises(TimedOut) as late:
        follow.next(0)
    return "is gone" in str(late.value)


def futures() -> int:
    """How many futures there are in this process."""
    gc.collect()
    return sum(type(each) is Future for each in gc.get_objects())


def in_loop(call: Callable[[], Awaitable[T]]) -> T:
    """Run a coroutine within a test's patience."""

    async def main() -> T:
        return await asyncio.wait_for(call(), PATIENCE)

    return asyncio.run(main())


# -- versions ------------------------------------------------------------------------------------------


def test_every_version_is_returned_now_and_after_each_change(client: Broker, name: str) -> None:
    publish(client, name)
    seen = []
    for version in client.follow(name):
        seen.append(version)
        if version == 3:
            break
        publish(client, name)
    assert seen == [1, 2, 3]


def test_a_pool_without_a_version_is_waited_for(client: Broker, name: str) -> None:
    with client.follow(name) as follow:
        with pytest.raises(TimedOut, match=rf"no new version of {name!r} came within 0 s$"):
            follow.next(0)
        first = begun(follow.__next__)
        publish(client, name)
        assert first.result(PATIENCE) == 1


def test_versions_that_come_faster_than_they_are_read_are_seen_as_one(client: Broker, name: str) -> None:
    with client.follow(name) as follow:
        for _ in range(20):
            publish(client, name)
        told(follow, 20)
        assert next(follow) == 20
        with pytest.raises(TimedOut):
            follow.next(0)


def test_a_version_that_was_retired_before_it_was_read_is_not_returned(client: Broker, name: str) -> None:
    with client.follow(name) as follow:
        publish(client, name)
        told(follow, 1)
        client.retire(name)
        told(follow, 0)
        with pytest.raises(TimedOut):
            follow.next(0)
        publish(client, name)
        assert next(follow) == 2
        client.retire(name)
        told(follow, 0)
        with pytest.raises(TimedOut):
            follow.next(0)


def test_threads_that_share_a_follow_get_each_version_once(client: Broker, name: str) -> None:
    seen: list[int] = []
    with client.follow(name) as follow:
        readers = [begun(lambda: seen.extend(follow)) for _ in range(4)]
        for version in range(1, 6):
            publish(client, name)
            eventually(lambda version=version: version in seen, "the version")
    for reader in readers:
        reader.result(PATIENCE)
    assert seen == [1, 2, 3, 4, 5]


def test_a_timeout_is_raised_and_the_iteration_goes_on(client: Broker, name: str) -> None:
    follow = client.follow(name, timeout=0.05)
    with pytest.raises(TimedOut, match=r"within 0\.05 s"):
        next(follow)
    with pytest.raises(TimedOut, match=r"within 0\.01 s"):
        follow.next(0.01)
    publish(client, name)
    assert follow.next(PATIENCE) == 1
    with pytest.raises(TimedOut):
        next(follow)
    follow.close()


@pytest.mark.parametrize("timeout", [-1, float("nan"), float("inf")])
def test_a_timeout_must_be_some_time(client: Broker, name: str, timeout: float) -> None:
    with pytest.raises(Invalid, match="timeout of"):
        client.follow(name, timeout=timeout)
    with client.follow(name) as follow, pytest.raises(Invalid, match="timeout of"):
        follow.next(timeout)
    assert repr(follow) == f"<Follow of {name!r}, closed>"


def test_a_name_that_no_pool_can_have_is_not_followed(client: Broker) -> None:
    with pytest.raises(Invalid, match="cannot name a pool"):
        client.follow("no name!")


# -- the end -------------------------------------------------------------------------------------------


def test_closing_from_another_thread_ends_the_iteration(client: Broker, name: str) -> None:
    publish(client, name)
    follow, seen = client.follow(name), list[int]()
    reader = begun(lambda: seen.extend(follow))
    eventually(lambda: seen, "the first version")
    follow.close()
    follow.close()
    reader.result(PATIENCE)
    assert seen == [1]
    with pytest.raises(StopIteration):
        follow.next(0)


def test_closing_the_broker_ends_the_iteration(lender: BrokerProcess, name: str) -> None:
    broker = Broker(lender.directory)
    follow = broker.follow(name)
    reader = begun(lambda: list(follow))
    broker.close()
    assert reader.result(PATIENCE) == []
    assert list(follow) == []
    with pytest.raises(Unavailable, match="this Broker is closed"):
        broker.follow(name)


def test_a_follow_that_is_dropped_ends_and_so_does_its_broker(client: Broker, name: str) -> None:
    publish(client, name)
    broker = Broker(client.directory)
    assert next(iter(broker.follow(name))) == 1
    eventually(lambda: not threads(), "the end of the thread")
    follow = broker.follow(name)
    session = broker.session
    del broker
    assert next(follow) == 1
    del follow
    eventually(lambda: session not in [info.session for info in client.clients()], "the end of the session")


def test_a_broker_that_is_closed_while_a_follow_begins_ends_it(
    lender: BrokerProcess, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = Broker(lender.directory)
    begin = follow_module.Follower.start

    def closing(follower: follow_module.Follower, follow: Follow) -> None:
        begin(follower, follow)
        broker.close()

    monkeypatch.setattr(follow_module.Follower, "start", closing)
    assert list(broker.follow(name)) == []


def test_a_follow_belongs_to_its_process(client: Broker, lender: BrokerProcess, name: str) -> None:
    done = run(
        lender,
        """
        import warnings
        warnings.simplefilter("ignore", DeprecationWarning)
        with Broker(directory) as broker, broker.follow(sys.argv[2]) as follow:
            if (child := os.fork()) == 0:
                for call in (follow.next, follow.close):
                    try:
                        call()
                    except Exception as error:
                        print("belongs to process" in str(error), flush=True)
                os._exit(0)
            os.waitpid(child, 0)
        """,
        name,
    )
    assert (done.returncode, done.stderr, done.stdout.split()) == (0, "", ["True", "True"])


def test_a_program_that_ends_in_the_middle_of_a_follow_ends(lender: BrokerProcess, name: str) -> None:
    done = run(
        lender,
        """
        broker = Broker(directory)
        follow = broker.follow(sys.argv[2])
        threading.Thread(target=lambda: list(follow), daemon=True).start()
        """,
        name,
    )
    assert (done.returncode, done.stderr) == (0, "")


# -- what stands in the way ----------------------------------------------------------------------------


def test_without_room_for_its_thread_nothing_is_followed(
    client: Broker, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(stacks: int) -> None:
        raise Shortage("no memory")

    monkeypatch.setattr(follow_module, "try_memory", refuse)
    with pytest.raises(Unavailable, match=f"no thread to follow pool {name!r}: no memory"):
        client.follow(name)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("error", [MemoryError(), ZeroDivisionError()], ids=repr)
def test_a_thread_that_fails_ends_the_iteration_of_all(
    client: Broker, name: str, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    fail_nth(monkeypatch, follow_module.Follower, "_note", 2, error)
    with client.follow(name) as follow:
        eventually(lambda: known(follow).session == 1, "the first news")
        waiting = [begun(lambda: next(follow)), begun(lambda: in_loop(lambda: anext(follow)))]
        publish(client, name)
        for outcome in waiting:
            assert isinstance(outcome.exception(PATIENCE), Unavailable)
        with pytest.raises(Unavailable, match=f"the thread that follows pool {name!r} has failed"):
            next(follow)
    with client.follow(name) as follow:
        assert next(follow) == 1


@pytest.mark.slow
def test_a_refusal_is_raised_by_the_iteration(client: Broker, name: str) -> None:
    watches = [client.watch(f"{name}-{number}") for number in range(1024)]
    with client.follow(name) as follow:
        for _ in range(2):
            with pytest.raises(OverQuota):
                next(follow)
    for watch in watches:
        watch.close()


@needs_root
def test_the_versions_of_the_owner_alone_are_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        configured("[sockets]\nmode = 0o666\n") as process,
        Broker(process.directory) as broker,
        visiting(process.directory, STRANGER, STRANGER) as squatter,
    ):
        assert squatter("publish", "minilm", 0o644) == 1
        with (
            broker.follow("minilm", owner=7) as follow,
            broker.follow("minilm", owner=STRANGER) as strangers,
            broker.follow("minilm") as everybodys,
        ):
            assert (next(strangers), next(everybodys)) == (1, 1)
            broker.retire("minilm")
            told(strangers, 0)
            publish(broker, "minilm")  # its own, which counts for every owner
            assert [next(each) for each in (follow, strangers, everybodys)] == [2, 2, 2]


def test_owners_are_unsupported_by_a_broker_that_came_later_and_is_too_old(
    client: Broker, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow_module, "FINDS", session_of(client).version + 1)
    with client.follow(name, owner=7) as follow, pytest.raises(Unsupported, match="too old"):
        next(follow)


def test_an_answer_about_the_owner_that_a_change_has_overtaken_does_not_count() -> None:
    """The broker answers in time, so that its answers are given by hand here."""
    asked: SimpleQueue[Callable[[object], None]] = SimpleQueue()
    ears: SimpleQueue[follow_module.Ear] = SimpleQueue()
    session: Any = SimpleNamespace(
        require=lambda *_: None,
        lost="",
        watches=SimpleNamespace(add=lambda ear, settle: ears.put(ear), remove=lambda ear: None),
        requests=SimpleNamespace(send=lambda body, settle: asked.put(settle)),
    )
    with Follow("policy", lambda pause: session, owners=(7,)) as follow:
        ear = ears.get(timeout=PATIENCE)
        ear.tell(1)
        first = asked.get(timeout=PATIENCE)
        ear.tell(2)
        first(Found(1))
        second = asked.get(timeout=PATIENCE)
        ear.tell(0)
        second(Found(2))
        ear.tell(3)
        third = asked.get(timeout=PATIENCE)
        assert known(follow) == (1, 0)
        third(Found(3))
        assert follow.next(PATIENCE) == 3
        assert asked.empty()


# -- from broker to broker -----------------------------------------------------------------------------


@pytest.fixture
def follower(broker: BrokerProcess) -> Iterator[Broker]:
    """A Broker on a broker that a test may kill."""
    with Broker(broker.directory) as client:
        yield client


@pytest.mark.slow
def test_a_broker_under_cubroker_keep_is_killed_and_the_versions_go_on() -> None:
    with keeping() as kept, Broker(kept.directory) as client, client.follow("policy") as follow:
        for version in (1, 2, 3):
            publish(client, "policy", share="vmm", durable=True)
            assert next(follow) == version
            kept.strike()
            client.pools()
            with pytest.raises(TimedOut, match=r"within 0 s$"):
                follow.next(0)
        assert known(follow).session == 1


def test_the_versions_of_the_next_broker_are_followed_without_a_store(broker: BrokerProcess, follower: Broker) -> None:
    publish(follower, "policy")
    with follower.follow("policy") as follow:
        assert next(follow) == 1
        for _ in range(2):
            broker.kill()
            broker.start()
            with Broker(broker.directory) as other:
                publish(other, "policy")
            assert next(follow) == 1, "another broker's version 1"
            with follower.attach("policy") as pool:
                assert (pool.lost, pool["weight"].tobytes()) == ("", content("weight", 128))
            assert not follower.lost


def test_a_version_that_went_with_its_broker_is_not_returned(broker: BrokerProcess, follower: Broker) -> None:
    publish(follower, "policy")
    with follower.follow("policy") as follow:
        told(follow, 1)
        broker.kill()
        told(follow, 0)
        with pytest.raises(TimedOut, match=r"came within 0 s: the broker on .* is gone"):
            follow.next(0)
        broker.start()
        with Broker(broker.directory) as other:
            publish(other, "policy")
            publish(other, "policy")
            told(follow, 2)
        assert next(follow) == 2


def test_a_follow_may_begin_before_its_broker(broker: BrokerProcess, follower: Broker) -> None:
    broker.kill()
    eventually(lambda: follower.lost, "the end of the session")
    opening = begun(lambda: Broker(broker.directory, wait=PATIENCE))
    with follower.follow("policy") as follow:
        first = begun(follow.__next__)
        broker.start()
        with opening.result(PATIENCE) as other, other.follow("policy") as early:
            publish(other, "policy")
            assert (first.result(PATIENCE), next(early)) == (1, 1)


def test_closing_ends_the_wait_for_a_broker(broker: BrokerProcess, follower: Broker) -> None:
    with follower.follow("policy") as follow:
        reader = begun(lambda: list(follow))
        broker.kill()
        eventually(lambda: misses_its_broker(follow), "the loss")
    assert reader.result(PATIENCE) == []
    eventually(lambda: not threads(), "the end of the thread")


def test_several_follows_share_the_session_of_the_next_broker(broker: BrokerProcess, follower: Broker) -> None:
    follows = [follower.follow(f"policy-{number}") for number in range(4)]
    broker.kill()
    broker.start()
    with Broker(broker.directory, wait=PATIENCE) as other:
        for follow in follows:
            publish(other, follow.name)
            assert next(follow) == 1
        assert len(other.clients()) == 2
    for follow in follows:
        follow.close()


def test_a_broker_that_only_greets_is_not_asked_again_and_again(
    tmp_path: Path, broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow_module, "LAST_PAUSE", 0.2)
    asked: list[float] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(tmp_path / SESSION_SOCKET))
        listener.listen()

        def serve() -> None:
            for _ in range(4):
                connection, _ = listener.accept()
                asked.append(time.monotonic())
                with connection:
                    connection.recv(4096)
                    connection.send(wire.pack(Welcome(1, 1, bytes(16), "host:1@4194304")))

        served = begun(serve)
        with Broker(tmp_path) as client, client.follow("policy"):
            served.result(PATIENCE)
    assert all(after - before >= 0.2 for before, after in pairwise(asked[1:])), asked  # the first one is the Broker's


def test_nothing_is_left_open_behind_a_follow(broker: BrokerProcess) -> None:
    Broker(broker.directory).close()
    before, running = files(os.getpid()).total(), set(threading.enumerate())
    with Broker(broker.directory) as client:
        for _ in range(2):
            publish(client, "policy")
            with client.follow("policy") as follow:
                assert next(follow) == 1
                broker.kill()
                broker.start()
                eventually(lambda: not client.lost, "the next session")
    eventually(lambda: set(threading.enumerate()) <= running, "the end of the threads")
    eventually(lambda: files(os.getpid()).total() <= before, "what was opened to be closed")


# -- in an event loop ----------------------------------------------------------------------------------


def test_a_task_follows_while_its_loop_runs(client: Broker, name: str) -> None:
    async def main() -> list[int]:
        seen: list[int] = []
        async for version in client.follow(name):
            seen.append(version)
            if version == 3:
                break
            asyncio.get_running_loop().call_soon(publish, client, name)
        return seen

    publish(client, name)
    assert in_loop(main) == [1, 2, 3]


def test_a_task_that_is_cancelled_leaves_nothing_and_the_follow_goes_on(client: Broker, name: str) -> None:
    async def main(follow: Follow) -> int:
        before = futures()
        waiting = [asyncio.ensure_future(anext(follow)) for _ in range(3)]
        await asyncio.sleep(0)
        assert futures() == before + 3, "each has begun, and waits"
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)
        assert all(task.cancelled() for task in waiting)
        del waiting, task
        assert futures() == before
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(follow), 0.01)
        publish(client, name)
        return await anext(follow)

    with client.follow(name) as follow:
        assert in_loop(lambda: main(follow)) == 1


def test_a_task_waits_for_as_long_as_the_timeout_says(client: Broker, name: str) -> None:
    async def main(follow: Follow) -> int:
        with pytest.raises(TimedOut, match=rf"no new version of {name!r} came within 0\.05 s"):
            await anext(follow)
        publish(client, name)
        follow.timeout = PATIENCE
        return await anext(follow)

    with client.follow(name, timeout=0.05) as follow:
        assert in_loop(lambda: main(follow)) == 1


def test_closing_from_another_thread_ends_the_iteration_of_a_task(client: Broker, name: str) -> None:
    loops, seen = SimpleQueue[asyncio.AbstractEventLoop](), SimpleQueue[int]()

    async def main() -> None:
        loops.put(asyncio.get_running_loop())
        async for version in follow:
            seen.put(version)

    publish(client, name)
    follow = client.follow(name)
    reader = begun(lambda: in_loop(main))
    assert seen.get(timeout=PATIENCE) == 1
    asyncio.run_coroutine_threadsafe(asyncio.sleep(0), loops.get()).result(PATIENCE)  # the task waits again
    follow.close()
    reader.result(PATIENCE)
    assert seen.empty()


def test_a_loop_that_was_closed_in_the_middle_of_a_wait_is_not_woken(client: Broker, name: str) -> None:
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda *_: None)  # which would be told of the task
    follow = client.follow(name)

    async def wait() -> int:
        return await anext(follow)

    waiting = wait()
    task = loop.create_task(waiting)
    loop.run_until_complete(asyncio.sleep(0))
    assert inspect.getcoroutinestate(waiting) == inspect.CORO_SUSPENDED
    loop.close()
    publish(client, name)
    assert next(follow) == 1, "the thread that tells of it goes on"
    waiting.close()
    del task
    follow.close()


def test_a_task_follows_from_broker_to_broker(broker: BrokerProcess, follower: Broker) -> None:
    async def main() -> list[int]:
        seen, ticks = list[int](), 0
        async for version in follower.follow("policy"):
            seen.append(version)
            if len(seen) == 3:
                break
            await asyncio.to_thread(broker.kill)
            await asyncio.to_thread(broker.start)
            with Broker(broker.directory) as other:
                publish(other, "policy")
            ticks += 1
        return seen

    publish(follower, "policy")
    assert in_loop(main) == [1, 1, 1]


# -- a pool's newer versions ---------------------------------------------------------------------------


def test_a_pool_follows_the_versions_that_are_newer_than_its_own(client: Broker, name: str) -> None:
    publish(client, name)
    publish(client, name)
    with client.attach(name) as pool, pool.follow() as follow:
        told(follow, 2)
        with pytest.raises(TimedOut):
            follow.next(0)
        publish(client, name)
        assert next(follow) == 3
    with client.attach(name) as pool:
        publish(client, name)
        with pool.follow(timeout=PATIENCE) as follow:
            assert next(follow) == 4


def test_closing_a_pool_ends_what_follows_it(client: Broker, name: str) -> None:
    publish(client, name)
    pool = client.attach(name)
    follow = pool.follow()
    reader = begun(lambda: list(follow))
    pool.close()
    assert reader.result(PATIENCE) == []
    with pytest.raises(Invalid, match="is closed in this process"):
        pool.follow()


@pytest.mark.slow
def test_a_pool_that_was_lost_with_its_session_has_no_newer_versions(broker: BrokerProcess, follower: Broker) -> None:
    put(follower, "policy", 1)
    with follower.attach("policy") as pool, pool.follow(switch=True) as follow:
        put(follower, "policy", 2)
        assert next(follow) == 2
        waiting = begun(follow.__next__)
        broker.kill()
        with pytest.raises(Unavailable, match=r"version 2 is lost: the broker on .* is gone.*attach again"):
            waiting.result(PATIENCE)
        broker.start()
        follower.reconnect()
        with pytest.raises(Unavailable, match="is lost"):
            next(pool.follow())


def test_a_version_that_was_lost_under_a_store_is_followed_by_the_next() -> None:
    with storing() as kept, Broker(kept.directory) as client:
        publish(client, "policy", durable=False)
        with client.attach("policy") as pool, pool.follow() as follow:
            kept.restart()
            eventually(lambda: pool.lost, "the notice")
            publish(client, "policy")
            assert next(follow) == 2


# -- a pool that is switched ---------------------------------------------------------------------------


def put(client: Broker, name: str, value: int) -> None:
    """Publish a version whose bytes are all one value."""
    with client.create(name, LAYOUT, share="vmm") as draft:
        draft["weight"].copy_from_bytes(bytes([value]) * 128)
        draft.seal()


def test_a_pool_is_switched_to_each_version_before_that_is_returned(client: Broker, name: str) -> None:
    put(client, name, 1)
    with client.attach(name) as pool:
        array, pointer, follow = pool["weight"].numpy(), pool["weight"].pointer, pool.follow(switch=True)
        put(client, name, 2)
        for version in follow:
            assert (pool.version, pool["weight"].pointer) == (version, pointer)
            assert array.tobytes() == bytes([version]) * 128
            if version == 4:
                break
            put(client, name, version + 1)


def test_a_pool_is_switched_while_versions_come_fast_and_shows_the_one_that_is_returned(
    client: Broker, name: str
) -> None:
    put(client, name, 1)
    with client.attach(name) as pool:
        array, follow = pool["weight"].numpy(), pool.follow(switch=True)
        writing = begun(lambda: [put(client, name, value) for value in range(2, 31)])
        seen = []
        while 30 not in seen:
            seen.append(next(follow))
            assert array.tobytes() == bytes([seen[-1]]) * 128
        writing.result(PATIENCE)
        assert seen == sorted(set(seen))


def test_a_switch_that_fails_is_raised_and_tried_again_by_the_next_call(client: Broker, name: str) -> None:
    put(client, name, 1)
    with client.attach(name) as pool, pool.follow(switch=True) as follow:
        put(client, name, 2)
        with pool["weight"].hold():
            for _ in range(2):
                with pytest.raises(Invalid, match="held"):
                    next(follow)
            assert pool.version == 1
        assert next(follow) == pool.version == 2


def test_a_version_that_is_retired_before_the_switch_is_skipped(
    client: Broker, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(client, name, 1)
    switch = Pool.switch

    tried: list[int] = []

    def late(pool: Pool, version: int) -> int:
        tried.append(version)
        if version == 2:
            client.retire(name)
        return switch(pool, version)

    with client.attach(name) as pool:
        monkeypatch.setattr(Pool, "switch", late)
        with pool.follow(switch=True) as follow:
            put(client, name, 2)
            waiting = begun(follow.__next__)
            eventually(lambda: tried, "the switch")
            put(client, name, 3)
            assert waiting.result(PATIENCE) == pool.version == 3
    assert tried == [2, 3]


def test_closing_a_pool_in_the_middle_of_its_switch_ends_the_iteration(
    client: Broker, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(client, name, 1)
    pool, switch = client.attach(name), Pool.switch

    def closing(pool: Pool, version: int) -> int:
        pool.close()
        return switch(pool, version)

    monkeypatch.setattr(Pool, "switch", closing)
    follow = pool.follow(switch=True)
    put(client, name, 2)
    assert list(follow) == []


def test_what_cannot_be_switched_is_told_before_it_is_followed(client: Broker, name: str) -> None:
    with client.create(name, LAYOUT, share="vmm") as draft, pytest.raises(Invalid, match="seal it first"):
        draft.follow(switch=True)
    publish(client, name, share="ipc")
    with client.attach(name) as pool, pytest.raises(Unsupported, match="shared as ipc"):
        pool.follow(switch=True)


def test_a_task_that_is_cancelled_during_a_switch_ends_after_it_and_gets_the_version_next_time(
    client: Broker, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    switching, go_on, switch = threading.Event(), threading.Event(), Pool.switch

    def slow(pool: Pool, version: int) -> int:
        switching.set()
        assert go_on.wait(PATIENCE)
        return switch(pool, version)

    async def main(pool: Pool, follow: Follow) -> int:
        task = asyncio.ensure_future(anext(follow))
        await asyncio.to_thread(switching.wait, PATIENCE)
        for _ in range(2):
            task.cancel()
            assert not (await asyncio.wait((task,), timeout=0.05))[0]
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert pool.version == 2
        return await anext(follow)

    put(client, name, 1)
    with client.attach(name) as pool:
        monkeypatch.setattr(Pool, "switch", slow)
        with pool.follow(switch=True) as follow:
            put(client, name, 2)
            assert in_loop(lambda: main(pool, follow)) == pool.version == 2
        assert pool["weight"].tobytes() == bytes([2]) * 128


@pytest.mark.slow
def test_a_pool_is_switched_after_its_broker_was_killed_under_cubroker_keep() -> None:
    with keeping() as kept, Broker(kept.directory) as client:
        put(client, "policy", 1)
        with client.attach("policy") as pool, pool.follow(switch=True, timeout=PATIENCE) as follow:
            array = pool["weight"].numpy()
            for version in (2, 3):
                kept.strike()
                put(client, "policy", version)
                assert next(follow) == pool.version == version
                assert array.tobytes() == bytes([version]) * 128


# -- the page ------------------------------------------------------------------------------------------


class Enough(Exception):
    """Ends a sample."""


def samples() -> list[dict[str, Any]]:
    """The samples of the section about following, each run."""
    section = PAGE.read_text().partition("\n## Follow\n")[2].partition("\n## ")[0]
    found: list[dict[str, Any]] = []
    for sample in re.findall(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL):
        program: dict[str, Any] = {}
        exec(sample, program)
        found.append(program)
    return found


def test_the_samples_of_the_page_use_each_version(
    broker: BrokerProcess, follower: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUBROKER_DIR", str(broker.directory))
    seen: list[int] = []

    def use(pool: Pool) -> None:
        assert pool["weight"].tobytes() == content("weight", 128)
        seen.append(pool.version)
        if len(seen) in (2, 4):
            raise Enough
        publish(follower, "policy")

    async def use_in_loop(pool: Pool) -> None:
        use(pool)

    publish(follower, "policy")
    threaded, asynchronous, _ = samples()  # the last one is that of tests/unit/examples/test_live_weights.py
    with pytest.raises(Enough):
        threaded["run"](use)
    with pytest.raises(Enough):
        in_loop(lambda: asynchronous["run"](follower, use_in_loop))
    assert seen == [1, 2, 2, 3]
