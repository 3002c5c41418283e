"""Versions that share allocations: who may, what is allocated and freed, who pays, and what a restart makes of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from cubroker.protocol import messages as m
from cubroker.protocol import status
from cubroker.server.ledger import Budget, Impossible
from cubroker.server.ledger import events as e
from cubroker.server.ledger.policy import Policy, Quota
from tests.unit.server.ledger.story import (
    ALICE,
    BOB,
    BROKER,
    MIB,
    Refusal,
    Story,
    answer,
    asks,
    attaches,
    creates,
    done,
    layout,
    refused,
)

GPU0 = Budget(0, "GPU-0", "first", 64 * MIB, 20 * MIB)
GPU1 = Budget(1, "GPU-1", "second", 64 * MIB, 20 * MIB)
D = m.DESCRIPTOR
BASE = (2 * MIB, 4 * MIB, 2 * MIB)
"""The allocations of version 1, ticket 1."""


@pytest.fixture
def story() -> Iterator[Story]:
    """Alice's sessions 1 and 2, and Bob's 3; version 1 of ``a`` has ticket 1, and session 2 leases it by lease 2."""
    story = told()
    yield story
    story.end()


def told(share: str = "vmm", policy: Policy | None = None, **terms: Any) -> Story:
    story = Story(GPU0, GPU1, store=100, policy=policy)
    story.joins(1, 2)
    story.joins(3, uid=BOB)
    story.joins(4, uid=BROKER)
    terms = {"durable": share != "ipc", **terms}
    handles = tuple(b"1.%d" % number if share == "ipc" else D for number in range(3))
    story.quietly(creates(1, 1, "a", *BASE, share=share, **terms), e.Allocated(1, handles))
    story.quietly(asks(1, 2, m.Seal(1)), attaches(2, 1, "a"))
    return story


def updates(
    session: int, request: int, *allocations: int | None, sizes: tuple[int, ...] = BASE, base: int = 1, **terms: Any
) -> e.RequestReceived:
    """Create an update of ``a``: for each allocation the base's that it is."""
    terms = {"share": "auto", "durable": None, **terms}
    asked = creates(session, request, "a", *sizes, **terms)
    assert isinstance(asked.body, m.Create)
    body = msgspec.structs.replace(asked.body, base=m.Base(base, allocations))
    return e.RequestReceived(session, request, body, asked.layout)


def published(story: Story, session: int, *allocations: int | None, ticket: int, lease: int, **terms: Any) -> None:
    """Publish an update, which gets one ticket."""
    effects = story.quietly(updates(session, 900, *allocations, **terms))
    (allocate,) = (effect for effect in effects if isinstance(effect, e.Allocate))
    assert allocate.ticket == ticket
    story.quietly(e.Allocated(ticket, (D,) * len(allocate.sizes)), asks(session, 901, m.Seal(lease)))


def memory(story: Story) -> dict[int, tuple[int, int]]:
    pools = story.tells(4, m.ListPools(), m.Pools).pools
    return {pool.version: (pool.memory, pool.shared) for pool in pools}


def allocated(story: Story) -> int:
    return story.tells(4, m.ListDevices(), m.DeviceList).devices[0].allocated


def test_an_update_is_allocated_what_is_new_and_its_writer_gets_that_alone(story: Story) -> None:
    story >> updates(1, 3, 0, None, 2) << e.Allocate(2, "GPU-0", (4 * MIB,), "vmm", True)
    story >> e.Allocated(2, (D,)) << e.SendFds(1, 3, (e.FdSource("GPU-0", 2),), writable=True)
    replicas = (m.ReplicaHandles("GPU-0", (b"", D, b"")),)
    story << answer(1, 3, m.Created(3, "a", 2, "vmm", replicas))
    story >> asks(1, 4, m.Seal(3)) << e.CancelFds(1, 3) << answer(1, 4, m.Sealed(2))
    story >> attaches(1, 5, "a")
    sources = (e.FdSource("GPU-0", 1, (0,)), e.FdSource("GPU-0", 2), e.FdSource("GPU-0", 1, (2,)))
    story << e.SendFds(1, 4, sources)
    story << answer(1, 5, m.Attached(4, "a", 2, "vmm", layout(*BASE).encode(), (m.ReplicaHandles("GPU-0", (D, D, D)),)))


