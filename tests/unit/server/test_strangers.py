"""Every request about a private pool, asked by its owner, by a reader and by a stranger: who learns what.

A stranger learns of a pool that has ended, or is yet to come, as little as of a name that nobody ever had: the answers
are the same bytes. While something of the pool lives, its name cannot be a secret, since nobody else can have it; what
the stranger hears is the same whatever state the pool is in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import msgspec
import pytest

from cubroker.protocol import messages as m
from cubroker.server.ledger import Ledger, Limits
from cubroker.server.ledger import events as e
from cubroker.server.ledger.policy import Policy
from tests.unit.server.ledger.story import ALICE, BOB, BROKER, MIB, Story, asks, attaches, creates, layout

READER = 1003
OWNER, STRANGER, MATE = 1, 2, 3
"""The sessions of Alice, whose pool it is, of Bob, and of a member of its group, who may read it: its mode is 640."""

SECRETS = ("1001", "group 100", "640", "session 1", "pid 101", "a@")
WAIT = 5.0


def make(attach: m.Where | None = None, wait: float = 0.0) -> m.Create:
    return m.Create("a", layout(MIB).encode(), ("GPU-0",), "ipc", wait, attach, None, None, False, False)


BODIES: dict[type[m.Request], tuple[m.Request, ...]] = {
    m.Attach: tuple(m.Attach("a", version, None, wait) for version in (0, 1, 2, 9) for wait in (0.0, WAIT)),
    m.Create: (make(),),
    m.Seal: (m.Seal(1), m.Seal(2)),
    m.SealDigested: tuple(m.SealDigested(lease, m.Digests("x", ((bytes(16),),))) for lease in (1, 2)),
    m.SealInPlace: (m.SealInPlace(1), m.SealInPlace(2)),
    m.SetLayout: (m.SetLayout(1, layout(MIB).encode()), m.SetLayout(2, layout(MIB).encode())),
    m.Close: (m.Close(1), m.Close(2)),
    m.SendDescriptors: (m.SendDescriptors(1), m.SendDescriptors(2)),
    m.Cancel: (m.Cancel(900),),
    m.Retire: tuple(m.Retire("a", version) for version in (0, 1, 2, 9)),
    m.Watch: (m.Watch("a", on=True), m.Watch("a", on=False)),
    m.Lock: (m.Lock("a", 0.0), m.Lock("a", WAIT)),
    m.Unlock: (m.Unlock(1),),
    m.Find: (m.Find("a"), m.Find("a", (ALICE,)), m.Find("a", (BOB,))),
    m.ListPools: (m.ListPools(),),
    m.ListClients: (m.ListClients(),),
    m.ListDevices: (m.ListDevices(),),
    m.Describe: tuple(m.Describe("a", version) for version in (0, 1, 2, 9)),
    m.ListDigests: tuple(m.ListDigests("a", version) for version in (0, 1, 2, 9)),
    m.Look: (m.Look(),),
    m.Tell: (m.Tell("a", 0), m.Tell(None, OWNER)),
    m.Drain: (m.Drain(on=True),),
    m.ShareEvent: (m.ShareEvent(2, "mine", "GPU-0", bytes(64)),),
    m.OpenEvent: tuple(m.OpenEvent(2, name, wait) for name in ("done", "other") for wait in (0.0, WAIT)),
    m.Recorded: (m.Recorded(1),),
    m.AwaitEvent: tuple(m.AwaitEvent(2, 1, after, wait) for after in (0, 7) for wait in (0.0, WAIT)),
    m.DropEvent: (m.DropEvent(1),),
}
"""What is asked of each kind: about the pool ``a``, leases 1 and 2 and event 1 of its owner, and session 1."""

EVERYBODYS = (m.ListDevices, m.Look)
"""What tells of room on devices, which is everybody's business: the bytes that are taken, and not by whom."""


def known(body: m.Reply) -> m.Reply:
    """An answer without the room on devices."""
    match body:
        case m.DeviceList():
            return m.DeviceList(())
        case m.View():
            assert all(not block.pool and block.owner not in (ALICE, READER) for block in body.blocks)
            return msgspec.structs.replace(body, devices=(), blocks=())
    return body


