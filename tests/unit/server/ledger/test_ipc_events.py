"""Events of writable versions: they belong to their maker's lease, and whoever waits for one is always answered."""

from __future__ import annotations

import pytest

from cubroker.protocol import messages as m
from cubroker.protocol import status
from cubroker.server.ledger import Limits, ipc_events
from cubroker.server.ledger import events as e
from cubroker.server.ledger.policy import Policy, Quota
from tests.unit.server.ledger.story import ALICE, BOB, MIB, Story, answer, asks, creates, done, handle, layout, refused

HANDLE = bytes(range(64))
MAKER, READER, OTHER = 1, 2, 3


@pytest.fixture
def story() -> Story:
    return told()


def told(limits: Limits | None = None, policy: Policy | None = None) -> Story:
    """A pool ``a`` whose readers may write, on which sessions 1, 2 and 3 have the leases 2, 3 and 4."""
    story = Story(limits=limits, policy=policy)
    story.joins(MAKER, READER, uid=ALICE)
    story.joins(OTHER, uid=BOB)
    story.quietly(creates(MAKER, 1, "a", MIB, writable=True), e.Allocated(1, (handle(1),)), asks(MAKER, 2, m.Seal(1)))
    for session in (MAKER, READER, OTHER):
        story >> asks(session, 3, m.Attach("a", 0, None, 0.0))
        body = m.Attached(
            session + 1, "a", 1, "ipc", layout(MIB).encode(), (m.ReplicaHandles("GPU-0", (handle(1),)),), writable=True
        )
        story << answer(session, 3, body)
    return story


def share(session: int, request: int, name: str = "ready", lease: int | None = None) -> e.RequestReceived:
    return asks(session, request, m.ShareEvent(lease or session + 1, name, "GPU-0", HANDLE))


def shared(session: int, request: int, event: int) -> e.Respond:
    return answer(session, request, m.EventShared(event))


def opens(session: int, request: int, name: str = "ready", wait: float = 0.0) -> e.RequestReceived:
    return asks(session, request, m.OpenEvent(session + 1, name, wait))


def opened(session: int, request: int, event: int) -> e.Respond:
    return answer(session, request, m.EventOpened(event, "GPU-0", HANDLE))


def waits(session: int, request: int, event: int, after: int = 0, wait: float = 5.0) -> e.RequestReceived:
    return asks(session, request, m.AwaitEvent(session + 1, event, after, wait))


def test_a_writable_version_says_so_from_its_draft_on(story: Story) -> None:
    story >> asks(READER, 4, m.ListPools())
    place = "ipc", ("GPU-0",), False, 3
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
        writable=True,
        how="",
        why="",
        opened_by="handle",
        memory=2 * MIB,
        published=0.0,
    )
    story << answer(READER, 4, m.Pools((info,)))
    story.end()


def test_generations_are_counted_and_wake_those_who_wait_for_them(story: Story) -> None:
    story >> share(MAKER, 10) << shared(MAKER, 10, 1)
    story >> opens(READER, 10) << opened(READER, 10, 1)
    story >> waits(READER, 11, 1) << e.SetTimer(1, 5.0)
    story >> waits(OTHER, 11, 1, after=1) << e.SetTimer(2, 5.0)
    story >> asks(MAKER, 11, m.Recorded(1))
    story << e.CancelTimer(1)
    story << answer(READER, 11, m.Generation(1))
    story << answer(MAKER, 11, m.Generation(1))
    story >> waits(READER, 12, 1, after=0) << answer(READER, 12, m.Generation(1))
    story >> waits(READER, 13, 1, after=1, wait=0.0)
    story << refused(READER, 13, "timeout", "event 'ready' of a@1 is at generation 1; session 1 (pid 101")
    story >> asks(MAKER, 12, m.Recorded(1))
    story << e.CancelTimer(2)
    story << answer(OTHER, 11, m.Generation(2))
    story << answer(MAKER, 12, m.Generation(2))
    story.end()