def test_shared_memory_counts_once_and_is_freed_with_the_last_version_that_has_it(story: Story) -> None:
    published(story, 1, 0, None, 2, ticket=2, lease=3)
    assert memory(story) == {1: (8 * MIB, 0), 2: (8 * MIB, 4 * MIB)}
    assert allocated(story) == 12 * MIB
    story >> asks(2, 2, m.Close(2)) << e.CancelFds(2, 2) << e.Free(1, "GPU-0", (1,)) << done(2, 2)
    assert memory(story) == {2: (8 * MIB, 0)}
    assert allocated(story) == 12 * MIB
    blocks = story.tells(4, m.Look(), m.View).blocks
    assert [(block.version, block.state, block.stage, block.nbytes) for block in blocks] == [
        (2, "current", "held", 4 * MIB),
        (1, "ended", "freeing", 4 * MIB),
        (2, "current", "held", 4 * MIB),
    ]
    story >> e.Freed(1, (1,))
    assert allocated(story) == 8 * MIB
    story >> asks(1, 5, m.Retire("a", 0)) << e.Free(1, "GPU-0", (0, 2)) << e.Free(2, "GPU-0")
    story << answer(1, 5, m.Retirement(2, 0))
    story >> e.Freed(1, (2, 0))
    story >> e.Freed(2)
    assert allocated(story) == 0
    story >> e.Freed(1, (0,))  # it is gone


def test_a_version_shares_with_none_that_has_ended_or_whose_number_it_got() -> None:
    def shared(version: int) -> list[tuple[int, int]]:
        sharing = story.tells(4, m.Describe("a", version), m.Description).shared
        return [(each.version, each.allocations) for each in sharing]

    story = told(policy=Policy(keep=4))
    for version in (2, 3, 4):
        published(story, 1, 0, None, 2, ticket=version, lease=version + 1, base=version - 1)
    story.quietly(asks(1, 3, m.Retire("a", 2)), e.Freed(2))
    assert shared(4) == [(1, 2), (3, 2)]
    story.quietly(updates(1, 4, 0, 1, 2, base=4), asks(1, 5, m.Close(6)))
    story.quietly(creates(1, 6, "a", 2 * MIB), e.Allocated(5, (D,)), asks(1, 7, m.Seal(7)))
    assert shared(4) == [(1, 2), (3, 2)]
    assert shared(5) == []
    assert memory(story)[5] == (2 * MIB, 0)
    story.end()


def test_a_view_says_which_versions_have_each_byte() -> None:
    story = told(policy=Policy(keep=3))
    story.quietly(asks(2, 2, m.Close(2)))
    published(story, 1, 0, None, 2, ticket=2, lease=3)
    published(story, 1, 0, None, None, ticket=3, lease=4, base=2)
    assert [(block.version, block.nbytes, block.shared) for block in story.ledger.view(everything=True).blocks] == [
        (1, 8 * MIB, (status.SharedBytes((1, 2, 3), 2 * MIB), status.SharedBytes((1, 2), 2 * MIB))),
        (2, 4 * MIB, ()),
        (3, 6 * MIB, ()),
    ]
    story.quietly(asks(1, 3, m.Retire("a", 1)))
    blocks = [block for block in story.ledger.view(everything=True).blocks if block.stage == "held"]
    assert [(block.version, block.nbytes, block.shared) for block in blocks] == [
        (2, 4 * MIB, (status.SharedBytes((2, 3), 2 * MIB),)),
        (2, 4 * MIB, ()),
        (3, 6 * MIB, ()),
    ]
    story.end()


