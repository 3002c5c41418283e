"""Pools whose tensors are spread over devices by a plan, and who gets which part of them."""

from __future__ import annotations

import pytest

from cubroker.protocol import messages as m
from cubroker.protocol import status
from cubroker.server.ledger import events as e
from cubroker.server.ledger.policy import Policy, Quota
from tests.unit.server.ledger.story import (
    ALICE,
    FIRST,
    GPU0,
    GPU1,
    MIB,
    SECOND,
    Story,
    answer,
    asks,
    attaches,
    creates,
    layout,
    refused,
)

BOTH = ("GPU-1", "GPU-0")
SIZES = (2 * MIB, 3 * MIB, 1)
PLAN = (0, 1, 0)
"""The first and the last allocation on GPU-1, the other one on GPU-0."""

SHARDS = (m.ReplicaHandles("GPU-1", (b"1a", b"", b"1b")), m.ReplicaHandles("GPU-0", (b"", b"0", b"")))


@pytest.fixture
def story() -> Story:
    story = Story()
    story.joins(1, 2)
    return story


def publish(story: Story) -> None:
    story.quietly(
        creates(1, 1, "a", *SIZES, devices=BOTH, plan=PLAN),
        e.Allocated(2, (b"0",)),
        e.Allocated(1, (b"1a", b"1b")),
        asks(1, 2, m.Seal(1)),
    )


def attached(lease: int, replicas: tuple[m.ReplicaHandles, ...]) -> m.Attached:
    return m.Attached(lease, "a", 1, "ipc", layout(*SIZES).encode(), replicas)


def test_each_device_gets_the_allocations_that_the_plan_puts_there(story: Story) -> None:
    story >> creates(1, 1, "a", *SIZES, devices=BOTH, plan=PLAN)
    story << e.Allocate(1, "GPU-1", (2 * MIB, 2 * MIB), "ipc")
    story << e.Allocate(2, "GPU-0", (4 * MIB,), "ipc")
    story >> e.Allocated(2, (b"0",))
    story >> e.Allocated(1, (b"1a", b"1b"))
    story << answer(1, 1, m.Created(1, "a", 1, "ipc", SHARDS))


def test_whoever_names_no_device_gets_every_shard_and_else_one(story: Story) -> None:
    publish(story)
    story >> attaches(2, 1, "a")
    story << answer(2, 1, attached(2, SHARDS))
    story >> attaches(2, 2, "a", device="GPU-0")
    story << answer(2, 2, attached(3, SHARDS[1:]))


def test_a_shard_elsewhere_is_no_replacement_for_one_here(story: Story) -> None:
    publish(story)
    story >> attaches(2, 1, "a", device="GPU-7", peers=("GPU-0", "GPU-1"))
    story << refused(
        2,
        1,
        "not_found",
        "a@1 has no shard on device GPU-7",
        "its shards are on the broker's devices 1 (second, GPU-1), 0 (first, GPU-0); name one, or none for all",
    )


def test_a_create_that_attaches_gets_what_an_attach_would_get(story: Story) -> None:
    every = m.Where(None)
    story >> creates(1, 1, "a", *SIZES, devices=BOTH, plan=PLAN, attach=every)
    story << e.Allocate(1, "GPU-1", (2 * MIB, 2 * MIB), "ipc")
    story << e.Allocate(2, "GPU-0", (4 * MIB,), "ipc")
    story >> creates(2, 1, "a", *SIZES, devices=BOTH, plan=PLAN, attach=every, wait=5.0)
    story << e.SetTimer(1, 5.0)
    story >> creates(2, 2, "a", *SIZES, devices=BOTH, plan=PLAN, attach="GPU-0", wait=5.0)
    story << e.SetTimer(2, 5.0)
    story.quietly(e.Allocated(2, (b"0",)), e.Allocated(1, (b"1a", b"1b")))
    story >> asks(1, 2, m.Seal(1))
    story << e.CancelTimer(1)
    story << answer(2, 1, attached(2, SHARDS))
    story << e.CancelTimer(2)
    story << answer(2, 2, attached(3, SHARDS[1:]))
    story << answer(1, 2, m.Sealed(1))
    story >> creates(2, 3, "a", MIB, attach=every)
    story << answer(2, 3, attached(4, SHARDS))


def test_budgets_and_quotas_count_what_is_on_each_device() -> None:
    story = Story(GPU0, GPU1, policy=Policy(quota=Quota(memory=8 * MIB)))
    story.joins(1)
    publish(story)
    story >> asks(1, 3, m.ListDevices())
    devices = story.effects.popleft()
    assert isinstance(devices, e.Respond)
    assert isinstance(devices.body, m.DeviceList)
    assert [device.allocated for device in devices.body.devices] == [4 * MIB, 4 * MIB]
    story >> creates(1, 4, "b", 1, wait=0.0)
    story << refused(1, 4, "over_quota", "of 8 MiB, 8 MiB are used")


