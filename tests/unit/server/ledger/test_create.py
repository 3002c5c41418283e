from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from cubroker.protocol import messages as m
from cubroker.protocol import status
from cubroker.server.ledger import Limits
from cubroker.server.ledger import events as e
from cubroker.server.ledger.policy import Policy, Quota
from tests.unit.server.ledger.story import (
    ALICE,
    BOB,
    FIRST,
    GPU0,
    GPU1,
    MIB,
    SECOND,
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


@pytest.fixture
def story() -> Iterator[Story]:
    """Sessions 1 and 2 are Alice's, 3 is Bob's; GPU-0 has a budget of 10 MiB and GPU-1 of 6."""
    story = Story()
    story.joins(1, 2, uid=ALICE)
    story.joins(3, uid=BOB)
    yield story
    story.end()


def test_a_draft_gets_memory_in_units_of_2_mib_on_each_of_its_devices(story: Story) -> None:
    story >> creates(1, 1, "a", 1, 3 * MIB, devices=("GPU-1", "GPU-0"))
    story << e.Allocate(1, "GPU-1", (2 * MIB, 4 * MIB), "ipc")
    story << e.Allocate(2, "GPU-0", (2 * MIB, 4 * MIB), "ipc")
    devices = story.tells(2, m.ListDevices(), m.DeviceList).devices
    assert [(device.allocated, device.promised) for device in devices] == [(0, 6 * MIB)] * 2
    story >> e.Allocated(2, (b"0", b"1"))
    story >> e.Allocated(1, (b"2", b"3"))
    replicas = (m.ReplicaHandles("GPU-1", (b"2", b"3")), m.ReplicaHandles("GPU-0", (b"0", b"1")))
    story << answer(1, 1, m.Created(1, "a", 1, "ipc", replicas))
    story >> asks(1, 2, m.Close(1))
    story << e.Free(1, "GPU-1")
    story << e.Free(2, "GPU-0")
    story << done(1, 2)


def test_sealing_ends_the_lease_of_the_writer_and_only_of_the_writer(story: Story) -> None:
    story.quietly(creates(1, 1, "a", MIB), e.Allocated(1, (handle(1),)))
    story >> asks(2, 1, m.Seal(1))
    story << refused(2, 1, "not_found", "holds no lease 1")
    story >> asks(1, 2, m.Seal(1))
    story << answer(1, 2, m.Sealed(1))
    story >> asks(1, 3, m.Seal(1))
    story << refused(1, 3, "not_found", "holds no lease 1")
    story >> attaches(1, 4, "a")
    story << attached(1, 4, 2, "a", 1, ticket=1)
    story >> asks(1, 5, m.Seal(2))
    story << refused(1, 5, "invalid", "a@1, which is published; only a draft can be sealed")


def test_a_second_writer_is_refused_or_waits_for_its_turn(story: Story) -> None:
    story >> creates(1, 1, "a", MIB)
    story << e.Allocate(1, "GPU-0", (2 * MIB,), "ipc")
    story >> creates(2, 1, "a", MIB)
    story << refused(2, 1, "exists", "a@1 is being written by session 1 (pid 101, uid 1001)")
    story >> creates(2, 2, "a", MIB, wait=5.0)
    story << e.SetTimer(1, 5.0)
    story >> creates(1, 2, "a", MIB, wait=6.0)
    story << e.SetTimer(2, 6.0)
    story >> e.Allocated(1, (handle(1),))
    story << created(1, 1, 1, "a", 1, GPU_0=1)
    story >> asks(1, 3, m.Seal(1))
    story << answer(1, 3, m.Sealed(1))
    story << e.CancelTimer(1)
    story << e.Allocate(2, "GPU-0", (2 * MIB,), "ipc")
    story >> e.TimerExpired(2)
    story << refused(1, 2, "timeout", "create of a waited 6 s for its turn as the writer: a@2 is being written by sess")
    story >> e.Allocated(2, (handle(2),))
    story << created(2, 2, 2, "a", 2, GPU_0=2)


def test_a_draft_given_up_is_freed_and_its_number_goes_to_the_next_in_line(story: Story) -> None:
    story.quietly(creates(1, 1, "a", MIB), e.Allocated(1, (handle(1),)), creates(2, 1, "a", MIB, wait=5.0))
    story >> asks(1, 2, m.Close(1))
    story << e.Free(1, "GPU-0")
    story << done(1, 2)
    story << e.CancelTimer(1)
    story << e.Allocate(2, "GPU-0", (2 * MIB,), "ipc")
    story >> e.Allocated(2, (handle(2),))
    story << created(2, 1, 2, "a", 1, GPU_0=2)


def test_what_can_never_fit_is_refused_at_once(story: Story) -> None:
    story >> creates(1, 1, "a", 7 * MIB, devices=("GPU-0", "GPU-1"), wait=5.0)
    story << refused(1, 1, "over_budget", f"a needs 8 MiB on {SECOND}, whose whole budget is 6 MiB")


def test_a_full_device_is_refused_with_what_takes_its_memory(story: Story) -> None:
    story.publishes(1, "old", nbytes=4 * MIB)
    story.publishes(3, "small", nbytes=MIB)
    story.quietly(creates(1, 1, "new", MIB), attaches(2, 9, "old"))
    story >> creates(1, 2, "a", 3 * MIB)
    story << refused(
        1, 2, "over_budget",
        f"a needs 4 MiB on {FIRST}: of its budget of 10 MiB, 6 MiB are allocated and 2 MiB promised",
        "the largest are old@1 4 MiB (current, user 1001, 1 lease), small@1 2 MiB (current, user 1002, 0 leases),"
        " new@1 2 MiB (promised, user 1001, 0 leases)",
    )  # fmt: skip
    story >> asks(1, 3, m.Retire("small", 0))
    story << refused(1, 3, "denied", "user 1001 may not publish or retire versions of small", "user 1002")
    story >> asks(3, 3, m.Retire("small", 0))
    story << e.Free(2, "GPU-0")
    story << answer(3, 3, m.Retirement(1, 0))
    story >> creates(1, 4, "a", 3 * MIB)
    story << refused(1, 4, "over_budget", "small@1 2 MiB (being freed, user 1002, 0 leases)")


def test_room_is_given_in_order_of_arrival_and_small_requests_do_not_overtake(story: Story) -> None:
    story.publishes(1, "old", nbytes=8 * MIB)
    story >> creates(1, 1, "big", 6 * MIB, wait=5.0)
    story << e.SetTimer(1, 5.0)
    story >> creates(2, 1, "small", MIB)
    story << refused(2, 1, "over_budget", f"small needs 2 MiB on {FIRST}, behind 1 earlier request for room there")
    story >> creates(2, 2, "small", MIB, wait=5.0)
    story << e.SetTimer(2, 5.0)
    story >> creates(2, 3, "other", MIB, devices=("GPU-1",))
    story << e.Allocate(2, "GPU-1", (2 * MIB,), "ipc")
    story >> asks(1, 2, m.Retire("old", 1))
    story << e.Free(1, "GPU-0")
    story << answer(1, 2, m.Retirement(1, 0))
    story >> e.Freed(1)
    story << e.CancelTimer(1)
    story << e.Allocate(3, "GPU-0", (6 * MIB,), "ipc")
    story << e.CancelTimer(2)
    story << e.Allocate(4, "GPU-0", (2 * MIB,), "ipc")


def test_a_request_on_two_devices_is_served_when_it_is_first_on_both(story: Story) -> None:
    story.publishes(1, "zero", nbytes=8 * MIB)
    story.publishes(1, "one", nbytes=4 * MIB, devices=("GPU-1",))
    story.quietly(creates(1, 1, "x", 4 * MIB, devices=("GPU-1",), wait=5.0))
    story.quietly(creates(1, 2, "both", 4 * MIB, devices=("GPU-0", "GPU-1"), wait=5.0))
    story.quietly(creates(1, 3, "y", 4 * MIB, wait=5.0))
    story.quietly(asks(1, 4, m.Retire("zero", 1)), asks(1, 5, m.Retire("one", 1)))
    story >> e.Freed(1)
    story >> e.Freed(2)
    story << e.CancelTimer(1)
    story << e.Allocate(3, "GPU-1", (4 * MIB,), "ipc")
    story >> asks(1, 6, m.Cancel(2))
    story << e.CancelTimer(2)
    story << refused(1, 2, "timeout", "cancelled")
    story << done(1, 6)
    story << e.CancelTimer(3)
    story << e.Allocate(4, "GPU-0", (4 * MIB,), "ipc")


def test_whoever_got_its_turn_late_keeps_its_place_by_arrival_in_the_line_for_room(story: Story) -> None:
    story.publishes(1, "old", nbytes=6 * MIB)
    story.quietly(creates(1, 1, "a", MIB), e.Allocated(2, (handle(2),)))
    story.quietly(creates(2, 1, "a", 4 * MIB, wait=5.0), creates(2, 2, "b", 4 * MIB, wait=6.0))
    story >> asks(1, 2, m.Seal(2))
    story << answer(1, 2, m.Sealed(1))
    story.quietly(asks(1, 3, m.Retire("old", 0)))
    story >> e.Freed(1)
    story << e.CancelTimer(1)
    story << e.Allocate(3, "GPU-0", (4 * MIB,), "ipc")
    story << e.CancelTimer(2)
    story << e.Allocate(4, "GPU-0", (4 * MIB,), "ipc")


def test_who_asks_for_a_pools_turn_hears_who_waits_for_room_for_its_next_version(story: Story) -> None:
    story.publishes(1, "a", nbytes=6 * MIB)
    story >> creates(1, 1, "a", 8 * MIB, wait=5.0)
    story << e.SetTimer(1, 5.0)
    story >> creates(2, 1, "a", MIB)
    story << refused(2, 1, "exists", "the next version of a is to be written by session 1", "waits for room")


def test_time_that_is_up_in_the_line_for_room_lets_the_next_one_pass(story: Story) -> None:
    story.publishes(1, "old", nbytes=6 * MIB)
    story >> creates(1, 1, "a", 8 * MIB, wait=5.0)
    story << e.SetTimer(1, 5.0)
    story >> creates(2, 1, "a", MIB)
    story << refused(2, 1, "exists", "the next version of a is to be written by session 1", "waits for room")
    story >> creates(2, 2, "b", 2 * MIB, wait=5.0)
    story << e.SetTimer(2, 5.0)
    story >> creates(2, 3, "c", 2 * MIB, wait=5.0)
    story << e.SetTimer(3, 5.0)
    story >> e.TimerExpired(3)
    story << refused(2, 3, "timeout", "create of c waited 5 s for room", "behind 2 earlier requests for room there")
    story >> e.TimerExpired(1)
    story << refused(1, 1, "timeout", "create of a waited 5 s for room: a needs 8 MiB", "6 MiB are allocated")
    story << e.CancelTimer(2)
    story << e.Allocate(2, "GPU-0", (2 * MIB,), "ipc")


def test_a_device_that_fails_ends_the_draft_on_all_devices_and_the_next_in_line_is_served(story: Story) -> None:
    story >> creates(1, 1, "a", 4 * MIB, devices=("GPU-0", "GPU-1"))
    story << e.Allocate(1, "GPU-0", (4 * MIB,), "ipc")
    story << e.Allocate(2, "GPU-1", (4 * MIB,), "ipc")
    story >> creates(2, 1, "a", 4 * MIB, devices=("GPU-1",), wait=5.0)
    story << e.SetTimer(1, 5.0)
    story >> e.AllocationFailed(1, "out_of_memory", "cuMemAlloc said no")
    story << e.Free(2, "GPU-1")
    story << refused(1, 1, "out_of_memory", "cuMemAlloc said no")
    story >> e.Allocated(2, (handle(2),))
    story >> e.Freed(2)
    story << e.CancelTimer(1)
    story << e.Allocate(3, "GPU-1", (4 * MIB,), "ipc")


def test_memory_that_is_not_wanted_any_more_is_counted_until_its_device_has_it_back(story: Story) -> None:
    story.quietly(creates(1, 1, "a", 6 * MIB, devices=("GPU-0", "GPU-1")), creates(2, 1, "b", 6 * MIB, wait=5.0))
    story >> asks(1, 2, m.Cancel(1))
    story << e.Free(1, "GPU-0")
    story << e.Free(2, "GPU-1")
    story << refused(1, 1, "timeout", "request 1 was cancelled by its caller")
    story << done(1, 2)
    story >> e.AllocationFailed(2, "device", "no")
    story >> e.Freed(2)
    story >> e.Freed(1)
    story << e.CancelTimer(1)
    story << e.Allocate(3, "GPU-0", (6 * MIB,), "ipc")


def test_memory_that_a_failed_allocation_left_behind_takes_room_for_good_and_is_nobodys(story: Story) -> None:
    story.quietly(creates(1, 1, "a", 4 * MIB, 2 * MIB), e.AllocationFailed(1, "device", "no", unfreed=4 * MIB))
    (first, _) = devices(story)
    assert (first.allocated, first.promised) == (4 * MIB, 0)
    story >> creates(1, 2, "a", 8 * MIB, wait=5.0)  # of 10
    lost = "(4 MiB of it lost: the driver did not take it back)"
    story << refused(1, 2, "over_budget", f"whose whole budget is 10 MiB {lost};")
    story.publishes(1, "b", nbytes=4 * MIB)
    story >> creates(2, 1, "c", 4 * MIB)
    words = (f"8 MiB are allocated {lost} and 0 bytes promised", "b@1 4 MiB (current")
    story << refused(2, 1, "over_budget", *words)
    story.quietly(asks(1, 3, m.Retire("b", 0)), e.Freed(2))
    story >> e.ProcessExited(1)
    story << e.ForgetSession(1)
    assert devices(story, 2)[0].allocated == 4 * MIB


def test_memory_left_behind_is_no_longer_its_users() -> None:
    story = Story(policy=Policy(quota=Quota(memory=4 * MIB)))
    story.joins(1)
    story.quietly(
        creates(1, 1, "a", 4 * MIB), asks(1, 2, m.Cancel(1)), e.AllocationFailed(1, "device", "no", unfreed=4 * MIB)
    )
    story >> creates(1, 3, "a", 4 * MIB)
    story << e.Allocate(2, "GPU-0", (4 * MIB,), "ipc")
    assert [(device.allocated, device.promised) for device in devices(story)] == [(4 * MIB, 4 * MIB), (0, 0)]


def test_memory_that_a_free_left_behind_takes_room_for_good_and_is_nobodys() -> None:
    story = Story(policy=Policy(quota=Quota(memory=6 * MIB)))
    story.joins(1)
    story.publishes(1, "a", nbytes=6 * MIB)
    story.quietly(asks(1, 90, m.Retire("a", 0)), e.Freed(1, unfreed=4 * MIB))
    assert [(device.allocated, device.promised) for device in devices(story)] == [(4 * MIB, 0), (0, 0)]
    story >> creates(1, 3, "a", 6 * MIB)  # all of the quota, and of what is left of the device
    story << e.Allocate(2, "GPU-0", (6 * MIB,), "ipc")


def test_who_waits_for_room_that_was_lost_is_refused_and_the_next_is_served(story: Story) -> None:
    story.quietly(creates(1, 1, "a", 10 * MIB))
    story.quietly(creates(1, 2, "b", 8 * MIB, wait=5.0), creates(3, 1, "b", 6 * MIB, wait=5.0))
    story >> e.AllocationFailed(1, "device", "no", unfreed=4 * MIB)
    story << refused(1, 1, "device", "no")
    story << e.CancelTimer(1)
    story << refused(1, 2, "over_budget", f"b needs 8 MiB on {FIRST}", "lost: the driver did not take it back")
    story << e.CancelTimer(2)
    story << e.Allocate(2, "GPU-0", (6 * MIB,), "ipc")


def test_a_turn_that_a_refusal_hands_on_is_in_order_of_arrival_too(story: Story) -> None:
    story.quietly(creates(1, 1, "x", 2 * MIB, devices=("GPU-1",)))
    story.quietly(creates(2, 1, "b", 6 * MIB, devices=("GPU-0", "GPU-1"), wait=5.0))
    story.quietly(creates(3, 1, "c", 6 * MIB, devices=("GPU-1",), wait=5.0), creates(3, 2, "c", 6 * MIB, wait=5.0))
    story.quietly(creates(1, 2, "a", 6 * MIB, wait=5.0))
    story >> e.AllocationFailed(1, "device", "no", unfreed=2 * MIB)
    story << refused(1, 1, "device", "no")
    story << e.CancelTimer(1)
    story << refused(2, 1, "over_budget", f"b needs 6 MiB on {SECOND}")
    story << e.CancelTimer(2)
    story << refused(3, 1, "over_budget", f"c needs 6 MiB on {SECOND}")
    story << e.CancelTimer(3)
    story << e.Allocate(2, "GPU-0", (6 * MIB,), "ipc")  # for the second c, which came before a


def devices(story: Story, session: int = 1) -> tuple[status.DeviceInfo, ...]:
    (listed,) = story.quietly(asks(session, 99, m.ListDevices()))
    assert isinstance(listed, e.Respond)
    assert isinstance(listed.body, m.DeviceList)
    return listed.body.devices


def test_the_first_of_many_writes_and_the_rest_attach(story: Story) -> None:
    story >> creates(1, 1, "a", MIB, wait=5.0, attach="GPU-0")
    story << e.Allocate(1, "GPU-0", (2 * MIB,), "ipc")
    story >> creates(2, 1, "a", MIB, wait=5.0, attach="GPU-0")
    story << e.SetTimer(1, 5.0)
    story >> creates(3, 1, "a", MIB, wait=5.0, attach="GPU-1")
    story << e.SetTimer(2, 5.0)
    story >> creates(2, 2, "a", MIB, wait=5.0)
    story << e.SetTimer(3, 5.0)
    story >> e.Allocated(1, (handle(1),))
    story << created(1, 1, 1, "a", 1, GPU_0=1)
    story >> asks(1, 2, m.Seal(1))
    story << e.CancelTimer(1)
    story << attached(2, 1, 2, "a", 1, ticket=1)
    story << e.CancelTimer(2)
    story << refused(3, 1, "not_found", f"a@1 is not on {SECOND}")
    story << answer(1, 2, m.Sealed(1))
    story << e.CancelTimer(3)
    story << e.Allocate(2, "GPU-0", (2 * MIB,), "ipc")
    story >> creates(3, 2, "a", MIB, attach="GPU-0")
    story << attached(3, 2, 3, "a", 1, ticket=1)


def test_when_the_writer_dies_one_of_those_who_wait_takes_over(story: Story) -> None:
    story.quietly(creates(1, 1, "a", MIB, attach="GPU-0"), e.Allocated(1, (handle(1),)))
    story.quietly(creates(3, 1, "a", MIB, wait=5.0, attach="GPU-0"), creates(2, 1, "a", MIB, wait=5.0, attach="GPU-0"))
    story >> e.ProcessExited(1)
    story << e.Free(1, "GPU-0")
    story << e.ForgetSession(1)
    story << e.CancelTimer(1)
    story << e.Allocate(2, "GPU-0", (2 * MIB,), "ipc")
    story >> e.Allocated(2, (handle(2),))
    story << created(3, 1, 2, "a", 1, GPU_0=2)


def test_a_name_belongs_to_the_user_who_wrote_it_first_as_long_as_any_version_lives(story: Story) -> None:
    story.joins(4, uid=0)
    story.publishes(1, "a")
    story >> creates(3, 1, "a", MIB, wait=5.0)
    story << refused(3, 1, "denied", "user 1002 may not publish or retire versions of a, which belongs to user 1001")
    assert story.publishes(4, "a") == 2
    story.quietly(creates(1, 2, "a", MIB))
    story >> creates(3, 2, "a", MIB, wait=5.0)
    story << refused(3, 2, "denied", "belongs to user 1001")
    story.quietly(asks(1, 3, m.Cancel(2)))
    story >> asks(1, 1, m.Retire("a", 0))
    story << e.Free(2, "GPU-0")
    story << answer(1, 1, m.Retirement(2, 0))
    story.quietly(e.Freed(1), e.Freed(2), e.Allocated(3, (handle(3),)), e.Freed(3))
    assert story.publishes(3, "a") == 3


def test_who_may_not_write_is_refused_when_its_turn_comes_and_the_next_is_served(story: Story) -> None:
    story.publishes(1, "a")
    story.quietly(attaches(2, 1, "a"), asks(1, 1, m.Retire("a", 1)), creates(1, 2, "a", MIB))
    story >> creates(3, 1, "a", MIB, wait=5.0, attach="GPU-0")
    story << e.SetTimer(1, 5.0)
    story >> creates(2, 2, "a", MIB, wait=5.0)
    story << e.SetTimer(2, 5.0)
    story >> e.AllocationFailed(2, "device", "no")
    story << refused(1, 2, "device", "no")
    story << e.CancelTimer(1)
    story << refused(3, 1, "denied", "belongs to user 1001")
    story << e.CancelTimer(2)
    story << e.Allocate(3, "GPU-0", (2 * MIB,), "ipc")
    story >> creates(3, 2, "a", MIB, attach="GPU-0")
    story << refused(3, 2, "exists", "a@2 is being written by session 2")
    story.quietly(e.AllocationFailed(3, "device", "no"))
    story >> creates(3, 3, "a", MIB, attach="GPU-0")
    story << refused(3, 3, "denied", "belongs to user 1001")


@pytest.mark.parametrize(
    ("devices", "usual", "expected"),
    [
        (("GPU-0",), "auto", "vmm"),
        (("GPU-1",), "auto", "ipc"),
        (("GPU-0", "GPU-1"), "auto", "ipc"),
        (("GPU-0",), "ipc", "ipc"),
        (("GPU-1",), "vmm", "vmm"),
    ],
)
def test_a_create_that_names_no_share_kind_gets_the_usual_one_or_vmm_where_all_its_devices_can(
    devices: tuple[str, ...], usual: str, expected: str
) -> None:
    story = Story(GPU0, replace(GPU1, vmm=False))
    story.joins(1)
    limits, budgets = Limits(), {device.uuid: device.budget for device in story.devices}
    story >> e.Reconfigured(Policy(share=usual), limits, budgets)
    story >> creates(1, 1, "a", MIB, devices=devices, share="auto")
    for number, uuid in enumerate(devices, start=1):
        story << e.Allocate(number, uuid, (2 * MIB,), expected)
    (info,) = story.tells(1, m.ListPools(), m.Pools).pools
    assert (info.share, info.protected) == (expected, expected == "vmm")
    story.end()


def test_a_create_that_names_no_share_kind_and_a_device_that_there_is_not_is_refused(story: Story) -> None:
    story >> creates(1, 1, "a", MIB, devices=("GPU-7",), share="auto")
    story << refused(1, 1, "not_found", "no device GPU-7")


@pytest.mark.parametrize(
    ("name", "sizes", "options", "code", "words"),
    [
        ("a name", (1,), {}, "invalid", "cannot name a pool"),
        ("a", (1,), {"share": "wish"}, "invalid", "unknown share kind 'wish'; use auto or ipc or vmm or multicast"),
        ("a", (1,), {"plan": (0, 0)}, "invalid", "the plan of a places 2 allocations, and its layout has 1"),
        ("a", (1,), {"plan": (1,)}, "invalid", "the plan of a names device 1 of 1; they are counted from 0"),
        (
            "a",
            (1, 1),
            {"devices": ("GPU-0", "GPU-1"), "plan": (1, 1)},
            "invalid",
            "the plan of a puts nothing on GPU-0; leave out devices without allocations",
        ),
        (
            "a",
            (1, 7 * MIB),
            {"devices": ("GPU-0", "GPU-1"), "plan": (0, 1)},
            "over_budget",
            f"a needs 8 MiB on {SECOND}, whose whole budget is 6 MiB",
        ),
        ("a", (), {}, "invalid", "the layout of a has no memory"),
        ("a", (1,), {"devices": ("GPU-0", "GPU-0")}, "invalid", "names a device twice: GPU-0, GPU-0"),
        (
            "a",
            (1,),
            {"devices": ("GPU-0", "GPU-7")},
            "not_found",
            "no device GPU-7; its devices are 0 (first, GPU-0), 1 (second, GPU-1)",
        ),
        ("a", (1,), {"attach": m.Where("GPU-8")}, "not_found", "no device GPU-8"),
    ],
)
def test_a_create_that_can_never_be_granted_says_why(
    story: Story, name: str, sizes: tuple[int, ...], options: dict[str, object], code: str, words: str
) -> None:
    body = {"devices": ("GPU-0",), "share": "ipc", "wait": 5.0, "attach": None} | options
    made = layout(*sizes)
    story >> e.RequestReceived(1, 1, m.Create(name=name, layout=made.encode(), **body), made.outline)  # type: ignore[arg-type]
    story << refused(1, 1, code, words)


def test_who_waits_for_room_for_a_private_pool_is_not_told_to_others(story: Story) -> None:
    story.publishes(1, "full", nbytes=10 * MIB)
    story.quietly(creates(1, 1, "a", MIB, mode=0o600, wait=5.0))
    story >> creates(3, 1, "a", MIB)
    story << refused(3, 1, "exists", "another session is writing a")
    story >> creates(2, 1, "a", MIB)
    story << refused(2, 1, "exists", "the next version of a is to be written by session 1", "which waits for room")