def test_a_view_and_a_refusal_stay_small_however_many_versions_share() -> None:
    story = told(policy=Policy(keep=40))
    story.quietly(asks(2, 2, m.Close(2)))
    for number in range(2, 2 + status.MAX_SHARERS):
        (block, *_) = story.ledger.view(everything=True).blocks
        assert block.shared == (() if number == 2 else (status.SharedBytes(tuple(range(1, number)), 8 * MIB),))
        story.quietly(updates(1, number * 10, 0, 1, 2, base=number - 1), asks(1, number * 10 + 1, m.Seal(number + 1)))
    (block, *_) = story.ledger.view(everything=True).blocks
    assert (block.nbytes, block.shared) == (8 * MIB, (status.SharedBytes((), 8 * MIB),))
    told_all = "; the largest are a@1 to a@17 (17 versions) 8 MiB (16 superseded, 1 current, "
    story >> creates(3, 1, "b", GPU0.budget) << refused(3, 1, "over_budget", told_all)
    story.end()


def test_a_view_stays_small_however_many_sets_of_versions_share() -> None:
    story = Story(Budget(0, "GPU-0", "first", 256 * MIB, 256 * MIB), store=1000)
    story.joins(1, 2)
    sizes = (2 * MIB,) * 32
    story.quietly(creates(1, 1, "a", *sizes, share="vmm", durable=True), e.Allocated(1, (D,) * 32))
    story.quietly(asks(1, 2, m.Seal(1)), attaches(2, 1, "a"))
    for bit in range(5):  # version 2 + bit has each allocation in whose number the bit is set
        mine = tuple(index if index >> bit & 1 else None for index in range(32))
        story.quietly(updates(2, 10 + 3 * bit, *mine, sizes=sizes), e.Allocated(2 + bit, (D,) * 16))
        story.quietly(asks(2, 11 + 3 * bit, m.Seal(3 + 2 * bit)), attaches(2, 12 + 3 * bit, "a"))
    (block, *_) = story.ledger.view(everything=True).blocks
    assert len(block.shared) == status.MAX_SHARERS + 1
    assert all(each.versions[0] == 1 and each.nbytes == 2 * MIB for each in block.shared[:-1])
    assert block.shared[-1] == status.SharedBytes((), 15 * 2 * MIB), "31 of 32 are shared, each by other versions"
    story.end()


def test_a_device_frees_nothing_that_a_version_has_and_nothing_twice(story: Story) -> None:
    published(story, 1, 0, None, 2, ticket=2, lease=3)
    story.quietly(asks(2, 2, m.Close(2)))
    for numbers, says in (((0,), "was freed, and versions have it"), ((7,), "has already")):
        with pytest.raises(Impossible, match=says):
            story.ledger.handle(e.Freed(1, numbers))
        story.ledger.recover()
    story >> e.Freed(1, (1,))


def test_an_update_without_a_change_is_granted_at_once_and_sends_nothing(story: Story) -> None:
    story >> updates(1, 3, 0, 1, 2)
    story << answer(1, 3, m.Created(3, "a", 2, "vmm", (m.ReplicaHandles("GPU-0", (b"", b"", b"")),)))
    story >> asks(1, 4, m.Seal(3)) << e.CancelFds(1, 3) << answer(1, 4, m.Sealed(2))
    assert memory(story) == {1: (8 * MIB, 0), 2: (8 * MIB, 8 * MIB)}


def test_a_draft_that_is_dropped_leaves_its_base_as_it_was(story: Story) -> None:
    story.quietly(updates(1, 3, 0, None, 2), e.Allocated(2, (D,)))
    story >> asks(1, 4, m.Close(3)) << e.CancelFds(1, 3) << e.Free(2, "GPU-0") << done(1, 4)
    story.quietly(updates(1, 5, 0, None, 2))
    story >> e.AllocationFailed(3, "device", "no") << refused(1, 5, "device", "no")
    assert memory(story) == {1: (8 * MIB, 0)}


def test_the_base_may_end_while_its_memory_is_shared(story: Story) -> None:
    story.quietly(updates(1, 3, 0, None, 2))
    story >> asks(1, 4, m.Retire("a", 1)) << answer(1, 4, m.Retirement(1, 1))
    story >> asks(2, 2, m.Close(2)) << e.CancelFds(2, 2) << e.Free(1, "GPU-0", (1,)) << done(2, 2)
    story.quietly(e.Allocated(2, (D,)), asks(1, 5, m.Seal(3)), e.Freed(1, (1,)))
    assert memory(story) == {2: (8 * MIB, 0)}