def test_a_sharded_create_waits_for_room_on_each_of_its_devices(story: Story) -> None:
    story.quietly(creates(1, 1, "full", 4 * MIB, devices=("GPU-1",)), e.Allocated(1, (b"x",)))
    story >> creates(2, 1, "a", 4 * MIB, 8 * MIB, devices=BOTH, plan=(0, 1))
    story << refused(2, 1, "over_budget", f"a needs 4 MiB on {SECOND}", "4 MiB are allocated")
    story >> creates(2, 2, "a", 4 * MIB, 8 * MIB, devices=BOTH, plan=(0, 1), wait=5.0)
    story << e.SetTimer(1, 5.0)
    story >> creates(1, 2, "b", 6 * MIB)
    story << refused(1, 2, "over_budget", f"b needs 6 MiB on {FIRST}, behind 1 earlier request for room there")
    story >> asks(1, 3, m.Close(1))
    story << e.Free(1, "GPU-1")
    story << answer(1, 3, m.Done())
    story >> e.Freed(1)
    story << e.CancelTimer(1)
    story << e.Allocate(2, "GPU-1", (4 * MIB,), "ipc")
    story << e.Allocate(3, "GPU-0", (8 * MIB,), "ipc")


def test_a_shard_that_cannot_be_allocated_ends_all_of_them_in_any_order(story: Story) -> None:
    story.quietly(creates(1, 1, "a", *SIZES, devices=BOTH, plan=PLAN))
    story >> e.AllocationFailed(1, "out_of_memory", "no")
    story << e.Free(2, "GPU-0")
    story << refused(1, 1, "out_of_memory", "no")
    story >> e.Allocated(2, (b"0",))
    story >> e.Freed(2)


def test_a_list_says_what_is_sharded(story: Story) -> None:
    publish(story)
    story >> asks(2, 1, m.ListPools())
    counts, policy = (sum(SIZES), 0), (ALICE, 100, 0o644)
    info = status.PoolInfo(
        "a",
        1,
        "current",
        *counts,
        "ipc",
        BOTH,
        False,
        0,
        *policy,
        True,
        False,
        "",
        "",
        "handle",
        memory=8 * MIB,
        published=0.0,
    )
    story << answer(2, 1, m.Pools((info,)))


# -- from other devices ------------------------------------------------------------------------------


def test_a_replica_here_comes_before_those_that_can_be_reached_and_these_are_taken_best_first(story: Story) -> None:
    number = story.publishes(1, "a", devices=("GPU-0", "GPU-1"))
    here, there = (m.ReplicaHandles(uuid, (b"handle %d" % ticket,)) for uuid, ticket in (("GPU-0", 1), ("GPU-1", 2)))
    for request, device, peers, taken in (
        (1, "GPU-0", ("GPU-1",), here),
        (2, "GPU-7", ("GPU-1", "GPU-0"), there),
        (3, "GPU-7", ("GPU-8", "GPU-0"), here),
    ):
        story >> attaches(2, request, "a", device=device, peers=peers)
        story << answer(2, request, m.Attached(request + 1, "a", number, "ipc", layout(MIB).encode(), (taken,)))


def test_a_pool_out_of_reach_is_not_found_in_words_that_say_where_it_is(story: Story) -> None:
    story.publishes(1, "a", devices=("GPU-1",))
    story >> attaches(2, 1, "a", device="GPU-0")
    story << refused(
        2,
        1,
        "not_found",
        f"a@1 is not on {FIRST}; it is on {SECOND}",
        "reach it from here over peer access",
    )
    story >> attaches(2, 2, "a", device="GPU-7", peers=("GPU-0", "GPU-8"))
    reach = f"nor on one that it can reach ({FIRST}, device GPU-8): it is on {SECOND}; attach there"
    story << refused(2, 2, "not_found", reach)


def test_whoever_reaches_a_device_of_the_broker_from_another_may_wait_for_a_pool_on_it(story: Story) -> None:
    story >> attaches(2, 1, "a", device="GPU-7", peers=("GPU-8",), wait=5.0)
    story << refused(2, 1, "not_found", "has no device GPU-7")
    story >> attaches(2, 2, "a", device="GPU-7", peers=("GPU-0",), wait=5.0)
    story << e.SetTimer(1, 5.0)
    story.quietly(creates(1, 1, "a", MIB), e.Allocated(1, (b"handle 1",)))
    story >> asks(1, 2, m.Seal(1))
    story << e.CancelTimer(1)
    replica = m.ReplicaHandles("GPU-0", (b"handle 1",))
    story << answer(2, 2, m.Attached(2, "a", 1, "ipc", layout(MIB).encode(), (replica,)))
    story << answer(1, 2, m.Sealed(1))


def test_a_create_that_attaches_reaches_a_peer_as_an_attach_does(story: Story) -> None:
    near = m.Where("GPU-7", ("GPU-8", "GPU-1"))
    for number, where in enumerate((m.Where("GPU-7"), m.Where("GPU-7", ("GPU-8",))), 1):
        story >> creates(1, number, "a", MIB, attach=where)
        story << refused(1, number, "not_found", "no device GPU-7; its devices are 0 (first, GPU-0), 1 (second, GPU-1)")
    story >> creates(1, 3, "a", MIB, devices=("GPU-1",), attach=near)
    story << e.Allocate(1, "GPU-1", (2 * MIB,), "ipc")
    story >> creates(2, 1, "a", MIB, attach=near, wait=5.0)
    story << e.SetTimer(1, 5.0)
    story.quietly(e.Allocated(1, (b"handle",)))
    story >> asks(1, 4, m.Seal(1))
    story << e.CancelTimer(1)
    there = (m.ReplicaHandles("GPU-1", (b"handle",)),)
    story << answer(2, 1, m.Attached(2, "a", 1, "ipc", layout(MIB).encode(), there))
    story << answer(1, 4, m.Sealed(1))
    story >> creates(2, 2, "a", MIB, attach=near)
    story << answer(2, 2, m.Attached(3, "a", 1, "ipc", layout(MIB).encode(), there))
