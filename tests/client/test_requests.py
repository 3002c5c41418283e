from __future__ import annotations

import pytest

from cubroker.client import requests
from cubroker.client.processes import Owner
from cubroker.client.requests import Requests, expect
from cubroker.protocol import wire
from cubroker.protocol.authentication import Bearer
from cubroker.protocol.bounds import MAX_RECEIVED
from cubroker.protocol.errors import NotFound, TimedOut, Unavailable
from cubroker.protocol.messages import (
    Answer,
    Close,
    Done,
    Envelope,
    Failed,
    ListDevices,
    ListPools,
    Pools,
    Reply,
    Request,
)

SECRET = bytes(range(16))


class Desk:
    """Requests without a connection: what leaves is collected, what is answered is given by hand."""

    def __init__(self) -> None:
        self.wakes = 0
        self.requests = Requests(Bearer(SECRET), Owner(), self.wake)

    def wake(self) -> None:
        self.wakes += 1

    def sent(self) -> list[tuple[int, int, Request]]:
        envelopes = [wire.unpack(data, Envelope) for data in self.requests.outbox]
        self.requests.outbox.clear()
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
    desk.requests.outbox.clear()
    for number in range(2, MAX_RECEIVED + 4):
        desk.answer(number, Pools(()))
    told = []
    for _ in range(3):
        desk.requests.submit(ListDevices())
        told.append(wire.unpack(desk.requests.outbox.pop(), Envelope).received)
    assert [len(numbers) for numbers in told] == [MAX_RECEIVED, 2, 0]
    assert [*told[0], *told[1]] == list(range(2, MAX_RECEIVED + 4))


def test_a_failure_becomes_the_error_of_its_code() -> None:
    desk = Desk()
    future = desk.requests.submit(ListPools())
    desk.answer(1, Failed("not_found", "no such thing"))
    with pytest.raises(NotFound, match="no such thing"):
        future.result()


def test_an_answer_that_comes_twice_counts_once() -> None:
    desk = Desk()
    future = desk.requests.submit(ListPools())
    desk.answer(1, Pools(()))
    desk.answer(1, Failed("invalid", "again"))
    assert future.result() == Pools(())
    assert not desk.requests.waiting()


def test_all_that_is_unanswered_is_sent_again_in_order() -> None:
    desk = Desk()
    for _ in range(4):
        desk.requests.submit(ListPools())
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
    desk.requests.resend_overdue()  # what waits to be sent is enough for now
    assert len(desk.sent()) == 1
    now += requests.RESEND * 0.2
    desk.requests.resend_overdue()
    assert [number for number, _, _ in desk.sent()] == [1]
    desk.requests.resend_overdue()
    assert desk.sent() == []


def test_what_is_sent_again_tells_what_came_since() -> None:
    desk = Desk()
    for body in (ListPools(), ListPools(), ListPools(), Close(5)):
        desk.requests.submit(body)
    desk.answer(1, Pools(()))
    desk.answer(3, Pools(()))
    desk.requests.resend_all()
    told = [wire.unpack(data, Envelope) for data in desk.requests.outbox]
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
    early = desk.requests.submit(ListPools())
    desk.requests.close(Unavailable("gone"))
    late = desk.requests.submit(ListPools())
    for future in (early, late):
        with pytest.raises(Unavailable, match="gone"):
            future.result()
    assert desk.sent() == []


def test_what_cannot_be_encoded_leaves_nothing_behind() -> None:
    desk = Desk()
    with pytest.raises(Exception, match="cannot be sent"):
        desk.requests.submit(Close(1 << 70))
    assert not desk.requests.waiting()
    desk.requests.submit(ListPools())
    assert desk.sent() == [(1, 1, ListPools())]


def test_a_reply_of_another_kind_is_reported() -> None:
    assert expect(Done(), Done) == Done()
    with pytest.raises(Unavailable, match="Done instead of Pools"):
        expect(Done(), Pools)


def test_a_silent_broker_is_no_error_of_the_request() -> None:
    with pytest.raises(TimedOut):
        Desk().requests.submit(ListPools()).result(0.001)
