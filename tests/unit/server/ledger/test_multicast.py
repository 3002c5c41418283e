"""Multicast versions: their replicas are a group, bound after they are allocated and unbound before they are freed."""

from __future__ import annotations

from itertools import product

import pytest

from cubroker.protocol import messages as m
from cubroker.server.ledger import Limits
from cubroker.server.ledger import events as e
from cubroker.server.ledger.states import GROUP, GroupEvent, GroupState, Impossible, step
from tests.unit.server.ledger.story import MIB, Story, answer, asks, attaches, creates, done, layout, refused

BOTH = ("GPU-0", "GPU-1")
D = m.DESCRIPTOR
MEMBERS = (("GPU-0", 1), ("GPU-1", 2))
SOURCES = tuple(e.FdSource(*member) for member in MEMBERS)
MADE = e.MulticastBound(3, "multicast", "it works", (4 * MIB,), (77,))
WITHOUT = e.MulticastBound(3, "copies", "no slots left")


def replicas(*devices: str) -> tuple[m.ReplicaHandles, ...]:
    return tuple(m.ReplicaHandles(device, (D,)) for device in devices)


def begun(*, writable: bool = True, limits: Limits | None = None) -> Story:
    """All memory is there, tickets 1 and 2, and group 3 is being bound."""
    story = Story(limits=limits)
    story.joins(1, 2)
    story >> creates(1, 1, "a", MIB, devices=BOTH, share="multicast", writable=writable)
    story << e.Allocate(1, "GPU-0", (2 * MIB,), "multicast")
    story << e.Allocate(2, "GPU-1", (2 * MIB,), "multicast")
    story >> e.Allocated(2, (D,)) >> e.Allocated(1, (D,))
    return story << e.BindMulticast(3, (2 * MIB,), MEMBERS)


def created(group: m.Team) -> e.Respond:
    return answer(1, 1, m.Created(1, "a", 1, "multicast", replicas(*BOTH), group))


def attached(lease: int, *devices: str, writable: bool = True, group: m.Team) -> e.Respond:
    body = m.Attached(lease, "a", 1, "multicast", layout(MIB).encode(), replicas(*devices), writable, group)
    return answer(2, lease, body)


def test_every_pair_of_a_bond_and_a_turn_is_in_the_table_or_forbidden() -> None:
    assert set(GROUP) == set(GroupState)
    assert [bond for bond, row in GROUP.items() if not row] == [GroupState.GONE]
    assert {turn for row in GROUP.values() for turn, after in row.items() if after is GroupState.GONE} == {
        GroupEvent.UNBOUND
    }
    for bond, turn in product(GroupState, GroupEvent):
        if turn not in GROUP[bond]:
            with pytest.raises(Impossible, match=f"{turn.name} cannot follow {bond.name}"):
                step(GROUP, bond, turn, ())


def test_a_draft_is_filled_once_its_group_is_bound_and_its_memory_freed_once_that_is_unbound() -> None:
    story = begun()
    story >> MADE
    story << e.SendFds(1, 1, SOURCES, 3, writable=True) << created(m.Team("multicast", "it works", (4 * MIB,)))
    story >> asks(1, 2, m.Seal(1)) << e.CancelFds(1, 1) << answer(1, 2, m.Sealed(1))
    story >> attaches(2, 2, "a", device="GPU-1")
    story << e.SendFds(2, 2, SOURCES[1:], 3, writable=True)
    story << attached(2, "GPU-1", group=m.Team("multicast", "it works", (4 * MIB,)))
    story >> asks(1, 3, m.Retire("a", 1)) << answer(1, 3, m.Retirement(1, 1))
    story >> asks(2, 3, m.Close(2)) << e.CancelFds(2, 2) << e.UnbindMulticast(3) << done(2, 3)
    story >> e.MulticastUnbound(3) << e.Free(1, "GPU-0") << e.Free(2, "GPU-1")
    story >> e.Freed(1) >> e.Freed(2)
    story.end()


