from __future__ import annotations

from collections import deque
from collections.abc import Generator

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cubroker.protocol import Layout, wire
from cubroker.protocol.messages import DESCRIPTOR, Answer, Attached, Created, Failed, ReplicaHandles
from cubroker.server.transport.reply_cache import (
    MAX_BYTES,
    MAX_REFUSED,
    MAX_REQUESTS,
    OVERHEAD,
    SHARE,
    Admission,
    Receipts,
    ReplyAccount,
    ReplyCache,
    SharedLayout,
    Spans,
    parts,
)


def answered(answers: ReplyCache, number: int, answer: bytes = b"answer") -> None:
    assert answers.admit(number, 1, b"here", 10) is Admission.NEW
    assert answers.settle(number, answer) == b"here"


def test_a_request_is_done_once_however_often_it_is_sent() -> None:
    answers = ReplyCache()
    assert answers.admit(7, 1, b"here", 10) is Admission.NEW
    assert answers.admit(7, 1, b"there", 10) is Admission.PENDING
    assert answers.is_pending(7)
    assert answers.settle(7, b"answer") == b"there"
    assert not answers.is_pending(7)
    assert answers.admit(7, 1, b"anywhere", 10) == b"answer"


def test_an_answer_is_kept_until_the_client_has_it() -> None:
    answers = ReplyCache()
    for number in (1, 2, 3):
        answered(answers, number)
    assert answers.admit(4, 3, b"here", 10) is Admission.NEW
    assert answers.admit(2, 3, b"here", 10) is Admission.STALE
    assert answers.admit(3, 1, b"here", 10) == b"answer"


def test_requests_may_arrive_and_be_answered_in_any_order() -> None:
    answers = ReplyCache()
    for number in (5, 2):
        assert answers.admit(number, 1, b"here", 10) is Admission.NEW
    answers.settle(2, b"two")
    answers.settle(5, b"five")
    assert answers.admit(2, 2, b"here", 10) == b"two"
    assert answers.admit(3, 2, b"here", 10) is Admission.NEW


def test_the_answer_of_a_request_that_its_client_gave_up_is_sent_and_not_kept() -> None:
    answers = ReplyCache()
    assert answers.admit(1, 1, b"here", 10) is Admission.NEW
    assert answers.admit(2, 2, b"here", 10) is Admission.NEW
    assert answers.settle(1, b"late") == b"here"
    assert answers.admit(1, 2, b"here", 10) is Admission.STALE


def test_a_request_about_another_one_that_has_not_come_is_for_later() -> None:
    answers = ReplyCache()
    for number in (2, 3):
        answered(answers, number)
    assert answers.admit(9, 1, b"here", 10, about=1) is Admission.LATER
    assert answers.admit(9, 1, b"here", 10, (3,), about=4) is Admission.LATER
    assert not answers.is_pending(9)
    assert answers.admit(4, 1, b"here", 10) is Admission.NEW
    for number, other in enumerate((4, 3, 2, 20), start=9):  # pending, received, answered, and not sent yet
        assert answers.admit(number, 1, b"here", 10, about=other) is Admission.NEW
    assert answers.admit(13, 2, b"here", 10, about=1) is Admission.NEW, "its client has the answer"


def test_a_lease_weighs_no_less_than_its_bytes_however_large_its_layout_and_however_its_memory_is_opened() -> None:
    for rows in ([bytes(64)], [bytes(64), b""], [b"", b"", bytes(64)], [DESCRIPTOR] * 64):
        replicas = tuple(ReplicaHandles(f"HOST-{place}", (handle,) * 4096) for place, handle in enumerate(rows))
        reader = Answer(1, Attached(1, "name", 1, "multicast", bytes(1 << 20), replicas))
        for lease in (reader, Answer(1, Created(1, "name", 1, "multicast", replicas))):
            own, layout = parts(lease)
            assert len(wire.pack(lease)) <= own + len(layout) < 2 * len(wire.pack(lease))


def full() -> tuple[ReplyCache, int]:
    """Return answers without room, and the number of the next request."""
    answers = ReplyCache()
    for number in range(1, MAX_REQUESTS + 1):
        answered(answers, number)
    return answers, MAX_REQUESTS + 1


def test_requests_past_the_bound_are_refused_until_answers_are_fetched() -> None:
    answers, late = full()
    assert answers.admit(late, 1, b"here", 10) is Admission.FULL
    assert not answers.is_pending(late)
    assert answers.admit(late + 1, 2, b"here", 10) is Admission.NEW


