"""Everything as of one moment, as far as a session may see it, and the event logs of pools and sessions."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cubroker.protocol import messages as m
from cubroker.protocol import status
from cubroker.server.ledger import events as e
from cubroker.server.ledger import memory, tables
from cubroker.server.ledger.memory import transition
from cubroker.server.ledger.policy import Policy
from cubroker.server.ledger.records import EVENT_LOG_LINES, Ticket
from cubroker.server.ledger.states import MemoryEvent
from cubroker.server.ledger.tables import Tables
from tests.unit.server.ledger.story import ALICE, BOB, BROKER, MIB, Story, asks, attaches, creates, refused

PROMISED = status.BlockInfo("GPU-1", "b", 1, "draft", "promised", 6 * MIB, BOB)


class Mistake(Exception):
    pass


@pytest.fixture
def story() -> Iterator[Story]:
    """Alice has published ``a``, which is hers alone, and Bob waits for the memory of his first version of ``b``."""
    story = Story()
    story.joins(1, uid=ALICE)
    story.joins(2, uid=BOB, gid=200)
    story.publishes(1, "a", nbytes=3 * MIB, mode=0o600)
    story.quietly(attaches(1, 1, "a"))
    story.ledger.handle(creates(2, 1, "b", 5 * MIB, devices=("GPU-1",)), 7.5)
    yield story
    story.end()


def look(story: Story, session: int) -> m.View:
    return story.tells(session, m.Look(), m.View)


def test_a_view_is_what_the_lists_say_and_the_memory_and_what_waits(story: Story) -> None:
    view = look(story, 1)
    assert view.devices == story.tells(1, m.ListDevices(), m.DeviceList).devices
    assert view.pools == story.tells(1, m.ListPools(), m.Pools).pools
    assert view.clients == story.tells(1, m.ListClients(), m.Clients).clients
    assert [client.uid for client in view.clients] == [ALICE]
    assert view.blocks == (status.BlockInfo("GPU-0", "a", 1, "current", "held", 4 * MIB, ALICE), PROMISED)
    assert view.waiters == ()
    waiter = status.WaiterInfo(2, 102, BOB, 1, "create", "b", "its memory", 6 * MIB, 7.5)
    assert look(story, 2).waiters == story.ledger.view(everything=True).waiters == (waiter,)


def test_of_pools_that_somebody_may_not_read_there_is_the_sum_of_their_bytes_and_no_user(story: Story) -> None:
    story.joins(3, uid=BROKER)
    story.publishes(1, "c", mode=0o600)
    story.quietly(attaches(1, 2, "a", 2, wait=5.0))
    for view, sessions in ((look(story, 2), [2]), (story.ledger.view(everything=False), [])):
        assert [pool.name for pool in view.pools] == ["b"]
        assert view.blocks == (PROMISED, status.BlockInfo("GPU-0", "", 0, "current", "held", 6 * MIB, status.HIDDEN_ID))
        assert [client.session for client in view.clients] == sessions
        assert [waiter.session for waiter in view.waiters] == sessions
    assert story.ledger.view(everything=True) == look(story, 3)


def test_the_stages_of_memory_are_told(story: Story) -> None:
    def stages() -> list[str]:
        return [block.stage for block in story.ledger.view(everything=True).blocks]

    assert stages() == ["held", "promised"]
    story.quietly(asks(2, 2, m.Cancel(1)))
    assert stages() == ["held", "given up"]
    story.quietly(e.Allocated(2, (b"handle",)))
    assert stages() == ["held", "freeing"]
    story.quietly(e.Freed(2))
    assert stages() == ["held"]


def test_memory_that_a_mistake_left_on_the_books_keeps_nobody_from_looking(
    story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shift_and_fail(tables: Tables, ticket: Ticket, report: MemoryEvent) -> None:
        transition(tables, ticket, report)
        raise Mistake

    story.quietly(asks(2, 2, m.Cancel(1)))
    monkeypatch.setattr(memory, "transition", shift_and_fail)
    with pytest.raises(Mistake):
        story.ledger.handle(e.Freed(2))
    assert [block.stage for block in story.ledger.view(everything=True).blocks] == ["held"]


def test_what_is_waited_for_is_said(story: Story) -> None:
    story.quietly(
        attaches(1, 3, "a", 2, wait=5.0),
        attaches(1, 4, "c", wait=5.0),
        creates(2, 5, "b", MIB, wait=5.0),
        creates(1, 6, "d", 2 * MIB, devices=("GPU-1",), wait=5.0),
    )
    waiters = story.ledger.view(everything=True).waiters
    assert {waiter.request: (waiter.what, waiter.awaits) for waiter in waiters} == {
        1: ("create", "its memory"),
        3: ("attach", "version 2"),
        4: ("attach", "a current version"),
        5: ("create", "its turn as the writer"),
        6: ("create", "room"),
    }


def test_whoever_waits_for_an_event_says_for_which() -> None:
    story = Story()
    story.joins(1, 2)
    created = story.quietly(creates(1, 1, "a", MIB, writable=True), e.Allocated(1, (b"handle",)))[-1]
    assert isinstance(created, e.Respond)
    story.quietly(asks(1, 2, m.Seal(1)), attaches(1, 3, "a"), attaches(2, 1, "a"))
    story.quietly(asks(2, 2, m.OpenEvent(3, "ready", 5.0)))
    shared = story.quietly(asks(1, 4, m.ShareEvent(2, "done", "GPU-0", bytes(64))))[-1]
    assert isinstance(shared, e.Respond)
    assert isinstance(shared.body, m.EventShared)
    story.quietly(asks(2, 3, m.AwaitEvent(3, shared.body.event, 4, 5.0)))
    waiters = story.ledger.view(everything=True).waiters
    assert [waiter.awaits for waiter in waiters] == ["event 'ready'", "event 'done' past generation 4"]
    story.end()


# -- event logs ------------------------------------------------------------------------------------


OTHER, ROOT, ADMIN = 1003, 0, 1005


@pytest.fixture
def logged() -> Iterator[Story]:
    logged = Story(policy=Policy(admins=frozenset((ADMIN,))))
    logged.joins(1, uid=ALICE)
    logged.joins(2, uid=BOB, gid=200)
    yield logged
    logged.end()


def test_every_line_says_when_it_happened(logged: Story) -> None:
    for now, event in ((10.5, creates(1, 1, "a", MIB)), (11.0, e.Allocated(1, (b"handle",)))):
        logged.ledger.handle(event, now)
    logged.ledger.handle(asks(1, 2, m.Seal(1)), 12.25)
    assert logged.tells(1, m.Tell("a", 0), m.Story).lines == (
        status.Line(10.5, "request 1 of session 1 (pid 101, uid 1001) began to wait"),
        status.Line(11.0, "memory 1 is held: the device allocated it"),
        status.Line(11.0, "version 1 is draft: all its memory was allocated"),
        status.Line(11.0, "request 1 of session 1 (pid 101, uid 1001) stopped waiting"),
        status.Line(12.25, "version 1 is current: its writer sealed it"),
    )


def test_a_pool_that_is_gone_is_told_of_and_goes_on_with_the_same_owner(logged: Story) -> None:
    logged.publishes(1, "a")
    logged.quietly(asks(1, 1, m.Retire("a", 0)), e.Freed(1))
    told = logged.log(1, "a")
    assert told[-5:] == [
        "session 1 (pid 101, uid 1001) retires version 1",
        "version 1 is retired: a user retired it",
        "version 1 is ended: no lease holds it, and it is not to be kept",
        "memory 1 is being freed: its version ended",
        "memory 1 is gone: the device freed it",
    ]
    logged.publishes(1, "a")
    again = logged.log(1, "a")
    assert again[: len(told)] == told
    assert again[-1] == "version 2 is current: its writer sealed it"


@pytest.mark.parametrize("mode", [0o644, 0o600])
def test_what_is_told_of_a_pool_is_for_those_who_could_read_it(logged: Story, mode: int) -> None:
    logged.joins(3, uid=ROOT, gid=900)
    logged.joins(4, uid=BROKER, gid=900)
    logged.joins(5, uid=ADMIN, gid=900)
    logged.publishes(1, "a", mode=mode)
    for ending in ((), (asks(1, 1, m.Retire("a", 1)), e.Freed(1))):  # while it lives, and when it is gone
        logged.quietly(*ending)
        for session in (1, 3, 4, 5):
            assert "version 1 is current: its writer sealed it" in logged.log(session, "a")
        if mode == 0o644:
            assert logged.log(2, "a") == logged.log(1, "a")
        else:
            told = "nothing is known of a pool a" if ending else "user 1002 may not read the events of a; ask its owner"
            logged >> asks(2, 800, m.Tell("a", 0))
            logged << refused(2, 800, "not_found" if ending else "denied", told)


def test_whoever_has_a_name_next_hears_nothing_of_the_user_before(logged: Story) -> None:
    logged.publishes(1, "a", mode=0o600)
    logged.quietly(asks(1, 1, m.Retire("a", 0)), e.Freed(1))
    logged.publishes(2, "a", mode=0o644)
    told = logged.log(2, "a")
    assert "version 2 is current: its writer sealed it" in told
    assert not [line for line in told if "version 1" in line or "1001" in line]


def test_a_session_is_told_of_to_its_own_user_and_to_administrators(logged: Story) -> None:
    logged.joins(3, uid=BOB)
    logged.joins(4, uid=ADMIN)
    logged.publishes(1, "a")
    logged.quietly(attaches(2, 1, "a"), attaches(2, 2, "b"))
    told = logged.log(2, 2)
    assert told[:2] == ["process 102 of user 1002 joined", "lease 2 on a@1 began"]
    assert told[2].startswith("Attach was refused (not_found): no pool is named 'b'")
    assert logged.log(3, 2) == logged.log(4, 2) == told
    logged >> asks(1, 1, m.Tell(None, 2))
    logged << refused(1, 1, "not_found", "nothing is known of a session 2 of user 1001")
    logged.quietly(e.ProcessExited(2))
    assert logged.log(3, 2)[-3:] == ["its process has ended", "lease 2 on a@1 ended", "it ended"]


def test_of_the_unknown_nothing_is_told(logged: Story) -> None:
    logged >> asks(1, 1, m.Tell("a", 0))
    logged << refused(1, 1, "not_found", "a pool a")
    logged >> asks(1, 2, m.Tell("no name", 0))
    logged << refused(1, 2, "invalid")
    logged >> asks(1, 3, m.Tell(None, 9))
    logged << refused(1, 3, "not_found", "session 9")


def test_a_name_that_is_only_watched_has_no_events(logged: Story) -> None:
    logged.joins(3, uid=ADMIN)
    logged.quietly(asks(1, 1, m.Watch("a", on=True)))
    logged >> asks(3, 2, m.Tell("a", 0))
    logged << refused(3, 2, "not_found", "a pool a")


def test_only_so_many_ended_pools_and_sessions_are_remembered(logged: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "MAX_PAST_LOGS", 1)
    logged.joins(3, 4)
    logged.quietly(e.ProcessExited(3), e.ProcessExited(4))
    for ticket, name in enumerate("ab", 1):
        logged.publishes(1, name)
        logged.quietly(asks(1, 1, m.Retire(name, 0)), e.Freed(ticket))
    for subject in (m.Tell("a", 0), m.Tell(None, 3)):
        logged >> asks(1, 2, subject)
        logged << refused(1, 2, "not_found", "nothing is known of")
    assert logged.log(1, "b")
    assert logged.log(1, 4)


def test_a_session_remembers_so_many_events(logged: Story) -> None:
    logged.quietly(*(attaches(1, request, "a") for request in range(2 * EVENT_LOG_LINES)))
    assert len(logged.log(1, 1)) == EVENT_LOG_LINES