def test_where_copies_take_its_place_who_may_write_is_handed_all_replicas_its_own_first() -> None:
    story = begun()
    story >> WITHOUT << e.SendFds(1, 1, SOURCES, writable=True) << created(m.Team("copies", "no slots left"))
    story >> asks(1, 2, m.Seal(1)) << e.CancelFds(1, 1) << answer(1, 2, m.Sealed(1))
    story >> attaches(2, 2, "a", device="GPU-1")
    story << e.SendFds(2, 2, SOURCES[::-1], writable=True)
    story << attached(2, *BOTH[::-1], group=m.Team("copies", "no slots left"))


def test_who_may_not_write_or_is_on_another_device_gets_one_replica_and_no_object() -> None:
    for writable, device, peers in ((False, "GPU-0", ()), (True, "GPU-9", ("GPU-0",))):
        story = begun(writable=writable)
        story.quietly(MADE, asks(1, 2, m.Seal(1)))
        story >> attaches(2, 2, "a", device=device, peers=peers) << e.SendFds(2, 2, SOURCES[:1], writable=writable)
        story << attached(2, "GPU-0", writable=writable, group=m.Team("multicast", "it works"))


def test_pools_tell_how_and_why_once_it_is_known() -> None:
    story, infos = begun(), []
    for event in (None, WITHOUT):
        respond = story.quietly(*([event] if event else []), asks(2, 9 + len(infos), m.ListPools()))[0]
        assert isinstance(respond, e.Respond)
        assert isinstance(respond.body, m.Pools)
        infos += respond.body.pools
    assert [(info.how, info.why) for info in infos] == [("", ""), ("copies", "no slots left")]


def test_one_device_alone_needs_no_group() -> None:
    story = Story()
    story.joins(1)
    story >> creates(1, 1, "a", MIB, share="multicast") << e.Allocate(1, "GPU-0", (2 * MIB,), "multicast")
    story >> e.Allocated(1, (D,)) << e.SendFds(1, 1, (("GPU-0", 1, ()),), writable=True)
    group = m.Team("copies", "it is on one device, so there is nothing to bind together")
    story << answer(1, 1, m.Created(1, "a", 1, "multicast", replicas("GPU-0"), group))
    story >> asks(1, 2, m.Close(1)) << e.CancelFds(1, 1) << e.Free(1, "GPU-0") << done(1, 2)


@pytest.mark.parametrize("order", [(MADE, e.MulticastUnbound(3)), (e.MulticastUnbound(3),)])
def test_a_group_that_is_cancelled_while_it_is_bound_is_unbound_all_the_same(order: tuple[e.LedgerEvent, ...]) -> None:
    story = begun()
    story >> e.ProcessExited(1) << e.UnbindMulticast(3) << e.ForgetSession(1)
    for event in order[:-1]:
        story >> event
    story >> order[-1] << e.Free(1, "GPU-0") << e.Free(2, "GPU-1")
    story >> e.Freed(2) >> e.Freed(1)
    story.end()


def test_a_member_whose_memory_fails_leaves_no_group() -> None:
    story = Story()
    story.joins(1)
    story.quietly(creates(1, 1, "a", MIB, devices=BOTH, share="multicast"), e.Allocated(1, (D,)))
    story >> e.AllocationFailed(2, "device", "no") << e.Free(1, "GPU-0") << refused(1, 1, "device", "no")


def test_a_writer_with_enough_leases_is_refused_when_its_group_is_bound() -> None:
    story = begun(limits=Limits(leases=1))
    story.quietly(creates(1, 2, "b", MIB), e.Allocated(4, (b"handle",)))
    story >> MADE << e.UnbindMulticast(3) << refused(1, 1, "over_quota")


def test_an_outcome_of_no_group_is_impossible() -> None:
    story = begun()
    for event in (e.MulticastBound(9, "copies", "no"), e.MulticastUnbound(9)):
        with pytest.raises(Impossible, match="an outcome of multicast group 9, which is not in the tables"):
            story.quietly(event)
    with pytest.raises(Impossible, match="UNBOUND cannot follow BINDING"):
        story.quietly(e.MulticastUnbound(3))


def test_a_multicast_pool_is_not_sharded() -> None:
    story = Story()
    story.joins(1)
    story >> creates(1, 1, "a", MIB, MIB, devices=BOTH, share="multicast", plan=(0, 1))
    story << refused(1, 1, "invalid", "sharded and multicast", "use vmm")
