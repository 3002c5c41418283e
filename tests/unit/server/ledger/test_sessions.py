from __future__ import annotations

from collections.abc import Iterator

import pytest

from cubroker.protocol import messages as m
from cubroker.protocol import status
from cubroker.server.ledger import Limits
from cubroker.server.ledger import events as e
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
    changed,
    created,
    creates,
    done,
    handle,
    layout,
    refused,
)


@pytest.fixture
def story() -> Iterator[Story]:
    """Session 1 is Alice's and has published a@1 on GPU-0; session 2 is Bob's. Limits are tight."""
    story = Story(limits=Limits(leases=2, requests=2, watches=1))
    story.joins(1, uid=ALICE)
    story.joins(2, uid=BOB)
    story.publishes(1, "a")
    yield story
    story.end()


def test_a_lease_falls_when_its_holder_dies(story: Story) -> None:
    story.quietly(attaches(2, 1, "a"), asks(1, 1, m.Retire("a", 0)))
    story >> e.ProcessExited(2)
    story << e.Free(1, "GPU-0")
    story << e.ForgetSession(2)
    story >> e.ProcessExited(2)
    story >> e.ConnectionLost(2)


def test_a_lost_session_keeps_its_leases_and_ends_with_the_last_of_them(story: Story) -> None:
    story.quietly(attaches(2, 1, "a"), attaches(2, 2, "a"))
    story >> e.ConnectionLost(2)
    story >> e.ConnectionLost(2)
    story >> attaches(2, 3, "a")
    story << refused(2, 3, "unavailable", "the connection of session 2 has ended; open a new session")
    story >> asks(2, 4, m.Close(2))
    story << done(2, 4)
    story >> asks(2, 5, m.Close(3))
    story << done(2, 5)
    story << e.ForgetSession(2)
    story >> asks(2, 6, m.Close(3))


def test_a_lost_session_that_holds_a_lease_stops_waiting_and_watching_all_the_same(story: Story) -> None:
    story.quietly(attaches(2, 1, "a"), attaches(2, 2, "b", wait=5.0), asks(2, 3, m.Watch("a", on=True)))
    story >> e.ConnectionLost(2)
    story << e.CancelTimer(1)
    story >> asks(1, 1, m.Retire("a", 0))
    story << answer(1, 1, m.Retirement(1, 1))


def test_a_lost_session_that_holds_nothing_ends_at_once_and_all_it_waits_for_with_it(story: Story) -> None:
    story.quietly(asks(2, 1, m.Watch("a", on=True)), attaches(2, 2, "b", wait=5.0), creates(2, 3, "c", MIB))
    story >> e.ConnectionLost(2)
    story << e.CancelTimer(1)
    story << e.Free(2, "GPU-0")
    story << e.ForgetSession(2)
    story >> e.Allocated(2, (handle(2),))
    story >> e.Freed(2)


def test_a_lost_writer_may_still_seal_and_nobody_else_gets_its_turn_before(story: Story) -> None:
    story.quietly(creates(2, 1, "b", MIB), e.Allocated(2, (handle(2),)))
    story >> e.ConnectionLost(2)
    story >> creates(1, 1, "b", MIB, attach="GPU-0")
    story << refused(1, 1, "exists", "b@1 is being written by session 2")
    story >> asks(2, 2, m.Seal(2))
    story << answer(2, 2, m.Sealed(1))
    story << e.ForgetSession(2)


def test_a_request_can_be_cancelled_while_it_waits_and_is_answered_before_the_cancel(story: Story) -> None:
    story >> attaches(2, 1, "b", wait=5.0)
    story << e.SetTimer(1, 5.0)
    story >> asks(2, 2, m.Cancel(1))
    story << e.CancelTimer(1)
    story << refused(2, 1, "timeout", "request 1 was cancelled by its caller")
    story << done(2, 2)
    story >> asks(2, 3, m.Cancel(1))
    story << done(2, 3)
    story >> e.TimerExpired(1)


