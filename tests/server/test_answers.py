from __future__ import annotations

from cubroker.server.answers import MAX_BYTES, MAX_REQUESTS, Answers, Verdict


def answered(answers: Answers, number: int, answer: bytes = b"answer") -> None:
    assert answers.admit(number, 1, b"here", 10) is Verdict.NEW
    assert answers.settle(number, answer) == b"here"


def test_a_request_is_done_once_however_often_it_is_sent() -> None:
    answers = Answers()
    assert answers.admit(7, 1, b"here", 10) is Verdict.NEW
    assert answers.admit(7, 1, b"there", 10) is Verdict.PENDING
    assert answers.is_pending(7)
    assert answers.settle(7, b"answer") == b"there"
    assert not answers.is_pending(7)
    assert answers.admit(7, 1, b"anywhere", 10) == b"answer"


def test_an_answer_is_kept_until_the_client_has_it() -> None:
    answers = Answers()
    for number in (1, 2, 3):
        answered(answers, number)
    assert answers.admit(4, 3, b"here", 10) is Verdict.NEW
    assert answers.admit(2, 3, b"here", 10) is Verdict.STALE
    assert answers.admit(3, 1, b"here", 10) == b"answer"


def test_requests_may_arrive_and_be_answered_in_any_order() -> None:
    answers = Answers()
    for number in (5, 2):
        assert answers.admit(number, 1, b"here", 10) is Verdict.NEW
    answers.settle(2, b"two")
    answers.settle(5, b"five")
    assert answers.admit(2, 2, b"here", 10) == b"two"
    assert answers.admit(3, 2, b"here", 10) is Verdict.NEW


def test_the_answer_of_a_request_that_its_client_gave_up_is_sent_and_not_kept() -> None:
    answers = Answers()
    assert answers.admit(1, 1, b"here", 10) is Verdict.NEW
    assert answers.admit(2, 2, b"here", 10) is Verdict.NEW
    assert answers.settle(1, b"late") == b"here"
    assert answers.admit(1, 2, b"here", 10) is Verdict.STALE


def test_requests_past_the_bound_are_refused_until_answers_are_fetched() -> None:
    answers = Answers()
    for number in range(1, MAX_REQUESTS + 1):
        answered(answers, number)
    last = MAX_REQUESTS + 1
    assert answers.admit(last, 1, b"here", 10) is Verdict.FULL
    assert not answers.is_pending(last)
    assert answers.admit(last, 2, b"here", 10) is Verdict.NEW


def test_bytes_past_the_bound_are_refused_but_one_request_always_fits() -> None:
    answers = Answers()
    answered(answers, 1, bytes(MAX_BYTES + 1))
    assert answers.admit(2, 1, b"here", 1) is Verdict.FULL
    assert answers.admit(2, 2, b"here", MAX_BYTES + 1) is Verdict.NEW
    assert answers.admit(3, 2, b"here", 1) is Verdict.FULL
    answers.settle(2, b"")
    assert answers.admit(3, 2, b"here", MAX_BYTES) is Verdict.NEW
