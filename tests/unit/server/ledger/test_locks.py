"""Locks of names: one session at a time, in the order in which they asked."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cubroker.protocol import messages as m
from cubroker.server.ledger import Ledger, Limits
from cubroker.server.ledger import events as e
from cubroker.server.ledger.policy import NameReservation, Policy, Quota
from tests.unit.server.ledger.story import ALICE, BOB, BROKER, Story, answer, asks, done, refused


@pytest.fixture
def story() -> Iterator[Story]:
    """Sessions 1 to 3 are Alice's, 4 is Bob's."""
    story = Story(store=100)
    story.joins(1, 2, 3)
    story.joins(4, uid=BOB, gid=200)
    yield story
    story.end()


def locks(session: int, request: int, name: str = "a", wait: float = 0.0) -> e.RequestReceived:
    return asks(session, request, m.Lock(name, wait))


def locked(session: int, request: int, lock: int) -> e.Respond:
    return answer(session, request, m.Locked(lock))


def names(story: Story, asker: int, session: int) -> tuple[str, ...]:
    return next(
        each.locks for each in story.tells(asker, m.ListClients(), m.Clients).clients if each.session == session
    )


def test_a_lock_goes_from_session_to_session_in_the_order_in_which_they_asked(story: Story) -> None:
    story >> locks(1, 1) << locked(1, 1, 1)
    story >> locks(2, 1, wait=5.0) << e.SetTimer(1, 5.0)
    story >> locks(4, 1, wait=5.0) << e.SetTimer(2, 5.0)
    story >> locks(3, 1, "b") << locked(3, 1, 2)
    story >> asks(1, 2, m.Unlock(1)) << e.CancelTimer(1) << locked(2, 1, 3) << done(1, 2)
    story >> asks(2, 2, m.Unlock(3)) << e.CancelTimer(2) << locked(4, 1, 4) << done(2, 2)
    story >> asks(4, 2, m.Unlock(4)) << done(4, 2)
    assert [names(story, 1, session) for session in (1, 2, 3)] == [(), (), ("b",)]
    story.joins(5, uid=BROKER)
    told = [line for line in story.log(5, "a") if "lock" in line]
    assert told[-1] == "session 4 (pid 104, uid 1002) gave back the lock of the name"


def test_a_lock_that_is_taken_is_refused_with_its_holder_to_those_who_may_see_that(story: Story) -> None:
    story >> locks(1, 1) << locked(1, 1, 1)
    story >> locks(2, 1) << refused(2, 1, "timeout", "session 1 (pid 101, uid 1001) has the lock of a; wait")
    story >> locks(4, 1) << refused(4, 1, "timeout", "a session of another user has the lock of a")
    story >> locks(2, 2, wait=5.0) << e.SetTimer(1, 5.0)
    story >> e.TimerExpired(1) << refused(2, 2, "timeout", "waited 5 s in vain: session 1")
    story >> locks(2, 3, wait=5.0) << e.SetTimer(2, 5.0)
    story >> asks(2, 4, m.Cancel(3)) << e.CancelTimer(2) << refused(2, 3, "timeout", "cancelled") << done(2, 4)


def test_a_lock_of_another_session_is_not_there_to_be_given_back(story: Story) -> None:
    story >> locks(1, 1) << locked(1, 1, 1)
    story >> asks(2, 1, m.Unlock(1)) << refused(2, 1, "not_found", "no lock 1", "given back already")
    story >> asks(1, 2, m.Unlock(1)) << done(1, 2)
    story >> asks(1, 3, m.Unlock(1)) << refused(1, 3, "not_found", "no lock 1")


def test_a_process_that_ends_hands_its_lock_over_and_a_lost_connection_does_not(story: Story) -> None:
    story >> locks(1, 1) << locked(1, 1, 1)
    story >> locks(2, 1, wait=5.0) << e.SetTimer(1, 5.0)
    story >> locks(3, 1, wait=5.0) << e.SetTimer(2, 5.0)
    story >> e.ConnectionLost(1)
    story >> e.ConnectionLost(2) << e.CancelTimer(1) << e.ForgetSession(2)  # it waits no more
    story >> locks(4, 1) << refused(4, 1, "timeout", "lost its connection and whose process lives")
    story >> e.ProcessExited(1) << e.CancelTimer(2) << locked(3, 1, 2) << e.ForgetSession(1)


def test_a_session_without_a_connection_ends_with_its_last_lock(story: Story) -> None:
    story >> locks(1, 1) << locked(1, 1, 1)
    story >> e.ConnectionLost(1)
    story >> locks(1, 2, "b") << refused(1, 2, "unavailable", "connection of session 1 has ended")
    story >> asks(1, 3, m.Unlock(1)) << done(1, 3) << e.ForgetSession(1)
    story >> locks(2, 1) << locked(2, 1, 2)


def test_only_those_who_may_publish_a_pool_have_its_lock_also_when_their_turn_comes() -> None:
    reserved = {"b": NameReservation(frozenset((ALICE,)))}
    story = Story(policy=Policy(reserved=reserved))
    story.joins(1)
    story.joins(2, uid=BOB, gid=200)
    story >> locks(2, 1, "b") << refused(2, 1, "denied", "names that begin with 'b' are reserved")
    story >> locks(1, 1) << locked(1, 1, 1)
    story >> locks(2, 2, wait=5.0) << e.SetTimer(1, 5.0)
    story.publishes(1, "a")
    story >> asks(1, 2, m.Unlock(1)) << e.CancelTimer(1) << refused(2, 2, "denied", "may not publish") << done(1, 2)
    story >> locks(2, 3) << refused(2, 3, "denied", "user 1002 may not publish or retire versions of a")


def test_locks_are_counted_for_the_session_and_for_its_user() -> None:
    policy = Policy(quotas={ALICE: Quota(locks=2)})
    story = Story(limits=Limits(locks=2), policy=policy)
    story.joins(1, 2, uid=ALICE)
    story.joins(3, uid=BOB)
    for request, name in enumerate("xyz"):
        story.quietly(locks(3, request, name))
    story >> locks(3, 9, "w") << refused(3, 9, "over_quota", "this session has 2 locks, the most", "release some")
    story >> locks(1, 1, "a") << locked(1, 1, 3)
    story >> locks(2, 1, "a", wait=5.0) << e.SetTimer(1, 5.0)
    story >> locks(2, 2, "b") << locked(2, 2, 4)
    story >> locks(2, 3, "c") << refused(2, 3, "over_quota", "user 1001 has 2 locks of a quota of 2", "(pid 102) 1")
    story >> asks(1, 2, m.Unlock(3)) << e.CancelTimer(1) << locked(2, 1, 5) << done(1, 2)
    story >> locks(1, 3, "b", wait=5.0) << refused(1, 3, "over_quota", "2 locks")


def test_whoever_has_too_many_when_its_turn_comes_is_refused_and_the_next_one_served() -> None:
    story = Story(limits=Limits(locks=1))
    story.joins(1, 2, 3)
    story >> locks(1, 1) << locked(1, 1, 1)
    story >> locks(2, 1, wait=5.0) << e.SetTimer(1, 5.0)
    story >> locks(3, 1, wait=5.0) << e.SetTimer(2, 5.0)
    story >> locks(2, 2, "b") << locked(2, 2, 2)
    story >> asks(1, 2, m.Unlock(1))
    story << e.CancelTimer(1) << refused(2, 1, "over_quota", "has 1 lock, ")
    story << e.CancelTimer(2) << locked(3, 1, 3) << done(1, 2)


def test_a_draining_broker_gives_no_locks(story: Story) -> None:
    story.joins(5, uid=BROKER)
    story >> locks(1, 1) << locked(1, 1, 1)
    story >> locks(2, 1, wait=5.0) << e.SetTimer(1, 5.0)
    story.quietly(asks(5, 1, m.Drain(on=True)))
    story >> locks(2, 2, "b") << refused(2, 2, "unavailable", "lends nothing new")
    story >> asks(1, 2, m.Unlock(1)) << done(1, 2)


def test_a_name_is_checked(story: Story) -> None:
    story >> locks(1, 1, "-bad") << refused(1, 1, "invalid", "'-bad' cannot name a lock")


def test_a_lock_and_its_number_outlive_the_broker(story: Story) -> None:
    story >> locks(1, 1) << locked(1, 1, 1)
    story >> locks(2, 1, wait=5.0) << e.SetTimer(1, 5.0)
    story.restarts()
    assert names(story, 1, 1) == ("a",)
    story >> locks(2, 1, wait=5.0) << e.SetTimer(1, 5.0)  # the client asks again
    story >> asks(1, 2, m.Unlock(1)) << e.CancelTimer(1) << locked(2, 1, 2) << done(1, 2)


def test_locks_that_contradict_each_other_are_given_up(story: Story) -> None:
    story >> locks(1, 1) << locked(1, 1, 1)
    story >> locks(2, 1, "b") << locked(2, 1, 2)
    items = story.ledger.snapshot()
    items[b"l/lock/3/b"] = items[b"l/lock/2/b"]
    items[b"l/lock/4/c"] = bytes([0x91, 99])
    ledger = Ledger.restore(story.devices, BROKER, Limits(), Policy(), items.items(), 100)
    ledger.check()
    assert [text.split(",")[0] for text in ledger.findings] == ["dropped lock 3 of b", "dropped lock 4 of c"]
    assert dict(ledger.changes()).keys() >= {b"l/lock/3/b", b"l/lock/4/c"}


def test_what_waits_for_a_lock_is_listed(story: Story) -> None:
    story >> locks(1, 1) << locked(1, 1, 1)
    story >> locks(2, 1, wait=5.0) << e.SetTimer(1, 5.0)
    (waiter,) = story.tells(1, m.Look(), m.View).waiters
    assert (waiter.session, waiter.what, waiter.pool, waiter.awaits) == (2, "lock", "a", "the lock of the name")
