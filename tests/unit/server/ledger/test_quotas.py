from __future__ import annotations

from collections.abc import Iterator

import pytest

from cubroker.protocol import messages as m
from cubroker.server.ledger import Budget
from cubroker.server.ledger import events as e
from cubroker.server.ledger.policy import Policy, Quota
from tests.unit.server.ledger.story import (
    ALICE,
    BOB,
    BROKER,
    MIB,
    Story,
    answer,
    asks,
    attached,
    attaches,
    created,
    creates,
    done,
    handle,
    layout,
    refused,
)

EVE = 1003
ROOMY = Budget(0, "GPU-0", "first", 64 * MIB, 64 * MIB)
SECOND = Budget(1, "GPU-1", "second", 64 * MIB, 64 * MIB)


def told(quota: Quota, *devices: Budget) -> Story:
    """Sessions 1 and 2 are Alice's, who has a quota; 3 is Bob's, who has none."""
    story = Story(*(devices or (ROOMY, SECOND)), policy=Policy(mode=0o666, quotas={ALICE: quota}))
    story.joins(1, 2, uid=ALICE)
    story.joins(3, uid=BOB)
    return story


@pytest.fixture
def story() -> Iterator[Story]:
    """Alice may have 8 MiB; the devices have room for all of it many times."""
    story = told(Quota(memory=8 * MIB))
    yield story
    story.end()


# -- memory ----------------------------------------------------------------------------------------


def test_a_user_who_has_used_up_its_memory_is_told_by_what_and_others_are_untouched(story: Story) -> None:
    story.publishes(1, "a", nbytes=4 * MIB)
    story >> creates(2, 1, "b", 6 * MIB)
    words = ("quota of user 1001", "of 8 MiB, 4 MiB are used", "a@1 4 MiB (current)", "retire what is not needed")
    story << refused(2, 1, "over_quota", *words)
    story >> creates(3, 1, "b", 32 * MIB)
    story << e.Allocate(2, "GPU-0", (32 * MIB,), "ipc")


def test_memory_counts_on_all_devices_together(story: Story) -> None:
    story >> creates(1, 1, "a", 4 * MIB, devices=("GPU-0", "GPU-1"))
    story << e.Allocate(1, "GPU-0", (4 * MIB,), "ipc")
    story << e.Allocate(2, "GPU-1", (4 * MIB,), "ipc")
    story >> creates(2, 1, "b", 1)
    story << refused(2, 1, "over_quota", "8 MiB are used", "a@1 4 MiB (promised)")


def test_what_can_never_fit_a_quota_is_refused_at_once(story: Story) -> None:
    story >> creates(1, 1, "a", 6 * MIB, devices=("GPU-0", "GPU-1"), wait=5.0)
    story << refused(1, 1, "over_quota", "a needs 12 MiB", "the quota of user 1001 is 8 MiB")
    story >> creates(1, 2, "a", 8 * MIB)
    story << e.Allocate(1, "GPU-0", (8 * MIB,), "ipc")


def test_memory_counts_until_the_device_has_it_back(story: Story) -> None:
    story.publishes(1, "a", nbytes=8 * MIB)
    story >> creates(2, 1, "b", 2 * MIB, wait=5.0)
    story << e.SetTimer(1, 5.0)
    story >> asks(1, 1, m.Retire("a", 0))
    story << e.Free(1, "GPU-0")
    story << answer(1, 1, m.Retirement(1, 0))
    story >> creates(2, 2, "c", 2 * MIB)
    words = ("a@1 8 MiB (being freed)", "behind 1 earlier create of this user")
    story << refused(2, 2, "over_quota", *words)
    story >> e.Freed(1)
    story << e.CancelTimer(1)
    story << e.Allocate(2, "GPU-0", (2 * MIB,), "ipc")


def test_a_wait_for_memory_of_ones_own_ends_with_its_time(story: Story) -> None:
    story.publishes(1, "a", nbytes=8 * MIB)
    story >> creates(2, 1, "b", 2 * MIB, wait=5.0)
    story << e.SetTimer(1, 5.0)
    story >> creates(2, 2, "c", 2 * MIB, wait=6.0) << e.SetTimer(2, 6.0)
    story >> creates(2, 3, "d", 2 * MIB)
    story << refused(2, 3, "over_quota", "behind 2 earlier creates of this user")
    story >> e.TimerExpired(1)
    story << refused(2, 1, "timeout", "create of b waited 5 s", "quota of user 1001", "8 MiB are used")


