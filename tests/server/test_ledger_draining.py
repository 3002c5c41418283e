"""Nobody gets anything new: the broker is drained by hand, or was told to end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cubroker.protocol import messages as m
from cubroker.server.ledger import events as e
from cubroker.server.ledger.states import Impossible
from tests.server.story import ALICE, BROKER, MIB, Story, answer, asks, attaches, creates, done, refused

BY_HAND = m.Draining("whoever runs it wants everything to be given back")
ENDING = m.Draining("it was told to end")


@pytest.fixture
def story() -> Iterator[Story]:
    """Session 1 runs the broker; sessions 2 and 3 are Alice's, of which 2 published ``a`` and holds it by lease 2."""
    story = Story()
    story.joins(1, uid=BROKER)
    story.joins(2, 3)
    story.publishes(2, "a")
    story.quietly(attaches(2, 1, "a"))
    yield story
    story.end()


@pytest.fixture
def stored() -> Iterator[Story]:
    """With a store: session 1 runs the broker; session 2 is Alice's, and holds ``a``, which is durable, by lease 2."""
    story = Story(store=100)
    story.joins(1, uid=BROKER)
    story.joins(2)
    lasting(story, "a", 1)
    story.quietly(attaches(2, 1, "a"))
    yield story
    story.end()


def lasting(story: Story, name: str, ticket: int) -> None:
    """Have session 2 publish a durable pool."""
    story.quietly(creates(2, 800, name, MIB, share="vmm", durable=True))
    (*_, created) = story.quietly(e.Allocated(ticket, (m.DESCRIPTOR,), (7,)))
    assert isinstance(created, e.Respond)
    assert isinstance(created.body, m.Created)
    story.quietly(asks(2, 801, m.Seal(created.body.lease)))


def drains(story: Story, *told: int, on: bool = True) -> None:
    story >> asks(1, 700, m.Drain(on))
    for session in told:
        story << e.Notify(session, BY_HAND if on else m.Draining(""))
    story << done(1, 700)


def test_a_broker_that_is_drained_lends_nothing_new_and_takes_back_what_it_lent(story: Story) -> None:
    drains(story, 1, 2, 3)
    words = "lends nothing new", "whoever runs it", "ask again later"
    story >> attaches(3, 1, "a")
    story << refused(3, 1, "unavailable", *words)
    story >> attaches(3, 2, "b", wait=5.0)
    story << refused(3, 2, "unavailable", *words)
    story >> creates(3, 3, "b", MIB)
    story << refused(3, 3, "unavailable", *words)
    story >> creates(3, 4, "a", MIB, attach="GPU-0")
    story << refused(3, 4, "unavailable", *words)
    story >> asks(2, 2, m.Retire("a", 0))
    story << answer(2, 2, m.Retirement(1, 1))
    story >> asks(2, 3, m.Close(2))
    story << e.Free(1, "GPU-0")
    story << done(2, 3)


def test_a_draft_is_filled_and_sealed_while_the_broker_is_drained(story: Story) -> None:
    story.quietly(creates(3, 1, "b", MIB), e.Allocated(2, (b"handle",)))
    drains(story, 1, 2, 3)
    story >> asks(3, 2, m.Seal(3))
    story << answer(3, 2, m.Sealed(1))


def test_whoever_waits_for_a_lease_is_refused_and_whoever_waits_for_an_event_is_not(story: Story) -> None:
    story.quietly(creates(2, 10, "w", MIB, writable=True), e.Allocated(2, (b"handle",)), asks(2, 11, m.Seal(3)))
    story.quietly(attaches(2, 12, "w"), asks(2, 13, m.OpenEvent(4, "ready", 5.0)))
    story.quietly(attaches(2, 14, "b", wait=5.0), creates(3, 1, "c", MIB), creates(3, 2, "c", MIB, wait=5.0))
    story >> asks(1, 700, m.Drain(True))
    story << e.DropTimer(2) << refused(2, 14, "unavailable", "lends nothing new")
    story << e.Free(3, "GPU-0") << refused(3, 1, "unavailable") << e.DropTimer(3) << refused(3, 2, "unavailable")
    for session in (1, 2, 3):
        story << e.Notify(session, BY_HAND)
    story << done(1, 700)
    story >> asks(2, 15, m.ShareEvent(4, "ready", "GPU-0", bytes(64)))
    story << e.DropTimer(1) << answer(2, 13, m.EventOpened(1, "GPU-0", bytes(64)))
    story << answer(2, 15, m.EventShared(1))


def test_draining_is_taken_back_and_said_once(story: Story) -> None:
    drains(story, on=False)
    drains(story, 1, 2, 3)
    drains(story)
    story.quietly(e.Lost(3))
    drains(story, 1, 2, on=False)
    story >> attaches(2, 2, "a")
    assert isinstance(story.effects.popleft(), e.Respond)


@pytest.mark.parametrize("uid", [BROKER, 0])
def test_root_and_the_user_who_runs_the_broker_may_drain_it(story: Story, uid: int) -> None:
    story.joins(4, uid=uid)
    *_, last = story.quietly(asks(4, 1, m.Drain(True)))
    assert last == done(4, 1)


def test_nobody_else_may_drain_it(story: Story) -> None:
    story >> asks(2, 2, m.Drain(True))
    story << refused(2, 2, "denied", f"user {ALICE}", f"user {BROKER}", "root")
    assert not story.ledger.draining


