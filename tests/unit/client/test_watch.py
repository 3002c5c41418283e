from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from cubroker.client import Broker
from cubroker.client.notices import Count
from cubroker.client.transport.requests import Steps
from cubroker.protocol.errors import Invalid, NotFound, TimedOut, Unavailable, Unsupported
from cubroker.protocol.messages import ENDS
from tests.brokers import PATIENCE, BrokerProcess, serving
from tests.unit.client.conftest import LAYOUT, begun, publish, session_of
from tests.unit.client.scripts import start


def test_a_watch_tells_of_now_and_of_every_change(client: Broker, name: str) -> None:
    with client.watch(name) as watch:
        assert next(watch) is None
        publish(client, name)
        assert next(watch) == 1
        publish(client, name)
        assert next(watch) == 2
        client.retire(name)
        assert next(watch) is None


def test_changes_that_nobody_reads_are_seen_as_one(client: Broker, name: str) -> None:
    with client.watch(name) as watch, client.watch(name) as marker:
        assert next(watch) is None
        for _ in range(3):
            publish(client, name)
        while next(marker) != 3:
            pass
        assert next(watch) == 3


def test_a_second_watch_begins_with_the_state_now_and_repeats_nothing_to_the_first(client: Broker, name: str) -> None:
    publish(client, name)
    with client.watch(name) as one:
        assert next(one) == 1
        with client.watch(name) as two:
            assert next(two) == 1
        publish(client, name)
        assert next(one) == 2


def test_closing_from_another_thread_ends_the_iteration(client: Broker, name: str) -> None:
    watch = client.watch(name)
    seen: list[int | None] = []
    begun = threading.Event()

    def read(versions: Iterator[int | None]) -> None:
        for version in versions:
            seen.append(version)
            begun.set()

    reader = threading.Thread(target=read, args=(watch,))
    reader.start()
    assert begun.wait(60)
    watch.close()
    watch.close()
    reader.join()
    assert seen == [None]


def test_a_closed_watch_ends_without_a_request_also_after_its_broker(lender: BrokerProcess, name: str) -> None:
    with Broker(lender.directory) as broker:
        publish(broker, name)
        watch = broker.watch(name, owner=os.getuid())
        assert next(watch) == 1
        watch.close()
    with pytest.raises(StopIteration):
        next(watch)


def test_a_watch_that_is_dropped_is_forgotten(client: Broker, name: str) -> None:
    client.watch(name)
    with client.watch(name) as watch:
        assert next(watch) is None
        publish(client, name)
        assert next(watch) == 1


def test_watches_that_are_dropped_leave_room_for_others(client: Broker, name: str) -> None:
    for number in range(1100):  # a session may have 1024
        assert next(client.watch(f"{name}-{number}")) is None


def test_a_finalizer_may_close_a_watch_or_a_pool_while_another_is_made(client: Broker, name: str) -> None:
    publish(client, name)
    watch, pool = client.watch(name), client.attach(name)
    busy = threading.Event()
    client.requests.call(lambda: busy.wait(PATIENCE) and None)  # the connection's thread can do nothing now
    pool.let_go()
    watch.close()
    busy.set()
    assert list(watch) == []
    pool.confirm()


def test_a_watch_ends_with_the_broker() -> None:
    with serving() as process, Broker(process.directory) as broker:
        watch = broker.watch("pool")
        assert next(watch) is None
        process.stop()
        with pytest.raises(Unavailable, match="is gone"):
            next(watch)
        with pytest.raises(Unavailable, match="is gone"):
            broker.watch("other")


def test_a_name_that_no_pool_can_have_is_not_watched(client: Broker) -> None:
    with pytest.raises(Invalid, match="cannot name a pool"):
        client.watch("no name!")