def test_who_opens_may_wait_for_the_maker_in_order_of_arrival(story: Story) -> None:
    story >> opens(OTHER, 10) << refused(OTHER, 10, "not_found", "a@1 has no event 'ready'; it has none")
    story >> opens(OTHER, 11, wait=5.0) << e.SetTimer(1, 5.0)
    story >> opens(READER, 10, wait=6.0) << e.SetTimer(2, 6.0)
    story >> opens(READER, 11, "taken", wait=7.0) << e.SetTimer(3, 7.0)
    story >> share(MAKER, 10)
    story << e.CancelTimer(1)
    story << opened(OTHER, 11, 1)
    story << e.CancelTimer(2)
    story << opened(READER, 10, 1)
    story << shared(MAKER, 10, 1)
    story >> e.TimerExpired(3)
    story << refused(READER, 11, "timeout", "waited 7 s in vain: a@1 has no event 'taken'; it has 'ready'")
    story.end()


@pytest.mark.parametrize(
    ("ends", "how", "effects"),
    [
        (asks(MAKER, 20, m.DropEvent(1)), "closed it", (done(MAKER, 20),)),
        (asks(MAKER, 20, m.Close(2)), "gave back the lease that it belonged to", (done(MAKER, 20),)),
        (e.ProcessExited(MAKER), "has ended", (e.ForgetSession(MAKER),)),
    ],
    ids=["dropped", "closed", "gone"],
)
def test_whoever_waits_is_told_who_ended_an_event_and_at_which_generation(
    story: Story, ends: e.LedgerEvent, how: str, effects: tuple[e.Effect, ...]
) -> None:
    story.quietly(share(MAKER, 10), asks(MAKER, 11, m.Recorded(1)))
    story >> waits(READER, 11, 1, after=1) << e.SetTimer(1, 5.0)
    story >> ends
    said = f"event 'ready' of a@1 ended at generation 1: session 1 (pid 101, uid 1001) {how}; open it anew"
    story << e.CancelTimer(1)
    story << refused(READER, 11, "unavailable", said)
    for effect in effects:
        story << effect
    story >> waits(OTHER, 12, 1) << refused(OTHER, 12, "unavailable", said)
    story >> share(READER, 12) << shared(READER, 12, 2)
    story.end()


def test_a_maker_whose_connection_is_lost_keeps_its_events_and_may_drop_them(story: Story) -> None:
    story.quietly(share(MAKER, 10), share(MAKER, 11, "taken"))
    story >> waits(READER, 11, 1) << e.SetTimer(1, 5.0)
    story >> waits(READER, 12, 2) << e.SetTimer(2, 5.0)
    story >> e.ConnectionLost(MAKER)
    story.end()
    story >> e.TimerExpired(1)
    story << refused(READER, 11, "timeout", "waited 5 s in vain", "makes the next one, which has lost its connection")
    story >> asks(MAKER, 12, m.DropEvent(2))
    story << e.CancelTimer(2)
    story << refused(READER, 12, "unavailable", "closed it")
    story << done(MAKER, 12)
    story.end()


def test_a_wait_ends_with_the_lease_that_it_waits_by(story: Story) -> None:
    story.quietly(share(MAKER, 10))
    story >> waits(READER, 11, 1) << e.SetTimer(1, 5.0)
    story >> opens(READER, 12, "other", wait=5.0) << e.SetTimer(2, 5.0)
    story >> asks(READER, 14, m.Attach("b", 0, None, 5.0)) << e.SetTimer(3, 5.0)  # which waits on
    story >> asks(READER, 13, m.Close(3))
    for number in (1, 2):
        story << e.CancelTimer(number)
        story << refused(READER, 10 + number, "not_found", "holds no lease 3")
    story << done(READER, 13)
    story >> asks(MAKER, 11, m.Recorded(1)) << answer(MAKER, 11, m.Generation(1))
    story >> e.TimerExpired(3) << refused(READER, 14, "timeout", "attach to b waited 5 s for it to be published")
    story.end()


