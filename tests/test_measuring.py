from __future__ import annotations

import os
from collections.abc import Callable
from threading import Event, Lock, Thread

import coverage
import pytest

from tests.unit.driver.mapping_commands import in_child

FORKS = 30

measured = coverage.Coverage.current()


@pytest.mark.skipif(not measured, reason="nothing is measured here")
def test_no_child_inherits_the_lock_of_coverage_from_another_thread() -> None:
    assert measured
    assert measured._collector
    lock = measured._collector.data_lock
    ended = Event()
    holder = Thread(target=lambda: hold_again_and_again(lock, ended.is_set))
    holder.start()
    try:
        locked = [in_child(lambda: state_of(lock)) for _ in range(FORKS)]
    finally:
        ended.set()
        holder.join()
    assert locked == ["free"] * FORKS


def hold_again_and_again(lock: Lock, ended: Callable[[], bool]) -> None:
    while not ended():
        with lock:
            for _ in range(1000):
                os.getppid()


def state_of(lock: Lock) -> str:
    """Return whether a lock is free, and leave it so: the end of a measured process takes it."""
    if lock.acquire(blocking=False):
        lock.release()
        return "free"
    lock.release()
    return "held"
