from __future__ import annotations

from collections.abc import Iterator

import pytest

from cubroker.protocol import messages as m
from cubroker.server.ledger import Budget
from cubroker.server.ledger import events as e
from tests.unit.server.ledger.story import (
    ALICE,
    BOB,
    FIRST,
    MIB,
    SECOND,
    Story,
    asks,
    attached,
    attaches,
    changed,
    creates,
    done,
    refused,
)


@pytest.fixture
def story() -> Iterator[Story]:
    """Session 1 has published a@1 on GPU-0 (ticket 1, lease 1); sessions 2 and 3 are somebody else's."""
    story = Story()
    story.joins(1, uid=ALICE)
    story.joins(2, 3, uid=BOB)
    story.publishes(1, "a")
    yield story
    story.end()


def test_everybody_may_attach_and_each_attach_is_a_lease_of_its_own(story: Story) -> None:
    story >> attaches(2, 1, "a")
    story << attached(2, 1, 2, "a", 1, ticket=1)
    story >> attaches(2, 2, "a", 1, device="GPU-0")
    story << attached(2, 2, 3, "a", 1, ticket=1)
    story >> asks(2, 3, m.Close(2))
    story << done(2, 3)
    assert [line for line in story.log(2, 2) if "ended" in line] == ["lease 2 on a@1 ended"]


def test_a_lease_closed_twice_or_held_by_another_session_is_not_found_in_the_same_words(story: Story) -> None:
    story >> attaches(2, 1, "a")
    story << attached(2, 1, 2, "a", 1, ticket=1)
    story >> asks(3, 1, m.Close(2))
    story << refused(3, 1, "not_found", "this session holds no lease 2; it was closed already, or was never its own")
    story >> asks(2, 2, m.Close(2))
    story << done(2, 2)
    story >> asks(2, 3, m.Close(2))
    story << refused(2, 3, "not_found", "this session holds no lease 2; it was closed already, or was never its own")


def test_a_device_without_a_replica_is_refused_with_the_devices_that_have_one(story: Story) -> None:
    story >> attaches(2, 1, "a", device="GPU-1")
    story << refused(2, 1, "not_found", f"a@1 is not on {SECOND}; it is on {FIRST}: attach there")


def test_a_device_is_named_by_what_is_the_same_for_every_process() -> None:
    uuid = "GPU-8d2f41c6-0000-0000-0000-000000000002"
    assert Budget(3, uuid, "NVIDIA H200", MIB, MIB).label == "the broker's device 3 (NVIDIA H200, GPU-8d2f41c6)"
    gone = Budget(-1, uuid, "", 0, 0)
    assert (gone.label, gone.listed) == (f"device {uuid}, which is gone", f"{uuid} (gone)")


def test_a_pool_on_several_devices_wants_to_know_which(story: Story) -> None:
    story.publishes(1, "both", devices=("GPU-0", "GPU-1"))
    story >> attaches(2, 1, "both")
    which = "both@1 is on several of the broker's devices, 0 (first, GPU-0), 1 (second, GPU-1); name one"
    story << refused(2, 1, "invalid", which)
    story >> attaches(2, 2, "both", device="GPU-1")
    story << attached(2, 2, 3, "both", 1, ticket=3, device="GPU-1")


def test_an_unknown_name_is_refused_with_names_that_are_near(story: Story) -> None:
    story.publishes(1, "llama-7b")
    story >> attaches(2, 1, "lama-7b")
    story << refused(2, 1, "not_found", "no pool is named 'lama-7b'; did you mean llama-7b?")
    story >> attaches(2, 2, "whisper")
    story << refused(2, 2, "not_found", "no pool is named 'whisper'; `cubroker ls` lists")
    story >> attaches(2, 3, "-no name-")
    story << refused(2, 3, "invalid", "cannot name a pool")
    story >> attaches(2, 4, "lama-7b", wait=5.0)
    story << e.SetTimer(1, 5.0)
    story >> e.TimerExpired(1)
    story << refused(2, 4, "timeout", "waited 5 s", "wait for it, or load it. Or did you mean llama-7b?")


def test_an_unknown_device_is_refused_even_if_the_pool_may_come(story: Story) -> None:
    story >> attaches(2, 1, "b", device="GPU-9", wait=5.0)
    story << refused(2, 1, "not_found", "no device GPU-9; its devices are 0 (first, GPU-0), 1 (second, GPU-1)")


def test_a_version_that_is_not_there_yet_is_refused_or_waited_for(story: Story) -> None:
    story >> attaches(2, 1, "a", 2)
    story << refused(2, 1, "not_found", "a has no version 2", "the last published one is 1")
    story >> attaches(2, 2, "a", 2, wait=5.0)
    story << e.SetTimer(1, 5.0)
    story >> attaches(3, 1, "a", 3, wait=6.0)
    story << e.SetTimer(2, 6.0)
    story.quietly(creates(1, 1, "a", MIB), e.Allocated(2, (b"handle 2",)))
    story >> attaches(2, 3, "a", 2)
    story << refused(2, 3, "not_found", "a@2 is being written by session 1 (pid 101, uid 1001)")
    story >> asks(1, 2, m.Seal(2))
    story << e.Free(1, "GPU-0")
    story << e.CancelTimer(1)
    story << attached(2, 2, 3, "a", 2, ticket=2)
    story << e.Respond(1, 2, m.Sealed(2))


