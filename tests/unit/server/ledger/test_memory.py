"""What the ledger makes of what processes were seen to have mapped: bytes beyond leases, and who gets no leases."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cubroker.protocol import messages as m
from cubroker.server.ledger import Budget, Limits
from cubroker.server.ledger import events as e
from cubroker.server.ledger.policy import Policy, Quota
from tests.unit.server.ledger.story import (
    ALICE,
    BOB,
    BROKER,
    MIB,
    Story,
    asks,
    attached,
    attaches,
    created,
    creates,
    done,
    handle,
    refused,
)

GPU = Budget(0, "GPU-0", "first", 64 * MIB, 64 * MIB)
LIMIT = Policy(quotas={ALICE: Quota(mapped_beyond_leases=MIB)})


def told(policy: Policy | None = None) -> Story:
    """Sessions 1 and 2 are Alice's, of processes 101 and 102; 3 is Bob's, of 103; 4 is the broker's own user's."""
    story = Story(GPU, policy=policy or Policy())
    story.joins(1, 2, uid=ALICE)
    story.joins(3, uid=BOB)
    story.joins(4, uid=BROKER)
    return story


@pytest.fixture
def story() -> Iterator[Story]:
    """Alice may have 1 MiB beyond leases."""
    story = told(LIMIT)
    yield story
    story.end()


def found(**memory: dict[int, int] | None) -> e.ProcessScanFinished:
    """What processes of Alice's (``a101=…``) and Bob's (``b103=…``) refer to, by ticket, each of one allocation."""
    users = {"a": ALICE, "b": BOB}
    return e.ProcessScanFinished(
        tuple(
            e.ProcessMemory(int(name[1:]), users[name[0]], each and {e.AllocationId(t, 0): n for t, n in each.items()})
            for name, each in memory.items()
        )
    )


def beyond(story: Story, asking: int = 4) -> dict[int, int | None]:
    """What a session is told of the processes of all sessions."""
    clients = story.tells(asking, m.ListClients(), m.Clients).clients
    return {client.session: client.mapped_beyond_leases for client in clients}


def test_memory_without_a_lease_counts_and_with_one_it_does_not(story: Story) -> None:
    story.publishes(1, "a", nbytes=2 * MIB)
    story >> attaches(1, 1, "a") << attached(1, 1, 2, "a", 1, ticket=1, nbytes=2 * MIB)
    story >> e.ProcessScanStarted()
    story >> found(a101={1: 2 * MIB}, a102={}, b103={1: 2 * MIB})
    assert beyond(story) == {1: 0, 2: 0, 3: 2 * MIB, 4: None}
    story >> asks(1, 2, m.Close(2)) << done(1, 2)
    story >> e.ProcessScanStarted()
    story >> found(a101={1: 2 * MIB}, a102={}, b103={})
    assert beyond(story) == {1: 2 * MIB, 2: 0, 3: 0, 4: None}


def test_memory_that_is_freed_is_nobodys_lease(story: Story) -> None:
    story >> e.ProcessScanStarted()
    story >> found(a101={77: 4 * MIB, 78: 2 * MIB})
    assert beyond(story)[1] == 6 * MIB


def test_a_draft_is_leased_by_its_writer(story: Story) -> None:
    story >> creates(1, 1, "a", 2 * MIB) << e.Allocate(1, "GPU-0", (2 * MIB,), "ipc")
    story >> e.Allocated(1, (handle(1),)) << created(1, 1, 1, "a", 1, GPU_0=1)
    story >> e.ProcessScanStarted()
    story >> found(a101={1: 2 * MIB})
    assert beyond(story)[1] == 0


def test_a_lease_of_another_process_of_the_same_user_covers_what_a_fork_has_mapped(story: Story) -> None:
    story.publishes(3, "a", nbytes=2 * MIB)
    story >> attaches(1, 1, "a") << attached(1, 1, 2, "a", 1, ticket=1, nbytes=2 * MIB)
    story >> e.ProcessScanStarted()
    story >> found(a101={1: 2 * MIB}, a102={1: 2 * MIB}, a900={1: 2 * MIB})
    assert beyond(story) == {1: 0, 2: 0, 3: None, 4: None}
    assert story.ledger.beyond_leases() == {ALICE: 0}


def test_a_lease_that_ends_while_processes_are_looked_at_counts_once_more(story: Story) -> None:
    story.publishes(1, "a", nbytes=2 * MIB)
    story >> attaches(1, 1, "a") << attached(1, 1, 2, "a", 1, ticket=1, nbytes=2 * MIB)
    story >> e.ProcessScanStarted()
    story >> asks(1, 2, m.Close(2)) << done(1, 2)
    story >> found(a101={1: 2 * MIB})
    assert beyond(story)[1] == 0
    story >> e.ProcessScanStarted()
    story >> found(a101={1: 2 * MIB})
    assert beyond(story)[1] == 2 * MIB


def test_what_nobody_could_look_at_is_unknown_and_neither_refuses_nor_counts(story: Story) -> None:
    assert beyond(story) == {1: None, 2: None, 3: None, 4: None}
    assert story.ledger.beyond_leases() == {}
    story.publishes(3, "a")
    story >> e.ProcessScanStarted()
    story >> found(a101=None, a102={}, b103=None)
    assert beyond(story) == {1: None, 2: 0, 3: None, 4: None}
    assert story.ledger.beyond_leases() == {ALICE: 0}
    story >> attaches(1, 1, "a") << attached(1, 1, 2, "a", 1, ticket=1)
    story >> e.ProcessScanFinished(())
    assert beyond(story)[2] is None


def test_one_is_told_of_the_processes_of_ones_own_user_and_administrators_of_all(story: Story) -> None:
    story >> e.ProcessScanStarted()
    story >> found(a101={77: MIB}, a102={}, b103={78: MIB})
    assert beyond(story, asking=1) == {1: MIB, 2: 0}
    assert beyond(story, asking=3) == {3: MIB}
    assert beyond(story, asking=4) == {1: MIB, 2: 0, 3: MIB, 4: None}


def test_past_its_quota_a_user_gets_no_leases_and_others_do(story: Story) -> None:
    story.publishes(3, "a")
    story >> e.ProcessScanStarted()
    story >> found(a101={77: MIB}, a102={}, b103={78: 32 * MIB})
    story >> attaches(2, 1, "a") << attached(2, 1, 2, "a", 1, ticket=1)
    story >> e.ProcessScanStarted()
    story >> found(a101={77: MIB}, a102={78: 2 * MIB, 79: MIB}, a900={80: MIB}, b103={78: 32 * MIB})
    words = (
        "processes of user 1001 have 5 MiB of the broker's memory mapped or open that no lease of this user covers",
        "of a quota of 1 MiB",
        "(process 102 3 MiB, process 900 1 MiB, process 101 1 MiB)",
        "unmap it and close its descriptors there, or end these processes (kill 102 900 101)",
    )
    story >> attaches(1, 1, "a") << refused(1, 1, "over_quota", *words)
    story >> creates(2, 2, "b", MIB) << refused(2, 2, "over_quota", *words)
    story >> attaches(3, 1, "a") << attached(3, 1, 3, "a", 1, ticket=1)
    story >> asks(2, 3, m.Close(2)) << done(2, 3)


def test_whoever_unmaps_or_ends_is_served_again(story: Story) -> None:
    story.publishes(3, "a")
    story >> e.ProcessScanStarted()
    story >> found(a101={77: 2 * MIB}, a102={78: 2 * MIB})
    story >> attaches(2, 1, "a") << refused(2, 1, "over_quota", "have 4 MiB")
    story >> e.ProcessExited(1) << e.ForgetSession(1)
    story >> attaches(2, 2, "a") << refused(2, 2, "over_quota", "have 2 MiB", "(kill 102)")
    story >> e.ProcessScanStarted()
    story >> found(a102={})
    story >> attaches(2, 3, "a") << attached(2, 3, 2, "a", 1, ticket=1)


def test_the_end_of_a_process_of_which_nothing_is_known_changes_nothing(story: Story) -> None:
    story >> e.ProcessScanStarted()
    story >> found(a101={77: 2 * MIB}, a102=None)
    story >> e.ProcessExited(2) << e.ForgetSession(2)
    story >> e.ProcessExited(3) << e.ForgetSession(3)
    assert story.ledger.beyond_leases() == {ALICE: 2 * MIB}


def test_memory_that_two_processes_have_counts_once_for_their_user(story: Story) -> None:
    story >> e.ProcessScanStarted()
    story >> found(a101={77: MIB}, a102={77: MIB})
    assert story.ledger.beyond_leases() == {ALICE: MIB}
    assert story.ledger.excesses() == {}
    assert beyond(story) == {1: MIB, 2: MIB, 3: None, 4: None}


def test_a_lease_that_is_waited_for_is_refused_when_it_comes(story: Story) -> None:
    story >> attaches(1, 1, "a", wait=5.0) << e.SetTimer(1, 5.0)
    story >> e.ProcessScanStarted()
    story >> found(a101={77: 2 * MIB})
    effects = story.quietly(creates(3, 1, "a", MIB), e.Allocated(1, (handle(1),)), asks(3, 2, m.Seal(1)))
    assert refused(1, 1, "over_quota", "have 2 MiB") in effects


def test_another_quota_holds_at_once(story: Story) -> None:
    story.publishes(3, "a")
    story >> e.ProcessScanStarted()
    story >> found(a101={77: 2 * MIB}, b103={78: MIB})
    assert story.ledger.excesses().keys() == {ALICE}
    story >> e.Reconfigured(Policy(quotas={BOB: Quota(mapped_beyond_leases=0)}), Limits(), {"GPU-0": 64 * MIB})
    assert story.ledger.excesses().keys() == {BOB}
    story >> attaches(1, 1, "a") << attached(1, 1, 2, "a", 1, ticket=1)
    story >> attaches(3, 1, "a") << refused(3, 1, "over_quota", "1 MiB of the broker's memory", "quota of 0 bytes")
