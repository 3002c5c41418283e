"""Whose turn it is: a clock that jobs advance, and a loop whose rounds are made by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest

from cubroker.protocol.messages import Done
from cubroker.server.event_queue import EventQueue, TurnDue
from cubroker.server.ledger.events import Respond
from cubroker.server.transport import requests
from cubroker.server.transport.requests import IDLE_ROUND, QUANTUM, FairQueue, Job

ALICE, BOB = 1000, 1001


class Desk:
    """Turns, and what was done in them."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.done: list[object] = []
        self.rounds = 0
        self.steps = 0
        self._soon: list[Callable[[], None]] = []
        patch.setattr(requests, "perf_counter", lambda: self.now)
        loop = SimpleNamespace(call_soon=self._soon.append)
        self.turns = FairQueue(cast(EventQueue, self), cast(asyncio.AbstractEventLoop, loop))
        self.outcome: Callable[[], None] = lambda: None  # done about a job that asks for it

    def job(self, what: object, seconds: float = QUANTUM, pieces: int = 1) -> Job:
        """Something that takes a while, in pieces; what is noted when it is done."""
        for piece in range(pieces):
            if piece:
                yield
            self.now += seconds / pieces
        self.done.append(what)
        return None

    def put(self, *event: TurnDue) -> None:
        """Make a step, as the broker does at the event."""
        self.steps += 1
        for _ in self.turns.step():
            self.outcome()

    def add(self, uid: int, owner: str, number: int, seconds: float = QUANTUM, pieces: int = 1) -> None:
        self.turns.put(uid, owner, number, self.job((owner, number), seconds, pieces))

    def round(self, seconds: float = 0.0) -> None:
        """A round of the loop, in which other work takes a while."""
        self.rounds += 1
        self.now += seconds
        due = self._soon[:]
        self._soon.clear()
        for call in due:
            call()

    def rest(self) -> None:
        """Make rounds until nothing is left to be done."""
        while self._soon:
            self.round()


@pytest.fixture
def desk(monkeypatch: pytest.MonkeyPatch) -> Desk:
    return Desk(monkeypatch)


def test_the_first_job_of_a_round_is_done_at_once_and_the_others_in_later_rounds(desk: Desk) -> None:
    for number in range(3):
        desk.add(ALICE, "a", number)
    assert desk.done == [("a", 0)]
    assert desk.steps == 1
    desk.rest()
    assert desk.done == [("a", 0), ("a", 1), ("a", 2)]
    assert desk.steps == 3
    desk.add(ALICE, "a", 3)
    assert desk.done[3:] == [("a", 3)]


def test_a_user_waits_for_one_step_of_another_however_many_jobs_that_has(desk: Desk) -> None:
    for number in range(1000):
        desk.add(ALICE, "a", number)
    desk.add(BOB, "b", 1)
    desk.rest()
    assert desk.done.index(("b", 1)) <= 2
    assert [number for owner, number in desk.done if owner == "a"] == list(range(1000))


def test_users_get_the_same_time_and_not_the_same_number_of_jobs(desk: Desk) -> None:
    for number in range(100):
        desk.add(ALICE, "a", number, 8 * QUANTUM)
        desk.add(BOB, "b", number, QUANTUM)
    while ("b", 99) not in desk.done:
        desk.round()
    assert 11 <= sum(owner == "a" for owner, _ in desk.done) <= 15


def test_a_user_who_comes_back_has_saved_up_no_time(desk: Desk) -> None:
    for number in range(100):
        desk.add(ALICE, "a", number)
    while len(desk.done) < 50:
        desk.round()
    for number in range(50):
        desk.add(BOB, "b", number)
    while len(desk.done) < 70:
        desk.round()
    assert 9 <= sum(owner == "b" for owner, _ in desk.done) <= 11


def test_sessions_of_one_user_take_turns_and_each_is_served_in_order(desk: Desk) -> None:
    for number in range(3):
        for owner in "abc":
            desk.add(ALICE, owner, number)
    desk.rest()
    assert desk.done == [(owner, number) for number in range(3) for owner in "abc"]


def test_a_long_job_is_interrupted_for_other_users_and_finished_before_the_next_of_its_own(desk: Desk) -> None:
    desk.add(ALICE, "a", 1, 10 * QUANTUM, pieces=100)
    assert desk.now == pytest.approx(QUANTUM)
    desk.add(ALICE, "other", 1)
    desk.add(BOB, "b", 1)
    desk.rest()
    assert desk.done == [("b", 1), ("a", 1), ("other", 1)]


