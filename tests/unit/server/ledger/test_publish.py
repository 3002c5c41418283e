"""Publication: what a version is sealed with, which versions are kept, and how the current one is found."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec
import pytest

from cubroker.protocol import messages as m
from cubroker.protocol.errors import CorruptJournal
from cubroker.protocol.layout import Layout, TensorSpec
from cubroker.server.ledger import Ledger, Limits
from cubroker.server.ledger import events as e
from cubroker.server.ledger.entries import StateEntry
from cubroker.server.ledger.policy import Policy, Quota
from cubroker.server.ledger.states import VersionState
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
    creates,
    done,
    refused,
)

BOTH = ("GPU-0", "GPU-1")
ONE, TWO, THREE = (bytes([number]) * 16 for number in (1, 2, 3))
D = m.DESCRIPTOR


def digests(*replicas: tuple[bytes, ...]) -> m.Digests:
    return m.Digests("cubroker-128-1", replicas)


@pytest.fixture
def story() -> Story:
    """Session 1 of ALICE and 2 of BOB, and a store."""
    story = Story(store=100)
    story.joins(1)
    story.joins(2, uid=BOB)
    return story


def drafts(story: Story, **terms: object) -> None:
    """Have session 1 fill version 1 of ``a``, two allocations on each of two devices, by lease 1."""
    story.quietly(creates(1, 1, "a", MIB, MIB, devices=BOTH, share="vmm", durable=True, **terms))  # type: ignore[arg-type]
    story.quietly(e.Allocated(1, (D, D)), e.Allocated(2, (D, D)))


def listed(story: Story, version: int = 0, session: int = 2) -> m.DigestList:
    return story.tells(session, m.ListDigests("a", version), m.DigestList)


def test_readers_are_told_what_a_version_was_sealed_with(story: Story) -> None:
    drafts(story)
    story.quietly(asks(2, 1, m.Watch("a", on=True)))
    assert listed(story, 1) == m.DigestList(1, BOTH, None)
    assert story.tells(2, m.Describe("a", 1), m.Description).info.digest == ""
    sealed = digests((ONE, TWO), (ONE, THREE))
    story >> asks(1, 2, m.SealDigested(1, sealed))
    story << e.CancelFds(1, 1) << changed(2, "a", 1) << answer(1, 2, m.Sealed(1))
    assert listed(story) == listed(story, 1) == m.DigestList(1, BOTH, sealed)
    assert story.tells(2, m.Describe("a", 0), m.Description).info.digest == "cubroker-128-1"
    assert [info.digest for info in story.tells(2, m.ListPools(), m.Pools).pools] == ["cubroker-128-1"]


def test_a_version_that_is_sealed_without_has_none(story: Story) -> None:
    drafts(story)
    story.quietly(asks(1, 2, m.Seal(1)))
    assert listed(story) == m.DigestList(1, BOTH, None)
    assert story.tells(2, m.Describe("a", 0), m.Description).info.digest == ""


def test_each_version_has_its_own_for_as_long_as_it_lives(story: Story) -> None:
    drafts(story)
    story.quietly(asks(1, 2, m.SealDigested(1, digests((ONE, TWO), (ONE, TWO)))), attaches(2, 1, "a", device="GPU-0"))
    story.quietly(creates(1, 3, "a", MIB), e.Allocated(3, (b"handle",)))
    story.quietly(asks(1, 4, m.SealDigested(3, digests((THREE,)))))
    assert listed(story) == m.DigestList(2, ("GPU-0",), digests((THREE,)))
    assert listed(story, 1) == m.DigestList(1, BOTH, digests((ONE, TWO), (ONE, TWO)))
    story.quietly(asks(2, 2, m.Close(2)))
    story >> asks(2, 3, m.ListDigests("a", 1)) << refused(2, 3, "retired", "a@1")
    story >> asks(2, 4, m.ListDigests("b", 0)) << refused(2, 4, "not_found", "no pool is named 'b'")


def test_who_may_not_read_a_pool_is_not_told_its_digests(story: Story) -> None:
    drafts(story, mode=0o600)
    story.quietly(asks(1, 2, m.SealDigested(1, digests((ONE, TWO), (ONE, TWO)))))
    story >> asks(2, 1, m.ListDigests("a", 0)) << refused(2, 1, "denied")


def test_a_shard_has_digests_of_its_own_allocations_alone(story: Story) -> None:
    story.quietly(creates(1, 1, "a", MIB, MIB, MIB, devices=BOTH, share="vmm", plan=(0, 1, 0)))
    story.quietly(e.Allocated(1, (D, D)), e.Allocated(2, (D,)))
    story >> asks(1, 2, m.SealDigested(1, digests((ONE, TWO, THREE), (b"", TWO, b"")))) << refused(1, 2, "invalid")
    sealed = digests((ONE, b"", THREE), (b"", TWO, b""))
    story.quietly(asks(1, 3, m.SealDigested(1, sealed)))
    assert listed(story) == m.DigestList(1, BOTH, sealed)


@pytest.mark.parametrize(
    "wrong",
    [
        digests(),
        digests((ONE, TWO)),
        digests((ONE, TWO), (ONE, TWO), (ONE, TWO)),
        digests((ONE, TWO), (ONE,)),
        digests((ONE, TWO), (ONE, TWO, THREE)),
        digests((ONE, TWO), (ONE, b"")),
        digests((ONE, TWO), (ONE, TWO[1:])),
    ],
)
def test_digests_of_anything_else_are_refused_and_the_draft_stays(story: Story, wrong: m.Digests) -> None:
    drafts(story)
    story >> asks(1, 2, m.SealDigested(1, wrong))
    story << refused(1, 2, "invalid", "a@1 cannot be sealed with these digests", "16 bytes", "2 replicas")
    story.quietly(asks(1, 3, m.SealDigested(1, digests((ONE, TWO), (ONE, TWO)))))
    assert listed(story).digests == digests((ONE, TWO), (ONE, TWO))


def test_what_readers_may_write_has_no_digest(story: Story) -> None:
    drafts(story, writable=True)
    story >> asks(1, 2, m.SealDigested(1, digests((ONE, TWO), (ONE, TWO))))
    story << refused(1, 2, "unsupported", "a@1 is writable by its readers")
    story.quietly(asks(1, 3, m.Seal(1)))
    assert listed(story).digests is None


def test_what_is_published_or_nobodys_draft_cannot_be_sealed_with_digests_either(story: Story) -> None:
    drafts(story)
    story.quietly(asks(1, 2, m.SealDigested(1, digests((ONE, TWO), (ONE, TWO)))), attaches(2, 1, "a", device="GPU-0"))
    again = m.SealDigested(2, digests((TWO, TWO), (TWO, TWO)))
    story >> asks(2, 2, again) << refused(2, 2, "invalid", "published")
    story >> asks(1, 3, again) << refused(1, 3, "not_found")
    assert listed(story).digests == digests((ONE, TWO), (ONE, TWO))


def test_a_session_that_is_lost_may_still_seal_with_digests(story: Story) -> None:
    drafts(story)
    story.quietly(e.ConnectionLost(1), asks(1, 2, m.SealDigested(1, digests((ONE, TWO), (ONE, TWO)))))
    assert listed(story).digests == digests((ONE, TWO), (ONE, TWO))


def test_a_broker_that_is_started_again_knows_them(story: Story) -> None:
    drafts(story)
    sealed = digests((ONE, TWO), (ONE, THREE))
    story.quietly(asks(1, 2, m.SealDigested(1, sealed)), attaches(2, 1, "a", device="GPU-0"))
    story.restarts()
    assert listed(story) == m.DigestList(1, BOTH, sealed)
    story.quietly(asks(1, 3, m.Retire("a", 0)))
    story.restarts()
    assert listed(story, 1) == m.DigestList(1, BOTH, sealed)
    story.restarts(1, 2)
    assert listed(story, 1) == m.DigestList(1, BOTH, sealed), "what holders of a lost version have mapped stays"


def test_they_are_written_down_with_the_publication(story: Story) -> None:
    drafts(story)
    story.ledger.changes()
    story.quietly(asks(1, 2, m.SealDigested(1, digests((ONE, TWO), (ONE, THREE)))))
    recorded = dict(story.ledger.changes())[b"l/state/1/a"]
    assert recorded is not None
    entry = msgspec.msgpack.decode(recorded, type=StateEntry)
    assert entry == StateEntry(VersionState.CURRENT, "", digests((ONE, TWO), (ONE, THREE)), 0.0, writer_lease=1)


def restored(items: dict[bytes, bytes]) -> Ledger:
    return Ledger.restore(Story().devices, BROKER, Limits(), Policy(), items.items(), 100)


def test_a_record_of_a_broker_that_knew_of_no_digests_is_gone_on_with(story: Story) -> None:
    drafts(story)
    story.quietly(asks(1, 2, m.Seal(1)))
    items = story.ledger.snapshot()
    assert msgspec.msgpack.decode(items[b"l/state/1/a"]) == ["current", "", None, 0.0, 1, False]
    items[b"l/state/1/a"] = msgspec.msgpack.encode(["current", ""])
    restored(items).check()


@pytest.mark.parametrize(
    "wrong",
    [
        lambda entry: replace_in(entry, digests((ONE, TWO))),
        lambda entry: replace_in(entry, digests((ONE, TWO), (ONE, TWO[1:]))),
    ],
)
def test_digests_that_no_ledger_writes_are_damage(story: Story, wrong: Callable[[StateEntry], StateEntry]) -> None:
    drafts(story)
    story.quietly(asks(1, 2, m.SealDigested(1, digests((ONE, TWO), (ONE, TWO)))), attaches(2, 1, "a", device="GPU-0"))
    items = story.ledger.snapshot()
    entry = msgspec.msgpack.decode(items[b"l/state/1/a"], type=StateEntry)
    items[b"l/state/1/a"] = msgspec.msgpack.encode(wrong(entry))
    with pytest.raises(CorruptJournal, match="contradicts itself"):
        restored(items)


def replace_in(entry: StateEntry, found: m.Digests) -> StateEntry:
    return msgspec.structs.replace(entry, digests=found)


# -- superseded versions that are kept -------------------------------------------------------------


@pytest.fixture
def kept() -> Iterator[Story]:
    """Two superseded versions of a pool are kept; sessions 1 and 2 are Alice's. GPU-0 has room for five."""
    kept = Story(policy=Policy(keep=2))
    kept.joins(1, 2)
    for _ in range(3):
        kept.publishes(1, "a")
    yield kept
    kept.end()