def hears(story: Story, session: int, body: m.Request) -> list[bytes]:
    """All that a session hears of a request, up to its time's end."""
    made = layout(MIB).outline if isinstance(body, m.Create | m.SetLayout) else None
    effects = story.quietly(e.RequestReceived(session, 700, body, made))
    for timer in [effect.timer for effect in effects if isinstance(effect, e.SetTimer)]:
        effects += story.quietly(e.TimerExpired(timer))
    answers = [known(each.body) for each in effects if isinstance(each, e.Respond) and each.session == session]
    notices = [each.notice for each in effects if isinstance(each, e.Notify) and each.session == session]
    return [msgspec.msgpack.encode(each) for each in (*answers, *notices)]


def begin() -> Story:
    story = Story(store=100)
    story.joins(OWNER, uid=ALICE)
    story.joins(STRANGER, uid=BOB, gid=200)
    story.joins(MATE, uid=READER, gid=100)
    return story


def never() -> Story:
    return begin()


def allocating() -> Story:
    story = begin()
    story.quietly(creates(OWNER, 900, "a", MIB, mode=0o640, writable=True))
    return story


def draft() -> Story:
    story = allocating()
    story.quietly(e.Allocated(1, (b"1",)))
    return story


def current() -> Story:
    """Version 1, on which its owner has lease 2, and event 1."""
    story = draft()
    story.quietly(asks(OWNER, 901, m.Seal(1)), attaches(OWNER, 902, "a"))
    story.quietly(asks(OWNER, 903, m.ShareEvent(2, "done", "GPU-0", bytes(64))))
    return story


def second_draft() -> Story:
    story = current()
    story.quietly(creates(OWNER, 904, "a", MIB), e.Allocated(2, (b"2",)))
    return story


def superseded() -> Story:
    story = second_draft()
    story.quietly(asks(OWNER, 905, m.Seal(3)))
    return story


def retired() -> Story:
    story = current()
    story.quietly(asks(OWNER, 906, m.Retire("a", 0)))
    return story


def lost() -> Story:
    story = current()
    story.restarts(1)
    return story


def past() -> Story:
    story = retired()
    story.quietly(asks(OWNER, 907, m.Close(2)), e.Freed(1))
    return story


def past_and_restarted() -> Story:
    story = past()
    story.restarts()
    return story


def past_and_lost() -> Story:
    story = lost()
    story.quietly(asks(OWNER, 908, m.Close(2)), e.Freed(1))
    return story


def past_and_awaited() -> Story:
    story = past_and_restarted()
    story.quietly(attaches(OWNER, 909, "a", wait=WAIT))
    return story


def discarded() -> Story:
    story = draft()
    story.quietly(asks(OWNER, 910, m.Close(1)), e.Freed(1))
    return story


def coming() -> Story:
    """Its first create waits for room."""
    story = begin()
    story.publishes(OWNER, "b", nbytes=10 * MIB, mode=0o640)
    story.quietly(creates(OWNER, 911, "a", MIB, wait=WAIT, mode=0o640))
    return story


GONE = (past, past_and_restarted, past_and_lost, past_and_awaited, discarded, coming)
ALIVE = (allocating, draft, current, second_draft, superseded, retired, lost)


def test_the_matrix_has_every_request() -> None:
    assert set(BODIES) == set(get_args(m.Request))


@pytest.mark.parametrize("scene", GONE, ids=lambda scene: scene.__name__)
@pytest.mark.parametrize("kind", [kind for kind in BODIES if kind is not m.Create], ids=lambda kind: kind.__name__)
def test_a_stranger_hears_of_a_private_pool_that_has_ended_or_is_to_come_what_it_hears_of_none(
    kind: type[m.Request], scene: Callable[[], Story]
) -> None:
    for body in BODIES[kind]:
        heard, expected = hears(scene(), STRANGER, body), hears(never(), STRANGER, body)
        assert heard == expected
        assert heard


