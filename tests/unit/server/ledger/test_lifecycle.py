"""Sessions, draining, shutdown and new rules: what begins and ends beside requests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from cubroker.protocol import messages as m
from cubroker.server.ledger import events as e
from cubroker.server.ledger.policy import Limits, Policy, Quota
from cubroker.server.ledger.states import Impossible
from tests.unit.server.ledger.story import (
    ALICE,
    BOB,
    BROKER,
    GPU0,
    MIB,
    Story,
    answer,
    asks,
    attached,
    attaches,
    changed,
    creates,
    done,
    refused,
)

BY_HAND = m.Draining("its operator wants everything to be given back")
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
    words = "lends nothing new", "its operator", "ask again later"
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
    story << e.CancelTimer(2) << refused(2, 14, "unavailable", "lends nothing new")
    story << e.Free(3, "GPU-0") << refused(3, 1, "unavailable") << e.CancelTimer(3) << refused(3, 2, "unavailable")
    for session in (1, 2, 3):
        story << e.Notify(session, BY_HAND)
    story << done(1, 700)
    story >> asks(2, 15, m.ShareEvent(4, "ready", "GPU-0", bytes(64)))
    story << e.CancelTimer(1) << answer(2, 13, m.EventOpened(1, "GPU-0", bytes(64)))
    story << answer(2, 15, m.EventShared(1))


def test_draining_is_taken_back_and_said_once(story: Story) -> None:
    drains(story, on=False)
    drains(story, 1, 2, 3)
    drains(story)
    story.quietly(e.ConnectionLost(3))
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
    assert not story.ledger.drain_reason


def test_a_broker_that_ends_tells_everybody_and_hears_when_nothing_is_held(story: Story) -> None:
    assert story.ledger.holders_text == "a@1 by session 2 (pid 102, uid 1001)"
    assert story.ledger.last_words(3) == ""
    assert "a@1: do not use a@1 any more" in story.ledger.last_words(2)
    story >> e.ShutdownStarted()
    for session in (1, 2, 3):
        story << e.Notify(session, ENDING)
    assert story.ledger.summary().startswith("draining; 1 version, 3 sessions, 1 lease; ")
    story >> attaches(3, 1, "a")
    story << refused(3, 1, "unavailable", "told to end")
    story >> asks(1, 1, m.Drain(False))
    story << refused(1, 1, "unavailable", "told to end", "wait")
    story >> e.ProcessExited(2)
    story << e.ShutdownReady() << e.ForgetSession(2)
    assert not story.ledger.holders_text
    with pytest.raises(Impossible):
        story.ledger.handle(e.ShutdownStarted())


def test_a_broker_that_nobody_holds_anything_of_has_nothing_to_wait_for(story: Story) -> None:
    story.quietly(asks(2, 2, m.Close(2)))
    assert not story.ledger.holders_text
    assert story.quietly(e.ShutdownStarted())[-1] == e.ShutdownReady()


def test_with_a_store_only_what_is_not_durable_is_refused_and_waited_for(stored: Story) -> None:
    assert not stored.ledger.holders_text
    stored.publishes(2, "b")
    stored.quietly(attaches(2, 2, "b"), attaches(2, 3, "b"))
    stored.quietly(attaches(1, 1, "c", wait=5.0), creates(1, 2, "d", MIB, share="vmm", durable=True, wait=5.0))
    assert stored.ledger.holders_text == "b@1 by session 2 (pid 102, uid 1001) 2 times"
    stored >> e.ShutdownStarted()
    stored << e.Notify(2, ENDING)
    assert not stored.ledger.drain_reason
    stored >> attaches(1, 3, "b")
    stored << refused(1, 3, "unavailable", "told to end", "start it again")
    stored >> creates(1, 4, "e", MIB)
    stored << refused(1, 4, "unavailable", "told to end")
    stored >> attaches(1, 5, "a")
    assert [type(stored.effects.popleft()) for _ in range(2)] == [e.SendFds, e.Respond]
    stored >> asks(2, 4, m.Close(4))
    stored << done(2, 4)
    stored >> asks(2, 5, m.Close(5))
    stored << e.ShutdownReady() << done(2, 5)
    stored >> asks(2, 6, m.Close(2))
    stored << e.CancelFds(2, 2) << done(2, 6)


def test_a_broker_that_ends_with_its_store_waits_for_everything_and_lends_nothing(stored: Story) -> None:
    stored.quietly(attaches(1, 1, "c", wait=5.0))
    assert not stored.ledger.shutdown_loses(with_store=False)
    assert stored.ledger.shutdown_loses(with_store=True)
    stored >> e.ShutdownStarted(with_store=True)
    stored << e.CancelTimer(1) << refused(1, 1, "unavailable", "told to end")
    stored << e.Notify(1, ENDING) << e.Notify(2, ENDING)
    assert stored.ledger.holders_text == "a@1 by session 2 (pid 102, uid 1001)"
    assert stored.ledger.drain_reason == "it was told to end"
    stored >> attaches(1, 5, "a")
    stored << refused(1, 5, "unavailable", "told to end")
    stored >> creates(1, 6, "e", MIB, share="vmm", durable=True)
    stored << refused(1, 6, "unavailable", "told to end")
    stored >> asks(2, 4, m.Close(2))
    stored << e.ShutdownReady() << e.CancelFds(2, 2) << done(2, 4)
    assert not stored.ledger.holders_text


def test_whoever_waits_for_what_turns_out_not_to_be_durable_is_refused(stored: Story) -> None:
    stored.quietly(
        creates(2, 2, "b", MIB), e.Allocated(2, (b"handle",)), attaches(1, 1, "b", wait=5.0), e.ShutdownStarted()
    )
    stored >> asks(2, 3, m.Seal(3))
    (
        stored
        << e.ShutdownReady()
        << e.CancelTimer(1)
        << refused(1, 1, "unavailable", "told to end")
        << answer(2, 3, m.Sealed(1))
    )


def test_memory_that_went_with_an_earlier_broker_is_not_waited_for(stored: Story) -> None:
    stored.publishes(2, "b")
    stored.quietly(attaches(2, 2, "b"))
    stored.restarts(2)
    assert not stored.ledger.holders_text
    assert stored.ledger.held_memory()[0].leases == 1
    stored.quietly(asks(2, 9, m.Close(2)))
    assert not stored.ledger.shutdown_loses(with_store=True)


def test_the_next_broker_is_drained_if_that_was_by_hand_and_not_if_it_was_told_to_end(stored: Story) -> None:
    stored.quietly(e.ShutdownStarted())
    stored.restarts()
    assert "draining" not in stored.ledger.summary()
    stored.quietly(asks(1, 700, m.Drain(True)))
    stored.restarts()
    assert stored.ledger.drain_reason == BY_HAND.why
    stored >> attaches(2, 2, "a")
    stored << refused(2, 2, "unavailable", "lends nothing new")


def test_what_many_hold_is_told_in_part(story: Story) -> None:
    for number in range(30):
        story.joins(10 + number)
        story.quietly(attaches(10 + number, 1, "a"))
    assert story.ledger.holders_text.count("a@1") == 20
    assert story.ledger.holders_text.endswith("and 11 more")


def test_what_stays_mapped_when_the_broker_ends_is_told_apart(stored: Story) -> None:
    assert "a@1: unmap it" in stored.ledger.last_words(2)


# -- new rules -------------------------------------------------------------------------------------


@pytest.fixture
def ruled() -> Iterator[Story]:
    """One device with room for five pieces of 2 MiB; session 1 is Alice's, session 2 Bob's."""
    ruled = Story(GPU0)
    ruled.joins(1)
    ruled.joins(2, uid=BOB)
    yield ruled
    ruled.end()


def rules(policy: Policy | None = None, limits: Limits | None = None, budget: int = 10 * MIB) -> e.Reconfigured:
    return e.Reconfigured(policy or Policy(), limits or Limits(), {"GPU-0": budget})


def test_a_smaller_budget_takes_nothing_away_and_grants_nothing_until_enough_is_free(ruled: Story) -> None:
    for name in ("a", "b", "c"):
        ruled.publishes(1, name)
    ruled >> rules(budget=4 * MIB)
    (device,) = ruled.tells(1, m.ListDevices(), m.DeviceList).devices
    assert (device.budget, device.allocated) == (4 * MIB, 6 * MIB)
    ruled >> creates(1, 1, "d", MIB)
    ruled << refused(1, 1, "over_budget")
    ruled >> creates(1, 2, "d", MIB, wait=5.0)
    ruled << e.SetTimer(1, 5.0)
    ruled >> asks(1, 3, m.Retire("a", 1))
    ruled << e.Free(1, "GPU-0")
    ruled << answer(1, 3, m.Retirement(1, 0))
    ruled >> e.Freed(1)
    ruled >> asks(1, 4, m.Retire("b", 1))
    ruled << e.Free(2, "GPU-0")
    ruled << answer(1, 4, m.Retirement(1, 0))
    ruled >> e.Freed(2)
    ruled << e.CancelTimer(1)
    ruled << e.Allocate(4, "GPU-0", (2 * MIB,), "ipc")


def test_a_larger_budget_serves_who_waits_for_room(ruled: Story) -> None:
    ruled >> rules(budget=2 * MIB)
    ruled.publishes(1, "a")
    ruled >> creates(2, 1, "b", MIB, wait=5.0)
    ruled << e.SetTimer(1, 5.0)
    ruled >> rules(budget=4 * MIB)
    ruled << e.CancelTimer(1)
    ruled << e.Allocate(2, "GPU-0", (2 * MIB,), "ipc")


def test_who_waits_for_room_that_there_will_never_be_is_refused(ruled: Story) -> None:
    ruled.publishes(1, "a")
    ruled >> creates(2, 1, "b", 10 * MIB, wait=5.0)
    ruled << e.SetTimer(1, 5.0)
    ruled >> rules(budget=8 * MIB)
    ruled << e.CancelTimer(1)
    ruled << refused(2, 1, "over_budget", "b needs 10 MiB")


def test_a_smaller_quota_takes_nothing_away_and_grants_nothing(ruled: Story) -> None:
    for name in ("a", "b"):
        ruled.publishes(1, name)
        ruled.quietly(attaches(1, 1, name), asks(1, 2, m.Watch(name, on=True)))
    nothing = Quota(*(0,) * 8)
    ruled >> rules(Policy(quotas={ALICE: nothing}))
    assert ruled.ledger.admission_error(BOB) is None
    refusal = ruled.ledger.admission_error(ALICE)
    assert refusal is not None
    assert "has 1 session of a quota of 0" in refusal.message
    ruled >> attaches(1, 3, "a")
    ruled << refused(1, 3, "over_quota")
    ruled >> creates(1, 4, "c", MIB)
    ruled << refused(1, 4, "over_quota")
    ruled >> attaches(2, 5, "a")
    ruled << attached(2, 5, 5, "a", 1, ticket=1)
    ruled >> asks(1, 6, m.Close(2))
    ruled << done(1, 6)


def test_a_larger_quota_serves_who_waits_for_it(ruled: Story) -> None:
    ruled >> rules(Policy(quota=Quota(memory=2 * MIB)))
    ruled.publishes(1, "a")
    ruled >> creates(1, 1, "b", MIB, wait=5.0)
    ruled << e.SetTimer(1, 5.0)
    ruled >> rules(Policy(quota=Quota(memory=4 * MIB)))
    ruled << e.CancelTimer(1)
    ruled << e.Allocate(2, "GPU-0", (2 * MIB,), "ipc")


def test_who_waits_for_more_than_the_quota_will_ever_have_is_refused(ruled: Story) -> None:
    four = Policy(quota=Quota(memory=4 * MIB))
    ruled >> rules(four)
    ruled.publishes(1, "a")
    ruled >> creates(1, 1, "b", 4 * MIB, wait=5.0)
    ruled << e.SetTimer(1, 5.0)
    ruled >> creates(2, 2, "b", 4 * MIB, wait=5.0)
    ruled << e.Allocate(2, "GPU-0", (4 * MIB,), "ipc")
    ruled >> rules(replace(four, quota=Quota(memory=2 * MIB)))
    ruled << e.CancelTimer(1)
    ruled << refused(1, 1, "over_quota", "b needs 4 MiB", "quota")


def test_versions_that_are_no_longer_kept_are_freed_unless_somebody_has_a_lease(ruled: Story) -> None:
    ruled >> rules(Policy(keep=3))
    for _ in range(4):
        ruled.publishes(1, "a")
    ruled.quietly(attaches(2, 1, "a", 1), asks(2, 2, m.Watch("a", on=True)))
    ruled >> rules(Policy(keep=1))
    ruled << e.Free(2, "GPU-0") << changed(2, "a", 4)
    assert [info.version for info in ruled.tells(1, m.ListPools(), m.Pools).pools] == [1, 3, 4]


def test_a_mode_and_administrators_hold_from_then_on(ruled: Story) -> None:
    ruled.publishes(1, "a", mode=0o600)
    ruled >> attaches(2, 1, "a")
    ruled << refused(2, 1, "denied")
    ruled >> rules(Policy(mode=0o600, admins=frozenset((BOB,))))
    ruled >> attaches(2, 2, "a")
    ruled << attached(2, 2, 2, "a", 1, ticket=1)
    ruled.publishes(1, "b")
    assert [info.mode for info in ruled.tells(1, m.ListPools(), m.Pools).pools] == [0o600, 0o600]
    ruled >> rules(Policy())
    ruled >> attaches(2, 3, "b")
    ruled << refused(2, 3, "denied")


def test_smaller_limits_of_a_session_end_nothing(ruled: Story) -> None:
    ruled.publishes(1, "a")
    ruled.quietly(attaches(1, 1, "a"), attaches(1, 2, "a"), asks(1, 3, m.Watch("a", on=True)))
    ruled.quietly(attaches(1, 4, "b", wait=5.0))
    ruled >> rules(limits=Limits(leases=1, requests=0, watches=0, events=0))
    ruled >> attaches(1, 5, "a")
    ruled << refused(1, 5, "over_quota", "this session has 1 lease,")
    ruled >> asks(1, 6, m.Close(2))
    ruled << done(1, 6)


def test_budgets_are_for_all_devices_or_it_is_impossible(ruled: Story) -> None:
    with pytest.raises(AssertionError):
        ruled.ledger.handle(e.Reconfigured(Policy(), Limits(), {"GPU-1": MIB}))


def test_who_stepped_aside_for_a_quota_holds_up_nobody_once_there_is_none(ruled: Story) -> None:
    ruled >> rules(Policy(quota=Quota(memory=2 * MIB)))
    ruled.publishes(1, "a")
    ruled >> creates(1, 1, "b", MIB, wait=5.0)
    ruled << e.SetTimer(1, 5.0)
    ruled >> creates(2, 2, "b", MIB)
    ruled << e.Allocate(2, "GPU-0", (2 * MIB,), "ipc")
    ruled >> rules()
    ruled >> creates(1, 3, "c", MIB)
    ruled << e.Allocate(3, "GPU-0", (2 * MIB,), "ipc")