def test_a_create_over_its_quota_steps_aside_for_other_users_of_its_name(story: Story) -> None:
    story.publishes(3, "b")
    story.publishes(1, "a", nbytes=8 * MIB)
    story >> creates(2, 1, "b", 2 * MIB, wait=5.0)
    story << e.SetTimer(1, 5.0)
    story >> creates(3, 1, "b", 2 * MIB)
    story << e.Allocate(3, "GPU-0", (2 * MIB,), "ipc")
    # Now there is room in the quota, but it is Bob's turn.
    story.quietly(asks(1, 1, m.Retire("a", 0)))
    story >> e.Freed(2)
    story >> e.Allocated(3, (handle(3),))
    story << created(3, 1, 3, "b", 2, GPU_0=3)
    story >> creates(1, 2, "c", 2 * MIB)
    story << refused(1, 2, "over_quota", "0 bytes are used", "1 earlier create of this user")
    story >> asks(3, 2, m.Close(3))
    story << e.Free(3, "GPU-0")
    story << done(3, 2)
    story << e.CancelTimer(1)
    story << e.Allocate(4, "GPU-0", (2 * MIB,), "ipc")


def test_whoever_stepped_aside_is_refused_once_when_the_name_belongs_to_somebody_else(story: Story) -> None:
    story.publishes(1, "full", nbytes=8 * MIB)
    story >> creates(1, 1, "a", MIB, wait=5.0) << e.SetTimer(1, 5.0)
    story >> creates(2, 1, "a", MIB, wait=5.0) << e.SetTimer(2, 5.0)
    story.quietly(creates(3, 1, "a", MIB, mode=0o600), e.Allocated(2, (handle(2),)))
    story >> asks(3, 2, m.Seal(2)) << answer(3, 2, m.Sealed(1))
    (
        story
        << e.CancelTimer(1)
        << refused(1, 1, "denied", "may not publish or retire versions", "whose owner does not allow it")
    )
    (
        story
        << e.CancelTimer(2)
        << refused(2, 1, "denied", "may not publish or retire versions", "whose owner does not allow it")
    )


def test_a_create_over_its_quota_holds_up_nobody_on_its_device() -> None:
    story = told(Quota(memory=8 * MIB), Budget(0, "GPU-0", "first", 16 * MIB, 16 * MIB))
    story.publishes(1, "a", nbytes=6 * MIB)
    story >> creates(2, 1, "b", 8 * MIB, wait=5.0)
    story << e.SetTimer(1, 5.0)
    story >> creates(3, 1, "c", 10 * MIB)
    story << e.Allocate(2, "GPU-0", (10 * MIB,), "ipc")
    story.end()


def test_later_creates_of_the_same_user_do_not_overtake(story: Story) -> None:
    story.publishes(1, "a", nbytes=4 * MIB)
    story >> creates(2, 1, "b", 6 * MIB, wait=5.0)
    story << e.SetTimer(1, 5.0)
    story >> creates(1, 1, "c", 2 * MIB, wait=6.0)
    story << e.SetTimer(2, 6.0)
    story >> asks(2, 2, m.Cancel(1))
    story << e.CancelTimer(1)
    story << refused(2, 1, "timeout", "cancelled")
    story << done(2, 2)
    story << e.CancelTimer(2)
    story << e.Allocate(2, "GPU-0", (2 * MIB,), "ipc")


def test_creates_that_wait_for_their_turn_take_nothing_of_the_quota(story: Story) -> None:
    story >> creates(1, 1, "a", 4 * MIB)
    story << e.Allocate(1, "GPU-0", (4 * MIB,), "ipc")
    for request in (2, 3, 4):
        story >> creates(1, request, "a", 4 * MIB, wait=5.0, attach="GPU-0")
        story << e.SetTimer(request - 1, 5.0)
    story >> creates(2, 1, "b", 4 * MIB)
    story << e.Allocate(2, "GPU-0", (4 * MIB,), "ipc")
    story >> e.Allocated(1, (handle(1),))
    story << created(1, 1, 1, "a", 1, GPU_0=1)
    story >> asks(1, 5, m.Seal(1))
    for request in (2, 3, 4):
        story << e.CancelTimer(request - 1)
        story << attached(1, request, request, "a", 1, ticket=1, nbytes=4 * MIB)
    story << answer(1, 5, m.Sealed(1))


