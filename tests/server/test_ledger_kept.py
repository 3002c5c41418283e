from __future__ import annotations

from collections.abc import Iterator

import pytest

from cubroker.protocol import messages as m
from cubroker.server.ledger import events as e
from cubroker.server.ledger.policy import Policy
from tests.server.story import MIB, Story, answer, asks, attached, attaches, creates, done, refused


@pytest.fixture
def story() -> Iterator[Story]:
    """Two superseded versions of a pool are kept; sessions 1 and 2 are Alice's. GPU-0 has room for five."""
    story = Story(policy=Policy(keep=2))
    story.joins(1, 2)
    for _ in range(3):
        story.publishes(1, "a")
    yield story
    story.end()


def states(story: Story) -> list[tuple[int, str]]:
    return [(info.version, info.state) for info in story.tells(1, m.ListPools(), m.Pools).pools]


def test_superseded_versions_stay_without_a_lease_and_can_be_attached_to(story: Story) -> None:
    assert states(story) == [(1, "superseded"), (2, "superseded"), (3, "current")]
    story >> attaches(2, 1, "a", 1)
    story << attached(2, 1, 4, "a", 1, ticket=1)
    story >> asks(2, 2, m.Close(4))
    story << done(2, 2)
    assert len(states(story)) == 3


def test_the_oldest_goes_when_the_next_one_is_superseded(story: Story) -> None:
    story.quietly(creates(1, 1, "a", MIB), e.Allocated(4, (b"4",)))
    story >> asks(1, 2, m.Seal(4))
    story << e.Free(1, "GPU-0")
    story << answer(1, 2, m.Sealed(4))
    assert states(story) == [(2, "superseded"), (3, "superseded"), (4, "current")]


def test_one_that_is_no_longer_kept_goes_with_its_last_lease(story: Story) -> None:
    story.quietly(attaches(2, 1, "a", 1))
    story.publishes(1, "a")
    assert states(story) == [(1, "superseded"), (2, "superseded"), (3, "superseded"), (4, "current")]
    story >> asks(2, 2, m.Close(4))
    story << e.Free(1, "GPU-0")
    story << done(2, 2)


def test_retiring_frees_a_kept_version_and_an_older_one_takes_its_place(story: Story) -> None:
    story.quietly(attaches(2, 1, "a", 1))
    story.publishes(1, "a")
    story >> asks(1, 1, m.Retire("a", 3))
    story << e.Free(3, "GPU-0")
    story << answer(1, 1, m.Retirement(3, 0))
    story >> asks(2, 2, m.Close(4))
    story << done(2, 2)
    assert states(story) == [(1, "superseded"), (2, "superseded"), (4, "current")]


def test_kept_versions_give_way_to_nothing_and_outlive_the_current_one(story: Story) -> None:
    story >> creates(1, 1, "b", 6 * MIB)
    story << refused(1, 1, "over_budget", "a@1 2 MiB (superseded")
    story >> asks(1, 2, m.Retire("a", 0))
    story << e.Free(3, "GPU-0")
    story << answer(1, 2, m.Retirement(3, 0))
    assert states(story) == [(1, "superseded"), (2, "superseded")]
    story >> attaches(1, 3, "a")
    story << refused(1, 3, "not_found", "a has no current version")
    story.publishes(1, "a")
    assert states(story) == [(1, "superseded"), (2, "superseded"), (4, "current")]
