"""Threads that share work: all are waited for, whatever interrupts their start or their end."""

from __future__ import annotations

from threading import Event, Thread, Timer

import pytest

from cubroker.client.crew import Crew
from tests.brokers import PATIENCE


class Work:
    """Work that goes on until it is told to end, some time after :meth:`finish_soon`."""

    def __init__(self) -> None:
        self.begun = Event()
        self.done = False
        self._leave = Event()

    def __call__(self) -> None:
        self.begun.set()
        assert self._leave.wait(PATIENCE)
        self.done = True

    def finish_soon(self) -> None:
        Timer(0.05, self._leave.set).start()


def test_a_thread_whose_start_was_interrupted_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    work, crew, start = Work(), Crew(2, "crew"), Thread.start

    def interrupted(thread: Thread) -> None:
        start(thread)
        assert work.begun.wait(PATIENCE)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            crew.submit(work)
    work.finish_soon()
    crew.end()
    assert work.done


def test_an_interrupt_of_the_wait_is_told_when_the_wait_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    work, crew, join, moments = Work(), Crew(1, "crew"), Thread.join, iter([True])

    def interrupted(thread: Thread) -> None:
        if next(moments, False):
            work.finish_soon()
            raise KeyboardInterrupt
        join(thread)

    crew.submit(work)
    with monkeypatch.context() as patch:
        patch.setattr(Thread, "join", interrupted)
        with pytest.raises(KeyboardInterrupt):
            crew.end()
    assert work.done


def test_what_nobody_has_begun_is_dropped() -> None:
    work, crew, late = Work(), Crew(1, "crew"), Event()
    crew.submit(work)
    dropped = crew.submit(late.set)
    assert work.begun.wait(PATIENCE)
    work.finish_soon()
    crew.end()
    assert dropped.cancelled()
    assert not late.is_set()