def test_the_rest_of_the_loop_gets_as_long_as_a_step_took_if_it_has_so_much_to_do(desk: Desk) -> None:
    for number in range(3):
        desk.add(ALICE, "a", number, 100 * IDLE_ROUND)
    began = desk.now
    while len(desk.done) < 2:
        desk.round(10 * IDLE_ROUND)
    assert 90 * IDLE_ROUND <= desk.now - began - 100 * IDLE_ROUND <= 120 * IDLE_ROUND
    desk.rounds = 0
    desk.rest()
    assert desk.rounds <= 5, "a loop with nothing else to do waits for nothing"


def test_a_request_has_one_job_at_a_time(desk: Desk) -> None:
    desk.add(ALICE, "a", 1, 3 * QUANTUM, pieces=3)
    desk.add(ALICE, "a", 2)
    assert desk.turns.has(ALICE, "a", 1)
    assert desk.turns.has(ALICE, "a", 2)
    assert not desk.turns.has(ALICE, "b", 2)
    for number in (1, 2):
        desk.add(ALICE, "a", number)
    desk.rest()
    assert desk.done == [("a", 1), ("a", 2)]
    assert not desk.turns.has(ALICE, "a", 1)
    desk.add(ALICE, "a", 1)
    assert desk.done[2:] == [("a", 1)]


def test_a_job_may_put_the_next_one_of_its_request_which_is_done_after_it(desk: Desk) -> None:
    def first() -> Job:
        yield from desk.job("first", 2 * QUANTUM, pieces=2)
        return Respond(1, 1, Done())

    def outcome() -> None:
        for _ in range(3):
            desk.turns.put(ALICE, "a", 1, desk.job("next", 2 * QUANTUM, pieces=2))

    desk.outcome = outcome
    desk.turns.put(ALICE, "a", 1, first())
    desk.add(ALICE, "a", 1)
    desk.add(ALICE, "a", 2)
    while "first" not in desk.done:
        desk.round()
    assert desk.turns.has(ALICE, "a", 1)
    desk.rest()
    assert desk.done == ["first", ("a", 2), "next"]
    assert not desk.turns.has(ALICE, "a", 1)


def test_a_session_takes_its_jobs_with_it_also_the_one_under_way(desk: Desk) -> None:
    desk.add(ALICE, "a", 1, 3 * QUANTUM, pieces=3)
    desk.add(ALICE, "a", 2)
    desk.add(ALICE, "b", 1)
    desk.turns.drop(ALICE, "a")
    desk.turns.drop(ALICE, "a")
    desk.rest()
    assert desk.done == [("b", 1)]
    desk.add(ALICE, "a", 1, 3 * QUANTUM, pieces=3)
    desk.turns.drop(ALICE, "a")
    desk.turns.drop(BOB, "b")
    desk.rest()
    assert desk.done == [("b", 1)]


def test_a_job_that_ends_its_own_session_is_the_last_of_it(desk: Desk) -> None:
    def last() -> Job:
        desk.turns.drop(ALICE, "a")
        yield
        desk.done.append("more of it")
        return None

    desk.add(ALICE, "b", 1)
    desk.turns.put(ALICE, "a", 1, last())
    desk.add(ALICE, "a", 2)
    desk.rest()
    assert desk.done == [("b", 1)]


def test_nothing_is_done_between_a_pause_and_its_end(desk: Desk) -> None:
    for number in range(3):
        desk.add(ALICE, "a", number)
    desk.turns.pause()
    desk.rest()
    desk.add(ALICE, "a", 3)
    assert desk.done == [("a", 0)]
    desk.turns.resume()
    desk.turns.resume()
    desk.rest()
    assert desk.done == [("a", number) for number in range(4)]


def test_a_job_that_fails_is_over_and_the_others_are_done(desk: Desk) -> None:
    def fail() -> Job:
        yield from ()
        raise ZeroDivisionError

    desk.add(ALICE, "a", 1)
    desk.turns.put(ALICE, "a", 2, fail())
    desk.add(ALICE, "a", 3)
    desk.round()
    with pytest.raises(ZeroDivisionError):
        desk.round()
    desk.rest()
    assert desk.done == [("a", 1), ("a", 3)]
    assert desk.steps == 3


def test_after_the_end_nothing_is_done(desk: Desk) -> None:
    for number in range(3):
        desk.add(ALICE, "a", number)
    desk.turns.close()
    desk.rest()
    assert desk.done == [("a", 0)]
