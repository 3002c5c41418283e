from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from cubroker.protocol import messages as m
from cubroker.server.ledger import events as e
from cubroker.server.ledger.entries import Limits
from cubroker.server.ledger.policy import Policy, Quota
from tests.server.story import (
    ALICE,
    BOB,
    GPU0,
    MIB,
    Story,
    answer,
    asks,
    attached,
    attaches,
    creates,
    done,
    refused,
)


@pytest.fixture
def story() -> Iterator[Story]:
    """One device with room for five pieces of 2 MiB; session 1 is Alice's, session 2 Bob's."""
    story = Story(GPU0)
    story.joins(1)
    story.joins(2, uid=BOB)
    yield story
    story.end()


def rules(policy: Policy | None = None, limits: Limits | None = None, budget: int = 10 * MIB) -> e.Reconfigured:
    return e.Reconfigured(policy or Policy(), limits or Limits(), {"GPU-0": budget})


def test_a_smaller_budget_takes_nothing_away_and_grants_nothing_until_enough_is_free(story: Story) -> None:
    for name in ("a", "b", "c"):
        story.publishes(1, name)
    story >> rules(budget=4 * MIB)
    (device,) = story.tells(1, m.ListDevices(), m.DeviceList).devices
    assert (device.budget, device.allocated) == (4 * MIB, 6 * MIB)
    story >> creates(1, 1, "d", MIB)
    story << refused(1, 1, "over_budget")
    story >> creates(1, 2, "d", MIB, wait=5.0)
    story << e.SetTimer(1, 5.0)
    story >> asks(1, 3, m.Retire("a", 1))
    story << e.Free(1, "GPU-0")
    story << answer(1, 3, m.Retirement(1, 0))
    story >> e.Freed(1)
    story >> asks(1, 4, m.Retire("b", 1))
    story << e.Free(2, "GPU-0")
    story << answer(1, 4, m.Retirement(1, 0))
    story >> e.Freed(2)
    story << e.DropTimer(1)
    story << e.Allocate(4, "GPU-0", (2 * MIB,), "ipc")


def test_a_larger_budget_serves_who_waits_for_room(story: Story) -> None:
    story >> rules(budget=2 * MIB)
    story.publishes(1, "a")
    story >> creates(2, 1, "b", MIB, wait=5.0)
    story << e.SetTimer(1, 5.0)
    story >> rules(budget=4 * MIB)
    story << e.DropTimer(1)
    story << e.Allocate(2, "GPU-0", (2 * MIB,), "ipc")


def test_who_waits_for_room_that_there_will_never_be_is_refused(story: Story) -> None:
    story.publishes(1, "a")
    story >> creates(2, 1, "b", 10 * MIB, wait=5.0)
    story << e.SetTimer(1, 5.0)
    story >> rules(budget=8 * MIB)
    story << e.DropTimer(1)
    story << refused(2, 1, "over_budget", "b needs 10 MiB")


def test_a_smaller_quota_takes_nothing_away_and_grants_nothing(story: Story) -> None:
    for name in ("a", "b"):
        story.publishes(1, name)
        story.quietly(attaches(1, 1, name), asks(1, 2, m.Watch(name, on=True)))
    nothing = Quota(*(0,) * 8)
    story >> rules(Policy(quotas={ALICE: nothing}))
    assert story.ledger.admit(BOB) is None
    refusal = story.ledger.admit(ALICE)
    assert refusal is not None
    assert "has 1 sessions of a quota of 0" in refusal.message
    story >> attaches(1, 3, "a")
    story << refused(1, 3, "over_quota")
    story >> creates(1, 4, "c", MIB)
    story << refused(1, 4, "over_quota")
    story >> attaches(2, 5, "a")
    story << attached(2, 5, 5, "a", 1, ticket=1)
    story >> asks(1, 6, m.Close(2))
    story << done(1, 6)


def test_a_larger_quota_serves_who_waits_for_it(story: Story) -> None:
    story >> rules(Policy(quota=Quota(memory=2 * MIB)))
    story.publishes(1, "a")
    story >> creates(1, 1, "b", MIB, wait=5.0)
    story << e.SetTimer(1, 5.0)
    story >> rules(Policy(quota=Quota(memory=4 * MIB)))
    story << e.DropTimer(1)
    story << e.Allocate(2, "GPU-0", (2 * MIB,), "ipc")


def test_who_waits_for_more_than_the_quota_will_ever_have_is_refused(story: Story) -> None:
    four = Policy(quota=Quota(memory=4 * MIB))
    story >> rules(four)
    story.publishes(1, "a")
    story >> creates(1, 1, "b", 4 * MIB, wait=5.0)
    story << e.SetTimer(1, 5.0)
    story >> creates(2, 2, "b", 4 * MIB, wait=5.0)
    story << e.Allocate(2, "GPU-0", (4 * MIB,), "ipc")
    story >> rules(replace(four, quota=Quota(memory=2 * MIB)))
    story << e.DropTimer(1)
    story << refused(1, 1, "over_quota", "b needs 4 MiB", "quota")


def test_versions_that_are_no_longer_kept_are_freed_unless_somebody_has_a_lease(story: Story) -> None:
    story >> rules(Policy(keep=3))
    for _ in range(4):
        story.publishes(1, "a")
    story.quietly(attaches(2, 1, "a", 1))
    story >> rules(Policy(keep=1))
    story << e.Free(2, "GPU-0")
    assert [info.version for info in story.tells(1, m.ListPools(), m.Pools).pools] == [1, 3, 4]


def test_a_mode_and_administrators_hold_from_then_on(story: Story) -> None:
    story.publishes(1, "a", mode=0o600)
    story >> attaches(2, 1, "a")
    story << refused(2, 1, "denied")
    story >> rules(Policy(mode=0o600, admins=frozenset((BOB,))))
    story >> attaches(2, 2, "a")
    story << attached(2, 2, 2, "a", 1, ticket=1)
    story.publishes(1, "b")
    assert [info.mode for info in story.tells(1, m.ListPools(), m.Pools).pools] == [0o600, 0o600]
    story >> rules(Policy())
    story >> attaches(2, 3, "b")
    story << refused(2, 3, "denied")


def test_smaller_limits_of_a_session_end_nothing(story: Story) -> None:
    story.publishes(1, "a")
    story.quietly(attaches(1, 1, "a"), attaches(1, 2, "a"), asks(1, 3, m.Watch("a", on=True)))
    story.quietly(attaches(1, 4, "b", wait=5.0))
    story >> rules(limits=Limits(leases=1, unfinished=0, watches=0, events=0))
    story >> attaches(1, 5, "a")
    story << refused(1, 5, "over_quota", "this session holds 1 leases")
    story >> asks(1, 6, m.Close(2))
    story << done(1, 6)


def test_budgets_are_for_all_devices_or_it_is_impossible(story: Story) -> None:
    with pytest.raises(AssertionError):
        story.ledger.handle(e.Reconfigured(Policy(), Limits(), {"GPU-1": MIB}))


def test_who_stepped_aside_for_a_quota_holds_up_nobody_once_there_is_none(story: Story) -> None:
    story >> rules(Policy(quota=Quota(memory=2 * MIB)))
    story.publishes(1, "a")
    story >> creates(1, 1, "b", MIB, wait=5.0)
    story << e.SetTimer(1, 5.0)
    story >> creates(2, 2, "b", MIB)
    story << e.Allocate(2, "GPU-0", (2 * MIB,), "ipc")
    story >> rules()
    story >> creates(1, 3, "c", MIB)
    story << e.Allocate(3, "GPU-0", (2 * MIB,), "ipc")