def test_room_in_the_quota_is_set_aside_while_a_create_waits_for_a_device() -> None:
    story = told(Quota(memory=8 * MIB), Budget(0, "GPU-0", "first", 8 * MIB, 8 * MIB), SECOND)
    story.publishes(3, "x", nbytes=8 * MIB)
    story >> creates(1, 1, "a", 6 * MIB, wait=5.0)
    story << e.SetTimer(1, 5.0)
    story >> creates(2, 1, "b", 4 * MIB, devices=("GPU-1",), wait=6.0)
    story << e.SetTimer(2, 6.0)
    story >> creates(2, 2, "c", 4 * MIB, devices=("GPU-1",))
    story << refused(2, 2, "over_quota", "6 MiB are used or set aside", "1 earlier create ")
    story >> e.TimerExpired(1)
    story << refused(1, 1, "timeout", "for room")
    story << e.CancelTimer(2)
    story << e.Allocate(2, "GPU-1", (4 * MIB,), "ipc")
    story.end()


def test_the_oldest_create_of_a_user_is_served_first_in_whatever_order_its_names_are_free(story: Story) -> None:
    story.publishes(1, "full", nbytes=4 * MIB)
    story.quietly(creates(3, 1, "p", MIB), e.Allocated(2, (handle(2),)))  # Bob has the turn in p
    story.quietly(creates(1, 1, "p", 4 * MIB, wait=5.0))  # waits for its turn
    story.quietly(creates(2, 1, "r", 4 * MIB))  # takes the rest of the quota
    story.quietly(creates(2, 2, "q", 4 * MIB, wait=6.0))  # waits for room in the quota
    story.quietly(asks(1, 2, m.Retire("full", 0)))
    story >> asks(3, 2, m.Close(2))
    story << e.Free(2, "GPU-0")
    story << done(3, 2)
    story >> e.Freed(1)
    story << e.CancelTimer(1)
    story << e.Allocate(4, "GPU-0", (4 * MIB,), "ipc")


def test_a_name_that_two_users_wait_for_is_offered_in_order_of_arrival_to_those_who_may(story: Story) -> None:
    story.publishes(1, "full", nbytes=8 * MIB)
    story.quietly(creates(3, 1, "p", MIB, mode=0o600))
    story.joins(4, uid=EVE)
    story.quietly(creates(1, 1, "q", MIB, wait=5.0))
    story.quietly(creates(3, 2, "q", MIB, wait=5.0))
    story >> creates(4, 1, "p", MIB, attach="GPU-0", wait=5.0)
    story << e.SetTimer(2, 5.0)
    story >> creates(1, 2, "p", MIB, attach="GPU-0", wait=5.0)
    story << e.SetTimer(3, 5.0)
    story >> e.ProcessExited(3)
    story << e.Free(2, "GPU-0")
    story << e.Free(3, "GPU-0")
    story << e.ForgetSession(3)
    story << e.CancelTimer(2)
    story << e.Allocate(4, "GPU-0", (2 * MIB,), "ipc")


def test_everything_of_a_user_that_is_gone_is_forgotten_but_what_it_published() -> None:
    story = told(Quota(memory=8 * MIB, sessions=2))
    story.publishes(1, "a", nbytes=4 * MIB)
    for session in (1, 2):
        story >> e.ProcessExited(session)
        story << e.ForgetSession(session)
    story.joins(4, uid=ALICE)
    story >> creates(4, 1, "b", 6 * MIB)
    story << refused(4, 1, "over_quota", "4 MiB are used")
    story >> asks(4, 2, m.Retire("a", 0))
    story << e.Free(1, "GPU-0")
    story << answer(4, 2, m.Retirement(1, 0))
    story >> e.ProcessExited(4)
    story << e.ForgetSession(4)
    story >> e.Freed(1)
    assert ALICE not in story.ledger._tables.users
    story.end()


# -- the rest --------------------------------------------------------------------------------------


def test_sessions_of_a_user_are_counted_as_long_as_they_hold_anything() -> None:
    story = told(Quota(sessions=2))
    story.publishes(3, "a")
    story.quietly(attaches(1, 1, "a"))
    refusal = story.ledger.admission_error(ALICE)
    assert refusal is not None
    assert refusal.code == "over_quota"
    holders = "(1 of process 101, 1 of process 102)"
    assert f"user 1001 has 2 sessions of a quota of 2 {holders}; end some of them" in refusal.message
    assert story.ledger.admission_error(BOB) is None
    story >> e.ConnectionLost(1)
    assert story.ledger.admission_error(ALICE) is not None
    story >> e.ProcessExited(1)
    story << e.ForgetSession(1)
    assert story.ledger.admission_error(ALICE) is None
    story.end()