def states(kept: Story) -> list[tuple[int, str]]:
    return [(info.version, info.state) for info in kept.tells(1, m.ListPools(), m.Pools).pools]


def test_superseded_versions_stay_without_a_lease_and_can_be_attached_to(kept: Story) -> None:
    assert states(kept) == [(1, "superseded"), (2, "superseded"), (3, "current")]
    kept >> attaches(2, 1, "a", 1)
    kept << attached(2, 1, 4, "a", 1, ticket=1)
    kept >> asks(2, 2, m.Close(4))
    kept << done(2, 2)
    assert len(states(kept)) == 3


def test_the_oldest_goes_when_the_next_one_is_superseded(kept: Story) -> None:
    kept.quietly(creates(1, 1, "a", MIB), e.Allocated(4, (b"4",)))
    kept >> asks(1, 2, m.Seal(4))
    kept << e.Free(1, "GPU-0")
    kept << answer(1, 2, m.Sealed(4))
    assert states(kept) == [(2, "superseded"), (3, "superseded"), (4, "current")]


def test_one_that_is_no_longer_kept_goes_with_its_last_lease(kept: Story) -> None:
    kept.quietly(attaches(2, 1, "a", 1))
    kept.publishes(1, "a")
    assert states(kept) == [(1, "superseded"), (2, "superseded"), (3, "superseded"), (4, "current")]
    kept >> asks(2, 2, m.Close(4))
    kept << e.Free(1, "GPU-0")
    kept << done(2, 2)