def test_a_base_that_ends_while_an_update_waits_for_room_is_refused_in_the_end(story: Story) -> None:
    story.quietly(creates(3, 1, "b", 12 * MIB, share="vmm", durable=True), e.Allocated(2, (D,)))
    story.quietly(updates(1, 3, 0, None, 2, wait=9.0))
    story >> asks(1, 4, m.Retire("a", 1)) << answer(1, 4, m.Retirement(1, 1))
    story >> asks(3, 2, m.Close(3)) << e.CancelFds(3, 3) << e.Free(2, "GPU-0") << done(3, 2)
    story >> e.Freed(2) << e.CancelTimer(1) << refused(1, 3, "invalid", "a@1 is retired and not leased by this session")


@pytest.mark.parametrize(
    ("asked", "code", "words"),
    [
        (updates(1, 3, 0, 1, 2, base=7), "not_found", "version 7"),
        (updates(3, 3, 0, 1, 2), "denied", "publish"),
        (updates(1, 3, 0, 1), "invalid", "once for each"),
        (updates(1, 3, 0, 0, 2), "invalid", "none twice"),
        (updates(1, 3, 0, 2, 1), "invalid", "cannot share memory with allocation 2"),
        (updates(1, 3, 0, 1, 5), "invalid", "cannot share memory with allocation 5"),
        (updates(1, 3, 0, 1, 2, share="ipc", durable=False), "unsupported", "share kind, vmm, and ipc"),
        (updates(1, 3, 0, 1, 2, durable=False), "unsupported", "durability, durable, and not durable"),
        (updates(1, 3, 0, 1, 2, devices=("GPU-1",)), "unsupported", "devices, GPU-0, and GPU-1"),
        (updates(1, 3, 0, 1, 2, plan=(0, 0, 0)), "unsupported", "placement, replicated, and sharded"),
        (updates(1, 3, 0, 1, 2, writable=True), "unsupported", "writable by its readers"),
        (updates(1, 3, 0, 1, 2, share="multicast"), "unsupported", "is multicast"),
    ],
)
def test_what_a_version_cannot_share_is_refused(story: Story, asked: e.RequestReceived, code: str, words: str) -> None:
    story >> asked << refused(asked.session, 3, code, words)


def test_an_update_is_created_and_never_attached_to(story: Story) -> None:
    story.quietly(asks(1, 3, m.Retire("a", 1)))
    story >> updates(1, 4, 0, 1, 2, attach="GPU-0") << refused(1, 4, "invalid", "leave one out")
    other = msgspec.structs.replace(updates(1, 5, 0, 1, 2).body, name="z")
    story >> e.RequestReceived(1, 5, other, layout(*BASE).outline) << refused(1, 5, "not_found", "z")


def test_a_private_pool_is_no_base_for_who_may_not_read_it() -> None:
    story = told(mode=0o602)
    story >> updates(3, 3, 0, 1, 2) << refused(3, 3, "denied", "may not attach")


def test_a_draft_and_a_lost_version_are_no_base_nor_is_a_superseded_one_without_a_lease() -> None:
    story = told(policy=Policy(keep=3))
    story.quietly(asks(2, 2, m.Close(2)))
    published(story, 1, 0, None, 2, ticket=2, lease=3)
    story >> updates(1, 3, 0, 1, 2) << refused(1, 3, "invalid", "a@1 is superseded and not leased")
    story.quietly(attaches(1, 4, "a", 1))
    (
        story
        >> updates(1, 5, 0, 1, 2)
        << answer(1, 5, m.Created(5, "a", 3, "vmm", (m.ReplicaHandles("GPU-0", (b"", b"", b"")),)))
    )
    story >> updates(1, 6, 0, 1, 2, base=3) << refused(1, 6, "invalid", "a@3 is a draft")
    story.quietly(asks(1, 7, m.Close(5)), e.MemoryLost(1, "it was taken away"))
    story >> updates(1, 8, 0, 1, 2, base=1) << refused(1, 8, "unavailable", "a@1 was lost: it was taken away")


