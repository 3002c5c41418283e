from __future__ import annotations

import threading
import weakref

import pytest

from cubroker.client.futures import Future
from cubroker.protocol.errors import NotFound, TimedOut


class Thing:
    pass


def test_a_value_reaches_everybody_who_waits() -> None:
    future: Future[int] = Future()
    found: list[int] = []
    threads = [threading.Thread(target=lambda: found.append(future.result())) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert not future.done()
    future.set(7)
    for thread in threads:
        thread.join()
    assert found == [7, 7, 7]
    assert future.done()


def test_an_error_is_raised_where_the_result_is_asked_for() -> None:
    future: Future[int] = Future()
    future.fail(NotFound("not there"))
    with pytest.raises(NotFound, match="not there"):
        future.result()


def test_waiting_ends_with_the_time() -> None:
    future: Future[int] = Future()
    assert not future.wait(0.001)
    with pytest.raises(TimedOut, match=r"0\.001"):
        future.result(0.001)


def test_a_process_that_is_stopped_while_it_waits_finds_what_came_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    future: Future[int] = Future()
    gate = future._gate

    class Stopped:
        """A lock that is waited for while the process is stopped: all the time is over, and the value is there."""

        release = gate.release

        def acquire(self, timeout: float) -> bool:
            if not future.done():
                future.set(7)
                return False
            return gate.acquire(timeout=timeout)

        def locked(self) -> bool:
            return gate.locked()

    monkeypatch.setattr(future, "_gate", Stopped())
    assert future.wait(30)
    assert future.result() == 7


def test_the_first_delivery_counts() -> None:
    future: Future[int] = Future()
    future.set(1)
    future.set(2)
    future.fail(NotFound("late"))
    assert future.result() == 1


@pytest.mark.parametrize("early", [True, False])
def test_nothing_is_kept_for_a_waiter_that_has_left(early: bool) -> None:
    future: Future[Thing] = Future()
    thing = Thing()
    alive = weakref.ref(thing)
    if early:
        future.abandon()
        future.set(thing)
    else:
        future.set(thing)
        future.abandon()
    del thing
    assert alive() is None


def test_an_interrupt_at_the_gate_shuts_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    future: Future[int] = Future()
    gate = future._gate

    class Interrupted:
        """A lock whose holder is interrupted before it gives it back."""

        def acquire(self, timeout: float) -> bool:
            taken = gate.acquire(timeout=timeout)
            future.set(7)  # which opens the gate
            if taken or gate.acquire(timeout=timeout):
                raise KeyboardInterrupt
            return False

        release = gate.release

    with monkeypatch.context() as patch:
        patch.setattr(future, "_gate", Interrupted())
        with pytest.raises(KeyboardInterrupt):
            future.wait(30)
    assert future.wait(0)
    assert future.result(0) == 7