def test_leases_of_a_session_are_limited(story: Story) -> None:
    story >> attaches(2, 1, "b", wait=5.0)
    story << e.SetTimer(1, 5.0)
    story >> creates(2, 2, "c", MIB)
    story << e.Allocate(2, "GPU-0", (2 * MIB,), "ipc")
    story >> attaches(2, 3, "a")
    story << attached(2, 3, 2, "a", 1, ticket=1)
    story >> attaches(2, 4, "a")
    story << attached(2, 4, 3, "a", 1, ticket=1)
    story >> attaches(2, 5, "a")
    story << refused(2, 5, "over_quota", "this session has 2 leases")
    story >> creates(2, 6, "d", MIB)
    story << refused(2, 6, "over_quota", "this session has 2 leases")
    story >> e.Allocated(2, (handle(2),))
    story << e.Free(2, "GPU-0")
    story << refused(2, 2, "over_quota", "this session has 2 leases")
    story.quietly(creates(1, 1, "b", MIB), e.Allocated(3, (handle(3),)))
    story >> asks(1, 2, m.Seal(4))
    story << e.CancelTimer(1)
    story << refused(2, 1, "over_quota", "this session has 2 leases")
    story << answer(1, 2, m.Sealed(1))


def test_unfinished_requests_of_a_session_are_limited_and_need_ids_of_their_own(story: Story) -> None:
    story >> attaches(2, 1, "b", wait=5.0)
    story << e.SetTimer(1, 5.0)
    story >> attaches(2, 1, "c", wait=5.0)
    story << refused(2, 1, "invalid", "request 1 is unfinished")
    story >> creates(2, 2, "b", MIB)
    story << e.Allocate(2, "GPU-0", (2 * MIB,), "ipc")
    story >> attaches(2, 3, "b", wait=5.0)
    story << refused(2, 3, "over_quota", "this session has 2 unfinished requests")
    story >> creates(2, 4, "d", MIB)
    story << refused(2, 4, "over_quota", "this session has 2 unfinished requests")
    story >> attaches(2, 5, "a")
    story << attached(2, 5, 2, "a", 1, ticket=1)


def test_watches_of_a_session_are_limited(story: Story) -> None:
    story >> asks(2, 1, m.Watch("a", on=True))
    story << changed(2, "a", 1)
    story << done(2, 1)
    story >> asks(2, 2, m.Watch("b", on=True))
    story << refused(2, 2, "over_quota", "this session has 1 watch, ")
    story >> asks(2, 3, m.Watch("a", on=True))
    story << changed(2, "a", 1)
    story << done(2, 3)


def test_pools_clients_and_devices_are_listed(story: Story) -> None:
    story >> creates(2, 1, "b", 3 * MIB, devices=("GPU-0", "GPU-1"))
    story << e.Allocate(2, "GPU-0", (4 * MIB,), "ipc")
    story << e.Allocate(3, "GPU-1", (4 * MIB,), "ipc")
    published = status.PoolInfo(
        "a",
        1,
        "current",
        MIB,
        0,
        "ipc",
        ("GPU-0",),
        False,
        0,
        ALICE,
        100,
        0o644,
        False,
        False,
        "",
        "",
        "handle",
        memory=2 * MIB,
        published=0.0,
    )
    draft = status.PoolInfo(
        "b",
        1,
        "draft",
        3 * MIB,
        0,
        "ipc",
        ("GPU-0", "GPU-1"),
        False,
        0,
        BOB,
        100,
        0o644,
        False,
        False,
        "",
        "",
        "",
        memory=8 * MIB,
    )
    story >> asks(1, 1, m.ListPools())
    story << answer(1, 1, m.Pools((published, draft)))
    story >> e.Allocated(2, (handle(2),))
    story >> asks(1, 2, m.ListDevices())
    zero = status.DeviceInfo(0, "GPU-0", "first", 16 * MIB, 10 * MIB, allocated=6 * MIB, promised=0)
    one = status.DeviceInfo(1, "GPU-1", "second", 16 * MIB, 6 * MIB, allocated=0, promised=4 * MIB)
    story << answer(1, 2, m.DeviceList((zero, one)))
    story >> e.Allocated(3, (handle(3),))
    story << created(2, 1, 2, "b", 1, GPU_0=2, GPU_1=3)
    story >> e.ConnectionLost(2)
    story >> asks(1, 3, m.ListClients())
    alice = status.ClientInfo(1, 101, ALICE, "connected", ())
    bob = status.ClientInfo(2, 102, BOB, "detached", (status.LeaseInfo("b", 1, 0.0),))
    story << answer(1, 3, m.Clients((alice,)))
    story.joins(4, uid=BROKER)
    story >> asks(4, 1, m.ListClients())
    broker = status.ClientInfo(4, 104, BROKER, "connected", ())
    story << answer(4, 1, m.Clients((alice, bob, broker)))