def test_waits_are_cancelled_and_die_with_their_session(story: Story) -> None:
    story.quietly(share(MAKER, 10))
    story >> waits(READER, 11, 1) << e.SetTimer(1, 5.0)
    story >> waits(OTHER, 11, 1) << e.SetTimer(2, 5.0)
    story >> asks(READER, 12, m.Cancel(11))
    story << e.CancelTimer(1)
    story << refused(READER, 11, "timeout", "cancelled")
    story << done(READER, 12)
    story >> e.ProcessExited(OTHER) << e.CancelTimer(2) << e.ForgetSession(OTHER)
    story.end()


def test_events_are_made_and_opened_on_published_writable_versions_alone(story: Story) -> None:
    story.publishes(MAKER, "read-only")
    story.quietly(asks(MAKER, 10, m.Attach("read-only", 0, None, 0.0)))
    story.quietly(creates(MAKER, 11, "draft", MIB, writable=True), e.Allocated(3, (handle(3),)))
    story >> share(MAKER, 12, lease=6)
    story << refused(MAKER, 12, "invalid", "read-only@1 is read-only", "writable=True")
    story >> share(MAKER, 13, lease=7) << refused(MAKER, 13, "invalid", "draft@1, a draft; seal it")
    story >> share(READER, 14, lease=2) << refused(READER, 14, "not_found", "holds no lease 2")
    story >> share(READER, 15, "-bad") << refused(READER, 15, "invalid", "'-bad' cannot name")
    unknown = m.ShareEvent(3, "ready", "GPU-7", HANDLE)
    story >> asks(READER, 16, unknown) << refused(READER, 16, "not_found", "no device GPU-7")
    story >> share(READER, 17) << shared(READER, 17, 1)
    story >> share(OTHER, 18) << refused(OTHER, 18, "exists", "session 2 (pid 102, uid 1001) made it")
    story.end()


def test_an_event_is_recorded_and_dropped_by_its_maker_alone_and_awaited_where_it_belongs(story: Story) -> None:
    story.quietly(share(MAKER, 10))
    bodies: tuple[m.Request, ...] = (m.Recorded(1), m.DropEvent(1), m.Recorded(9))
    for request, body in enumerate(bodies, 11):
        story >> asks(READER, request, body) << refused(READER, request, "not_found", "this session has no event")
    story.quietly(creates(OTHER, 20, "b", MIB, writable=True), e.Allocated(2, (handle(2),)), asks(OTHER, 21, m.Seal(5)))
    story.quietly(asks(OTHER, 22, m.Attach("b", 0, None, 0.0)))
    story >> asks(OTHER, 23, m.AwaitEvent(6, 1, 0, 5.0))
    story << refused(OTHER, 23, "unavailable", "event 1 of b@1 has ended, or never existed")
    story.end()


def test_events_of_a_session_and_of_a_user_are_limited() -> None:
    story = told(Limits(events=1))
    story.quietly(share(MAKER, 10))
    story >> share(MAKER, 11, "more") << refused(MAKER, 11, "over_quota", "this session has 1 event, the most")
    story = told(policy=Policy(quota=Quota(events=1)))
    story.quietly(share(MAKER, 10))
    story >> share(READER, 11, "more")
    story << refused(READER, 11, "over_quota", "user 1001 has 1 event of a quota of 1 (session 1 (pid 101) 1)")
    story.quietly(asks(MAKER, 11, m.DropEvent(1)))
    story >> share(READER, 12) << shared(READER, 12, 2)
    story.end()


def test_only_the_last_ends_are_remembered(story: Story) -> None:
    for event in range(1, ipc_events.MAX_ENDED_REASONS + 2):
        story.quietly(share(MAKER, 2 * event + 8), asks(MAKER, 2 * event + 9, m.DropEvent(event)))
    story >> waits(READER, 10, 1) << refused(READER, 10, "unavailable", "event 1 of a@1 has ended, or never existed")
    story >> waits(READER, 11, 2) << refused(READER, 11, "unavailable", "session 1 (pid 101, uid 1001) closed it")
    story.end()
