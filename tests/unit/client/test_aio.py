"""The Broker for asyncio, on a real broker."""

from __future__ import annotations

import asyncio
import inspect
import re
import signal
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from cubroker import Broker as BlockingBroker
from cubroker import Draft as BlockingDraft
from cubroker import Pool as BlockingPool
from cubroker.aio import Broker, Draft, Pool
from cubroker.client import session
from cubroker.client.fork_guard import SessionThread
from cubroker.client.memory.lease import LeaseHandle
from cubroker.client.memory.mapping import LeasedMemory
from cubroker.driver import Context, DriverError
from cubroker.driver import Event as DriverEvent
from cubroker.protocol.errors import DeviceFailure, Invalid, NotFound, TimedOut, Unavailable, Unsupported
from cubroker.protocol.messages import Answer, Attached
from tests.brokers import PATIENCE, BrokerProcess, eventually, serving
from tests.unit.client import test_synchronization
from tests.unit.client.conftest import LAYOUT, begun, content, leases, publish

PAGE = Path(__file__).parents[3] / "docs" / "live-weights.md"

T = TypeVar("T")

ELSEWHERE = {"attaching", "requests"}
"""What only the blocking Broker has: steps, and futures on which threads wait."""

ITERATED = {"follow"}
"""What returns an asynchronous iterator at once."""


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a test's coroutine, for as long as any test waits at most."""

    async def limited() -> T:
        async with asyncio.timeout(PATIENCE):
            return await main

    return asyncio.run(limited())


async def waiting(broker: Broker, name: str, count: int) -> bool:
    """Whether so many requests for a pool wait at the broker."""
    return sum(waiter.pool == name for waiter in (await broker.look()).waiters) == count


async def none_lent(broker: Broker) -> bool:
    """Whether there is neither a lease nor a draft."""
    return not any(info.leases or info.state == "draft" for info in await broker.pools())


async def until(condition: Callable[[], Awaitable[object]]) -> None:
    """Ask again and again, while the loop goes on."""
    while not await condition():
        await asyncio.sleep(0)


class Heart:
    """Counts the turns of a loop."""

    def __init__(self) -> None:
        self.beats = 0

    async def beat(self) -> None:
        while True:
            self.beats += 1
            await asyncio.sleep(0)

    async def more(self, count: int) -> None:
        """Return when it has beaten so many times more."""
        goal = self.beats + count
        while self.beats < goal:
            await asyncio.sleep(0)


@asynccontextmanager
async def beating() -> AsyncIterator[Heart]:
    heart = Heart()
    task = asyncio.create_task(heart.beat())
    try:
        yield heart
    finally:
        task.cancel()


def session_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if isinstance(thread, SessionThread)]


async def none_follows() -> bool:
    """Whether no thread of a follow is left."""
    return all(thread.name != "cubroker-follow" for thread in threading.enumerate())


def public(kind: type) -> dict[str, Any]:
    return {name: value for name, value in inspect.getmembers(kind) if not name.startswith("_")}


def test_every_method_of_a_broker_is_awaitable_with_the_same_parameters() -> None:
    ours, theirs = public(Broker), public(BlockingBroker)
    assert theirs.keys() - ours.keys() == ELSEWHERE
    for name, method in theirs.items():
        if name in ELSEWHERE or not callable(method):
            continue
        assert inspect.iscoroutinefunction(ours[name]) or name in ITERATED, name
        given, wanted = (inspect.signature(each).parameters.values() for each in (ours[name], method))
        assert [(each.name, each.kind, each.default) for each in given] == [
            (each.name, each.kind, each.default) for each in wanted
        ], name


@pytest.mark.parametrize(("kind", "below"), [(Pool, BlockingPool), (Draft, BlockingDraft)])
def test_a_method_of_a_pool_has_the_same_parameters(kind: type, below: type) -> None:
    for name, method in public(kind).items():
        if inspect.isfunction(method):
            assert [*inspect.signature(method).parameters] == [*inspect.signature(getattr(below, name)).parameters]


@pytest.mark.parametrize("kind", [BlockingBroker, BlockingPool, BlockingDraft])
def test_what_a_blocking_method_returns_is_said_by_its_signature(kind: type) -> None:
    for name, method in public(kind).items():
        if inspect.isfunction(method):
            steps = name in {"attaching", "confirming", "switching", "waking"}  # for those that wait in another way
            assert ("Steps" in str(inspect.signature(method).return_annotation)) == steps, name