def test_a_version_is_described_by_number_or_as_the_current_one(story: Story) -> None:
    place = "ipc", ("GPU-0",), False, 0
    info = status.PoolInfo(
        "a",
        1,
        "current",
        MIB,
        0,
        *place,
        ALICE,
        100,
        0o644,
        False,
        False,
        "",
        "",
        "handle",
        memory=2 * MIB,
        published=0.0,
    )
    story >> asks(2, 1, m.Describe("a", 0))
    story << answer(2, 1, m.Description(info, layout(MIB).encode()))
    story >> asks(2, 2, m.Describe("a", 1))
    story << answer(2, 2, m.Description(info, layout(MIB).encode()))
    story >> asks(2, 3, m.Describe("a", 2))
    story << refused(2, 3, "not_found", "a has no version 2")
    story >> asks(2, 4, m.Describe("b", 0))
    story << refused(2, 4, "not_found", "no pool is named 'b'")
    story >> asks(2, 9, m.Describe("no name", 0))
    story << refused(2, 9, "invalid", "cannot name a pool")
    story.publishes(1, "a")
    story >> asks(2, 5, m.Describe("a", 1))
    story << refused(2, 5, "retired", "a@1", "the current one is 2")
    story >> creates(2, 6, "b", MIB)
    story << e.Allocate(3, "GPU-0", (2 * MIB,), "ipc")
    story >> asks(2, 7, m.Describe("b", 0))
    story << refused(2, 7, "not_found", "b has no current version: b@1 is being written by session 2")
    story >> asks(2, 8, m.Describe("b", 1))
    draft = status.PoolInfo("b", 1, "draft", MIB, 0, *place, BOB, 100, 0o644, False, False, "", "", "", memory=2 * MIB)
    story << answer(2, 8, m.Description(draft, layout(MIB).encode()))


def test_retiring_says_how_many_leases_are_left_and_may_be_repeated(story: Story) -> None:
    story.quietly(attaches(1, 1, "a"), attaches(2, 1, "a"))
    story >> asks(2, 2, m.Retire("a", 1))
    story << refused(2, 2, "denied", "user 1002 may not publish or retire versions of a, which belongs to user 1001")
    story >> asks(1, 2, m.Retire("a", 0))
    story << answer(1, 2, m.Retirement(1, 2))
    story >> asks(1, 3, m.Retire("a", 0))
    story << refused(1, 3, "not_found", "a has no current version: it was retired")
    story.quietly(asks(2, 3, m.Close(3)))
    story >> asks(1, 4, m.Retire("a", 1))
    story << answer(1, 4, m.Retirement(1, 1))
    story >> asks(1, 5, m.Close(2))
    story << e.Free(1, "GPU-0")
    story << done(1, 5)
    story >> asks(1, 6, m.Retire("a", 1))
    story << refused(1, 6, "retired", "a@1 was retired")


def test_a_superseded_version_can_be_retired_while_the_current_one_goes_on(story: Story) -> None:
    story.quietly(attaches(2, 1, "a"))
    story.publishes(1, "a")
    story >> asks(1, 1, m.Retire("a", 1))
    story << answer(1, 1, m.Retirement(1, 1))
    story >> attaches(2, 2, "a")
    story << attached(2, 2, 4, "a", 2, ticket=2)


def test_a_draft_cannot_be_retired(story: Story) -> None:
    story.quietly(creates(1, 1, "b", MIB))
    story >> asks(1, 2, m.Retire("b", 1))
    story << refused(1, 2, "invalid", "b@1 is a draft of session 1 (pid 101, uid 1001); it ends when that session")