def test_a_user_may_be_kept_out_altogether() -> None:
    story = Story(policy=Policy(quota=Quota(sessions=0), quotas={BROKER: Quota()}))
    refusal = story.ledger.admission_error(ALICE)
    assert refusal is not None
    assert "user 1001 has 0 sessions of a quota of 0; end" in refusal.message
    assert story.ledger.admission_error(BROKER) is None


def test_descriptors_of_a_user_are_those_of_its_sessions_and_of_memory_that_takes_some() -> None:
    emulated = Budget(0, "GPU-0", "emulated", 64 * MIB, 64 * MIB, descriptors=1)
    story = told(Quota(descriptors=8), emulated, SECOND)
    story.joins(4, uid=ALICE)
    story >> creates(1, 1, "b", MIB, MIB, wait=5.0, devices=("GPU-1", "GPU-0"))
    story << e.Allocate(1, "GPU-1", (2 * MIB, 2 * MIB), "ipc")
    story << e.Allocate(2, "GPU-0", (2 * MIB, 2 * MIB), "ipc")
    who = "(3 sessions, 1 of process 101, 1 of process 102, 1 of process 104; memory, b@1 2 (promised))"
    words = ("this takes 1 of the broker's descriptors", f"user 1001 has 8 of a quota of 8 {who}; end some sessions")
    story >> creates(2, 1, "c", MIB, wait=5.0)
    story << refused(2, 1, "over_quota", *words)
    story >> creates(2, 2, "c", MIB, devices=("GPU-1",))
    story << e.Allocate(3, "GPU-1", (2 * MIB,), "ipc")
    story >> e.ProcessExited(4)
    story << e.ForgetSession(4)
    # A create counts while it waits, and its memory until the device has it back.
    story >> creates(2, 3, "b", MIB, MIB, wait=5.0)
    story << e.SetTimer(1, 5.0)
    refusal = story.ledger.admission_error(ALICE)
    assert refusal is not None
    assert (
        "this takes 2 of the broker's descriptors, and user 1001 has 8 of a quota of 8 (2 sessions" in refusal.message
    )
    story.quietly(asks(2, 4, m.Cancel(3)))
    assert story.ledger.admission_error(ALICE) is None
    story >> creates(2, 5, "d", MIB, MIB)
    story << e.Allocate(4, "GPU-0", (2 * MIB, 2 * MIB), "ipc")
    story.quietly(asks(1, 2, m.Cancel(1)))
    assert story.ledger.admission_error(ALICE) is not None
    story.quietly(e.AllocationFailed(2, "device", "no"))
    assert story.ledger.admission_error(ALICE) is None
    story.end()


def test_memory_that_readers_are_handed_takes_one_more_descriptor_for_each_allocation_where_it_lies() -> None:
    emulated = Budget(0, "GPU-0", "emulated", 64 * MIB, 64 * MIB, descriptors=1)
    story = told(Quota(descriptors=9), emulated, SECOND)  # four of them are those of two sessions
    both = ("GPU-0", "GPU-1")
    story >> creates(1, 1, "a", MIB, MIB, devices=both, share="vmm")
    story << refused(1, 1, "over_quota", "takes 6 of the broker's descriptors, and user 1001 has 4 of a quota of 9")
    story >> creates(1, 2, "a", MIB, MIB, MIB, devices=both, share="vmm", plan=(1, 0, 1))
    story << e.Allocate(1, "GPU-0", (2 * MIB,), "vmm")
    story << e.Allocate(2, "GPU-1", (2 * MIB, 2 * MIB), "vmm")
    story >> creates(2, 1, "b", MIB, MIB, devices=("GPU-1",), share="vmm")
    story << refused(2, 1, "over_quota", "takes 2 of the broker's descriptors, and user 1001 has 8 of a quota of 9")
    story.quietly(creates(2, 2, "b", MIB, devices=("GPU-1",), share="vmm"))
    assert story.ledger.admission_error(ALICE) is not None
    story.quietly(asks(1, 3, m.Cancel(2)), e.AllocationFailed(1, "device", "no"), e.AllocationFailed(2, "device", "no"))
    # Of the 9 are 5 now taken; two replicas that are bound together take 2 on a GPU and 5 on an emulated device.
    story >> creates(1, 4, "a", MIB, devices=both, share="multicast")
    story << refused(1, 4, "over_quota", "takes 7 of the broker's descriptors, and user 1001 has 5 of a quota of 9")
    story.end()