def test_memory_that_is_lost_takes_every_version_along_that_has_some_of_its_ticket(story: Story) -> None:
    published(story, 1, 0, None, 2, ticket=2, lease=3)
    effects = story.quietly(e.MemoryLost(1, "it went"))
    assert [effect.notice for effect in effects if isinstance(effect, e.Notify)] == [m.PoolLost("a", 1, "it went")]
    states = {pool.version: pool.state for pool in story.tells(4, m.ListPools(), m.Pools).pools}
    assert states == {1: "lost"}, "version 2, which nobody leases, has ended"


def test_the_user_who_had_memory_allocated_pays_for_it_until_it_is_freed() -> None:
    story = told(mode=0o666, policy=Policy(quota=Quota(memory=10 * MIB)))
    published(story, 3, 0, None, 2, ticket=2, lease=3)
    story.quietly(asks(2, 2, m.Close(2)))
    story >> creates(1, 5, "b", 6 * MIB) << refused(1, 5, "over_quota", "a@2")
    story.quietly(e.Freed(1, (1,)))
    story >> creates(1, 6, "b", 6 * MIB) << e.Allocate(3, "GPU-0", (6 * MIB,), "ipc")
    story.end()


def test_a_user_whose_version_has_others_memory_alone_is_known_until_it_ends() -> None:
    story = told(mode=0o666)
    story.quietly(updates(3, 3, 0, 1, 2), asks(3, 4, m.Seal(3)), e.ProcessExited(3))
    assert {pool.version: pool.owner for pool in story.tells(4, m.ListPools(), m.Pools).pools} == {1: ALICE, 2: BOB}
    story.quietly(asks(4, 9, m.Retire("a", 2)))
    assert memory(story) == {1: (8 * MIB, 0)}


def test_a_sharded_version_shares_on_each_device() -> None:
    story = Story(GPU0, GPU1, store=100)
    story.joins(1)
    both = ("GPU-0", "GPU-1")
    terms: dict[str, Any] = {"devices": both, "plan": (1, 0, 0), "share": "vmm", "durable": True}
    story.quietly(creates(1, 1, "a", *BASE, **terms), e.Allocated(1, (D, D)), e.Allocated(2, (D,)))
    story.quietly(asks(1, 2, m.Seal(1)))
    story >> updates(1, 3, 0, None, 2, None, sizes=(*BASE, MIB), devices=both, plan=(1, 0, 0, 0))
    story << e.Allocate(3, "GPU-0", (4 * MIB, 2 * MIB), "vmm", True)
    story >> e.Allocated(3, (D, D)) << e.SendFds(1, 2, (e.FdSource("GPU-0", 3),), writable=True)
    replicas = (m.ReplicaHandles("GPU-0", (b"", D, b"", D)), m.ReplicaHandles("GPU-1", (b"", b"", b"", b"")))
    story << answer(1, 3, m.Created(2, "a", 2, "vmm", replicas))
    (
        story
        >> updates(1, 4, None, 0, 2, devices=both, plan=(0, 1, 0))
        << refused(1, 4, "invalid", "cannot share memory with allocation 0")
    )
    story >> asks(1, 5, m.Close(2)) << e.CancelFds(1, 2) << e.Free(3, "GPU-0") << done(1, 5)


def test_where_some_memory_has_fabric_handles_and_some_none_descriptors_open_all() -> None:
    story = told(durable=False)
    story.quietly(updates(1, 3, 0, None, 2))
    story >> e.Allocated(2, (b"fabric",)) << e.SendFds(1, 3, (e.FdSource("GPU-0", 2),), writable=True)
    story << answer(1, 3, m.Created(3, "a", 2, "vmm", (m.ReplicaHandles("GPU-0", (b"", D, b"")),)))


