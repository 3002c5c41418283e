"""Memory that descriptors open: each lease has them handed over before it is granted, and withdrawn when it ends."""

from __future__ import annotations

import pytest

from cubroker.protocol import messages as m
from cubroker.server import events as e
from tests.server.story import MIB, Story, answer, asks, attaches, creates, done, layout

D = m.DESCRIPTOR
BOTH = ("GPU-0", "GPU-1")


@pytest.fixture
def story() -> Story:
    story = Story()
    story.joins(1, 2)
    return story


def attached(lease: int, *devices: str) -> m.Attached:
    return m.Attached(
        lease, "a", 1, "vmm", layout(MIB, MIB).encode(), tuple(m.Replica(each, (D, D)) for each in devices)
    )


def publish(story: Story) -> None:
    story >> creates(1, 1, "a", MIB, MIB, devices=BOTH, share="vmm")
    story << e.Allocate(1, "GPU-0", (2 * MIB, 2 * MIB), "vmm")
    story << e.Allocate(2, "GPU-1", (2 * MIB, 2 * MIB), "vmm")
    story >> e.Allocated(2, (D, D), (12, 13))
    story >> e.Allocated(1, (D, D), (10, 11))
    story << e.HandOver(1, 1, (("GPU-0", 1), ("GPU-1", 2)))
    story << answer(1, 1, m.Created(1, "a", 1, "vmm", tuple(m.Replica(each, (D, D)) for each in BOTH)))


def test_a_writer_is_handed_all_of_its_draft_and_a_reader_what_it_leased(story: Story) -> None:
    publish(story)
    story >> asks(1, 2, m.Seal(1))
    story << e.Withdraw(1, 1)
    story << answer(1, 2, m.Sealed(1))
    story >> attaches(2, 1, "a", device="GPU-1")
    story << e.HandOver(2, 2, (("GPU-1", 2),))
    story << answer(2, 1, attached(2, "GPU-1"))


def test_whoever_waited_is_handed_over_at_publication(story: Story) -> None:
    story >> attaches(2, 1, "a", device="GPU-7", peers=("GPU-0",), wait=5.0)
    story << e.SetTimer(1, 5.0)
    publish(story)
    story >> asks(1, 2, m.Seal(1))
    story << e.Withdraw(1, 1)
    story << e.DropTimer(1)
    story << e.HandOver(2, 2, (("GPU-0", 1),))
    story << answer(2, 1, attached(2, "GPU-0"))
    story << answer(1, 2, m.Sealed(1))


def test_descriptors_are_withdrawn_before_their_memory_is_freed_however_a_lease_ends(story: Story) -> None:
    publish(story)
    story >> asks(1, 2, m.Close(1))
    story << e.Withdraw(1, 1)
    story << e.Free(1, "GPU-0")
    story << e.Free(2, "GPU-1")
    story << done(1, 2)
    story >> creates(2, 1, "b", 1, share="vmm")
    story << e.Allocate(3, "GPU-0", (2 * MIB,), "vmm")
    story >> e.Allocated(3, (D,), (14,))
    story << e.HandOver(2, 2, (("GPU-0", 3),))
    story << answer(2, 1, m.Created(2, "b", 1, "vmm", (m.Replica("GPU-0", (D,)),)))
    story >> e.Gone(2)
    story << e.Withdraw(2, 2)
    story << e.Free(3, "GPU-0")
    story << e.Forget(2)
