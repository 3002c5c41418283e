from __future__ import annotations

import os
from collections.abc import Callable
from threading import Event, RLock, Thread

import coverage
import pytest

from tests.unit.driver.mapping_commands import in_child

FORKS = 30


@pytest.fixture
def lock() -> RLock:
    """The lock of coverage's data."""
    measured = coverage.Coverage.current()  # not at the import of this module, which is not measured
    if not measured:
        pytest.skip("nothing is measured here")
    assert measured._collector
    held: RLock = measured._collector.data_lock
    return held


def test_no_child_inherits_the_lock_of_coverage_from_another_thread(lock: RLock) -> None:
    ended = Event()
    holder = Thread(target=lambda: hold_again_and_again(lock, ended.is_set))
    holder.start()
    try:
        locked = [in_child(lambda: state_of(lock)) for _ in range(FORKS)]
    finally:
        ended.set()
        holder.join()
    assert locked == ["free"] * FORKS


def test_what_runs_in_a_child_before_that_lock_is_released_there_can_be_measured(lock: RLock) -> None:
    with lock:
        assert lock.acquire(blocking=False)
        lock.release()


def hold_again_and_again(lock: RLock, ended: Callable[[], bool]) -> None:
    while not ended():
        with lock:
            for _ in range(1000):
                os.getppid()


def state_of(lock: RLock) -> str:
    """Return whether another thread can take a lock."""
    found: list[str] = []

    def look() -> None:
        if lock.acquire(timeout=0.0):
            lock.release()
            found.append("free")

    thread = Thread(target=look)
    thread.start()
    thread.join()
    return "".join(found) or "held"
