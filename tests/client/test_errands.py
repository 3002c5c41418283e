"""Driver calls on threads of their own: they return, fail, or are given up."""

from __future__ import annotations

import threading

import pytest

from cubroker.client.errands import Errand
from cubroker.driver import DriverError


def test_what_a_call_raises_is_raised_and_what_returns_is_over() -> None:
    done = []
    errand = Errand(lambda: done.append(threading.current_thread().name))
    assert errand.run()
    errand.give_up()  # too late
    assert done == ["cubroker-errand"]
    with pytest.raises(ValueError, match="no"):
        Errand(lambda: int("no")).run()  # type: ignore[arg-type]

    def fail() -> None:
        raise DriverError("cuMemMap", 999, "CUDA_ERROR_UNKNOWN")

    with pytest.raises(DriverError, match="CUDA_ERROR_UNKNOWN"):
        Errand(fail).run()


def test_a_call_that_is_given_up_holds_nobody_up() -> None:
    begun, release = threading.Event(), threading.Event()
    over: list[threading.Thread] = []

    def call() -> None:
        over.append(threading.current_thread())
        begun.set()
        release.wait()

    errand = Errand(call)
    giver = threading.Thread(target=lambda: begun.wait() and errand.give_up())
    giver.start()
    assert not errand.run()
    release.set()
    for thread in (giver, *over):
        thread.join()
    never = Errand(over.clear)
    never.give_up()
    assert not never.run()
    assert over, "it was not even begun"


def test_where_threads_have_run_out_the_call_is_made_here(monkeypatch: pytest.MonkeyPatch) -> None:
    done = []

    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    assert Errand(lambda: done.append(threading.current_thread())).run()
    assert done == [threading.current_thread()]
