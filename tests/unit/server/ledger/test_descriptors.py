"""Memory that descriptors open: each lease has them handed over before it is granted, and withdrawn when it ends."""

from __future__ import annotations

import pytest

from cubroker.protocol import messages as m
from cubroker.server.ledger import events as e
from tests.unit.server.ledger.story import MIB, Story, answer, asks, attaches, creates, done, layout, refused

D = m.DESCRIPTOR
BOTH = ("GPU-0", "GPU-1")


@pytest.fixture
def story() -> Story:
    story = Story()
    story.joins(1, 2)
    return story


def attached(lease: int, *devices: str) -> m.Attached:
    return m.Attached(
        lease, "a", 1, "vmm", layout(MIB, MIB).encode(), tuple(m.ReplicaHandles(each, (D, D)) for each in devices)
    )


FABRIC = (b"f" * 64, b"g" * 64)


def created(*handles: tuple[bytes, ...]) -> m.Created:
    return m.Created(1, "a", 1, "vmm", tuple(map(m.ReplicaHandles, BOTH, handles)))


def allocates(story: Story) -> None:
    story >> creates(1, 1, "a", MIB, MIB, devices=BOTH, share="vmm")
    story << e.Allocate(1, "GPU-0", (2 * MIB, 2 * MIB), "vmm")
    story << e.Allocate(2, "GPU-1", (2 * MIB, 2 * MIB), "vmm")


def publish(story: Story) -> None:
    allocates(story)
    story >> e.Allocated(2, (D, D), (12, 13))
    story >> e.Allocated(1, (D, D), (10, 11))
    story << e.SendFds(1, 1, (("GPU-0", 1, ()), ("GPU-1", 2, ())), writable=True)
    story << answer(1, 1, created((D, D), (D, D)))


def test_a_writer_is_handed_all_of_its_draft_and_a_reader_what_it_leased(story: Story) -> None:
    publish(story)
    story >> asks(1, 2, m.Seal(1))
    story << e.CancelFds(1, 1)
    story << answer(1, 2, m.Sealed(1))
    story >> attaches(2, 1, "a", device="GPU-1")
    story << e.SendFds(2, 2, (("GPU-1", 2, ()),))
    story << answer(2, 1, attached(2, "GPU-1"))


def test_whoever_waited_is_handed_over_at_publication(story: Story) -> None:
    story >> attaches(2, 1, "a", device="GPU-7", peers=("GPU-0",), wait=5.0)
    story << e.SetTimer(1, 5.0)
    publish(story)
    story >> asks(1, 2, m.Seal(1))
    story << e.CancelFds(1, 1)
    story << e.CancelTimer(1)
    story << e.SendFds(2, 2, (("GPU-0", 1, ()),))
    story << answer(2, 1, attached(2, "GPU-0"))
    story << answer(1, 2, m.Sealed(1))


def test_descriptors_are_withdrawn_before_their_memory_is_freed_however_a_lease_ends(story: Story) -> None:
    publish(story)
    story >> asks(1, 2, m.Close(1))
    story << e.CancelFds(1, 1)
    story << e.Free(1, "GPU-0")
    story << e.Free(2, "GPU-1")
    story << done(1, 2)
    story >> creates(2, 1, "b", 1, share="vmm")
    story << e.Allocate(3, "GPU-0", (2 * MIB,), "vmm")
    story >> e.Allocated(3, (D,), (14,))
    story << e.SendFds(2, 2, (("GPU-0", 3, ()),), writable=True)
    story << answer(2, 1, m.Created(2, "b", 1, "vmm", (m.ReplicaHandles("GPU-0", (D,)),)))
    story >> e.ProcessExited(2)
    story << e.CancelFds(2, 2)
    story << e.Free(3, "GPU-0")
    story << e.ForgetSession(2)


def test_fabric_handles_come_with_the_answer_and_descriptors_to_whoever_asks_for_them_once(story: Story) -> None:
    allocates(story)
    story >> e.Allocated(2, FABRIC, (12, 13))
    story >> e.Allocated(1, FABRIC[::-1], (10, 11))
    story << answer(1, 1, created(FABRIC[::-1], FABRIC))
    assert story.tells(1, m.Describe("a", 1), m.Description).info.opened_by == "fabric handle"
    story >> asks(1, 2, m.SendDescriptors(1))
    story << e.SendFds(1, 1, (("GPU-0", 1, ()), ("GPU-1", 2, ())), writable=True)
    story << done(1, 2)
    story >> asks(1, 3, m.SendDescriptors(1))
    story << refused(1, 3, "invalid", "lease 1 on a@1 has no descriptors that were not sent")
    story >> asks(1, 4, m.Seal(1))
    story << e.CancelFds(1, 1)
    story << answer(1, 4, m.Sealed(1))
    story >> attaches(2, 1, "a", device="GPU-1")
    replica = (m.ReplicaHandles("GPU-1", FABRIC),)
    story << answer(2, 1, m.Attached(2, "a", 1, "vmm", layout(MIB, MIB).encode(), replica))
    story >> asks(2, 2, m.SendDescriptors(1))
    story << refused(2, 2, "not_found", "this session holds no lease 1")
    story >> asks(2, 3, m.SendDescriptors(2))
    story << e.SendFds(2, 2, (("GPU-1", 2, ()),))
    story << done(2, 3)
    story >> asks(2, 4, m.Close(2))
    story << e.CancelFds(2, 2)
    story << done(2, 4)


def test_where_one_device_has_no_fabric_handles_descriptors_open_all_of_a_version(story: Story) -> None:
    allocates(story)
    story >> e.Allocated(1, FABRIC, (10, 11))
    assert story.tells(1, m.Describe("a", 1), m.Description).info.opened_by == ""
    story >> e.Allocated(2, (FABRIC[0], D), (12, 13))
    story << e.SendFds(1, 1, (("GPU-0", 1, ()), ("GPU-1", 2, ())), writable=True)
    story << answer(1, 1, created((D, D), (D, D)))
    assert story.tells(1, m.Describe("a", 1), m.Description).info.opened_by == "descriptor"
    story >> asks(1, 2, m.SendDescriptors(1))
    story << refused(1, 2, "invalid", "no descriptors that were not sent")


def test_a_lease_of_a_lost_session_is_sent_nothing_more(story: Story) -> None:
    allocates(story)
    story.quietly(e.Allocated(2, FABRIC, (12, 13)), e.Allocated(1, FABRIC, (10, 11)), e.ConnectionLost(1))
    story >> asks(1, 2, m.SendDescriptors(1))
    story << refused(1, 2, "unavailable", "the connection of session 1 has ended")
