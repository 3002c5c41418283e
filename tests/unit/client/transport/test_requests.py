from __future__ import annotations

import threading
import weakref

import pytest

from cubroker.client.fork_guard import OwnerProcess
from cubroker.client.transport import requests
from cubroker.client.transport.requests import UNWANTED, Future, Pending, Requests, expect
from cubroker.protocol import wire
from cubroker.protocol.errors import CubrokerError, Invalid, NotFound, TimedOut, Unavailable
from cubroker.protocol.fields import MAX_RECEIVED
from cubroker.protocol.messages import (
    Answer,
    Cancel,
    Close,
    Done,
    Envelope,
    Failed,
    ListDevices,
    ListPools,
    Pools,
    Reply,
    Request,
    SetLayout,
)
from cubroker.protocol.wire import Bearer

SECRET = bytes(range(16))


class Desk:
    """Requests without a connection: what leaves is collected, what is answered is given by hand."""

    def __init__(self) -> None:
        self.wakes = 0
        self.requests = Requests(Bearer(SECRET), OwnerProcess(), self.wake)

    def wake(self) -> None:
        self.wakes += 1

    def leave(self) -> list[Envelope]:
        """What the connection's thread sends."""
        self.requests.take()
        envelopes = [wire.unpack(data, Envelope) for data in self.requests.outbox]
        self.requests.outbox.clear()
        return envelopes

    def sent(self) -> list[tuple[int, int, Request]]:
        envelopes = self.leave()
        assert all(envelope.secret == SECRET for envelope in envelopes)
        return [(envelope.id, envelope.oldest, envelope.body) for envelope in envelopes]

    def answer(self, number: int, body: Reply) -> None:
        self.requests.answer(Answer(number, body))


def test_numbers_rise_and_the_oldest_unanswered_one_is_told() -> None:
    desk = Desk()
    futures = [desk.requests.submit(ListPools()) for _ in range(3)]
    assert desk.sent() == [(1, 1, ListPools()), (2, 1, ListPools()), (3, 1, ListPools())]
    desk.answer(1, Pools(()))
    desk.answer(3, Pools(()))
    desk.requests.submit(ListDevices())
    assert desk.sent() == [(4, 2, ListDevices())]
    assert [future.done() for future in futures] == [True, False, True]
    assert desk.wakes == 4


def test_answers_past_one_that_waits_are_told_one_by_one_and_once() -> None:
    desk = Desk()
    for _ in range(MAX_RECEIVED + 3):
        desk.requests.submit(ListPools())
    desk.leave()
    for number in range(2, MAX_RECEIVED + 4):
        desk.answer(number, Pools(()))
    told = []
    for _ in range(3):
        desk.requests.submit(ListDevices())
        told.append(desk.leave()[0].received)
    assert [len(numbers) for numbers in told] == [MAX_RECEIVED, 2, 0]
    assert [*told[0], *told[1]] == list(range(2, MAX_RECEIVED + 4))


def test_a_failure_becomes_the_error_of_its_code() -> None:
    desk = Desk()
    future = desk.requests.submit(ListPools())
    desk.leave()
    desk.answer(1, Failed("not_found", "no such thing"))
    with pytest.raises(NotFound, match="no such thing"):
        future.result()


def test_an_answer_that_comes_twice_counts_once() -> None:
    desk = Desk()
    future = desk.requests.submit(ListPools())
    desk.leave()
    desk.answer(1, Pools(()))
    desk.answer(1, Failed("invalid", "again"))
    assert future.result() == Pools(())
    assert not desk.requests.waiting()


def test_all_that_is_unanswered_is_sent_again_in_order() -> None:
    desk = Desk()
    for _ in range(4):
        desk.requests.submit(ListPools())
    desk.requests.take()
    desk.answer(2, Pools(()))
    desk.requests.resend_all()  # two of them had not left yet, and leave once
    assert [number for number, _, _ in desk.sent()] == [1, 3, 4]


def test_only_what_was_sent_a_while_ago_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(requests, "monotonic", lambda: now)
    desk = Desk()
    desk.requests.submit(ListPools())
    desk.sent()
    now += requests.RESEND * 0.9
    desk.requests.submit(ListDevices())
    desk.requests.take()
    desk.requests.resend_overdue()  # what waits to be sent is enough for now
    assert len(desk.sent()) == 1
    now += requests.RESEND * 0.2
    desk.requests.resend_overdue()
    assert [number for number, _, _ in desk.sent()] == [1]
    desk.requests.resend_overdue()
    assert desk.sent() == []


def test_a_large_request_is_sent_again_at_growing_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(requests, "monotonic", lambda: now)
    desk = Desk()
    desk.requests.submit(SetLayout(1, bytes(requests.LARGE)))
    sent = list[float]()
    for tick in range(40):
        now = tick * requests.RESEND
        if tick == 20:
            desk.leave()
            desk.requests.resend_all()  # the gateway was replaced
        desk.requests.resend_overdue()
        sent += [now / requests.RESEND] * len(desk.leave())
    assert sent == [0, 1, 3, 7, 15, 20, 21, 23, 27, 35]


