"""Durable versions, the room that they take in the store, and versions whose memory went with a broker."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cubroker.protocol import messages as m
from cubroker.server.ledger import Impossible
from cubroker.server.ledger import events as e
from cubroker.server.ledger.policy import Policy
from tests.unit.server.ledger.story import (
    ALICE,
    BOB,
    BROKER,
    GPU0,
    MIB,
    Story,
    answer,
    asks,
    attaches,
    changed,
    created,
    creates,
    done,
    handle,
    refused,
)

WHY = "its memory was shared as ipc"


def holding() -> Story:
    """Version 1 of ``a``, of session 1, which sessions 2 and 3 hold by leases 2, 3 and 4, and 4 watches."""
    story = Story(store=100)
    story.joins(1, 2, 3, 4)
    story.publishes(1, "a")
    story.quietly(*(attaches(session, request, "a") for session, request in ((2, 1), (2, 2), (3, 1))))
    story >> asks(4, 1, m.Watch("a", True)) << changed(4, "a", 1) << done(4, 1)
    return story


def lost(session: int, number: int = 1) -> e.Notify:
    return e.Notify(session, m.PoolLost("a", number, WHY))


def test_only_memory_that_descriptors_open_can_be_durable() -> None:
    story = Story(store=100)
    story.joins(1)
    story >> creates(1, 1, "a", MIB, durable=True)
    story << refused(1, 1, "unsupported", "a is to be durable", "shared as ipc", "use vmm or multicast")
    (
        story
        >> creates(1, 2, "a", MIB, share="vmm", durable=True)
        << e.Allocate(1, "GPU-0", (2 * MIB,), "vmm", durable=True)
    )
    story >> e.Allocated(1, (m.DESCRIPTOR,))
    story << e.SendFds(1, 1, (("GPU-0", 1, ()),), writable=True)
    story << answer(1, 2, m.Created(1, "a", 1, "vmm", (m.ReplicaHandles("GPU-0", (m.DESCRIPTOR,)),)))
    assert story.tells(1, m.ListPools(), m.Pools).pools[0].durable


def is_durable(story: Story, share: str, *sizes: int, devices: tuple[str, ...] = ("GPU-0",)) -> bool:
    """Whether a version is durable whose create does not say so; it is gone afterwards."""
    allocates = story.quietly(creates(1, 1, "a", *sizes, devices=devices, share=share, durable=None))
    (info,) = story.tells(1, m.ListPools(), m.Pools).pools
    story.quietly(asks(1, 2, m.Cancel(1)))
    for effect in allocates:
        assert isinstance(effect, e.Allocate)
        assert effect.durable == info.durable
        story.quietly(e.Freed(effect.ticket))
    return info.durable


@pytest.mark.parametrize(("share", "durable"), [("ipc", False), ("vmm", True), ("multicast", True), ("auto", True)])
def test_a_create_that_does_not_say_so_is_durable_where_share_kind_and_store_allow_it(
    share: str, durable: bool
) -> None:
    with_store, without = Story(store=100), Story()
    for story in (with_store, without):
        story.joins(1)
    assert is_durable(with_store, share, MIB) == durable
    assert not is_durable(without, share, MIB)


def test_a_durable_create_that_names_no_share_kind_is_vmm_whatever_is_usual() -> None:
    story = Story(replace(GPU0, vmm=False), policy=Policy(share="ipc"), store=100)
    story.joins(1)
    story >> creates(1, 1, "a", MIB, share="auto", durable=True)
    story << e.Allocate(1, "GPU-0", (2 * MIB,), "vmm", durable=True)


def test_memory_that_nobody_insists_on_leaves_half_of_the_store_to_sessions() -> None:
    story = Story(store=8)
    story.joins(1)
    assert is_durable(story, "auto", MIB, MIB, MIB, MIB)
    assert not is_durable(story, "auto", MIB, MIB, MIB, MIB, MIB)
    assert is_durable(story, "auto", MIB, MIB, devices=("GPU-0", "GPU-1"))
    assert not is_durable(story, "auto", MIB, MIB, MIB, devices=("GPU-0", "GPU-1"))
    story.joins(2, 3)
    assert is_durable(story, "auto", MIB, MIB)
    assert not is_durable(story, "auto", MIB, MIB, MIB)  # the sessions have taken more than half


def test_a_broker_that_makes_way_for_the_next_one_takes_creates_that_will_be_durable() -> None:
    story = Story(store=8)
    story.joins(1)
    story.quietly(e.ShutdownStarted(with_store=False))
    story >> creates(1, 1, "a", *(MIB,) * 5, share="auto", durable=None)
    story << refused(1, 1, "unavailable", "lends nothing new")
    story >> creates(1, 2, "a", MIB, share="auto", durable=None)
    story << e.Allocate(1, "GPU-0", (2 * MIB,), "vmm", durable=True)


def test_without_a_store_nothing_is_durable_and_nothing_is_recorded() -> None:
    story = Story()
    story.joins(1)
    story >> creates(1, 1, "a", MIB, share="vmm", durable=True)
    story << refused(1, 1, "unsupported", "a is to be durable", "no store", "cubroker keep", "systemd")
    assert not story.ledger.changes()


def test_the_store_has_room_for_so_many_sessions_and_pieces_of_durable_memory() -> None:
    story = Story(store=8)
    story.joins(1, 2)
    story.quietly(creates(1, 1, "a", MIB, MIB, share="vmm", durable=True))
    assert story.ledger.admission_error(7) is None
    assert story.ledger.stored_fds == 6
    story >> creates(1, 2, "b", MIB, MIB, MIB, share="vmm", durable=True)
    words = "3 places", "has 8", "4 are taken by 2 sessions", "2 by durable memory"
    story << refused(1, 2, "over_quota", *words)
    story >> creates(2, 2, "a", MIB, share="vmm", durable=True, wait=5.0) << e.SetTimer(1, 5.0)
    refusal = story.ledger.admission_error(7)
    assert refusal is not None
    assert (refusal.code, "3 by durable memory" in refusal.message) == ("over_quota", True)
    story >> asks(2, 3, m.Cancel(2)) << e.CancelTimer(1)
    story << refused(2, 2, "timeout") << done(2, 3)
    assert story.ledger.admission_error(7) is None
    story.quietly(creates(2, 4, "c", MIB, share="vmm"), e.ProcessExited(2), e.Freed(2))
    story >> creates(1, 3, "b", MIB, MIB, MIB, share="vmm", durable=True)
    story << e.Allocate(3, "GPU-0", (2 * MIB,) * 3, "vmm", durable=True)
    story.quietly(e.ProcessExited(1), e.Freed(1))
    assert story.ledger.admission_error(7) is None


def test_a_store_that_is_full_has_places_left_for_sessions_of_those_who_run_the_broker() -> None:
    story = Story(store=64, policy=Policy(admins=frozenset((5,))))
    story.joins(1, uid=BROKER)
    story.joins(*range(2, 31))
    refusal = story.ledger.admission_error(ALICE)
    assert refusal is not None
    assert refusal.code == "over_quota"
    assert "has 64, 4 of them held back for root, administrators and the broker's own user" in refusal.message
    story >> creates(1, 1, "a", MIB, share="vmm", durable=True)
    story << refused(1, 1, "over_quota", "1 place of", "4 of them held back")
    assert [story.ledger.admission_error(uid, verified=True) for uid in (0, BROKER, 5)] == [None] * 3
    story.joins(31, uid=0)
    story.joins(32, uid=5)
    refusal = story.ledger.admission_error(0, verified=True)
    assert refusal is not None
    assert "has 64: 64 are taken by 32 sessions" in refusal.message


def test_a_version_that_is_lost_stays_with_its_holders_and_with_nobody_else() -> None:
    story = holding()
    story >> e.MemoryLost(1, WHY) << lost(2) << lost(3) << changed(4, "a", 0)
    (info,) = story.tells(1, m.ListPools(), m.Pools).pools
    assert (info.state, info.why, info.leases) == ("lost", WHY, 3)
    assert story.tells(1, m.ListDevices(), m.DeviceList).devices[0].allocated == 2 * MIB
    story >> attaches(1, 1, "a") << refused(1, 1, "not_found", f"it was lost ({WHY})", "1 was the last one", "load it")
    story >> attaches(1, 2, "a", 1) << refused(1, 2, "retired", "a@1 was lost", WHY)
    story >> asks(1, 3, m.Retire("a", 1)) << answer(1, 3, m.Retirement(1, 3))
    story.quietly(asks(2, 3, m.Close(2)), asks(2, 4, m.Close(3)))
    story >> e.ProcessExited(3) << e.Free(1, "GPU-0") << changed(4, "a", 0) << e.ForgetSession(3)
    story >> e.Freed(1)
    story >> attaches(1, 4, "a") << refused(1, 4, "not_found", f"it was lost ({WHY})", "1 was the last one", "load it")
    assert story.publishes(1, "a") == 2
    story >> attaches(1, 5, "a", 1) << refused(1, 5, "retired", "a@1 was lost", WHY, "the current one is 2")


def test_a_version_that_nobody_holds_ends_when_it_is_lost() -> None:
    story = Story(store=100)
    story.joins(1)
    story.publishes(1, "a")
    story >> e.MemoryLost(1, WHY) << e.Free(1, "GPU-0")
    story >> e.Freed(1)
    story >> attaches(1, 1, "a") << refused(1, 1, "not_found", "no version of a is left", WHY)
    story >> asks(1, 2, m.Retire("a", 1)) << refused(1, 2, "retired", "a@1 was lost", WHY)


def test_a_detached_holder_is_not_told() -> None:
    story = holding()
    story.quietly(e.ConnectionLost(2), e.ConnectionLost(4))
    story >> e.MemoryLost(1, WHY) << lost(3)


@pytest.mark.parametrize("state", ["superseded", "retired"])
def test_what_is_out_of_service_can_be_lost_too(state: str) -> None:
    story = holding()
    if state == "superseded":
        story.publishes(1, "a")
    else:
        story.quietly(asks(1, 1, m.Retire("a", 1)))
    story >> e.MemoryLost(1, WHY) << lost(2) << lost(3)
    assert {info.state for info in story.tells(1, m.ListPools(), m.Pools).pools if info.version == 1} == {"lost"}


def test_the_number_of_a_draft_that_is_lost_is_not_given_out_again() -> None:
    story = Story(store=100)
    story.joins(1, 2)
    story.quietly(creates(1, 1, "a", MIB), e.Allocated(1, (handle(1),)))
    story >> attaches(2, 1, "a", 1, wait=5.0) << e.SetTimer(1, 5.0)
    story >> attaches(2, 2, "a", wait=5.0) << e.SetTimer(2, 5.0)
    story >> creates(2, 3, "a", MIB, wait=5.0) << e.SetTimer(3, 5.0)
    story >> e.MemoryLost(1, WHY) << lost(1)
    story << e.CancelTimer(1) << refused(2, 1, "retired", "a@1 was lost", WHY)
    story << e.CancelTimer(3) << e.Allocate(2, "GPU-0", (2 * MIB,), "ipc")
    story >> asks(1, 2, m.Seal(1)) << refused(1, 2, "unavailable", "a@1 was lost before it was sealed", WHY)
    story >> asks(1, 3, m.Close(1)) << e.Free(1, "GPU-0") << done(1, 3)
    story >> e.Allocated(2, (handle(2),)) << created(2, 3, 2, "a", 2, GPU_0=2)


def test_who_may_not_read_what_a_lost_draft_would_have_been_waits_on() -> None:
    story = Story(store=100)
    story.joins(1)
    story.joins(2, uid=BOB)
    story >> attaches(2, 1, "a", 1, wait=5.0) << e.SetTimer(1, 5.0)
    story.quietly(creates(1, 1, "a", MIB, mode=0o600), e.Allocated(1, (handle(1),)))
    story >> e.MemoryLost(1, WHY) << lost(1)
    story >> e.TimerExpired(1)
    story << refused(2, 1, "timeout")
    story.end()


def test_a_version_is_lost_once_however_much_of_its_memory_is_lost() -> None:
    story = Story(store=100)
    story.joins(1, 2)
    story.publishes(1, "a", devices=("GPU-0", "GPU-1"))
    story.quietly(attaches(2, 1, "a", device="GPU-1"))
    story >> e.MemoryLost(2, WHY) << lost(2)
    story >> e.MemoryLost(1, "another reason")
    story >> asks(2, 2, m.Close(2)) << e.Free(1, "GPU-0") << e.Free(2, "GPU-1") << done(2, 2)
    story >> e.MemoryLost(1, "another reason")


def test_memory_that_is_unknown_or_still_on_its_way_cannot_be_lost() -> None:
    story = Story(store=100)
    story.joins(1)
    with pytest.raises(Impossible, match="ticket 1, which is not in the tables"):
        story >> e.MemoryLost(1, WHY)
    story.quietly(creates(1, 1, "a", MIB))
    with pytest.raises(Impossible, match="LOST cannot follow ALLOCATING"):
        story >> e.MemoryLost(1, WHY)


def test_a_version_that_the_policy_kept_is_lost_like_any_other() -> None:
    story = Story(store=100, policy=Policy(keep=1))
    story.joins(1)
    story.publishes(1, "a")
    story.publishes(1, "a")
    story.quietly(asks(1, 1, m.Watch("a", on=True)))
    story >> e.MemoryLost(1, WHY) << e.Free(1, "GPU-0") << changed(1, "a", 2)