def test_waiters_for_the_first_version_are_served_in_order_of_arrival(story: Story) -> None:
    story >> attaches(3, 1, "b", wait=5.0)
    story << e.SetTimer(1, 5.0)
    story >> attaches(2, 1, "b", 1, wait=6.0)
    story << e.SetTimer(2, 6.0)
    story >> attaches(2, 2, "b", device="GPU-1", wait=7.0)
    story << e.SetTimer(3, 7.0)
    story.quietly(creates(1, 1, "b", MIB), e.Allocated(2, (b"handle 2",)))
    story >> asks(1, 2, m.Seal(2))
    story << e.CancelTimer(1)
    story << attached(3, 1, 3, "b", 1, ticket=2)
    story << e.CancelTimer(2)
    story << attached(2, 1, 4, "b", 1, ticket=2)
    story << e.CancelTimer(3)
    story << refused(2, 2, "not_found", f"b@1 is not on {SECOND}; it is on {FIRST}: attach there")
    story << e.Respond(1, 2, m.Sealed(1))


def test_a_waiter_whose_time_is_up_is_told_what_it_waited_for(story: Story) -> None:
    story >> attaches(2, 1, "b", wait=5.0)
    story << e.SetTimer(1, 5.0)
    story >> attaches(2, 2, "a", 7, wait=2.5)
    story << e.SetTimer(2, 2.5)
    story >> e.TimerExpired(1)
    story << refused(2, 1, "timeout", "attach to b waited 5 s for it to be published", "none was published", "load it")
    story >> e.TimerExpired(2)
    story << refused(2, 2, "timeout", "attach to a waited 2.5 s", "the last published one is 1")
    story >> e.TimerExpired(2)
    story.quietly(asks(1, 1, m.Retire("a", 0)), attaches(2, 3, "a", wait=1.0))
    story >> e.TimerExpired(3)
    story << refused(2, 3, "timeout", "a has no current version: it was retired, and 1 was the last one")


def test_a_superseded_version_can_be_attached_to_by_number_as_long_as_it_lives(story: Story) -> None:
    story >> attaches(2, 1, "a")
    story << attached(2, 1, 2, "a", 1, ticket=1)
    story.publishes(1, "a")
    story >> attaches(3, 1, "a", 1)
    story << attached(3, 1, 4, "a", 1, ticket=1)
    story >> asks(2, 2, m.Close(2))
    story << done(2, 2)
    story >> asks(3, 2, m.Close(4))
    story << e.Free(1, "GPU-0")
    story << done(3, 2)
    story >> attaches(3, 3, "a", 1, wait=9.0)
    story << refused(3, 3, "retired", "a@1 was retired or replaced", "the current one is 2")


def test_a_retired_version_is_closed_to_new_leases_and_numbers_are_not_given_out_twice(story: Story) -> None:
    story >> attaches(2, 1, "a")
    story << attached(2, 1, 2, "a", 1, ticket=1)
    story >> asks(1, 1, m.Retire("a", 1))
    story << e.Respond(1, 1, m.Retirement(1, 1))
    story >> attaches(3, 1, "a", 1)
    story << refused(3, 1, "retired", "a@1 was retired or replaced", "no other one is current")
    story >> attaches(3, 2, "a")
    story << refused(3, 2, "not_found", "a has no current version: it was retired")
    story >> asks(2, 2, m.Close(2))
    story << e.Free(1, "GPU-0")
    story << done(2, 2)
    story >> attaches(3, 3, "a")
    story << refused(3, 3, "not_found", "no version of a is left: 1 was the last one")
    story >> attaches(3, 4, "a", 1)
    story << refused(3, 4, "retired", "a@1")
    assert story.publishes(2, "a") == 2


def test_a_watch_tells_what_is_current_now_and_whenever_that_changes(story: Story) -> None:
    story >> asks(2, 1, m.Watch("a", on=True))
    story << changed(2, "a", 1)
    story << done(2, 1)
    story >> asks(3, 1, m.Watch("b", on=True))
    story << changed(3, "b", 0)
    story << done(3, 1)
    story >> asks(3, 2, m.Watch("b", on=True))
    story << changed(3, "b", 0)
    story << done(3, 2)
    story.quietly(creates(1, 1, "a", MIB), e.Allocated(2, (b"handle 2",)))
    story >> asks(1, 2, m.Seal(2))
    story << changed(2, "a", 2)
    story << e.Free(1, "GPU-0")
    story << e.Respond(1, 2, m.Sealed(2))
    story >> asks(1, 3, m.Retire("a", 0))
    story << e.Free(2, "GPU-0")
    story << changed(2, "a", 0)
    story << e.Respond(1, 3, m.Retirement(2, 0))
    story >> asks(2, 2, m.Watch("a", on=False))
    story << done(2, 2)
    story >> asks(2, 3, m.Watch("a", on=False))
    story << done(2, 3)
    story.quietly(e.Freed(1), creates(1, 4, "a", MIB), e.Allocated(3, (b"handle 3",)))
    story >> asks(1, 5, m.Seal(3))
    story << e.Respond(1, 5, m.Sealed(3))
    story >> asks(2, 4, m.Watch("no name", on=True))
    story << refused(2, 4, "invalid", "cannot name a pool")