def test_retiring_frees_a_kept_version_and_an_older_one_takes_its_place(kept: Story) -> None:
    kept.quietly(attaches(2, 1, "a", 1))
    kept.publishes(1, "a")
    kept >> asks(1, 1, m.Retire("a", 3))
    kept << e.Free(3, "GPU-0")
    kept << answer(1, 1, m.Retirement(3, 0))
    kept >> asks(2, 2, m.Close(4))
    kept << done(2, 2)
    assert states(kept) == [(1, "superseded"), (2, "superseded"), (4, "current")]


def test_who_watches_is_told_again_what_is_current_when_another_version_has_ended(kept: Story) -> None:
    kept.joins(3)
    kept.quietly(attaches(2, 1, "a", 1), asks(3, 1, m.Watch("a", on=True)))
    kept >> asks(1, 1, m.Retire("a", 1)) << answer(1, 1, m.Retirement(1, 1))
    kept >> asks(2, 2, m.Close(4)) << e.Free(1, "GPU-0") << changed(3, "a", 3) << done(2, 2)
    kept >> asks(1, 2, m.Retire("a", 2)) << e.Free(2, "GPU-0") << changed(3, "a", 3)
    kept << answer(1, 2, m.Retirement(2, 0))
    kept.quietly(attaches(2, 3, "a"))
    kept >> asks(1, 3, m.Retire("a", 3)) << changed(3, "a", 0) << answer(1, 3, m.Retirement(3, 1))
    kept >> e.ProcessExited(2) << e.Free(3, "GPU-0") << changed(3, "a", 0) << e.ForgetSession(2)