def test_a_user_without_descriptors_is_kept_out() -> None:
    story = Story(policy=Policy(quota=Quota(descriptors=1)))
    refusal = story.ledger.admission_error(ALICE)
    assert refusal is not None
    assert refusal.code == "over_quota"
    assert "this takes 2 of the broker's descriptors, and user 1001 has 0 of a quota of 1; end" in refusal.message


def test_leases_of_a_user_are_limited_over_all_its_sessions() -> None:
    story = told(Quota(leases=2))
    story.publishes(3, "a")
    story.quietly(attaches(1, 1, "a"), attaches(2, 1, "a"))
    story >> attaches(1, 2, "a")
    words = ("user 1001 has 2 leases of a quota of 2", "session 1 (pid 101) 1", "session 2 (pid 102) 1")
    story << refused(1, 2, "over_quota", *words)
    story >> creates(1, 3, "b", MIB)
    story << refused(1, 3, "over_quota", "has 2 leases")
    story >> attaches(3, 1, "a")
    story << attached(3, 1, 4, "a", 1, ticket=1)
    story >> asks(2, 2, m.Close(3))
    story << done(2, 2)
    story >> attaches(1, 4, "a")
    story << attached(1, 4, 5, "a", 1, ticket=1)
    story.end()


def test_waiting_requests_of_a_user_are_limited_over_all_its_sessions() -> None:
    story = told(Quota(requests=2))
    story.quietly(attaches(1, 1, "a", wait=5.0), attaches(1, 2, "a", wait=5.0))
    story >> attaches(2, 1, "a", wait=5.0)
    words = ("user 1001 has 2 unfinished requests of a quota of 2 (session 1 (pid 101) 2); cancel",)
    story << refused(2, 1, "over_quota", *words)
    story >> attaches(3, 1, "a", wait=5.0)
    story << e.SetTimer(3, 5.0)
    story >> e.ConnectionLost(1)
    story << e.CancelTimer(1)
    story << e.CancelTimer(2)
    story << e.ForgetSession(1)
    story >> attaches(2, 2, "a", wait=5.0)
    story << e.SetTimer(4, 5.0)
    story.end()


def test_watches_of_a_user_are_limited_over_all_its_sessions() -> None:
    story = told(Quota(watches=1))
    story.quietly(asks(1, 1, m.Watch("a", on=True)))
    story >> asks(2, 1, m.Watch("b", on=True))
    story << refused(2, 1, "over_quota", "user 1001 has 1 watch of a quota of 1 (session 1 (pid 101) 1)")
    story.quietly(asks(1, 2, m.Watch("a", on=False)))
    story >> asks(2, 2, m.Watch("b", on=True))
    story << e.Notify(2, m.PoolChanged("b", 0))
    story << done(2, 2)
    story.end()
    story = told(Quota(watches=2))
    story.quietly(asks(1, 1, m.Watch("a", on=True)), asks(1, 2, m.Watch("b", on=True)))
    story >> asks(2, 1, m.Watch("c", on=True))
    story << refused(2, 1, "over_quota", "user 1001 has 2 watches of a quota of 2 (")


def test_layouts_of_a_user_are_limited_while_they_wait_and_while_they_are_published() -> None:
    size = len(layout(MIB).encode())
    story = told(Quota(layouts=2 * size))
    story.publishes(1, "a")
    story.quietly(creates(3, 1, "b", MIB))
    story >> creates(1, 1, "b", MIB, wait=5.0)
    story << e.SetTimer(1, 5.0)
    story >> creates(2, 1, "c", MIB)
    story << refused(
        2, 1, "over_quota", f"this layout takes {size} bytes, and those of user 1001 take {2 * size} bytes"
    )
    story >> asks(1, 2, m.Cancel(1))
    story << e.CancelTimer(1)
    story << refused(1, 1, "timeout", "cancelled")
    story << done(1, 2)
    story >> creates(2, 2, "c", MIB)
    story << e.Allocate(3, "GPU-0", (2 * MIB,), "ipc")
    story.end()