def test_what_was_refused_is_never_done() -> None:
    answers, late = full()
    for number in (late, late + 7):
        assert answers.admit(number, 1, b"here", 10) is Admission.FULL
    for number in (late, late + 7):  # copies
        assert answers.admit(number, late, b"here", 10) is Admission.FULL
    for number in (late + 3, late + 8):  # the first was lost while there was no room
        assert answers.admit(number, late, b"here", 10) is Admission.NEW
    assert answers.admit(late, late + 8, b"here", 10) is Admission.STALE, "its client has the refusal"
    assert answers.receipts.refused == 0


def test_refusals_of_a_client_that_leaves_out_numbers_are_bounded() -> None:
    answers, late = full()
    for number in range(late, late + 2 * MAX_REFUSED + 1, 2):
        assert answers.admit(number, 1, b"here", 10) is Admission.FULL
    assert answers.receipts.refused == (late, late + 2 * MAX_REFUSED + 1)
    assert answers.admit(late + 1, late, b"here", 10, must_deliver=True) is Admission.NEW, "it takes no refusal"


def test_what_its_client_insists_on_is_not_refused_but_done_when_there_is_room() -> None:
    answers, late = full()
    assert answers.admit(late, 1, b"here", 10, must_deliver=True) is Admission.LATER
    assert answers.admit(late + 1, 1, b"here", 10) is Admission.FULL
    assert answers.admit(late, 2, b"here", 10, must_deliver=True) is Admission.NEW
    assert answers.admit(late, 2, b"there", 10, must_deliver=True) is Admission.PENDING


def of_one_user(count: int) -> list[ReplyCache]:
    """Return the answers of so many sessions of one user."""
    account, sessions = ReplyAccount(), [ReplyCache() for _ in range(count)]
    for each in sessions:
        each.move(account)
    return sessions


def attached(lease: int, layout: bytes) -> Answer:
    return Answer(lease, Attached(lease, "name", 1, "ipc", layout, (ReplicaHandles("HOST-0", (bytes(64),)),)))


