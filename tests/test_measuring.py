from __future__ import annotations

import os
from collections.abc import Callable
from threading import Event, Lock, Thread

import coverage
import pytest
from coverage.collector import Collector

from tests.measuring import unmeasured
from tests.unit.driver.mapping_commands import in_child

FORKS = 3  # each child writes down all that this process has measured, which takes seconds


@pytest.fixture
def collector() -> Collector:
    """What collects the data of coverage, and has a lock."""
    measured = coverage.Coverage.current()  # not at the import of this module, which is not measured
    if not measured:
        pytest.skip("nothing is measured here")
    assert measured._collector
    return measured._collector


def test_no_child_inherits_the_lock_of_coverage_from_another_thread(collector: Collector) -> None:
    ended = Event()
    holder = Thread(target=lambda: hold_again_and_again(collector, ended.is_set))
    holder.start()
    try:
        locked = [in_child(lambda: state_of(collector)) for _ in range(FORKS)]
    finally:
        ended.set()
        holder.join()
    assert locked == ["free"] * FORKS


def test_what_runs_in_a_child_before_that_lock_is_released_there_can_be_measured(collector: Collector) -> None:
    lock = collector.data_lock
    assert lock
    with lock:
        assert lock.acquire(blocking=False)
        lock.release()


def test_measuring_again_does_not_wrap_the_end_of_a_process_once_more(collector: Collector) -> None:
    end = os._exit
    with unmeasured():
        pass
    assert os._exit is end, "each wrapper saves all data, and calls the one before it"


def hold_again_and_again(collector: Collector, ended: Callable[[], bool]) -> None:
    assert collector.data_lock
    while not ended():
        with collector.data_lock:
            for _ in range(1000):
                os.getppid()


def state_of(collector: Collector) -> str:
    """Return whether this thread can take the lock, and leave it so: the end of a measured process takes it."""
    assert collector.data_lock
    if collector.data_lock.acquire(blocking=False):
        collector.data_lock.release()
        return "free"
    collector.data_lock = Lock()
    return "held"
