from __future__ import annotations

from collections.abc import Iterator

import pytest

from cubroker.protocol import infos
from cubroker.protocol import messages as m
from cubroker.server.ledger import books
from cubroker.server.ledger import events as e
from cubroker.server.ledger.chronicle import STORY
from cubroker.server.ledger.policy import Policy
from tests.server.story import ALICE, BOB, BROKER, MIB, Story, asks, attaches, creates, refused

OTHER, ROOT, ADMIN = 1003, 0, 1005


@pytest.fixture
def story() -> Iterator[Story]:
    story = Story(policy=Policy(admins=frozenset((ADMIN,))))
    story.joins(1, uid=ALICE)
    story.joins(2, uid=BOB, gid=200)
    yield story
    story.end()


def hear(story: Story, session: int, subject: str | int) -> list[str]:
    pool, number = (subject, 0) if isinstance(subject, str) else (None, subject)
    return [line.text for line in story.tells(session, m.Tell(pool, number), m.Story).lines]


def test_every_line_says_when_it_happened(story: Story) -> None:
    for now, event in ((10.5, creates(1, 1, "a", MIB)), (11.0, e.Allocated(1, (b"handle",)))):
        story.ledger.handle(event, now)
    story.ledger.handle(asks(1, 2, m.Seal(1)), 12.25)
    assert story.tells(1, m.Tell("a", 0), m.Story).lines == (
        infos.Line(10.5, "request 1 of session 1 (pid 101, uid 1001) began to wait"),
        infos.Line(11.0, "memory 1 is held: the device allocated it"),
        infos.Line(11.0, "version 1 is draft: all its memory was allocated"),
        infos.Line(11.0, "request 1 of session 1 (pid 101, uid 1001) stopped waiting"),
        infos.Line(12.25, "version 1 is current: its writer sealed it"),
    )


def test_a_pool_that_is_gone_is_told_of_and_goes_on_with_the_same_owner(story: Story) -> None:
    story.publishes(1, "a")
    story.quietly(asks(1, 1, m.Retire("a", 0)), e.Freed(1))
    told = hear(story, 1, "a")
    assert told[-5:] == [
        "session 1 (pid 101, uid 1001) retires version 1",
        "version 1 is retired: somebody retired it",
        "version 1 is ended: nobody holds it or is to have it any more",
        "memory 1 is being freed: nobody needs it any more",
        "memory 1 is gone: the device freed it",
    ]
    story.publishes(1, "a")
    again = hear(story, 1, "a")
    assert again[: len(told)] == told
    assert again[-1] == "version 2 is current: its writer sealed it"


@pytest.mark.parametrize("mode", [0o644, 0o600])
def test_what_is_told_of_a_pool_is_for_those_who_could_read_it(story: Story, mode: int) -> None:
    story.joins(3, uid=ROOT, gid=900)
    story.joins(4, uid=BROKER, gid=900)
    story.joins(5, uid=ADMIN, gid=900)
    story.publishes(1, "a", mode=mode)
    for ending in ((), (asks(1, 1, m.Retire("a", 1)), e.Freed(1))):  # while it lives, and when it is gone
        story.quietly(*ending)
        for session in (1, 3, 4, 5):
            assert "version 1 is current: its writer sealed it" in hear(story, session, "a")
        if mode == 0o644:
            assert hear(story, 2, "a") == hear(story, 1, "a")
        else:
            told = "nothing is known of a pool a" if ending else "user 1002 may not hear of a; ask its owner"
            story >> asks(2, 800, m.Tell("a", 0))
            story << refused(2, 800, "not_found" if ending else "denied", told)


def test_whoever_has_a_name_next_hears_nothing_of_the_user_before(story: Story) -> None:
    story.publishes(1, "a", mode=0o600)
    story.quietly(asks(1, 1, m.Retire("a", 0)), e.Freed(1))
    story.publishes(2, "a", mode=0o644)
    told = hear(story, 2, "a")
    assert "version 2 is current: its writer sealed it" in told
    assert not [line for line in told if "version 1" in line or "1001" in line]


def test_a_session_is_told_of_to_its_own_user_and_to_administrators(story: Story) -> None:
    story.joins(3, uid=BOB)
    story.joins(4, uid=ADMIN)
    story.publishes(1, "a")
    story.quietly(attaches(2, 1, "a"), attaches(2, 2, "b"))
    told = hear(story, 2, 2)
    assert told[:2] == ["process 102 of user 1002 joined", "lease 2 on a@1 began"]
    assert told[2].startswith("Attach was refused (not_found): no pool is named 'b'")
    assert hear(story, 3, 2) == hear(story, 4, 2) == told
    story >> asks(1, 1, m.Tell(None, 2))
    story << refused(1, 1, "not_found", "nothing is known of a session 2 of user 1001")
    story.quietly(e.Gone(2))
    assert hear(story, 3, 2)[-3:] == ["its process has ended", "lease 2 on a@1 ended", "it ended"]


def test_of_the_unknown_nothing_is_told(story: Story) -> None:
    story >> asks(1, 1, m.Tell("a", 0))
    story << refused(1, 1, "not_found", "a pool a")
    story >> asks(1, 2, m.Tell("no name", 0))
    story << refused(1, 2, "invalid")
    story >> asks(1, 3, m.Tell(None, 9))
    story << refused(1, 3, "not_found", "session 9")


def test_only_so_many_ended_pools_and_sessions_are_remembered(story: Story, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(books, "MAX_PAST", 1)
    story.joins(3, 4)
    story.quietly(e.Gone(3), e.Gone(4))
    for ticket, name in enumerate("ab", 1):
        story.publishes(1, name)
        story.quietly(asks(1, 1, m.Retire(name, 0)), e.Freed(ticket))
    assert (story.ledger.story("a"), story.ledger.story(3)) == ((), ())
    assert story.ledger.story("b")
    assert story.ledger.story(4)


def test_a_session_remembers_so_many_events(story: Story) -> None:
    story.quietly(*(attaches(1, request, "a") for request in range(2 * STORY)))
    assert len(hear(story, 1, 1)) == STORY
