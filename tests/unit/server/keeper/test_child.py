"""When a watchdog acts, and when the next start comes."""

from __future__ import annotations

import math
import subprocess
from collections.abc import Iterator

import pytest

from cubroker.server.keeper.child import ABORTING, UNKILLABLE, Backoff, Run, RunPhase, TimeLimits


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    """One that ignores SIGABRT, and says when it does."""
    ignoring = ["sh", "-c", "trap '' ABRT; echo; exec sleep 1000"]
    with subprocess.Popen(ignoring, stdout=subprocess.PIPE) as started:
        assert started.stdout
        started.stdout.readline()
        yield started
        started.kill()


WATCHED = TimeLimits(watchdog=10.0)


def test_a_process_that_does_not_even_abort_is_killed(process: subprocess.Popen[bytes]) -> None:
    run = Run(process.pid, 0.0, WATCHED)
    run.handle({"READY": "1"}, 100.0)
    assert run.enforce(109.9) is None
    assert run.enforce(110.0) == "gave no sign of life in time, and is aborted"
    run.handle({"WATCHDOG": "1", "READY": "1", "STOPPING": "1", "EXTEND_TIMEOUT_USEC": "99000000"}, 111.0)
    assert run.enforce(110.0 + ABORTING) == "does not end, and is killed"
    assert process.wait() == -9


def test_a_process_that_is_not_ready_in_time_is_aborted(process: subprocess.Popen[bytes]) -> None:
    run = Run(process.pid, 100.0, TimeLimits(start=30.0))
    run.handle({"WATCHDOG": "1", "STATUS": "loads"}, 120.0)
    assert run.enforce(129.9) is None
    run.handle({"EXTEND_TIMEOUT_USEC": "60000000"}, 129.9)
    assert run.enforce(189.8) is None
    assert run.enforce(189.9) == "is not ready after 60 s, and is aborted"
    assert run.phase is RunPhase.ABORTED


def test_a_process_that_does_not_end_in_time_is_killed_and_not_aborted(process: subprocess.Popen[bytes]) -> None:
    run = Run(process.pid, 0.0, TimeLimits(start=300.0, watchdog=10.0, stop=30.0))
    run.stop(100.0)
    run.stop(120.0)
    run.handle({"READY": "1", "WATCHDOG": "1", "WATCHDOG_USEC": "5000000"}, 121.0)
    assert run.enforce(129.9) is None
    assert run.enforce(130.0) == "does not end, and is killed"
    assert process.wait() == -9
    assert run.enforce(139.9) is None
    assert run.enforce(130.0 + UNKILLABLE) == "is still there 10 s after SIGKILL: it hangs in the kernel"
    assert run.due == math.inf


def test_a_process_that_ends_has_its_time_and_may_ask_for_more() -> None:
    run = Run(0, 0.0, TimeLimits(watchdog=10.0, stop=30.0))
    run.handle({"READY": "1"}, 100.0)
    run.handle({"STOPPING": "1", "EXTEND_TIMEOUT_USEC": "20000000"}, 101.0)
    assert run.due == 131.0
    run.handle({"EXTEND_TIMEOUT_USEC": "70000000"}, 102.0)
    assert run.due == 172.0
    run.handle({"EXTEND_TIMEOUT_USEC": "much"}, 103.0)
    assert run.due == 172.0


def test_a_sign_of_life_counts_from_when_it_came_and_no_other_time_is_extended() -> None:
    run = Run(0, 0.0, WATCHED)
    run.handle({"READY": "1"}, 100.0)
    run.handle({"WATCHDOG": "1"}, 109.0)
    run.handle({"EXTEND_TIMEOUT_USEC": "90000000"}, 109.0)
    assert run.due == 119.0


def test_without_limits_a_process_takes_any_time() -> None:
    run = Run(0, 0.0)
    for fields in ({"WATCHDOG": "1"}, {"READY": "1"}, {"WATCHDOG": "1"}, {"STOPPING": "1"}):
        run.handle(fields, 1.0)
        assert run.due == math.inf


def test_a_process_may_change_the_time_it_has_or_end_the_watch() -> None:
    run = Run(0, 0.0, WATCHED)
    run.handle({"READY": "1", "WATCHDOG_USEC": "5000000"}, 100.0)
    assert run.due == 105.0
    run.handle({"WATCHDOG_USEC": "0"}, 101.0)
    assert run.due == math.inf


def test_a_process_that_asks_to_be_ended_is_aborted_unless_it_ends(process: subprocess.Popen[bytes]) -> None:
    ending = Run(process.pid, 0.0, TimeLimits(stop=30.0))
    ending.handle({"STOPPING": "1", "WATCHDOG": "trigger"}, 1.0)
    assert ending.enforce(2.0) is None
    run = Run(process.pid, 0.0)
    run.handle({"READY": "1"}, 1.0)
    run.handle({"WATCHDOG": "trigger"}, 2.0)
    assert run.enforce(2.0) == "gave no sign of life in time, and is aborted"


def test_a_keeper_that_stood_still_itself_gives_the_process_its_time_again() -> None:
    limits = TimeLimits(start=20.0, watchdog=10.0, stop=30.0)
    run = Run(0, 0.0, limits)
    assert run.enforce(500.0) is None
    assert run.due == 520.0
    run.handle({"READY": "1"}, 520.0)
    assert run.enforce(600.0) is None
    assert run.due == 610.0
    run.stop(610.0)
    assert run.enforce(700.0) is None
    assert run.due == 730.0


def test_pauses_double_up_to_the_longest_and_end_with_a_steady_run() -> None:
    pace = Backoff(0.3)
    assert [pace.after(0.1) for _ in range(6)] == [0.0, 0.05, 0.1, 0.2, 0.3, 0.3]
    assert pace.after(3600.0) == 0.0
    assert [pace.after(0.1) for _ in range(3)] == [0.0, 0.05, 0.1]


def test_without_pauses_every_start_comes_at_once() -> None:
    pace = Backoff(0.0)
    assert [pace.after(0.1) for _ in range(3)] == [0.0, 0.0, 0.0]