def test_kept_versions_give_way_to_nothing_and_outlive_the_current_one(kept: Story) -> None:
    kept >> creates(1, 1, "b", 6 * MIB)
    kept << refused(1, 1, "over_budget", "a@1 2 MiB (superseded")
    kept >> asks(1, 2, m.Retire("a", 0))
    kept << e.Free(3, "GPU-0")
    kept << answer(1, 2, m.Retirement(3, 0))
    assert states(kept) == [(1, "superseded"), (2, "superseded")]
    kept >> attaches(1, 3, "a")
    kept << refused(1, 3, "not_found", "a has no current version")
    kept.publishes(1, "a")
    assert states(kept) == [(1, "superseded"), (2, "superseded"), (4, "current")]


# -- finding the current version -------------------------------------------------------------------


@pytest.fixture
def published() -> Story:
    """Session 1 of Alice has published a@1, which all may read, and b@1, which only she may; session 2 is Bob's."""
    published = Story()
    published.joins(1, uid=ALICE)
    published.joins(2, uid=BOB)
    published.publishes(1, "a")
    published.publishes(1, "b", mode=0o600)
    return published


@pytest.mark.parametrize(
    ("name", "owners", "version"),
    [("a", (), 1), ("a", (ALICE,), 1), ("a", (7,), 0), ("b", (7,), 0), ("none", (), 0)],
)
def test_a_pool_is_found_by_its_name_and_owner(
    published: Story, name: str, owners: tuple[int, ...], version: int
) -> None:
    published >> asks(2, 9, m.Find(name, owners))
    published << answer(2, 9, m.Found(version))
    published.end()


