"""The broker is killed under the holders of durable multicast pools: the next one binds the replicas together anew."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import pytest

from cubroker.client import Broker, Pool
from cubroker.client.transport.fd_receiver import FdReceiver
from cubroker.client.transport.requests import Future
from cubroker.driver import DriverError, MulticastOff, Window
from cubroker.protocol.errors import CubrokerError, DeviceFailure, Invalid, TimedOut, Unavailable, Unsupported
from cubroker.protocol.messages import (
    DESCRIPTOR,
    Close,
    Created,
    Descriptors,
    Done,
    ListPools,
    Rebound,
    ReplicaHandles,
    Team,
)
from tests.brokers import eventually, serving
from tests.stores import StoredBroker, storing
from tests.unit.client.conftest import impatient, leases, received, session_of
from tests.unit.client.memory.test_broadcast import NAMES, OPTIONS, TENSORS, WAYS, heard, make, text
from tests.unit.client.scripts import start

DEVICES = "host:3@16MiB"
OBJECT = re.compile(r" (\d+) +/memfd:cubroker-multicast")


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[StoredBroker]:
    """A broker with a store, whose three devices are bound together."""
    monkeypatch.setenv(OPTIONS, "")
    with storing(DEVICES) as broker:
        yield broker
        assert "Traceback" not in broker.log()


@pytest.fixture
def client(kept: StoredBroker) -> Iterator[Broker]:
    with Broker(kept.directory) as broker:
        yield broker
        for pool in broker.pools():
            broker.retire(pool.name, pool.version)
        eventually(lambda: not any(device.allocated for device in broker.devices()), "the memory to be freed")
        assert broker.driver.context(0).calls.module.violations == 0
    assert not objects()


def objects() -> set[str]:
    """The multicast objects that this process has mapped."""
    return set(OBJECT.findall(Path("/proc/self/maps").read_text()))


def lasting(client: Broker, *, writable: bool = True) -> None:
    """Publish a durable multicast pool on all devices."""
    with client.create("x", TENSORS, devices=(0, 1, 2), share="multicast", writable=writable, durable=True) as draft:
        for name in NAMES:
            draft.broadcast(text(name), name)
        draft.seal()


def replaced(before: set[str]) -> None:
    """Return when nothing is mapped of the objects that there were."""
    eventually(lambda: not objects() & before, "other objects in their place")


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_who_held_replicas_goes_on_storing_to_all_and_so_does_who_comes_after_a_kill(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices, options = WAYS[way]
    monkeypatch.setenv(OPTIONS, options)
    with storing(devices) as kept, Broker(kept.directory) as client:
        lasting(client)
        with client.attach("x", device=0) as first, client.attach("x", device=1) as second:
            where = [pool["odd"].pointer for pool in (first, second)]
            multicast = [pool.multicast_pointer("odd") for pool in (first, second) if pool.how == "multicast"]
            how = first.how, first.why
            for salt in (1, 3):
                before = objects()
                kept.restart()
                with Broker(kept.directory) as other, other.attach("x", device=2) as third:
                    replaced(before)
                    for number, pool in enumerate((first, second, third)):
                        for name in NAMES:
                            pool.broadcast(text(name, salt + number), name)
                            assert heard(other, name) == [text(name, salt + number)] * 3
                assert (first.how, first.why) == (second.how, second.why) == how
            assert [pool["odd"].pointer for pool in (first, second)] == where
            assert [pool.multicast_pointer("odd") for pool in (first, second) if pool.how == "multicast"] == multicast
            assert leases(client, "x") == 2
        assert client.driver.context(0).calls.module.violations == 0
        assert "Traceback" not in kept.log()
    assert not objects()


def test_readers_that_may_not_write_keep_their_replicas(client: Broker, kept: StoredBroker) -> None:
    lasting(client, writable=False)
    with client.attach("x", device=1) as pool:
        kept.restart()
        assert heard(client, "odd") == [text("odd")] * 3
        assert pool["odd"].tobytes() == text("odd")
        with pytest.raises(Invalid, match="create it with writable=True"):
            pool.broadcast(text("odd"), "odd")


def test_a_draft_goes_on_storing_to_all_and_is_published(client: Broker, kept: StoredBroker) -> None:
    options = {"devices": (0, 1, 2), "share": "multicast", "writable": True, "durable": True}
    with client.create("x", TENSORS, **options) as draft:  # type: ignore[arg-type]
        for salt in (1, 2):
            before = objects()
            kept.restart()
            replaced(before)
            draft.broadcast(text("odd", salt), "odd")
            assert [replica["odd"].tobytes() for replica in draft.replicas] == [text("odd", salt)] * 3
        draft.seal()
    assert heard(client, "odd") == [text("odd", 2)] * 3


@pytest.mark.slow
def test_another_way_to_all_replicas_is_taken_and_told(
    client: Broker, kept: StoredBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def restart(options: str) -> None:
        monkeypatch.setenv(OPTIONS, options)
        before = [(pool.how, pool.why) for pool in (held, draft)]
        kept.restart()
        eventually(lambda: (held.how, held.why) != before[0] and (draft.how, draft.why) != before[1], "the notices")

    lasting(client)
    with (
        client.attach("x", device=1) as held,
        client.create("y", TENSORS, devices=(0, 2), share="multicast", durable=True) as draft,
    ):
        for salt, (options, how) in enumerate(
            [("slots=0", "copies"), ("cuMulticastCreate=801", "copies"), ("", "multicast"), ("slots=0", "copies")]
        ):
            restart(options)
            assert held.how == draft.how == how
            assert bool(objects()) == (how == "multicast")
            held.broadcast(text("odd", salt), "odd")
            draft.broadcast(text("whole", salt), "whole")
            assert heard(client, "odd") == [text("odd", salt)] * 3
            assert [replica["whole"].tobytes() for replica in draft.replicas] == [text("whole", salt)] * 2
            if how == "copies":
                with pytest.raises(Unsupported, match="is written by copies"):
                    held.multicast_pointer("odd")


def test_a_draft_that_had_to_do_without_multicast_here_goes_on_with_copies(
    client: Broker, kept: StoredBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    off = "cuMemMap", 800, "CUDA_ERROR_NOT_PERMITTED", "NCCL_NVLS_ENABLE=0 says no"
    with monkeypatch.context() as patch:
        patch.setattr(Window, "map", _raising(MulticastOff, *off))
        draft = client.create("x", TENSORS, devices=(0, 1), share="multicast", durable=True)
    with draft, client.create("y", TENSORS, devices=(0, 1), share="multicast", durable=True) as other:
        before = objects()
        assert len(before) == 1
        kept.restart()
        replaced(before)  # the other's, whose turn is later
        draft.broadcast(text("odd", 1), "odd")
        other.broadcast(text("odd", 2), "odd")
        assert [replica["odd"].tobytes() for replica in draft.replicas] == [text("odd", 1)] * 2
        assert [replica["odd"].tobytes() for replica in other.replicas] == [text("odd", 2)] * 2
        assert len(objects()) == 1


# -- at the same time -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_broadcasts_that_run_meanwhile_all_reach_every_replica(client: Broker, kept: StoredBroker) -> None:
    lasting(client)
    over = threading.Event()
    rounds = count()

    with client.attach("x", device=1) as pool:

        def store(name: str) -> None:
            while not over.is_set():
                pool.broadcast(text(name, next(rounds)), name)
            pool.broadcast(text(name, 9), name)

        with ThreadPoolExecutor(2) as threads:
            stores = [threads.submit(store, name) for name in ("odd", "whole")]
            try:
                for _ in range(3):
                    before = objects()
                    kept.restart()
                    replaced(before)
            finally:
                over.set()
            for each in stores:
                each.result()
        assert all(heard(client, name) == [text(name, 9)] * 3 for name in ("odd", "whole"))


@pytest.mark.slow
def test_nothing_is_unmapped_under_a_tensor_that_is_held(client: Broker, kept: StoredBroker) -> None:
    lasting(client)
    with client.attach("x", device=0) as held, client.attach("x", device=1) as other:
        both = objects()
        with held["tiny"].hold():
            kept.restart()
            eventually(lambda: len(objects() - both) == 1, "the other's new object")
            kept.restart()
            eventually(lambda: objects() & both and len(objects() - both) == 1, "the other's next object")
            assert both & objects(), "it is there for what uses its addresses"
            held.broadcast(text("odd", 4), "odd")
            assert other["odd"].tobytes() == text("odd", 4)
        replaced(both)
        assert len(objects()) == 1
        held.broadcast(text("odd", 5), "odd")
        assert heard(client, "odd") == [text("odd", 5)] * 3


@pytest.mark.slow
def test_a_pool_that_is_asleep_wakes_with_the_objects_of_the_next_broker(client: Broker, kept: StoredBroker) -> None:
    lasting(client)
    with client.attach("x", device=1) as pool:
        where = pool["odd"].pointer, pool.multicast_pointer("odd")
        pool.sleep()
        kept.restart()
        assert not objects()
        pool.wake()
        assert (pool["odd"].pointer, pool.multicast_pointer("odd")) == where
        before = objects()
        pool.broadcast(text("odd", 2), "odd")
        kept.restart()
        replaced(before)
        pool.sleep()
        pool.wake()
        assert (pool["odd"].pointer, pool.multicast_pointer("odd")) == where
        pool.broadcast(text("odd", 3), "odd")
        assert heard(client, "odd") == [text("odd", 3)] * 3


def broadcasts(pool: Pool) -> bool:
    """Store to all replicas, unless there is no way; objects are mapped before they are one."""
    try:
        pool.broadcast(text("odd", 1), "odd")
    except Unsupported:
        return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize("addresses", [True, False], ids=["addresses go back", "addresses stay"])
def test_what_is_refused_is_told_and_the_next_broker_mends_it(
    addresses: bool,
    client: Broker,
    kept: StoredBroker,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    lasting(client)
    with client.attach("x", device=1) as pool:
        with monkeypatch.context() as patch:
            patch.setattr(Window, "map", _raising(DriverError, "cuMemMap", 802, "CUDA_ERROR_SYSTEM_NOT_READY"))
            if not addresses:
                patch.setattr(Window, "close", _raising(DriverError, "cuMemAddressFree", 999, "CUDA_ERROR_UNKNOWN"))
            kept.restart()
            eventually(lambda: not objects(), "the old objects to go")
            with pytest.raises(Unsupported, match=r"after a restart: .*NOT_READY.*close it, and attach again"):
                pool.broadcast(text("odd", 1), "odd")
        assert "NOT_READY" in caplog.text
        assert pool["odd"].tobytes() == text("odd")
        kept.restart()
        eventually(lambda: broadcasts(pool), "another way to all replicas")
        assert objects()
        assert heard(client, "odd") == [text("odd", 1)] * 3


def test_descriptors_that_cannot_come_and_notices_that_are_late(client: Broker, kept: StoredBroker) -> None:
    lasting(client)

    def bring(pool: Pool, notice: Rebound, given: CubrokerError | tuple[int, ...]) -> None:
        done: Future[None] = Future()
        session = session_of(client)
        (multicast,) = (each for each in session.rebindable if each.lease == pool.lease)
        session.cleanup.put(lambda: multicast.rebound(notice, given))
        session.cleanup.put(lambda: done.set(None))
        done.result()

    with client.attach("x", device=1) as pool:
        late = Rebound(pool.lease, (), Team("multicast", "late", (1,)))
        bring(pool, late, ())  # the inbox knows of none such
        pool.broadcast(text("odd", 1), "odd")
        bring(pool, late, DeviceFailure("no room for descriptors"))
        with pytest.raises(Unsupported, match=r"no room for descriptors; close it, and attach again"):
            pool.broadcast(text("odd", 2), "odd")
        kept.restart()
        eventually(lambda: broadcasts(pool), "the notice of new objects")
        pool.broadcast(text("odd", 2), "odd")
        assert heard(client, "odd") == [text("odd", 2)] * 3


# -- not yet --------------------------------------------------------------------------------------------


def unbound(client: Broker, monkeypatch: pytest.MonkeyPatch) -> Pool:
    """Attach as if a notice had come in between, whose descriptors are still on their way."""
    with monkeypatch.context() as patch:
        patch.setattr(FdReceiver, "later", lambda *_: True)
        return client.attach("x", device=1)


def test_a_broadcast_waits_until_the_replicas_are_bound_together(
    client: Broker, kept: StoredBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    lasting(client)
    with unbound(client, monkeypatch) as pool:
        assert not objects()
        assert pool["odd"].tobytes() == text("odd")
        thread = threading.Thread(target=pool.broadcast, args=(text("odd", 1), "odd"))
        thread.start()
        kept.restart()
        thread.join()
        assert heard(client, "odd") == [text("odd", 1)] * 3
    with unbound(client, monkeypatch) as pool:
        pool.sleep()
        pool.wake()
        pool.broadcast(text("odd", 2), "odd")
        assert heard(client, "odd") == [text("odd", 2)] * 3
        pool.sleep()
        where = pool.multicast_pointer
        with monkeypatch.context() as patch:
            patch.setattr(FdReceiver, "later", lambda *_: True)
            pool.wake()
        assert not objects()
        assert pool["odd"].tobytes() == text("odd", 2)
        kept.restart()
        assert where("odd")
        pool.broadcast(text("odd", 3), "odd")
        assert heard(client, "odd") == [text("odd", 3)] * 3


def test_a_broadcast_that_waits_is_told_that_nothing_comes(
    client: Broker, kept: StoredBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    lasting(client)
    with unbound(client, monkeypatch) as pool:
        with impatient(client, 0.1), pytest.raises(TimedOut, match=r"not bound together again within 0\.1 s"):
            pool.broadcast(text("odd"), "odd")
        with monkeypatch.context() as patch:
            patch.setitem(session_of(client).losses, (pool.name, pool.version), "descriptors of its memory are missing")
            with pytest.raises(Unavailable, match=r"is lost: descriptors .* are missing; close it"):
                pool.broadcast(text("odd"), "odd")
        _refused(pool, pool.sleep, Invalid, "is asleep")
    with unbound(client, monkeypatch) as pool:
        _refused(pool, pool.close, Invalid, "is closed")


def test_a_broadcast_that_waits_is_told_that_the_broker_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OPTIONS, "")
    with serving(DEVICES) as process, Broker(process.directory) as client:
        make(client)
        with unbound(client, monkeypatch) as pool:
            _refused(pool, process.kill, Unavailable, "is gone")
            with pytest.raises(Unavailable, match="is gone"):
                pool.broadcast(text("odd"), "odd")
            assert pool["odd"].tobytes() == text("odd")


LATE = """
from cubroker.driver import Window
mapping, killed = Window.map, []

