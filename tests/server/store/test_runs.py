"""When a watchdog acts, and when the next start comes."""

from __future__ import annotations

import math
import subprocess
from collections.abc import Iterator

import pytest

from cubroker.server.store.pace import Pace
from cubroker.server.store.runs import ABORTING, Run


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """One that ignores SIGABRT, and says when it does."""
    ignoring = ["sh", "-c", "trap '' ABRT; echo; exec sleep 1000"]
    with subprocess.Popen(ignoring, stdout=subprocess.PIPE) as started:
        assert started.stdout
        started.stdout.readline()
        yield started
        started.kill()


def test_a_process_that_does_not_even_abort_is_killed(process: subprocess.Popen[bytes]) -> None:
    run = Run(process.pid, 0.0, 10.0)
    run.heed({"READY": "1"}, 100.0)
    assert run.watch(109.9) is None
    assert run.watch(110.0) == "gave no sign of life in time, and is aborted"
    run.heed({"WATCHDOG": "1", "STOPPING": "1"}, 111.0)
    assert run.watch(110.0 + ABORTING) == "does not end, and is killed"
    assert process.wait() == -9
    assert run.due == math.inf


def test_a_sign_of_life_counts_from_when_it_came() -> None:
    run = Run(0, 0.0, 10.0)
    run.heed({"READY": "1"}, 100.0)
    run.heed({"WATCHDOG": "1"}, 109.0)
    assert run.due == 119.0


def test_nobody_waits_for_a_process_that_is_not_ready_or_is_about_to_end_or_is_not_watched() -> None:
    run = Run(0, 0.0, 10.0)
    run.heed({"WATCHDOG": "1"}, 1.0)
    assert run.due == math.inf
    run.heed({"READY": "1"}, 2.0)
    assert run.due == 12.0
    run.heed({"STOPPING": "1"}, 3.0)
    assert run.due == math.inf
    unwatched = Run(0, 0.0, None)
    unwatched.heed({"READY": "1", "WATCHDOG": "1"}, 1.0)
    assert unwatched.due == math.inf


def test_a_process_may_change_the_time_it_has_or_end_the_watch() -> None:
    run = Run(0, 0.0, 10.0)
    run.heed({"READY": "1", "WATCHDOG_USEC": "5000000"}, 100.0)
    assert run.due == 105.0
    run.heed({"WATCHDOG_USEC": "0"}, 101.0)
    assert run.due == math.inf


def test_a_keeper_that_stood_still_itself_gives_the_process_its_time_again() -> None:
    run = Run(0, 0.0, 10.0)
    run.heed({"READY": "1"}, 100.0)
    assert run.watch(500.0) is None
    assert run.due == 510.0


def test_pauses_double_up_to_the_longest_and_end_with_a_steady_run() -> None:
    pace = Pace(0.3)
    assert [pace.after(0.1) for _ in range(6)] == [0.0, 0.05, 0.1, 0.2, 0.3, 0.3]
    assert pace.after(3600.0) == 0.0
    assert [pace.after(0.1) for _ in range(3)] == [0.0, 0.05, 0.1]


def test_without_pauses_every_start_comes_at_once() -> None:
    pace = Pace(0.0)
    assert [pace.after(0.1) for _ in range(3)] == [0.0, 0.0, 0.0]