def test_bytes_past_the_bound_of_a_user_are_refused_to_all_its_sessions_and_to_nobody_else() -> None:
    first, second = of_one_user(2)
    assert first.admit(1, 1, b"here", MAX_BYTES // 2) is Admission.NEW
    assert second.admit(1, 1, b"here", MAX_BYTES // 2) is Admission.FULL
    assert ReplyCache().admit(1, 1, b"here", MAX_BYTES // 2) is Admission.NEW
    answered(second, 2, bytes(MAX_BYTES // 3))
    assert second.admit(3, 1, b"here", MAX_BYTES // 3) is Admission.FULL
    assert second.admit(4, 3, b"here", MAX_BYTES // 3) is Admission.NEW
    first.settle(1, b"done")
    assert first.admit(2, 1, b"here", MAX_BYTES // 2) is Admission.NEW


def test_a_session_always_has_a_small_share_whatever_the_others_of_its_user_have() -> None:
    greedy, modest = of_one_user(2)
    assert greedy.admit(1, 1, b"here", MAX_BYTES - OVERHEAD) is Admission.NEW
    count = SHARE // (2 * OVERHEAD)
    for number in range(1, count + 1):
        assert modest.admit(number, 1, b"here", OVERHEAD) is Admission.NEW
    assert modest.admit(count + 1, 1, b"here", OVERHEAD) is Admission.FULL
    modest.settle(1, b"")
    assert modest.admit(count + 2, 2, b"here", OVERHEAD) is Admission.NEW


def test_a_layout_counts_once_however_many_requests_and_answers_of_a_user_have_it() -> None:
    layout, sessions = bytes(MAX_BYTES // 2), of_one_user(100)
    for each in sessions:
        assert each.admit(1, 1, b"here", 10, layout=bytes(layout)) is Admission.NEW
    account = sessions[0].account
    assert account.nbytes == len(layout) + 100 * (10 + OVERHEAD)
    assert sessions[0].admit(2, 1, b"here", 10, layout=b"x" + layout) is Admission.FULL
    for each in sessions:
        each.settle(1, attached(1, layout))
    assert len(layout) < account.nbytes < len(layout) + 100 * 1024
    for each in sessions:
        assert each.admit(3, 2, b"here", 10) is Admission.NEW, "the client has the lease"
    assert account.nbytes == 100 * (10 + OVERHEAD)


@pytest.mark.parametrize("data", [Layout.pack([("a", "U8", (1,))]).encode(), b"no layout"])
def test_a_layout_is_checked_once_for_all_who_bring_it(data: bytes) -> None:
    layout, outcomes = SharedLayout(data), list[object]()

    def check() -> Generator[None, None, None]:
        outcomes.append((yield from layout.check()))

    for _ in range(2):
        deque(check())
    assert outcomes[0] is outcomes[1]
    assert isinstance(outcomes[0], Failed) == (data == b"no layout")


def test_a_session_that_ends_gives_back_all_that_it_has() -> None:
    first, second = of_one_user(2)
    for number, answer in enumerate((b"one", attached(2, b"layout")), start=1):
        assert first.admit(number, 1, b"here", 10, layout=b"layout") is Admission.NEW
        first.settle(number, answer)
    assert first.admit(3, 1, b"here", 10, layout=b"another") is Admission.NEW
    assert second.admit(1, 1, b"here", 10, layout=b"layout") is Admission.NEW
    first.close()
    assert first.account.nbytes == 10 + OVERHEAD + len(b"layout")
    second.close()
    assert first.account.nbytes == 0


def test_a_session_that_hung_up_keeps_its_answers_and_no_request() -> None:
    (answers,) = of_one_user(1)
    answered(answers, 1)
    assert answers.admit(2, 1, b"here", 10, layout=b"layout") is Admission.NEW
    answers.abandon()
    assert answers.account.nbytes == len(b"answer") + OVERHEAD
    assert answers.admit(1, 1, b"here", 10) == b"answer"
    assert answers.admit(2, 1, b"here", 10) is Admission.NEW


def test_what_a_session_brings_along_counts_on_its_users_account() -> None:
    answers = ReplyCache(None, {1: b"one", 2: attached(2, b"layout"), 3: None})
    assert answers.admit(4, 1, b"here", 10) is Admission.NEW
    before, account = answers.account, ReplyAccount()
    nbytes = before.nbytes
    answers.move(account)
    assert (before.nbytes, account.nbytes) == (0, nbytes)
    assert nbytes > 10 + 3 * OVERHEAD + len(b"onelayout")


def test_what_was_only_told_is_told_anew() -> None:
    (answers,) = of_one_user(1)
    for _ in range(2):
        assert answers.admit(1, 1, b"here", 10) is Admission.NEW
        assert answers.tell(1, MAX_BYTES // 2) == b"here"
        assert answers.account.nbytes == OVERHEAD, "it is not kept"
    assert answers.admit(2, 2, b"here", 10) is Admission.NEW
    assert answers.admit(1, 1, b"here", 10) is Admission.STALE
    assert answers.admit(3, 3, b"here", 10) is Admission.NEW
    assert answers.tell(2, 10) == b"here", "its client gave it up"
    assert answers.account.nbytes == 10 + OVERHEAD


def test_what_was_told_is_told_anew_though_a_later_request_was_refused() -> None:
    (answers,) = of_one_user(1)
    for number in (1, 2):
        assert answers.admit(number, 1, b"here", 10) is Admission.NEW
        answers.tell(number, 10)
    assert answers.admit(3, 1, b"here", 10) is Admission.NEW
    assert answers.admit(4, 1, b"here", MAX_BYTES) is Admission.FULL
    assert answers.admit(1, 1, b"here", 10) is Admission.NEW
    assert answers.admit(2, 1, b"here", MAX_BYTES) is Admission.FULL, "there is no room for it now"
    for number in (4, 2):
        assert answers.admit(number, 1, b"here", 10) is Admission.FULL, "its client has heard so"


def test_a_session_that_acknowledges_nothing_is_sent_no_answers_without_end() -> None:
    first, second = of_one_user(2)
    for number, answer in ((1, None), (2, attached(2, bytes(MAX_BYTES // 2)))):
        assert first.admit(number, 1, b"here", 10) is Admission.NEW
        if answer:
            first.settle(number, answer)
        else:
            first.tell(number, MAX_BYTES // 2)
    assert first.admit(3, 1, b"here", 10) is Admission.FULL
    assert second.admit(1, 1, b"here", 10) is Admission.NEW, "that costs no memory"
    assert first.admit(4, 1, b"here", 10, (1,)) is Admission.NEW
    assert first.admit(1, 1, b"here", 10) is Admission.STALE


def test_a_request_that_waits_does_not_keep_the_answers_of_those_after_it() -> None:
    answers = ReplyCache()
    assert answers.admit(1, 1, b"here", 10) is Admission.NEW  # and is never answered
    for number in range(2, 3 * MAX_REQUESTS):
        assert answers.admit(number, 1, b"here", 10, (number - 1,)) is Admission.NEW
        answers.settle(number, bytes(100_000))
    assert answers.admit(5, 1, b"here", 10) is Admission.STALE, "a late copy of a request whose answer came"
    assert answers.is_pending(1)
    assert answers.settle(1, b"at last") == b"here"
    assert answers.admit(1, 1, b"here", 10) == b"at last"


def test_what_lasts_is_told_once_and_once_more_when_the_client_has_it() -> None:
    answers = ReplyCache()
    for number in (1, 2, 3):
        assert answers.admit(number, 1, b"here", 10) is Admission.NEW
    answers.settle(1, b"one", lasting=True)
    answers.settle(2, b"two")
    answers.settle(3, b"three", lasting=True)
    assert answers.lasting == {1, 3}
    assert answers.changes == {1: b"one", 3: b"three"}
    answers.written()
    assert answers.changes == {}
    assert answers.admit(4, 2, b"here", 10, (2,)) is Admission.NEW
    assert answers.changes == {1: None}
    answers.written()
    assert answers.admit(5, 1, b"here", 10, (3,)) is Admission.NEW
    assert answers.changes == {3: None}
    assert answers.lasting == set()


def test_what_an_earlier_broker_answered_is_answered_again_and_what_it_refused_is_refused() -> None:
    receipts = Receipts(oldest=3, refused=(6, 7, 8, 9), received=(5, 6))
    answers = ReplyCache(receipts, {3: b"three", 4: None})
    assert answers.receipts == receipts
    assert answers.lasting == {3}
    assert answers.changes == {4: None}
    verdicts = {number: answers.admit(number, 1, b"here", 10) for number in (2, 3, 5, 6, 7, 8, 9)}
    assert verdicts == {
        2: Admission.STALE,
        3: b"three",
        5: Admission.STALE,
        6: Admission.FULL,
        7: Admission.NEW,  # told, or pending, when that broker ended
        8: Admission.FULL,
        9: Admission.NEW,
    }


@pytest.mark.parametrize(
    ("oldest", "refused", "edges"), [(0, 0, 0), (3, 0, 0), (3, 2, 0), (3, 3, (3, 4)), (3, 8, (3, 9)), (0, 1, (0, 2))]
)
def test_of_refusals_an_earlier_build_wrote_the_highest_number(oldest: int, refused: int, edges: object) -> None:
    answers = ReplyCache(Receipts(oldest=oldest, refused=refused, received=()))
    assert answers.receipts.refused == edges
    if edges:
        assert answers.admit(refused, 1, b"here", 10) is Admission.FULL
    assert answers.admit(refused + 3, 1, b"here", 10) is Admission.NEW


def test_an_earlier_build_reads_the_receipts_of_a_session_that_was_refused_nothing() -> None:
    answers = ReplyCache()
    assert answers.admit(4, 4, b"here", 10) is Admission.NEW
    written = msgspec.msgpack.encode(answers.receipts)
    assert msgspec.msgpack.decode(written, type=tuple[int, int, tuple[int, ...]]) == (4, 0, ())


def test_numbers_that_were_never_asked_are_no_receipts() -> None:
    answers = ReplyCache()
    assert answers.admit(1, 1, b"here", 10, (1, 2, 3)) is Admission.NEW
    assert answers.settle(1, b"one") == b"here"
    assert answers.admit(2, 1, b"here", 10) is Admission.NEW


def test_receipts_in_tatters_are_bounded_too() -> None:
    answers = ReplyCache()
    assert answers.admit(1, 1, b"here", 10) is Admission.NEW
    number = 3
    while answers.admit(number, 1, b"here", 10, (number - 2,)) is Admission.NEW:
        answers.settle(number, b"")
        number += 2
    assert number <= 2 * MAX_REQUESTS + 3
    assert answers.admit(number + 1, number + 1, b"here", 10) is Admission.NEW


@settings(database=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.integers(0, 30), unique=True), st.integers(0, 31))
def test_spans_are_a_set(numbers: list[int], bound: int) -> None:
    spans, known = Spans(), set[int]()
    for number in numbers:
        spans.add(number)
        known.add(number)
        assert {other for other in range(32) if other in spans} == known
        assert len(spans) == sum(other - 1 not in known for other in known)
    spans.drop_runs_before(bound)
    kept = {other for other in range(32) if other in spans}
    assert {other for other in known if other >= bound} <= kept <= known
    assert all(other >= bound or other + 1 in kept or other + 1 == bound for other in kept)