def test_a_stranger_may_have_the_name_of_a_private_pool_that_has_ended() -> None:
    """The number of its version tells how many there were: numbers are not given out twice."""
    for scene, number in ((never, 1), (discarded, 1), (past, 2), (past_and_restarted, 2)):
        assert scene().publishes(STRANGER, "a", mode=0o600) == number


def test_the_turn_to_create_a_private_pool_tells_strangers_no_more_than_that_it_is_taken() -> None:
    (heard,) = hears(coming(), STRANGER, make())
    refusal = msgspec.msgpack.decode(heard, type=m.Failed)
    assert refusal.code == "exists"
    assert refusal.message == "another session is writing a; wait until it ends, or use another name"
    (told,) = hears(coming(), MATE, make())
    assert b"is to be written by session 1 (pid 101, uid 1001), which waits for room" in told


NAMED = (m.Attach, m.Create, m.Retire, m.Watch, m.Lock, m.Find, m.Describe, m.ListDigests, m.Tell)
"""Requests that name a pool: of one that lives a stranger hears that it is not for strangers."""


@pytest.mark.parametrize("scene", ALIVE, ids=lambda scene: scene.__name__)
@pytest.mark.parametrize("kind", BODIES, ids=lambda kind: kind.__name__)
def test_of_a_private_pool_that_lives_a_stranger_hears_the_same_whatever_its_state(
    kind: type[m.Request], scene: Callable[[], Story]
) -> None:
    denied = set()
    for body in BODIES[kind]:
        heard, nothing = hears(scene(), STRANGER, body), hears(never(), STRANGER, body)
        if kind in NAMED and body not in (m.Watch("a", on=False), m.Tell(None, OWNER), m.Find("a", (BOB,))):
            (answer,) = (msgspec.msgpack.decode(each, type=m.Failed) for each in heard)
            assert answer.code == "denied"
            assert not [secret for secret in SECRETS if secret in answer.message], answer.message
            denied.add(answer.message)
        else:
            assert heard == nothing
            assert heard
    assert len(denied) == (kind in NAMED)


Outcome = type[m.Reply] | str | None
"""What comes of a request: an answer, a refusal's code, or nothing at once."""

OUTCOMES: dict[type[m.Request], tuple[Outcome, Outcome]] = {
    m.Attach: (m.Attached, m.Attached),
    m.Create: (None, "denied"),
    m.Seal: ("not_found", "not_found"),
    m.SealDigested: ("not_found", "not_found"),
    m.SealInPlace: ("not_found", "not_found"),
    m.SetLayout: ("not_found", "not_found"),
    m.Close: ("not_found", "not_found"),
    m.SendDescriptors: ("not_found", "not_found"),
    m.Cancel: (m.Done, m.Done),
    m.Retire: (m.Retirement, "denied"),
    m.Watch: (m.Done, m.Done),
    m.Lock: (m.Locked, "denied"),
    m.Unlock: ("not_found", "not_found"),
    m.Find: (m.Found, m.Found),
    m.ListPools: (m.Pools, m.Pools),
    m.ListClients: (m.Clients, m.Clients),
    m.ListDevices: (m.DeviceList, m.DeviceList),
    m.Describe: (m.Description, m.Description),
    m.ListDigests: (m.DigestList, m.DigestList),
    m.Look: (m.View, m.View),
    m.Tell: (m.Story, m.Story),
    m.Drain: ("denied", "denied"),
    m.ShareEvent: (m.EventShared, "not_found"),
    m.OpenEvent: (m.EventOpened, "not_found"),
    m.Recorded: (m.Generation, "not_found"),
    m.AwaitEvent: ("timeout", "not_found"),
    m.DropEvent: (m.Done, "not_found"),
}
"""What the first request of each kind comes to, of the owner and of a reader."""