def late(window, source, **options):
    if not killed:
        killed.append(True)
        print("mapping", flush=True)
        sys.stdin.readline()
    mapping(window, source, **options)

Window.map = late
with Broker(directory) as broker:
    pool = broker.attach("x", device=1)
    pool.broadcast(bytes(1001), "odd")
    print(pool.how, pool["odd"].tobytes() == bytes(1001), flush=True)
    sys.stdin.readline()
    os._exit(0)
"""


def test_objects_whose_broker_was_killed_while_they_were_to_be_mapped_hold_nobody_up(
    client: Broker, kept: StoredBroker
) -> None:
    """A driver would wait for their devices for ever."""
    lasting(client)
    with start(kept, LATE, measured=False) as worker:
        assert worker.stdout is not None
        assert worker.stdin is not None
        try:
            assert worker.stdout.readline() == "mapping\n"
            kept.kill()
            worker.stdin.write("\n")
            worker.stdin.flush()
            kept.start()
            assert worker.stdout.readline() == "multicast True\n", worker.stderr and worker.stderr.read()
            assert heard(client, "odd") == [bytes(1001)] * 3
        finally:
            worker.kill()
            worker.communicate()


# -- descriptors, one by one ----------------------------------------------------------------------------


def test_descriptors_of_a_notice_are_told_from_those_of_the_answer_and_of_the_notice_before() -> None:
    inbox = FdReceiver()
    came: list[tuple[str, object]] = []
    everything: list[int] = []

    def made(number: int) -> list[int]:
        numbers = received(inbox, number)
        everything.extend(numbers)
        return numbers

    def taken(name: str) -> Callable[[object], None]:
        return lambda given: came.append((name, given))

    def notice(lease: int, sizes: int) -> Rebound:
        return Rebound(lease, (), Team("multicast", "", (1,) * sizes))

    def delivered() -> list[tuple[str, object]]:
        given, came[:] = list(came), []
        return given

    # The answer's come once more, and in part, when a notice is there already: they are none of its own.
    inbox.expect(1, 3, taken("answer"))
    inbox.put(Descriptors(1, 2), own := made(2))
    inbox.rebound(first := notice(1, 2), taken("first"))
    assert delivered() == [("answer", tuple(own))]
    inbox.put(Descriptors(1, 2), made(2))
    inbox.put(Descriptors(1, 1, rebound=True), made(1))
    assert not inbox.later(1, first)
    assert inbox.later(1, None)
    inbox.rebound(second := notice(1, 2), taken("second"))
    inbox.put(Descriptors(1, 2), made(2))
    assert inbox.later(1, first)
    inbox.put(Descriptors(1, 2, rebound=True), new := made(2))
    assert delivered() == [("second", tuple(new))]
    assert not inbox.later(1, second)
    inbox.put(Descriptors(1, 2, rebound=True), made(2))  # more than anybody spoke of
    assert not delivered()

    # A notice comes before the answer: what came before it, and then what comes with it.
    inbox.put(Descriptors(2, 2), early := made(2))
    inbox.rebound(notice(2, 1), taken("notice"))
    inbox.put(Descriptors(2, 1, rebound=True), late := made(1))
    assert not delivered()
    inbox.expect(2, 5, taken("answer"))
    assert delivered() == [("answer", tuple(early)), ("notice", tuple(late))]
    inbox.rebound(notice(2, 0), taken("nothing"))
    assert delivered() == [("nothing", ())]

    # Nobody wants the lease.
    inbox.put(Descriptors(3, 1), made(1))
    inbox.rebound(notice(3, 1), taken("unwanted"))
    inbox.put(Descriptors(3, 1, rebound=True), unwanted := made(1))
    inbox.settled(ListPools(), Created(3, "x", 1, "multicast", (ReplicaHandles("d", (DESCRIPTOR,)),)))
    assert delivered() == [("unwanted", tuple(unwanted))]

    # It ends while something is on its way, and so does the connection.
    inbox.rebound(notice(1, 2), taken("ended"))
    inbox.put(Descriptors(1, 1, rebound=True), made(1))
    inbox.settled(Close(1), Done())
    inbox.drained()
    inbox.rebound(notice(2, 2), taken("failed"))
    inbox.put(Descriptors(2, 1, rebound=True), made(1))
    inbox.fail(Unavailable("it is over"))
    ((name, given),) = delivered()
    assert name == "failed"
    assert isinstance(given, Unavailable)
    assert inbox.later(2, None)
    kept = {*own, *new, *early, *late, *unwanted}
    assert {each for each in everything if os.path.lexists(f"/proc/self/fd/{each}")} == kept
    inbox.close(kept)


def _refused(pool: Pool, action: Callable[[], object], kind: type[CubrokerError], words: str) -> None:
    """Have ``action`` end a broadcast that waits, or that comes after it."""
    failures: list[CubrokerError] = []

    def store() -> None:
        try:
            pool.broadcast(text("odd"), "odd")
        except CubrokerError as error:
            failures.append(error)

    thread = threading.Thread(target=store)
    thread.start()
    action()
    thread.join()
    (failure,) = failures
    assert isinstance(failure, kind)
    assert words in failure.message


def _raising(kind: type[DriverError], *words: object) -> object:
    def fail(window: Window, source: object = None, *, readonly: bool = False) -> None:
        raise kind(*words)  # type: ignore[arg-type]

    return fail
