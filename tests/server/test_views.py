"""Everything as of one moment: what a session may see of it, and what a stranger may."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cubroker.protocol import infos
from cubroker.protocol import messages as m
from cubroker.server.ledger import events as e
from cubroker.server.ledger import room
from cubroker.server.ledger.entries import Allocation
from cubroker.server.ledger.room import shift
from cubroker.server.ledger.states import Report
from tests.server.story import ALICE, BOB, BROKER, MIB, Story, asks, attaches, creates

PROMISED = infos.BlockInfo("GPU-1", "b", 1, "draft", "promised", 6 * MIB, BOB)


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
    assert view.blocks == (infos.BlockInfo("GPU-0", "a", 1, "current", "held", 4 * MIB, ALICE), PROMISED)
    assert view.waiters == ()
    waiter = infos.WaiterInfo(2, 102, BOB, 1, "create", "b", "its memory", 6 * MIB, 7.5)
    assert look(story, 2).waiters == story.ledger.view(everything=True).waiters == (waiter,)


def test_of_pools_that_somebody_may_not_read_there_is_the_sum_of_their_bytes_and_no_user(story: Story) -> None:
    story.joins(3, uid=BROKER)
    story.publishes(1, "c", mode=0o600)
    story.quietly(attaches(1, 2, "a", 2, wait=5.0))
    for view, sessions in ((look(story, 2), [2]), (story.ledger.view(everything=False), [])):
        assert [pool.name for pool in view.pools] == ["b"]
        assert view.blocks == (PROMISED, infos.BlockInfo("GPU-0", "", 0, "current", "held", 6 * MIB, infos.NOBODY))
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
    def shift_and_fail(allocation: Allocation, report: Report) -> None:
        shift(allocation, report)
        raise Mistake

    story.quietly(asks(2, 2, m.Cancel(1)))
    monkeypatch.setattr(room, "shift", shift_and_fail)
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