@pytest.mark.parametrize("kind", BODIES, ids=lambda kind: kind.__name__)
def test_the_owner_and_the_readers_of_a_private_pool_are_served(kind: type[m.Request]) -> None:
    for session, expected in zip((OWNER, MATE), OUTCOMES[kind], strict=True):
        body = BODIES[kind][0]
        made = layout(MIB).outline if isinstance(body, m.Create | m.SetLayout) else None
        effects = current().quietly(e.RequestReceived(session, 700, body, made))
        said = [effect.body for effect in effects if isinstance(effect, e.Respond) and effect.session == session]
        came = [each.code if isinstance(each, m.Failed) else type(each) for each in said]
        assert came == ([] if expected is None else [expected])


def test_who_waits_for_what_only_others_may_read_hears_nothing_of_its_end() -> None:
    story = begin()
    story.quietly(asks(STRANGER, 1, m.Watch("a", on=True)), attaches(STRANGER, 2, "a", 1, wait=WAIT))
    story.quietly(attaches(MATE, 1, "a", 1, wait=WAIT))
    story.quietly(creates(OWNER, 900, "a", MIB, mode=0o640), e.Allocated(1, (b"1",)))
    effects = story.quietly(e.MemoryLost(1, "it went with its device"))
    assert [effect.session for effect in effects if isinstance(effect, e.Respond)] == [MATE]
    effects += story.quietly(asks(OWNER, 901, m.Close(1)), e.Freed(1))
    assert STRANGER not in [effect.session for effect in effects if isinstance(effect, e.Respond | e.Notify)]
    (refusal,) = [each.body for each in story.quietly(e.TimerExpired(1)) if isinstance(each, e.Respond)]
    assert refusal == m.Failed("timeout", "attach to a waited 5 s for it to be published: a has no version 1: none was"
                               " published that you may read; wait for it, or ask for another")  # fmt: skip


def test_a_version_counts_for_who_asks_for_its_owner_and_for_that_one() -> None:
    def found(session: int, *owners: int) -> int:
        (answer,) = hears(current(), session, m.Find("a", owners))
        return msgspec.msgpack.decode(answer, type=m.Found).version

    assert [found(MATE), found(MATE, ALICE), found(MATE, BOB, ALICE), found(OWNER, BOB)] == [1, 1, 1, 1]
    assert [found(MATE, BOB), found(MATE, READER)] == [0, 0]


def test_who_may_publish_and_not_read_hears_not_who_writes() -> None:
    story = begin()
    story.publishes(OWNER, "a", mode=0o602)
    story.quietly(creates(OWNER, 900, "a", MIB), e.Allocated(2, (b"2",)))
    for body in (make(), m.Retire("a", 2), m.Retire("a", 9)):
        (heard,) = hears(story, STRANGER, body)
        assert b"101" not in heard


def test_of_a_past_that_was_recorded_without_an_owner_administrators_alone_hear() -> None:
    """As a broker before this one recorded it."""
    story = past()
    story.joins(4, uid=BROKER)
    items = dict(story.ledger.snapshot())
    (key,) = [key for key in items if key.startswith(b"l/name/")]
    items[key] = msgspec.msgpack.encode(msgspec.msgpack.decode(items[key])[:-1])
    story.ledger = Ledger.restore(story.devices, BROKER, Limits(), Policy(), items.items(), 100)
    story.quietly(e.Resumed())
    codes = [msgspec.msgpack.decode(hears(story, each, m.Describe("a", 1))[0])[1] for each in (OWNER, MATE, 4)]
    assert codes == ["not_found", "not_found", "retired"]


@pytest.mark.parametrize(("mode", "told"), [(0o602, False), (0o606, True)])
def test_who_waits_for_room_for_a_next_version_is_told_to_readers(mode: int, told: bool) -> None:
    story = begin()
    story.publishes(OWNER, "a", mode=mode)
    story.publishes(OWNER, "b", nbytes=8 * MIB)
    story.quietly(creates(OWNER, 900, "a", MIB, wait=WAIT))
    (heard,) = hears(story, STRANGER, make())
    assert (b"is to be written by session 1 (pid 101, uid 1001)" in heard) == told
    assert (b"101" in heard) == told