def test_what_is_sent_again_tells_what_came_since() -> None:
    desk = Desk()
    for body in (ListPools(), ListPools(), ListPools(), Close(5)):
        desk.requests.submit(body)
    desk.leave()
    desk.answer(1, Pools(()))
    desk.answer(3, Pools(()))
    desk.requests.resend_all()
    told = desk.leave()
    assert [(each.id, each.oldest, each.received) for each in told] == [(2, 2, (3,)), (4, 2, ())]


def test_a_broker_without_room_for_a_close_gets_it_until_there_is_some(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(requests, "monotonic", lambda: now)
    desk = Desk()
    close = desk.requests.submit(Close(5))
    for _ in range(3):
        assert desk.sent() == [(1, 1, Close(5))]
        now += 1.1 * requests.RESEND
        desk.requests.resend_overdue()
    desk.answer(1, Done())
    assert close.result() == Done()


def test_closing_settles_what_waits_and_what_comes_later() -> None:
    desk = Desk()
    sent = desk.requests.submit(ListPools())
    desk.leave()
    posted = desk.requests.submit(ListPools())
    desk.requests.close(Unavailable("gone"))
    late = desk.requests.submit(ListPools())
    for future in (sent, posted, late):
        with pytest.raises(Unavailable, match="gone"):
            future.result()
    assert desk.sent() == []


def test_what_cannot_be_encoded_leaves_nothing_behind() -> None:
    desk = Desk()
    futures = [desk.requests.submit(Close(lease)) for lease in (1 << 70, object())]  # type: ignore[arg-type]
    assert desk.sent() == []
    for future in futures:
        with pytest.raises(Invalid, match="cannot be sent"):
            future.result()
    assert not desk.requests.waiting()
    desk.requests.submit(ListPools())
    assert desk.sent() == [(1, 1, ListPools())]


def test_a_request_that_is_given_up_is_cancelled_where_it_has_come_to() -> None:
    desk = Desk()
    told: list[Reply | CubrokerError] = []
    never, waiting, answered = Pending(told.append), Pending(told.append), Pending(told.append)
    desk.requests.post(ListPools(), waiting)
    desk.requests.post(ListDevices(), answered)
    desk.leave()
    desk.answer(2, Done())
    for pending in (never, waiting, answered):
        desk.requests.cancel(pending)
    assert desk.sent() == [(3, 1, Cancel(1))]
    assert told == [Done(), UNWANTED]
    desk.requests.post(ListPools(), never)
    assert desk.sent() == [], "the caller has given it up before it came to this"


def test_what_comes_once_the_connection_is_over_is_settled_by_its_own_thread() -> None:
    desk = Desk()
    told: list[object] = []
    never = Pending(told.append)
    desk.requests.close(Unavailable("gone"), quietly=True)
    desk.requests.cancel(never)
    desk.requests.call(lambda: told.append("called"))
    assert told == [UNWANTED, "called"]


def test_a_reply_of_another_kind_is_reported() -> None:
    assert expect(Done(), Done) == Done()
    with pytest.raises(Unavailable, match="Done instead of Pools"):
        expect(Done(), Pools)


def test_a_silent_broker_is_no_error_of_the_request() -> None:
    with pytest.raises(TimedOut):
        Desk().requests.submit(ListPools()).result(0.001)


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


def gated(monkeypatch: pytest.MonkeyPatch, gate: object) -> Future[int]:
    """Make a future that is waited for at a lock of a test's own."""
    with monkeypatch.context() as patch:
        locks = iter((gate, threading.Lock()))
        patch.setattr(requests, "Lock", lambda: next(locks))
        return Future()


def test_a_process_that_is_stopped_while_it_waits_finds_what_came_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Lock()

    class Stopped:
        """A lock that is waited for while the process is stopped: all the time is over, and the value is there."""

        release = gate.release

        def acquire(self, timeout: float = -1) -> bool:
            if gate.locked() and not future.done():
                future.set(7)
                return False
            return gate.acquire(timeout=timeout)

    future = gated(monkeypatch, Stopped())
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
    gate, interrupts = threading.Lock(), [True]

    class Interrupted:
        """A lock whose first holder after its maker is interrupted before it gives it back."""

        def acquire(self, timeout: float = -1) -> bool:
            if not gate.locked() or not interrupts:
                return gate.acquire(timeout=timeout)
            interrupts.clear()
            taken = gate.acquire(timeout=timeout)
            future.set(7)  # which opens the gate
            if taken or gate.acquire(timeout=timeout):
                raise KeyboardInterrupt
            return False

        release = gate.release

    future = gated(monkeypatch, Interrupted())
    with pytest.raises(KeyboardInterrupt):
        future.wait(30)
    assert future.wait(0)
    assert future.result(0) == 7


@pytest.mark.slow
def test_tasks_that_ask_again_when_all_is_over_end_one_after_the_other() -> None:
    desk, futures = Desk(), list[Future[Reply]]()
    for _ in range(5000):
        desk.requests.call(lambda: futures.append(desk.requests.submit(ListPools())))
    desk.requests.close(Unavailable("gone"))
    assert len(futures) == 5000
    for future in futures:
        with pytest.raises(Unavailable, match="gone"):
            future.result(0)