def test_a_pool_is_published_read_and_retired(client: BlockingBroker, name: str) -> None:
    async def main() -> None:
        async with Broker(client.directory) as broker:
            assert (broker.directory, broker.uid) == (client.directory, client.uid)
            assert str(broker.session) in repr(broker)
            assert broker.draining == ""
            async with await broker.create(name, LAYOUT, devices=(0, 1)) as draft:
                assert [info.state for info in await broker.pools()] == ["draft"]
                for replica in draft.replicas:
                    replica["weight"].copy_from_bytes(content("weight", 128))
                assert await draft.seal() == 1
            async with await broker.attach(name, device=1) as pool:
                assert pool["weight"].tobytes() == content("weight", 128)
                assert (pool.name, pool.version, pool.share, pool.lost) == (name, 1, "vmm", "")
                assert (pool.layout, [device.index for device in pool.devices]) == (LAYOUT, [1])
                assert (list(pool), len(pool)) == (list(client.attach(name, device=0)), 4)
                assert repr(pool) == f"<Pool {name!r} version 1, 4 tensors>"
                assert {pool: 1}[pool] == 1
            assert pool.closed
            assert ["weight" in pool, "other" in pool] == [True, False]
            info, layout, plan = await broker.describe(name)
            assert (info.name, layout, plan) == (name, LAYOUT, ())
            assert [device.index for device in await broker.devices()] == [0, 1]
            assert broker.session in [each.session for each in await broker.clients()]
            assert (await broker.digests(name)).digests is None
            assert await broker.story(name)
            assert (await broker.retire(name)).version == 1
            with pytest.raises(NotFound, match=r"it was retired.*; load it again"):
                await broker.attach(name)

    run(main())


def test_the_first_of_many_tasks_gets_the_draft_and_the_rest_wait_for_it(client: BlockingBroker, name: str) -> None:
    async def work(broker: Broker) -> bytes:
        async with await broker.attach_or_create(name, LAYOUT, device=0) as pool:
            if isinstance(pool, Draft):
                pool["weight"].copy_from_bytes(content("weight", 128))
                assert await pool.seal() == 1
                return b""
            return pool["weight"].tobytes()

    async def main() -> list[bytes]:
        async with Broker(client.directory) as broker:
            return await asyncio.gather(*(work(broker) for _ in range(20)))

    assert sorted(run(main())) == [b"", *[content("weight", 128)] * 19]


def test_a_draft_that_is_left_without_a_seal_is_discarded(client: BlockingBroker, name: str) -> None:
    async def main() -> None:
        async with Broker(client.directory) as broker:
            async with await broker.create(name, LAYOUT, plan=dict.fromkeys((spec.name for spec in LAYOUT.tensors), 0)):
                pass
            assert await broker.pools() == ()
            for create in (broker.create, broker.attach_or_create):
                for devices in ("0", 1, ()):
                    with pytest.raises(Invalid, match="no list of devices"):
                        await create(name, LAYOUT, devices=devices)
                with pytest.raises(Invalid, match="is no plan"):
                    await create(name, LAYOUT, plan=0)

    run(main())


def test_arrays_are_published(client: BlockingBroker, name: str) -> None:
    async def main() -> None:
        async with Broker(client.directory) as broker:
            assert await broker.publish(name, {"x": np.arange(4, dtype=np.float32)}) == 1
            async with await broker.attach(name) as pool:
                assert pool["x"].numpy().tolist() == [0, 1, 2, 3]

    run(main())


def test_publications_that_wait_for_their_turn_take_no_thread_of_the_loop(client: BlockingBroker, name: str) -> None:
    async def main() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        async with Broker(client.directory) as broker:
            async with await broker.create(name, [("x", "F32", (2,))]) as draft:
                publishing = [
                    asyncio.create_task(broker.publish(name, {"x": np.full(2, number)}, wait=PATIENCE))
                    for number in range(3)
                ]
                await until(lambda: waiting(broker, name, 3))
                assert await draft.seal(in_place=True) == 1  # in the one thread that the loop has
            assert sorted(await asyncio.gather(*publishing)) == [2, 3, 4]

    run(main())


def test_a_publication_that_is_cancelled_while_it_waits_ends_here_and_at_the_broker(
    client: BlockingBroker, name: str
) -> None:
    client.publish(name, {"x": np.zeros(2), "y": np.zeros(2)})

    async def main() -> None:
        async with Broker(client.directory) as broker:
            async with await broker.create(name, [("x", "F32", (2,))]):
                publishing = asyncio.create_task(broker.publish(name, {"x": np.ones(2)}, wait=PATIENCE, base=name))
                await until(lambda: waiting(broker, name, 1))
                assert leases(client, name) == 2  # on the base and on the draft
                publishing.cancel()
                with pytest.raises(asyncio.CancelledError) as raised:
                    await publishing
                await until(lambda: waiting(broker, name, 0))
                assert leases(client, name) == 1
            assert [(info.version, info.state) for info in client.pools() if info.name == name] == [(1, "current")]
            del raised  # the error and its frames were kept until here

    run(main())


