"""Work on a thread of its own: it is waited for whatever interrupts its caller, and ends early if it can."""

from __future__ import annotations

from collections import deque
from queue import SimpleQueue
from threading import Event, Thread, get_ident

import pytest

from cubroker.client import crew
from cubroker.client.crew import Boss, work_off
from cubroker.client.futures import Future
from tests.brokers import PATIENCE


class Work:
    """Work that goes on until it is told to end."""

    def __init__(self) -> None:
        self.begun = Event()
        self.leave = Event()
        self.done = False

    def __call__(self) -> int:
        self.begun.set()
        assert self.leave.wait(PATIENCE)
        self.done = True
        return get_ident()


def test_interrupts_of_the_wait_are_told_when_the_work_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    work, stopped, waits, wait = Work(), Event(), iter(range(10)), Future.wait

    def interrupted(future: Future[None], timeout: float | None = None) -> bool:
        match next(waits):
            case 0:
                assert work.begun.wait(PATIENCE)
                raise KeyboardInterrupt
            case 1 | 2:
                assert stopped.is_set()
                raise KeyboardInterrupt
            case _:
                work.leave.set()
                return wait(future, timeout)

    monkeypatch.setattr(Future, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Boss("boss", work).result(stopped.set)
    assert work.done


def test_a_report_that_fails_stops_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    work = Work()
    monkeypatch.setattr(crew, "REPORT", 0.001)

    def report() -> None:
        assert work.begun.wait(PATIENCE)
        raise RuntimeError("the bar broke")

    with pytest.raises(RuntimeError, match="the bar broke"):
        Boss("boss", work).result(work.leave.set, report)
    assert work.done


def test_work_whose_thread_comes_after_the_interrupt_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    work, late, start = Work(), SimpleQueue[Thread](), Thread.start

    def interrupted(future: Future[None], timeout: float | None = None) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(Thread, "start", lambda thread: late.put(thread))
    monkeypatch.setattr(Future, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Boss("boss", work).result(lambda: None)
    thread = late.get(timeout=PATIENCE)
    start(thread)
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert not work.begun.is_set()


def test_the_caller_gets_the_value_and_the_error_of_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    work = Work()
    work.leave.set()
    assert Boss("boss", work).result(lambda: None) != get_ident()
    with pytest.raises(ZeroDivisionError):
        Boss("boss", lambda: 1 // 0).result(lambda: None)

    def none_left(thread: Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(Thread, "start", none_left)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        Boss("boss", work).result(lambda: None)


def test_what_fails_leaves_nothing_to_do() -> None:
    todo, did = deque([1, 0, 2]), list[int]()
    with pytest.raises(ZeroDivisionError):
        work_off(todo, lambda number: did.append(1 // number))
    assert did == [1]
    assert not todo