def test_a_pool_without_a_current_version_is_found_as_0_and_a_private_one_is_denied(published: Story) -> None:
    published >> asks(2, 8, m.Find("b"))
    published << refused(2, 8, "denied")
    published.quietly(asks(1, 7, m.Watch("a", on=True)), asks(1, 8, m.Retire("a", 1)))
    published >> asks(2, 9, m.Find("a"))
    published << answer(2, 9, m.Found(0))
    published.end()


# -- another layout, and seals in place ----------------------------------------------------------------


def lays_out(session: int, request: int, lease: int, *sizes: int, tensors: int = 0) -> e.RequestReceived:
    made = Layout(tuple(TensorSpec(f"t{each}", "U8", (1,), 0, 256 * each) for each in range(tensors)), sizes)
    return e.RequestReceived(session, request, m.SetLayout(lease, made.encode()), made.outline)


def described(story: Story, version: int) -> tuple[Layout, m.Description]:
    told = story.tells(1, m.Describe("a", version), m.Description)
    return Layout.decode(told.layout), told


def test_a_draft_gets_another_layout_of_its_memory_which_its_readers_see(story: Story) -> None:
    drafts(story)
    story >> lays_out(1, 2, 1, MIB, MIB - 256, tensors=3) << done(1, 2)
    layout, told = described(story, 1)
    assert [tensor.name for tensor in layout.tensors] == ["t0", "t1", "t2"]
    assert (told.info.tensors, told.info.nbytes) == (3, 2 * MIB - 256)
    assert any("another layout, of 3 tensors" in line for line in story.log(1, "a"))
    story.quietly(asks(1, 3, m.Seal(1)))
    (granted,) = [
        each.body for each in story.quietly(attaches(2, 1, "a", device="GPU-0")) if isinstance(each, e.Respond)
    ]
    assert isinstance(granted, m.Attached)
    assert Layout.decode(granted.layout) == layout


@pytest.mark.parametrize("sizes", [(MIB,), (MIB, MIB, MIB), (MIB, 3 * MIB), (3 * MIB, MIB)])
def test_a_layout_of_other_memory_is_refused_and_the_draft_stays(story: Story, sizes: tuple[int, ...]) -> None:
    drafts(story)
    story >> lays_out(1, 2, 1, *sizes) << refused(1, 2, "invalid", "a@1", "the draft's memory is 2097152, 2097152")
    assert described(story, 1)[0].allocations == (MIB, MIB)


def test_a_long_list_of_allocations_is_cut_short(story: Story) -> None:
    drafts(story)
    story >> lays_out(1, 2, 1, 1, 2, 3, 4, 5) << refused(1, 2, "invalid", "1, 2, 3, 4, … (5) bytes")


def test_a_layout_of_shards_is_that_of_each_device(story: Story) -> None:
    sizes = (MIB, 3 * MIB, MIB)
    story.quietly(creates(1, 1, "a", *sizes, devices=BOTH, share="vmm", plan=(0, 1, 0)))
    story.quietly(e.Allocated(1, (D, D)), e.Allocated(2, (D,)))
    story >> lays_out(1, 2, 1, 3 * MIB, MIB, MIB) << refused(1, 2, "invalid", "2097152, 4194304, 2097152")
    story >> lays_out(1, 3, 1, MIB, 4 * MIB, MIB) << done(1, 3)


def test_only_the_writer_of_a_draft_gives_it_a_layout(story: Story) -> None:
    drafts(story)
    story >> lays_out(2, 1, 1, MIB, MIB) << refused(2, 1, "not_found")
    story.quietly(asks(1, 2, m.Seal(1)), attaches(1, 3, "a", device="GPU-0"))
    story >> lays_out(1, 4, 2, MIB, MIB) << refused(1, 4, "invalid", "published; only a draft can get another layout")