@pytest.mark.parametrize("turns", range(6))
def test_a_publication_whose_copy_waits_for_a_thread_is_cancelled_with_its_draft(
    client: BlockingBroker, name: str, turns: int
) -> None:
    client.publish(name, {"x": np.zeros(2), "y": np.zeros(2)})
    hold = threading.Event()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(1))
        async with Broker(client.directory) as broker, Broker(client.directory) as other:
            async with await other.create(name, [("x", "F32", (2,))]):
                publishing = asyncio.create_task(broker.publish(name, {"x": np.ones(2)}, wait=PATIENCE, base=name))
                await until(lambda: waiting(other, name, 1))
                held = loop.run_in_executor(None, hold.wait)

            async def has_draft() -> bool:
                return any(info.state == "draft" for info in await other.pools())

            await until(has_draft)
            for _ in range(turns):
                await other.pools()
            publishing.cancel()
            try:
                with pytest.raises(asyncio.CancelledError) as raised:
                    await publishing
                async with asyncio.timeout(PATIENCE / 4):
                    await until(lambda: none_lent(other))
            finally:
                hold.set()  # else the end of this loop waits for the thread
            await held
            assert [(info.version, info.state) for info in client.pools() if info.name == name] == [(1, "current")]
            del raised

    run(main())


def test_cuda_alone_is_the_device_that_is_current_where_it_is_named() -> None:
    arrays = {"x": np.arange(4, dtype=np.float32)}

    async def main(directory: Path) -> None:
        async with Broker(directory) as broker:
            driver = broker.driver
            with driver.context(1).current():
                for options in ({"devices": ["cuda"]}, {"plan": {"x": "cuda"}}, {"plan": {"*": "cuda"}}):
                    version = await broker.publish("a", arrays, **options)
                    async with await broker.attach("a", device="cuda") as pool:
                        assert (pool.version, pool.blocking.device.index) == (version, 1)
                async with await broker.attach("a", device="cuda", version=version) as pool:
                    assert pool.blocking.device.index == 1
                for create in (broker.create, broker.attach_or_create):
                    async with await create("b", LAYOUT, devices=["cuda"]) as draft:
                        assert draft.blocking.device.index == 1
                async with await broker.attach_or_create("b", LAYOUT, device="cuda") as draft:
                    assert draft.blocking.device.index == 1
                async with await broker.create("b", [("x", "F32", (4,))], plan={"x": "cuda"}) as draft:
                    assert draft.blocking.device.index == 1
            assert driver.context(1).calls.module.retained == [0, 1]

    with serving("host:2@10MiB") as server:
        run(main(server.directory))


def test_what_is_current_later_does_not_count(broker: BrokerProcess) -> None:
    async def main() -> None:
        for ask in ("create", "attach_or_create"):
            async with Broker(broker.directory) as client:
                with client.driver.context(1).current():
                    asked = asyncio.create_task(getattr(client, ask)("pool", LAYOUT, devices=["cuda"]))
                    await asyncio.sleep(0)  # a thread makes the context, if need be
                with client.driver.context(0).current():
                    async with await asked as draft:
                        assert draft.blocking.device.index == 1

    run(main())


def test_digests_are_computed_and_checked(client: BlockingBroker, name: str) -> None:
    async def main() -> None:
        async with Broker(client.directory) as broker:
            async with await broker.create(name, LAYOUT) as draft:
                await draft.seal(digest=True)
            async with await broker.attach(name) as pool:
                await pool.check()
            assert (await broker.digests(name)).digests is not None

    run(main())


