"""Drafts that others attach to: one lease writes, the others read, and the memory stays for the last of them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cubroker.protocol import messages as m
from cubroker.server.ledger import Limits
from cubroker.server.ledger import events as e
from cubroker.server.ledger.policy import Policy, Quota
from tests.unit.server.ledger.story import (
    BOB,
    MIB,
    Story,
    answer,
    asks,
    attached,
    attaches,
    changed,
    created,
    creates,
    done,
    handle,
    layout,
    refused,
)

GPU0 = "GPU-0"
READ_ONLY = Quota(leases=1)


def reads(session: int, request: int, version: int = 1, *, name: str = "a", wait: float = 0.0) -> e.RequestReceived:
    return asks(session, request, m.Attach(name, version, None, wait, unsealed=True))


@pytest.fixture
def story() -> Iterator[Story]:
    """Session 1 writes a@1 on GPU-0 (ticket 1, lease 1); 2 to 4 are of the same user."""
    story = Story(store=100)
    story.joins(1, 2, 3, 4)
    story.quietly(creates(1, 1, "a", MIB), e.Allocated(1, (handle(1),)))
    yield story
    story.end()


def lent(story: Story, session: int = 3, lease: int = 2) -> None:
    story >> reads(session, 1)
    story << attached(session, 1, lease, "a", 1, ticket=1)


def states(story: Story) -> list[tuple[int, str, int]]:
    return [(each.version, each.state, each.leases) for each in story.tells(2, m.ListPools(), m.Pools).pools]


def test_a_reader_has_a_lease_of_its_own_which_the_seal_makes_one_of_the_version(story: Story) -> None:
    lent(story)
    assert states(story) == [(1, "draft", 2)]
    story >> asks(1, 2, m.Seal(1))
    story << answer(1, 2, m.Sealed(1))
    assert states(story) == [(1, "current", 1)]
    story >> reads(4, 1)
    story << attached(4, 1, 3, "a", 1, ticket=1)
    story >> asks(1, 3, m.Retire("a", 1))
    story << answer(1, 3, m.Retirement(1, 2))
    story.quietly(asks(3, 2, m.Close(2)))
    story >> asks(4, 2, m.Close(3))
    story << e.Free(1, GPU0) << done(4, 2)


def test_the_memory_of_a_draft_that_is_given_up_is_freed_with_its_last_reader(story: Story) -> None:
    story.quietly(asks(2, 1, m.Watch("a", True)))
    lent(story)
    lent(story, 4, 3)
    story >> asks(1, 2, m.Close(1))
    story << done(1, 2)
    assert states(story) == [(1, "retired", 2)]
    assert "version 1 is retired: its writer gave it up, and it was lent" in story.log(2, "a")
    story >> reads(2, 2)
    story << refused(2, 2, "retired", "a@1")
    story >> asks(1, 3, m.Retire("a", 1))
    story << answer(1, 3, m.Retirement(1, 2))
    story >> asks(3, 2, m.Close(2))
    story << done(3, 2)
    story >> e.ProcessExited(4)
    story << e.Free(1, GPU0) << changed(2, "a", 0) << e.ForgetSession(4)
    assert story.publishes(1, "a") == 2


def test_a_writer_that_dies_gives_its_draft_up(story: Story) -> None:
    lent(story)
    story >> e.ProcessExited(1)
    story << e.ForgetSession(1)
    assert states(story) == [(1, "retired", 1)]
    story >> asks(3, 2, m.Close(2))
    story << e.Free(1, GPU0) << done(3, 2)


def test_a_draft_without_readers_ends_with_its_writer_and_its_number_goes_only_if_a_reader_knew_it(
    story: Story,
) -> None:
    lent(story)
    story.quietly(asks(3, 2, m.Close(2)))
    story >> asks(1, 2, m.Close(1))
    story << e.Free(1, GPU0) << done(1, 2)
    story.quietly(creates(1, 3, "a", MIB), e.Allocated(2, (handle(2),)))
    story >> asks(1, 4, m.Close(3))
    story << e.Free(2, GPU0) << done(1, 4)
    assert story.publishes(1, "a") == 2


def test_the_next_writer_has_its_turn_while_readers_hold_what_was_given_up(story: Story) -> None:
    lent(story)
    story.quietly(creates(2, 1, "a", MIB, wait=9.0))
    story >> asks(1, 2, m.Close(1))
    story << done(1, 2) << e.CancelTimer(1) << e.Allocate(2, GPU0, (2 * MIB,), "ipc")
    story >> e.Allocated(2, (handle(2),))
    story << created(2, 1, 3, "a", 2, GPU_0=2)


def test_only_the_writers_lease_writes(story: Story) -> None:
    lent(story)
    for request, body in enumerate((m.Seal(2), m.SealInPlace(2)), start=2):
        story >> asks(3, request, body)
        story << refused(3, request, "invalid", "lease 2 reads a@1, a draft", "its writer's lease alone")
    made = layout(MIB)
    story >> e.RequestReceived(3, 4, m.SetLayout(2, made.encode()), made.outline)
    story << refused(3, 4, "invalid", "it can get another layout by its writer's lease alone")
    story >> asks(1, 2, m.SealInPlace(1))
    story << answer(1, 2, m.Sealed(1))
    assert states(story) == [(1, "current", 2)]


@pytest.mark.parametrize("version", [0, 1])
def test_who_does_not_ask_for_a_draft_waits_for_its_seal(story: Story, version: int) -> None:
    story >> attaches(3, 1, "a", version)
    story << refused(3, 1, "not_found", "being written by session 1")
    story >> attaches(3, 2, "a", version, wait=9.0)
    story << e.SetTimer(1, 9.0)
    lent(story, 4, 2)
    story >> asks(1, 2, m.Seal(1))
    story << e.CancelTimer(1) << attached(3, 2, 3, "a", 1, ticket=1) << answer(1, 2, m.Sealed(1))


def test_who_waits_for_a_draft_by_number_is_refused_when_it_is_given_up_and_others_wait_on(story: Story) -> None:
    lent(story)
    story.quietly(attaches(3, 2, "a", 1, wait=9.0), attaches(4, 1, "a", wait=9.0))
    story >> asks(1, 2, m.Close(1))
    story << e.CancelTimer(1) << refused(3, 2, "retired", "a@1") << done(1, 2)
    assert len(story.tells(4, m.Look(), m.View).waiters) == 1
    story.quietly(asks(4, 2, m.Cancel(1)))


def test_who_may_not_know_of_a_draft_waits_on_when_it_is_given_up() -> None:
    story = Story()
    story.joins(1, 2)
    story.joins(3, uid=BOB)
    story.quietly(attaches(3, 1, "a", 1, wait=9.0))
    story.quietly(creates(1, 1, "a", MIB, mode=0o600), e.Allocated(1, (handle(1),)), reads(2, 1))
    story >> asks(1, 2, m.Close(1))
    story << done(1, 2)
    story >> e.TimerExpired(1)
    story << refused(3, 1, "timeout", "a has no version 1")


def test_a_draft_that_is_allocated_is_waited_for(story: Story) -> None:
    story.quietly(creates(1, 2, "b", MIB))
    story >> reads(3, 1, name="b")
    story << refused(3, 1, "not_found", "b@1 is being written by session 1")
    story >> reads(3, 2, name="b", wait=9.0)
    story << e.SetTimer(1, 9.0)
    story >> e.Allocated(2, (handle(2),))
    story << created(1, 2, 2, "b", 1, GPU_0=2)
    story << e.CancelTimer(1) << attached(3, 2, 3, "b", 1, ticket=2)


def test_a_reader_needs_the_mode_that_the_pool_has_and_the_one_that_it_will_have(story: Story) -> None:
    story.joins(5, uid=BOB)
    story.quietly(asks(1, 2, m.Seal(1)))
    story.quietly(creates(1, 3, "a", MIB, mode=0o600), e.Allocated(2, (handle(2),)))
    story >> attaches(5, 1, "a")
    story << attached(5, 1, 3, "a", 1, ticket=1)
    story >> reads(5, 2, 2)
    story << refused(5, 2, "denied", "user 1002 may not attach to a@2 before its seal", "ask its owner")
    story >> reads(2, 1, 2)
    story << attached(2, 1, 4, "a", 2, ticket=2)
    story.quietly(asks(1, 4, m.Seal(2)))
    story.quietly(creates(1, 5, "a", MIB, mode=0o644), e.Allocated(3, (handle(3),)))
    story >> reads(5, 3, 3)
    story << refused(5, 3, "denied", "user 1002 may not attach to a")


def test_memory_that_its_readers_could_write_is_read_before_the_seal_by_its_writers_user_alone() -> None:
    story = Story(store=100)
    story.joins(1, 2)
    story.joins(3, uid=BOB)
    story.quietly(creates(1, 1, "a", MIB), e.Allocated(1, (handle(1),)))
    story >> reads(3, 1)
    words = ("a@1 cannot be attached to before its seal by user 1002", "it is shared as ipc", "share='vmm'")
    story << refused(3, 1, "unsupported", *words)
    story >> reads(2, 1)
    story << attached(2, 1, 2, "a", 1, ticket=1)
    story >> asks(1, 2, m.Seal(1))
    story << answer(1, 2, m.Sealed(1))
    story >> attaches(3, 2, "a")
    story << attached(3, 2, 3, "a", 1, ticket=1)
    story.quietly(creates(1, 3, "b", MIB, share="vmm"), e.Allocated(2, (m.DESCRIPTOR,)), reads(3, 3, name="b"))
    assert [(each.name, each.leases) for each in story.tells(1, m.ListPools(), m.Pools).pools] == [("a", 2), ("b", 2)]


def test_readers_of_what_they_will_write_wait_for_its_seal(story: Story) -> None:
    story.quietly(creates(1, 2, "b", MIB, writable=True), reads(3, 1, name="b", wait=9.0))
    story >> e.Allocated(2, (handle(2),))
    story << created(1, 2, 2, "b", 1, GPU_0=2)
    words = ("b@1 cannot be attached to before its seal", "wait for it to be sealed")
    story << e.CancelTimer(1) << refused(3, 1, "unsupported", *words)
    story >> asks(1, 3, m.Seal(2))
    story << answer(1, 3, m.Sealed(1))


def test_what_was_never_sealed_can_be_no_base(story: Story) -> None:
    lent(story, 2)
    made = layout(MIB)
    update = m.Create("a", made.encode(), (GPU0,), "auto", 0.0, None, base=m.Base(1, (0,)))
    for last in (asks(3, 9, m.Find("a")), asks(1, 2, m.Close(1))):
        story >> e.RequestReceived(2, 2, update, made.outline)
        story << refused(2, 2, "invalid", "a@1 is a draft, or was given up as one")
        story.quietly(last)
    story.quietly(asks(2, 3, m.Close(2)))


def test_a_readers_lease_counts_for_its_quota_and_none_is_granted_by_a_broker_that_drains() -> None:
    story = Story(policy=Policy(quotas={BOB: READ_ONLY}), limits=Limits(leases=2))
    story.joins(1)
    story.joins(3, uid=BOB)
    story.quietly(creates(1, 1, "a", MIB, share="vmm"), e.Allocated(1, (m.DESCRIPTOR,)), reads(1, 2), reads(3, 1))
    for session in (1, 3):
        story >> reads(session, 9)
        story << refused(session, 9, "over_quota", "lease")
    story.quietly(asks(3, 2, m.Close(3)))
    story.joins(4, uid=1000)
    story.quietly(asks(4, 1, m.Drain(True)))
    story >> reads(3, 3)
    story << refused(3, 3, "unavailable", "lends nothing new")
    story >> asks(1, 3, m.Seal(1))
    story << e.CancelFds(1, 1) << answer(1, 3, m.Sealed(1))


def test_the_next_broker_knows_which_lease_writes_and_that_the_draft_was_lent() -> None:
    story = Story(store=100)
    story.joins(1)
    story.joins(3, uid=BOB)
    create = creates(1, 1, "a", MIB, share="vmm", durable=True)
    story.quietly(create, e.Allocated(1, (m.DESCRIPTOR,)), reads(3, 1))
    before = [(story.ledger.granted(*each), story.ledger.sent_fds(*each)) for each in ((1, 1), (3, 2))]
    story.restarts()
    grants = [(story.ledger.granted(*each), story.ledger.sent_fds(*each)) for each in ((1, 1), (3, 2))]
    assert grants == before
    kinds = [(type(granted), sent.writable) for granted, sent in grants if sent]
    assert kinds == [(m.Created, True), (m.Attached, False)]
    story.quietly(asks(1, 2, m.Close(1)))
    story.restarts()
    assert [(each.version, each.state, each.leases) for each in story.tells(3, m.ListPools(), m.Pools).pools] == [
        (1, "retired", 1)
    ]
    story >> asks(3, 2, m.Close(2))
    story << e.CancelFds(3, 2) << e.Free(1, GPU0) << done(3, 2)


def test_a_draft_that_is_lost_is_told_to_its_writer_and_its_readers(story: Story) -> None:
    lent(story)
    story >> e.MemoryLost(1, "it went")
    lost = m.PoolLost("a", 1, "it went")
    story << e.Notify(1, lost) << e.Notify(3, lost)
    story >> asks(1, 2, m.Close(1))
    story << done(1, 2)
    story >> asks(3, 2, m.Close(2))
    story << e.Free(1, GPU0) << done(3, 2)