def test_a_wait_that_takes_too_long_is_told_and_the_watch_goes_on(client: Broker, name: str) -> None:
    with client.watch(name, timeout=0.05) as watch:
        assert next(watch) is None
        for call, seconds in (
            (watch.__next__, "0.05"),
            (lambda: watch.next(0), "0"),
            (lambda: watch.next(0.01), "0.01"),
        ):
            with pytest.raises(TimedOut, match=rf"{name!r} did not change within {seconds} s"):
                call()
        publish(client, name)
        assert watch.next(PATIENCE) == 1
        publish(client, name)
        with client.watch(name) as other:
            assert other.next() == 2, "the first one was told before"
        assert watch.next(timeout=0) == 2
    with pytest.raises(StopIteration):
        watch.next(0)


@pytest.mark.parametrize("timeout", [-1, float("nan"), float("inf")])
def test_a_timeout_of_a_watch_must_be_some_time(client: Broker, name: str, timeout: float) -> None:
    with pytest.raises(Invalid, match="timeout of"):
        client.watch(name, timeout=timeout)
    with client.watch(name) as watch, pytest.raises(Invalid, match="timeout of"):
        watch.next(timeout)
    assert repr(watch) == f"<Watch of {name!r}, closed>"


# -- the end of versions -------------------------------------------------------------------------------


def test_the_end_of_old_versions_is_waited_for(client: Broker, lender: BrokerProcess, name: str) -> None:
    assert client.wait_ended(name, timeout=0)
    with pytest.raises(NotFound, match=name):
        client.wait_ended(name, 1)
    publish(client, name)
    first = client.attach(name)
    publish(client, name)
    second = client.attach(name)
    publish(client, name)
    with Broker(lender.directory) as trainer:
        assert not trainer.wait_ended(name, timeout=0)
        assert not trainer.wait_ended(name, 3, timeout=0.01)
        waiting = [begun(lambda: trainer.wait_ended(name)), begun(lambda: trainer.wait_ended(name, 2))]
        first.close()
        assert trainer.wait_ended(name, 1)
        assert not any(each.done() for each in waiting)
        second.close()
        assert [each.result(PATIENCE) for each in waiting] == [True, True]
        with client.create(name, LAYOUT):
            assert trainer.wait_ended(name)
            assert not trainer.wait_ended(name, 4, timeout=0)
        with client.attach(name):
            retired = begun(lambda: trainer.wait_ended(name, 3))
            trainer.retire(name)
            assert not trainer.wait_ended(name, timeout=0)
        assert retired.result(PATIENCE)


def test_a_lease_that_ends_with_its_process_ends_its_version(client: Broker, lender: BrokerProcess, name: str) -> None:
    publish(client, name)
    program = """
        with Broker(directory) as broker, broker.attach(sys.argv[2]) as pool:
            print("here", flush=True)
            sys.stdin.readline()
    """
    with start(lender, program, name) as reader:
        assert reader.stdout
        assert reader.stdout.readline() == "here\n"
        publish(client, name)
        waiting = begun(lambda: client.wait_ended(name))
        reader.kill()
        assert waiting.result(PATIENCE)


def test_nothing_is_told_twice_by_what_watches_when_another_version_ends(client: Broker, name: str) -> None:
    publish(client, name)
    pool = client.attach(name)
    publish(client, name)
    with client.watch(name) as watch, client.follow(name) as follow:
        assert (next(watch), next(follow)) == (2, 2)
        pool.close()
        assert client.wait_ended(name)
        for each in (watch, follow):
            with pytest.raises(TimedOut):
                each.next(0)


def test_the_wait_for_an_end_is_over_with_its_broker_and_refused_by_one_that_is_too_old(
    client: Broker, lender: BrokerProcess, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits, more = threading.Event(), Count.more

    def waiting(count: Count, before: int, timeout: float) -> Steps[bool]:
        waits.set()
        return more(count, before, timeout)

    publish(client, name)
    with client.attach(name), Broker(lender.directory) as other:
        publish(client, name)
        assert not other.wait_ended(name, timeout=0)
        monkeypatch.setattr(Count, "more", waiting)
        ended = begun(lambda: other.wait_ended(name))
        assert waits.wait(PATIENCE)
        other.close()
        assert isinstance(ended.exception(PATIENCE), Unavailable)
    session_of(client).version = ENDS - 1
    with pytest.raises(Unsupported, match="the broker is too old to tell; upgrade it"):
        client.wait_ended(name)