@pytest.mark.parametrize("end", ["seal", "cancel", "close", "broker"])
def test_a_digest_blocks_no_loop_that_waits_for_it_or_closes_its_draft(
    client: BlockingBroker, name: str, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    computing, gate, released = threading.Event(), threading.Event(), list[bool]()
    digests = Context.digests

    def slow(self: Context, ranges: Any) -> list[bytes]:
        computing.set()
        released.append(gate.wait(PATIENCE / 4))
        return digests(self, ranges)

    async def begins() -> bool:
        return computing.is_set()

    async def main() -> None:
        async with Broker(client.directory) as broker, beating() as heart:
            draft = await broker.create(name, LAYOUT)
            tensor = draft["weight"]
            monkeypatch.setattr(Context, "digests", slow)
            sealing = asyncio.create_task(draft.seal(digest=True))
            await until(begins)
            with pytest.raises(Invalid):
                tensor.copy_from_bytes(bytes(128))
            ends: list[asyncio.Task[Any]] = []
            if end == "cancel":
                sealing.cancel()
                with suppress(asyncio.CancelledError):
                    await sealing
            if end in ("cancel", "close"):
                ends.append(asyncio.create_task(draft.close()))
            if end == "broker":
                ends.append(asyncio.create_task(broker.close()))
            await heart.more(100)
            assert not any(each.done() for each in ends)
            gate.set()
            if end != "cancel":
                assert await sealing == 1
            await asyncio.gather(*ends)
            assert draft.closed

    run(main())
    assert released == [True]
    assert client.digests(name).digests is not None
    assert [(info.version, info.leases) for info in client.pools()] == [(1, 0)]


def test_a_draft_that_is_closed_while_its_digest_fails_is_discarded(
    client: BlockingBroker, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    computing, gate = threading.Event(), threading.Event()

    def refuse(self: Context, ranges: object) -> list[bytes]:
        computing.set()
        gate.wait(PATIENCE)
        raise DriverError("cuLaunchKernel", 719, "CUDA_ERROR_LAUNCH_FAILED", "")

    monkeypatch.setattr(Context, "digests", refuse)
    draft = client.create(name, LAYOUT)
    tensor = draft["weight"]
    sealing = begun(lambda: draft.seal(digest=True))
    assert computing.wait(PATIENCE)
    closing = begun(draft.close)
    eventually(lambda: draft.closed, "the end of the draft")
    gate.set()
    assert isinstance(sealing.exception(PATIENCE), DeviceFailure)
    assert closing.result(PATIENCE) is None
    with pytest.raises(Invalid, match="given back"):
        tensor.tobytes()
    assert client.pools() == ()


@pytest.mark.slow
def test_hundreds_of_attaches_wait_at_once_and_the_loop_goes_on(client: BlockingBroker, name: str) -> None:
    async def main() -> None:
        async with Broker(client.directory) as broker, beating() as heart:
            threads = threading.enumerate()
            attaching = [asyncio.create_task(broker.attach(name, wait=PATIENCE)) for _ in range(200)]

            async def all_wait() -> bool:
                return sum(waiter.pool == name for waiter in (await broker.look()).waiters) == 200

            await until(all_wait)
            await heart.more(1000)
            assert not any(task.done() for task in attaching)
            assert threading.enumerate() == threads
            async with await broker.create(name, LAYOUT) as draft:
                draft["weight"].copy_from_bytes(content("weight", 128))
                await draft.seal()
            pools = await asyncio.gather(*attaching)
            assert leases(client, name) == 200
            assert {pool["weight"].tobytes() for pool in pools} == {content("weight", 128)}
            await asyncio.gather(*(pool.close() for pool in pools))
            assert leases(client, name) == 0

    run(main())


def test_a_cancelled_attach_does_not_wait_at_the_broker_any_more(client: BlockingBroker, name: str) -> None:
    async def main() -> None:
        async with Broker(client.directory) as broker:

            async def waits() -> bool:
                return name in [waiter.pool for waiter in (await broker.look()).waiters]

            async def waits_no_more() -> bool:
                return not await waits()

            attaching = asyncio.create_task(broker.attach(name, wait=PATIENCE))
            await until(waits)
            attaching.cancel()
            with pytest.raises(asyncio.CancelledError):
                await attaching
            await until(waits_no_more)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await broker.attach(name, wait=PATIENCE)
            await until(waits_no_more)

    run(main())


@pytest.mark.parametrize("turns", range(12))
def test_an_attach_that_is_cancelled_in_the_middle_leaves_no_lease(
    client: BlockingBroker, name: str, turns: int
) -> None:
    publish(client, name)

    async def main() -> None:
        async with Broker(client.directory) as broker:
            for number in range(10):
                attaching = asyncio.create_task(broker.attach(name))
                if number % 2:  # until its memory is mapped, and this loop is told
                    await broker.pools()
                for _ in range(turns):
                    await asyncio.sleep(0)
                attaching.cancel()
                with suppress(asyncio.CancelledError):
                    await (await attaching).close()
                del attaching

            async def none_left() -> bool:
                return not any(info.leases for info in await broker.pools())

            await until(none_left)

    run(main())


def test_a_wait_that_the_broker_ends_raises_as_in_a_thread(client: BlockingBroker, name: str) -> None:
    async def main() -> None:
        async with Broker(client.directory) as broker:
            with pytest.raises(TimedOut, match="for it to be published"):
                await broker.attach(name, wait=0.01)
            assert not await broker.wait_draining(0.01)
            await broker.drain()
            assert await broker.wait_draining()
            assert broker.draining
            await broker.drain(on=False)
            assert await broker.wait_draining(over=True)

    run(main())


@pytest.mark.slow
def test_a_broker_that_is_stopped_blocks_no_loop_and_is_not_waited_for_beyond_the_time_limit(
    broker: BrokerProcess,
) -> None:
    async def main() -> None:
        async with Broker(broker.directory, timeout=0.5) as client, beating() as heart:
            broker.process.send_signal(signal.SIGSTOP)
            try:
                asking = asyncio.create_task(client.pools())
                await heart.more(100)
                with pytest.raises(TimedOut, match=r"did not answer the request ListPools within 0.5 s"):
                    await asking
            finally:
                broker.process.send_signal(signal.SIGCONT)
            assert await client.pools() == ()

    run(main())


def test_connecting_blocks_no_loop(broker: BrokerProcess) -> None:
    async def main() -> None:
        async with beating() as heart:
            client = Broker(broker.directory)
            broker.process.send_signal(signal.SIGSTOP)
            try:
                connecting = asyncio.create_task(client.connect())
                await heart.more(1000)
                assert not connecting.done()
                with pytest.raises(Unavailable, match="not connected yet"):
                    _ = client.session
                assert repr(client) == "<Broker that is not connected>"
            finally:
                broker.process.send_signal(signal.SIGCONT)
            assert await connecting is await client.connect() is client
            await client.close()

    run(main())


def test_a_session_whose_connect_was_cancelled_ends(broker: BrokerProcess) -> None:
    async def main() -> None:
        broker.process.send_signal(signal.SIGSTOP)
        try:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await Broker(broker.directory).connect()
        finally:
            broker.process.send_signal(signal.SIGCONT)

    run(main())
    with BlockingBroker(broker.directory) as observer:
        eventually(lambda: len(observer.clients()) == 1, "the end of the session that no task waits for")


def test_a_session_ends_whose_connect_was_cancelled_while_the_driver_was_loaded(
    broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    loading, go_on = threading.Event(), threading.Event()
    monkeypatch.setattr(BlockingBroker, "driver", property(lambda _: (loading.set(), go_on.wait(PATIENCE))))

    async def cancelled() -> asyncio.CancelledError:
        connecting = asyncio.create_task(Broker(broker.directory).connect())
        await asyncio.to_thread(loading.wait, PATIENCE)
        connecting.cancel()
        go_on.set()
        with pytest.raises(asyncio.CancelledError) as caught:
            await connecting
        return caught.value

    error = run(cancelled())
    with BlockingBroker(broker.directory) as observer:
        eventually(lambda: len(observer.clients()) == 1, "the end of the session, although there is still its error")
    assert error.__traceback__


def test_a_connect_to_no_broker_fails(tmp_path: Path) -> None:
    async def main() -> None:
        broker = Broker(tmp_path)
        with pytest.raises(Unavailable, match="no broker serves"):
            await broker.connect()
        await broker.close()

    run(main())


def test_tasks_that_connect_at_once_share_a_session(client: BlockingBroker) -> None:
    async def main() -> None:
        broker = Broker(client.directory)
        await asyncio.gather(*(broker.connect() for _ in range(5)))
        session = broker.session
        await broker.connect()
        assert broker.session == session
        await broker.close()

    run(main())
    eventually(lambda: len(client.clients()) == 1, "the end of the sessions that were too many")


@pytest.mark.slow
def test_a_broker_that_comes_later_is_waited_for_and_the_next_one_too(broker: BrokerProcess) -> None:
    async def lost(client: Broker) -> bool:
        return bool(client.lost)

    async def main() -> None:
        broker.kill()
        with pytest.raises(TimedOut, match=r"waited 0.01 s for a broker: no broker serves"):
            await Broker(broker.directory, wait=0.01).connect()
        async with beating() as heart:
            client = Broker(broker.directory, wait=PATIENCE)
            connecting = asyncio.create_task(client.connect())
            await heart.more(1000)
            assert not connecting.done()
            await asyncio.to_thread(broker.start)
            await connecting
            assert client.lost == ""
            async with await client.create("pool", LAYOUT) as draft:
                await draft.seal()
            pool = await client.attach("pool")
            broker.kill()
            await until(lambda: lost(client))
            assert pool.lost
            with pytest.raises(Unavailable, match="no broker serves"):
                await client.reconnect()
            reconnecting = asyncio.create_task(client.reconnect(PATIENCE))
            await heart.more(1000)
            assert not reconnecting.done()
            await asyncio.to_thread(broker.start)
            await reconnecting
            assert await client.pools() == ()
            broker.kill()
            await until(lambda: lost(client))
            await asyncio.to_thread(broker.start)
            with pytest.raises(NotFound, match="pool"):
                await client.attach("pool")
            assert client.lost == ""
            await client.close()

    run(main())


@pytest.mark.slow
def test_an_attach_whose_session_is_lost_on_the_way_opens_none_on_the_loop(
    broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    use, greet, greeted = Broker._use, session.greet, list[threading.Thread]()
    deaths = 2

    def greeting(directory: Path, timeout: float) -> Any:
        greeted.append(threading.current_thread())
        return greet(directory, timeout)

    async def using(client: Broker, devices: Any) -> tuple[str, ...]:
        nonlocal deaths
        uuids = await use(client, devices)
        if deaths:  # in the middle of an attach
            deaths -= 1
            broker.kill()
            await until(lambda: lost(client))
            await asyncio.to_thread(broker.start)
        return uuids

    async def lost(client: Broker) -> bool:
        return bool(client.lost)

    async def main() -> None:
        async with Broker(broker.directory) as client:
            monkeypatch.setattr(Broker, "_use", using)
            with pytest.raises(NotFound, match="pool"):
                await client.attach("pool", device=0)
            assert client.lost == ""

    monkeypatch.setattr(session, "greet", greeting)
    run(main())
    assert len(greeted) == 3
    assert threading.current_thread() not in greeted


def test_the_server_of_the_page_goes_from_version_to_version(
    broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUBROKER_DIR", str(broker.directory))
    sample = re.search(r"^## asyncio\n.*?^```python\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert sample
    program: dict[str, Any] = {}
    exec(sample[1], program)
    seen: list[int] = []

    async def step(pools: list[Pool], extra: Pool, version: int) -> bool:
        assert [pool["weight"].tobytes() for pool in (*pools, extra)] == [content("weight", 128)] * 3
        seen.append(version)
        if version == 1:
            await asyncio.to_thread(publish, other, "adapter")
        return version < 2

    with BlockingBroker(broker.directory) as other:
        for name in ("a", "b", "adapter"):
            publish(other, name)
        run(program["serve"](["a", "b"], step))
        assert seen == [1, 2]
        assert len(other.clients()) == 1


def test_loops_in_two_threads_share_a_broker(client: BlockingBroker, name: str) -> None:
    publish(client, name)
    broker = Broker(client.directory)
    run(broker.connect())

    async def work() -> int:
        for _ in range(20):
            async with await broker.attach(name) as pool:
                assert pool["weight"].tobytes() == content("weight", 128)
        return len(await broker.pools())

    others = [begun(lambda: run(work())) for _ in range(2)]
    assert [each.result(PATIENCE) for each in others] == [1, 1]
    run(broker.close())


def test_a_loop_that_is_closed_while_it_waits_stands_in_no_other_loops_way(client: BlockingBroker, name: str) -> None:
    broker = Broker(client.directory)
    run(broker.connect())
    loop = asyncio.new_event_loop()
    loop.set_exception_handler(lambda *_: None)  # which would be told of the task
    attaching = loop.create_task(broker.attach(name, wait=PATIENCE))
    loop.run_until_complete(asyncio.sleep(0.01))
    loop.close()
    publish(client, name)
    eventually(lambda: leases(client, name), "the lease that no loop takes")
    assert [info.name for info in run(broker.pools())] == [name]
    with suppress(RuntimeError):  # it cleans up
        attaching.get_coro().close()  # type: ignore[union-attr]
    run(broker.close())
    del attaching
    eventually(lambda: not leases(client, name), "the end of the lease")


def test_closing_ends_what_other_tasks_wait_for(client: BlockingBroker, name: str) -> None:
    async def main() -> None:
        broker = await Broker(client.directory).connect()
        changes = await broker.watch(name)
        assert await anext(changes) is None
        waiting: list[asyncio.Task[Any]] = [
            asyncio.create_task(broker.attach(name, wait=PATIENCE)),
            asyncio.create_task(broker.create(name, LAYOUT, wait=PATIENCE)),
            asyncio.create_task(anext(changes)),  # type: ignore[arg-type]
            asyncio.create_task(broker.wait_draining()),
        ]
        drafting = await waiting[1]
        await broker.close()
        assert drafting.closed
        outcomes = await asyncio.gather(waiting[0], *waiting[2:], return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [Unavailable] * 3
        with pytest.raises(Unavailable, match="this Broker is closed"):
            await broker.pools()

    before = session_threads()
    run(main())
    eventually(lambda: session_threads() == before, "the end of its threads")
    assert client.pools() == ()


def test_a_watch_is_iterated_and_its_end_ends_the_iteration(client: BlockingBroker, name: str) -> None:
    async def main() -> None:
        async with Broker(client.directory) as broker:
            seen = []
            async with await broker.watch(name, owner="root") as changes:
                async for version in changes:
                    seen.append(version)
                    if version is None and len(seen) == 1:
                        async with await broker.create(name, LAYOUT) as draft:
                            await draft.seal()
                    elif version:
                        await broker.retire(name)
                    else:
                        await changes.close()
            assert seen == [None, 1, None]

    run(main())


def test_a_pool_is_followed(client: BlockingBroker, name: str) -> None:
    publish(client, name)

    async def main() -> list[int]:
        seen = []
        async with Broker(client.directory) as broker, await broker.attach(name) as pool:
            with broker.follow(name, timeout=PATIENCE) as versions, pool.follow(switch=True) as newer:
                async for version in versions:
                    seen.append(version)
                    if version == 2:
                        return [*seen, await anext(newer), pool.version]
                    await asyncio.to_thread(publish, client, name)
        return seen

    assert run(main()) == [1, 2, 2, 2]


def test_the_end_of_a_block_ends_a_follow_at_once(client: BlockingBroker, name: str) -> None:
    publish(client, name)

    async def main() -> None:
        async with Broker(client.directory) as broker, await broker.attach(name) as pool:
            async with broker.follow(name) as versions, pool.follow() as newer:
                assert await anext(versions) == 1
                waiting = [asyncio.create_task(anext(follow, "over")) for follow in (versions, newer)]
                await asyncio.sleep(0)
            assert await asyncio.gather(*waiting) == ["over", "over"]
            await until(none_follows)

    run(main())


def test_a_cancelled_iteration_goes_on_later(client: BlockingBroker, name: str) -> None:
    async def main() -> None:
        async with Broker(client.directory) as broker, await broker.watch(name) as changes:
            assert await anext(changes) is None
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await anext(changes)
            with pytest.raises(TimedOut, match=r"did not change within 0.01 s"):
                await changes.next(0.01)
            publish(client, name)
            assert await anext(changes) == 1

    run(main())


def test_tasks_that_wake_a_pool_at_once_leave_one_lease(client: BlockingBroker, name: str) -> None:
    publish(client, name)

    async def main() -> None:
        async with Broker(client.directory) as broker, await broker.attach(name) as pool:
            address = pool["weight"].pointer
            await pool.sleep()
            assert pool.asleep
            assert leases(client, name) == 0
            await asyncio.gather(*(pool.wake() for _ in range(10)))
            assert not pool.asleep
            assert (pool["weight"].pointer, pool["weight"].tobytes()) == (address, content("weight", 128))

            async def one_left() -> bool:
                return [info.leases for info in await broker.pools()] == [1]

            await until(one_left)
            await pool.wake()

    run(main())


def test_a_cancelled_wake_leaves_the_pool_asleep_or_awake_and_no_lease_more(client: BlockingBroker, name: str) -> None:
    publish(client, name)

    async def main() -> None:
        async with Broker(client.directory) as broker, await broker.attach(name) as pool:
            for turns in range(20):
                await pool.sleep()
                waking = asyncio.create_task(pool.wake())
                for _ in range(turns):
                    await asyncio.sleep(0)
                waking.cancel()
                with suppress(asyncio.CancelledError):
                    await waking
                await pool.wake()
                assert pool["weight"].tobytes() == content("weight", 128)

            async def one_left() -> bool:
                return [info.leases for info in await broker.pools()] == [1]

            await until(one_left)

    run(main())


def test_a_pool_is_switched(client: BlockingBroker, name: str) -> None:
    publish(client, name)

    async def main() -> None:
        async with Broker(client.directory) as broker, await broker.attach(name) as pool:
            address = pool["weight"].pointer
            with pytest.raises(TimedOut):
                await pool.switch(2, wait=0.01)
            switching = asyncio.create_task(pool.switch(2, wait=PATIENCE))
            await asyncio.to_thread(publish, client, name)
            assert await switching == pool.version == 2
            assert (pool["weight"].pointer, pool["weight"].tobytes()) == (address, content("weight", 128))

    run(main())


def test_a_cancelled_switch_leaves_one_version_or_the_other(client: BlockingBroker, name: str) -> None:
    publish(client, name)

    async def main() -> None:
        async with Broker(client.directory) as broker, await broker.attach(name) as pool, beating() as heart:
            keeping = [await broker.attach(name)]
            await asyncio.to_thread(publish, client, name)
            keeping.append(await broker.attach(name))
            for number in range(20):
                before = pool.version
                switching = asyncio.create_task(pool.switch(3 - before))
                await heart.more(number)
                switching.cancel()
                with suppress(asyncio.CancelledError):
                    assert await switching == 3 - before
                assert pool["weight"].tobytes() == content("weight", 128)
                assert pool.version in (1, 2)

            async def as_before() -> bool:
                return sum([info.leases for info in await broker.pools()]) == 3

            await until(as_before)
            del keeping

    run(main())


def test_a_switch_that_is_cancelled_again_ends_when_all_of_one_version_is_mapped(
    client: BlockingBroker, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mapping, go_on, replace = threading.Event(), threading.Event(), LeaseHandle.replace

    def slow(lease: LeaseHandle, *args: Any) -> LeasedMemory:
        mapping.set()
        assert go_on.wait(PATIENCE)
        return replace(lease, *args)

    async def main() -> None:
        async with Broker(client.directory) as broker, await broker.attach(name) as pool:
            await asyncio.to_thread(publish, client, name)
            monkeypatch.setattr(LeaseHandle, "replace", slow)
            switching = asyncio.create_task(pool.switch())
            await asyncio.to_thread(mapping.wait, PATIENCE)
            try:
                for _ in range(3):
                    switching.cancel()
                    assert not (await asyncio.wait((switching,), timeout=0.05))[0]
            finally:
                go_on.set()
            with pytest.raises(asyncio.CancelledError):
                await switching
            assert pool.version == 2
            assert pool["weight"].tobytes() == content("weight", 128)

    publish(client, name)
    run(main())


def test_a_wake_whose_answer_comes_after_a_switch_maps_no_version_under_the_number_of_another(
    client: BlockingBroker, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gateway that dies takes answers along; the request is sent again, and answered late."""
    publish(client, name)

    async def main() -> None:
        async with Broker(client.directory) as broker, await broker.attach(name) as pool:
            requests, lost = broker.blocking.requests, set[int]()
            read = requests.read

            def losing(frame: bytes) -> Answer | None:
                answer = read(frame)
                if answer and isinstance(answer.body, Attached) and (not lost or answer.id in lost):
                    lost.add(answer.id)
                    return None
                return answer

            async def one_lost() -> bool:
                return bool(lost)

            async with await broker.attach(name):  # version 1 stays
                await asyncio.to_thread(publish, client, name)
                await pool.sleep()
                monkeypatch.setattr(requests, "read", losing)
                waking = asyncio.create_task(pool.wake())
                await until(one_lost)
                assert await pool.switch(2) == 2
                await pool.sleep()
                monkeypatch.setattr(requests, "read", read)
                with pytest.raises(Invalid, match="was switched to version 2 while version 1 was woken"):
                    await waking
                assert (pool.version, pool.asleep) == (2, True)
            await pool.wake()
            assert (pool.version, pool["weight"].tobytes()) == (2, content("weight", 128))
            assert leases(client, name) == 1

    run(main())


def test_an_event_is_made_recorded_waited_for_and_closed(client: BlockingBroker, name: str) -> None:
    publish(client, name, writable=True)

    async def main() -> None:
        async with Broker(client.directory) as broker, await broker.attach(name) as pool, beating() as heart:
            async with await pool.event("ready", device=0) as event:
                assert (event.name, event.mine, event.device.index, event.closed) == ("ready", True, 0, False)
                assert "mine" in repr(event)
                with pytest.raises(TimedOut):
                    await event.wait(timeout=0.01)
                waiting = asyncio.create_task(event.wait(timeout=PATIENCE))
                await heart.more(100)
                assert not waiting.done()
                assert await event.record() == 1
                assert await waiting == 1
                assert await event.record() == 2
                assert await event.wait(stream=0, after=1) == 2
                with pytest.raises(NotFound):
                    await pool.open_event("other")
            assert event.closed
            with pytest.raises(Invalid, match="closed"):
                await event.record()

    run(main())


def test_an_event_of_another_process_is_waited_for_and_a_cancelled_wait_ends_at_the_broker(
    client: BlockingBroker, lender: BrokerProcess, name: str
) -> None:
    test_synchronization.scratch(client, name)

    async def main() -> None:
        async with Broker(client.directory) as broker, await broker.attach(name) as pool:

            async def waits() -> bool:
                return name in [waiter.pool for waiter in (await broker.look()).waiters]

            async def waits_no_more() -> bool:
                return not await waits()

            opening = asyncio.create_task(pool.open_event("ready", wait=PATIENCE))
            await until(waits)
            with test_synchronization.producing(lender, name) as producer:
                event = await opening
                waiting = asyncio.create_task(event.wait(timeout=PATIENCE))
                await until(waits)
                waiting.cancel()
                with suppress(asyncio.CancelledError):
                    await waiting
                await until(waits_no_more)
                waiting = asyncio.create_task(event.wait(timeout=PATIENCE))
                assert await asyncio.to_thread(producer.ask, "write 7") == "1"
                assert await waiting == 1
                assert set(pool["x"].tobytes()) == {7}
                waiting = asyncio.create_task(event.wait(timeout=PATIENCE))
                await until(waits)
            with pytest.raises(Unavailable):  # its maker has ended
                await waiting

    run(main())


def test_work_before_an_event_is_waited_for_while_the_loop_goes_on(
    client: BlockingBroker, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(client, name, writable=True)
    finished = threading.Event()
    monkeypatch.setattr(DriverEvent, "done", lambda event: finished.is_set())

    async def main() -> None:
        async with Broker(client.directory) as broker, await broker.attach(name) as pool, beating() as heart:
            event = await pool.event("ready")
            await event.record()
            with pytest.raises(TimedOut, match="the work before it goes on"):
                await event.wait(timeout=0.01)
            waiting = asyncio.create_task(event.wait(after=0, timeout=PATIENCE))
            await heart.more(1000)
            assert not waiting.done()
            finished.set()
            assert await waiting == 1

    run(main())


def test_an_array_is_broadcast_to_all_replicas(client: BlockingBroker, name: str) -> None:
    async def main() -> None:
        async with (
            Broker(client.directory) as broker,
            await broker.create(name, LAYOUT, devices=(0, 1), share="multicast") as draft,
        ):
            await draft.broadcast(np.full((4, 8), 3, np.float32), "weight")
            assert [set(replica["weight"].numpy().flat) for replica in draft.replicas] == [{3.0}, {3.0}]

    run(main())


def test_pools_that_cannot_sleep_say_so(client: BlockingBroker, name: str) -> None:
    publish(client, name, share="ipc")

    async def main() -> None:
        async with Broker(client.directory) as broker, await broker.attach(name) as pool:
            with pytest.raises(Unsupported, match="cannot sleep"):
                await pool.sleep()

    run(main())


def test_the_pool_below_goes_into_code_that_takes_one(client: BlockingBroker, name: str) -> None:
    publish(client, name)

    async def main() -> None:
        async with Broker(client.directory) as broker, await broker.attach(name) as pool:
            assert isinstance(pool.blocking, BlockingPool)
            assert (await asyncio.to_thread(broker.blocking.pools))[0].leases == 1

    run(main())