def test_a_longer_layout_counts_for_the_quota_and_a_shorter_one_gives_back() -> None:
    story = Story(policy=Policy(quota=Quota(layouts=80)))
    story.joins(1)
    story.quietly(creates(1, 1, "a", MIB), e.Allocated(1, (b"handle",)))
    story >> lays_out(1, 2, 1, MIB, tensors=9) << refused(1, 2, "over_quota", "of a quota of 80")
    story >> lays_out(1, 3, 1, MIB, tensors=5) << done(1, 3)
    story >> creates(1, 4, "b", MIB, MIB, MIB, MIB) << refused(1, 4, "over_quota")
    story >> lays_out(1, 5, 1, MIB) << done(1, 5)
    story.quietly(creates(1, 6, "b", MIB, MIB, MIB, MIB))
    assert [info.name for info in story.tells(1, m.ListPools(), m.Pools).pools] == ["a", "b"]


def test_a_version_that_is_sealed_in_place_stays_leased_by_its_writer(story: Story) -> None:
    story.quietly(
        creates(1, 1, "a", MIB, share="vmm", durable=True), e.Allocated(1, (D,)), attaches(2, 1, "a", wait=5.0)
    )
    effects = story.quietly(asks(1, 2, m.SealInPlace(1)))
    assert answer(1, 2, m.Sealed(1)) in effects
    assert not any(isinstance(effect, e.CancelFds | e.Free) for effect in effects)
    assert any(isinstance(effect, e.Respond) and isinstance(effect.body, m.Attached) for effect in effects)
    assert described(story, 1)[1].info.leases == 2
    story >> asks(1, 3, m.SealInPlace(1)) << refused(1, 3, "invalid", "published")
    story.quietly(asks(1, 4, m.Retire("a", 1)), asks(2, 2, m.Close(2)))
    assert described(story, 1)[1].info.leases == 1
    story >> asks(1, 5, m.Close(1)) << e.CancelFds(1, 1) << e.Free(1, "GPU-0") << done(1, 5)


def test_a_version_is_sealed_in_place_with_its_digests(story: Story) -> None:
    story.quietly(creates(1, 1, "a", MIB, share="vmm", durable=True), e.Allocated(1, (D,)))
    story >> asks(1, 2, m.SealInPlace(1, digests((ONE, TWO)))) << refused(1, 2, "invalid", "digests")
    story.quietly(asks(1, 3, m.SealInPlace(1, digests((ONE,)))))
    assert listed(story).digests == digests((ONE,))


def test_all_shards_are_sealed_in_place_and_replicas_and_multicast_pools_are_not(story: Story) -> None:
    drafts(story)
    story >> asks(1, 2, m.SealInPlace(1)) << refused(1, 2, "unsupported", "a@1", "2 replicas")
    story.quietly(creates(1, 3, "b", MIB, share="multicast"), e.Allocated(3, (D,)))
    story >> asks(1, 4, m.SealInPlace(2)) << refused(1, 4, "unsupported", "shared as multicast")
    story.quietly(creates(1, 5, "c", MIB, MIB, devices=BOTH, share="vmm", plan=(0, 1)))
    story.quietly(e.Allocated(4, (D,)), e.Allocated(5, (D,)), asks(1, 6, m.SealInPlace(3)))
    assert story.tells(1, m.Describe("c", 1), m.Description).info.leases == 1


@pytest.mark.parametrize("sealed", [False, True])
def test_the_next_broker_knows_the_layout_and_the_lease(story: Story, *, sealed: bool) -> None:
    story.quietly(creates(1, 1, "a", MIB, share="vmm", durable=True), e.Allocated(1, (D,)))
    story.quietly(lays_out(1, 2, 1, MIB, tensors=2))
    if sealed:
        story.quietly(asks(1, 3, m.SealInPlace(1)))
    story.restarts()
    assert described(story, 1)[1].info.tensors == 2
    assert described(story, 1)[1].info.leases == 1
    story.quietly(asks(1, 4, m.Close(1) if sealed else m.SealInPlace(1)))
    assert described(story, 1)[1].info.state == "current"