def test_a_version_tells_what_it_shares_with_which(story: Story) -> None:
    published(story, 1, 0, None, 2, ticket=2, lease=3)
    described = story.tells(1, m.Describe("a", 1), m.Description)
    assert described.shared == (status.SharingInfo(2, 2, 4 * MIB),)


def test_what_shares_memory_is_not_sealed_in_place(story: Story) -> None:
    story.quietly(updates(1, 3, 0, None, 2), e.Allocated(2, (D,)))
    story >> asks(1, 4, m.SealInPlace(3)) << refused(1, 4, "unsupported", "shares memory with an earlier one")


def test_an_allocation_is_leased_by_who_leases_any_version_that_has_it(story: Story) -> None:
    published(story, 1, 0, None, 2, ticket=2, lease=3)
    story.quietly(attaches(3, 3, "a", 2), e.ProcessScanStarted())
    pieces = {e.AllocationId(1, 0): 2 * MIB, e.AllocationId(1, 1): 4 * MIB, e.AllocationId(2, 0): 4 * MIB}
    story.quietly(e.ProcessScanFinished((e.ProcessMemory(103, BOB, pieces),)))
    clients = story.tells(4, m.ListClients(), m.Clients).clients
    assert clients[2].mapped_beyond_leases == 4 * MIB, "version 1 alone has it"


def test_a_restart_knows_what_is_shared_and_counts_it_once(story: Story) -> None:
    published(story, 1, 0, None, 2, ticket=2, lease=3)
    story.quietly(asks(2, 2, m.Close(2)))  # and the freeing of what version 1 alone had is not reported any more
    story.quietly(attaches(2, 3, "a"))
    story.restarts()
    assert not story.ledger.findings
    assert memory(story) == {2: (8 * MIB, 0)}
    assert allocated(story) == 8 * MIB
    held = {each.ticket: each.sizes for each in story.ledger.held_memory()}
    assert held == {1: {0: 2 * MIB, 2: 2 * MIB}, 2: {0: 4 * MIB}}
    sent = story.ledger.sent_fds(2, 4)
    assert sent is not None
    assert sent.sources == (
        e.FdSource("GPU-0", 1, (0,)),
        e.FdSource("GPU-0", 2),
        e.FdSource("GPU-0", 1, (2,)),
    )
    story.quietly(e.ConnectionLost(1), asks(2, 5, m.Close(4)))
    story >> asks(4, 1, m.Retire("a", 2)) << e.Free(1, "GPU-0", (0, 2)) << e.Free(2, "GPU-0")
    story << answer(4, 1, m.Retirement(2, 0))


def test_a_draft_that_shares_memory_outlives_a_restart(story: Story) -> None:
    story.quietly(updates(1, 3, 0, None, 2), e.Allocated(2, (D,)))
    story.restarts()
    granted = m.Created(3, "a", 2, "vmm", (m.ReplicaHandles("GPU-0", (b"", D, b"")),))
    assert story.ledger.granted(1, 3) == granted
    story.quietly(asks(1, 4, m.Seal(3)))
    assert memory(story) == {1: (8 * MIB, 0), 2: (8 * MIB, 4 * MIB)}


def test_a_draft_outlives_a_restart_whose_base_ended_while_it_was_allocated(story: Story) -> None:
    story.quietly(updates(1, 3, 0, None, 2), asks(4, 1, m.Retire("a", 1)), asks(2, 2, m.Close(2)))
    recorded = dict(story.ledger.changes())
    assert b"l/memory/1/a" not in recorded or recorded[b"l/memory/1/a"] is None  # no version that is recorded has it
    story.quietly(e.Allocated(2, (D,)))
    recorded |= dict(story.ledger.changes())
    assert {key: value for key, value in recorded.items() if value is not None} == story.ledger.snapshot()


def test_a_waiting_create_is_told_which_versions_have_the_memory(story: Story) -> None:
    published(story, 1, 0, None, 2, ticket=2, lease=3)
    story.quietly(creates(3, 1, "b", 12 * MIB, wait=9.0))
    story >> e.TimerExpired(1) << e.Respond(3, 1, Refusal("timeout", "a@1, a@2 8 MiB (superseded, current"))  # type: ignore[arg-type]