def test_a_broker_that_ends_tells_everybody_and_hears_when_nothing_is_held(story: Story) -> None:
    assert story.ledger.held == "a@1 by session 2 (pid 102, uid 1001)"
    assert story.ledger.last_words(3) == ""
    assert "a@1: do not use a@1 any more" in story.ledger.last_words(2)
    story >> e.Ending()
    for session in (1, 2, 3):
        story << e.Notify(session, ENDING)
    assert story.ledger.summary().startswith("draining; ")
    story >> attaches(3, 1, "a")
    story << refused(3, 1, "unavailable", "told to end")
    story >> asks(1, 1, m.Drain(False))
    story << refused(1, 1, "unavailable", "told to end", "wait")
    story >> e.Gone(2)
    story << e.Drained() << e.Forget(2)
    assert not story.ledger.held
    with pytest.raises(Impossible):
        story.ledger.handle(e.Ending())


def test_a_broker_that_nobody_holds_anything_of_has_nothing_to_wait_for(story: Story) -> None:
    story.quietly(asks(2, 2, m.Close(2)))
    assert not story.ledger.held
    assert story.quietly(e.Ending())[-1] == e.Drained()


def test_with_a_store_only_what_is_not_durable_is_refused_and_waited_for(stored: Story) -> None:
    assert not stored.ledger.held
    stored.publishes(2, "b")
    stored.quietly(attaches(2, 2, "b"), attaches(2, 3, "b"))
    stored.quietly(attaches(1, 1, "c", wait=5.0), creates(1, 2, "d", MIB, share="vmm", durable=True, wait=5.0))
    assert stored.ledger.held == "b@1 by session 2 (pid 102, uid 1001) 2 times"
    stored >> e.Ending()
    stored << e.Notify(2, ENDING)
    assert not stored.ledger.draining
    stored >> attaches(1, 3, "b")
    stored << refused(1, 3, "unavailable", "told to end", "the next one")
    stored >> creates(1, 4, "e", MIB)
    stored << refused(1, 4, "unavailable", "told to end")
    stored >> attaches(1, 5, "a")
    assert [type(stored.effects.popleft()) for _ in range(2)] == [e.HandOver, e.Respond]
    stored >> asks(2, 4, m.Close(4))
    stored << done(2, 4)
    stored >> asks(2, 5, m.Close(5))
    stored << e.Drained() << done(2, 5)
    stored >> asks(2, 6, m.Close(2))
    stored << e.Withdraw(2, 2) << done(2, 6)


def test_a_broker_that_ends_with_its_store_waits_for_everything_and_lends_nothing(stored: Story) -> None:
    stored.quietly(attaches(1, 1, "c", wait=5.0))
    assert not stored.ledger.takes_along(with_store=False)
    assert stored.ledger.takes_along(with_store=True)
    stored >> e.Ending(with_store=True)
    stored << e.DropTimer(1) << refused(1, 1, "unavailable", "told to end")
    stored << e.Notify(1, ENDING) << e.Notify(2, ENDING)
    assert stored.ledger.held == "a@1 by session 2 (pid 102, uid 1001)"
    assert stored.ledger.draining == "it was told to end"
    stored >> attaches(1, 5, "a")
    stored << refused(1, 5, "unavailable", "told to end")
    stored >> creates(1, 6, "e", MIB, share="vmm", durable=True)
    stored << refused(1, 6, "unavailable", "told to end")
    stored >> asks(2, 4, m.Close(2))
    stored << e.Drained() << e.Withdraw(2, 2) << done(2, 4)
    assert not stored.ledger.held


def test_whoever_waits_for_what_turns_out_not_to_be_durable_is_refused(stored: Story) -> None:
    stored.quietly(creates(2, 2, "b", MIB), e.Allocated(2, (b"handle",)), attaches(1, 1, "b", wait=5.0), e.Ending())
    stored >> asks(2, 3, m.Seal(3))
    stored << e.Drained() << e.DropTimer(1) << refused(1, 1, "unavailable", "told to end") << answer(2, 3, m.Sealed(1))


def test_memory_that_went_with_an_earlier_broker_is_not_waited_for(stored: Story) -> None:
    stored.publishes(2, "b")
    stored.quietly(attaches(2, 2, "b"))
    stored.restarts(2)
    assert not stored.ledger.held
    assert stored.ledger.memory()[0].leases == 1
    stored.quietly(asks(2, 9, m.Close(2)))
    assert not stored.ledger.takes_along(with_store=True)


def test_the_next_broker_is_drained_if_that_was_by_hand_and_not_if_it_was_told_to_end(stored: Story) -> None:
    stored.quietly(e.Ending())
    stored.restarts()
    assert "draining" not in stored.ledger.summary()
    stored.quietly(asks(1, 700, m.Drain(True)))
    stored.restarts()
    assert stored.ledger.draining == BY_HAND.why
    stored >> attaches(2, 2, "a")
    stored << refused(2, 2, "unavailable", "lends nothing new")


def test_what_many_hold_is_told_in_part(story: Story) -> None:
    for number in range(30):
        story.joins(10 + number)
        story.quietly(attaches(10 + number, 1, "a"))
    assert story.ledger.held.count("a@1") == 20
    assert story.ledger.held.endswith("and 11 more")


def test_what_stays_mapped_when_the_broker_ends_is_told_apart(stored: Story) -> None:
    assert "a@1: unmap it" in stored.ledger.last_words(2)
