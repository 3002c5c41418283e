from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

from cubroker.protocol import messages as m
from cubroker.protocol import status
from cubroker.server.ledger import Ledger, Limits
from cubroker.server.ledger import events as e
from cubroker.server.ledger.policy import NameReservation, Policy
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
    creates,
    done,
    refused,
)

MATE, FRIEND, ROOT, ADMIN = 1003, 1004, 0, 1005
POWERFUL = {4: ROOT, 5: BROKER, 6: ADMIN}


@pytest.fixture
def story() -> Iterator[Story]:
    """Session 1 is Alice's, of group 100; 2 Bob's, of 200; 3 a mate's, 100 by a supplementary group."""
    story = Story(policy=Policy(admins=frozenset((ADMIN,))))
    story.joins(1, uid=ALICE)
    story.joins(2, uid=BOB, gid=200)
    story.joins(3, uid=MATE, gid=300, groups=(200, 100))
    for session, uid in POWERFUL.items():
        story.joins(session, uid=uid, gid=900)
    yield story
    story.end()


def listed(story: Story, session: int) -> tuple[status.PoolInfo, ...]:
    return story.tells(session, m.ListPools(), m.Pools).pools


def test_a_pool_is_readable_and_not_writable_for_others_by_default(story: Story) -> None:
    story.publishes(1, "a")
    (info,) = listed(story, 2)
    assert (info.owner, info.group, info.mode) == (ALICE, 100, 0o644)
    story >> attaches(2, 1, "a")
    story << attached(2, 1, 2, "a", 1, ticket=1)
    words = ("user 1002", "a, which belongs to user 1001 and group 100, with mode 644", "use another name")
    story >> creates(2, 2, "a", MIB)
    story << refused(2, 2, "denied", *words)
    story >> asks(2, 3, m.Retire("a", 0))
    story << refused(2, 3, "denied", *words)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o600])
def test_the_first_class_that_a_user_belongs_to_decides_who_may_read(story: Story, mode: int) -> None:
    story.publishes(1, "a", mode=mode)
    for session, bits in ((2, mode), (3, mode >> 3)):
        readable = bool(bits & 4)
        asked = (
            m.Attach("a", 0, None, 0.0),
            m.Attach("a", 9, None, 5.0),
            m.Describe("a", 0),
            m.ListDigests("a", 0),
            m.Watch("a", on=True),
        )
        for request, body in enumerate(asked):
            story >> asks(session, 10 + request, body)
            bodies = [effect.body for effect in story.effects if isinstance(effect, e.Respond)]
            refusals = [body.code for body in bodies if isinstance(body, m.Failed)]
            assert refusals == ([] if readable else ["denied"])
            story.effects.clear()
        assert bool(listed(story, session)) == readable


@pytest.mark.parametrize("mode", [0o664, 0o646, 0o666])
def test_whoever_may_write_publishes_and_retires_and_the_pool_stays_its_owners(story: Story, mode: int) -> None:
    story.publishes(1, "a", mode=mode)
    for session, bits in ((2, mode), (3, mode >> 3)):
        if bits & 2:
            story.publishes(session, "a")
            info = next(info for info in listed(story, 1) if info.state == "current")
            assert (info.owner, info.group, info.mode) == ({2: BOB, 3: MATE}[session], 100, mode)
            story >> asks(session, 1, m.Retire("a", info.version - 1))
            story << refused(session, 1, "retired")
        else:
            story >> creates(session, 1, "a", MIB)
            story << refused(session, 1, "denied")


@pytest.mark.parametrize("session", [1, *POWERFUL])
def test_the_owner_and_the_powerful_may_do_everything_whatever_the_mode_says(story: Story, session: int) -> None:
    story.publishes(1, "a", mode=0)
    story >> attaches(session, 1, "a")
    story << attached(session, 1, 2, "a", 1, ticket=1)
    assert len(listed(story, session)) == 1
    assert story.publishes(session, "a", mode=0o600) == 2
    story >> asks(session, 2, m.Retire("a", 1))
    story << answer(session, 2, m.Retirement(1, 1))


def test_the_mode_changes_when_its_owner_publishes_with_another(story: Story) -> None:
    story.publishes(1, "a", mode=0o600)
    story.quietly(creates(1, 1, "a", MIB, mode=0o666), e.Allocated(2, (b"2",)))
    story >> attaches(2, 1, "a")
    story << refused(2, 1, "denied", "user 1002 may not attach to a", "its mode does not allow that")
    story >> asks(1, 2, m.Seal(2))
    story << e.Free(1, "GPU-0")
    story << answer(1, 2, m.Sealed(2))
    assert [info.mode for info in listed(story, 2)] == [0o666]
    story >> creates(2, 2, "a", MIB, mode=0o600)
    story << refused(2, 2, "denied", "user 1002 may not change the mode of a", "leave the mode out")
    story >> creates(2, 3, "a", MIB, mode=0o666)
    story << e.Allocate(3, "GPU-0", (2 * MIB,), "ipc")


def test_a_discarded_draft_changes_no_mode_and_a_name_without_versions_is_free_for_all(story: Story) -> None:
    story.publishes(1, "a")
    story.quietly(creates(1, 1, "a", MIB, mode=0o600), e.Allocated(2, (b"2",)), asks(1, 2, m.Close(2)))
    assert [info.mode for info in listed(story, 2)] == [0o644]
    story.quietly(asks(1, 3, m.Retire("a", 0)))
    story.publishes(2, "a", mode=0o640)
    (info,) = listed(story, 2)
    assert (info.owner, info.group, info.mode) == (BOB, 200, 0o640)


def test_who_waited_and_may_not_read_what_comes_is_denied(story: Story) -> None:
    story.quietly(attaches(2, 1, "a", wait=5.0), asks(2, 2, m.Watch("a", on=True)))
    story.quietly(creates(1, 1, "a", MIB, mode=0o600), e.Allocated(1, (b"1",)))
    story >> creates(2, 3, "a", MIB, wait=5.0, attach="GPU-0")
    story << e.SetTimer(2, 5.0)
    story >> asks(1, 2, m.Seal(1))
    story << e.CancelTimer(1)
    story << refused(2, 1, "denied", "user 1002 may not attach to a")
    story << e.CancelTimer(2)
    story << refused(2, 3, "denied", "user 1002 may not attach to a")
    story << answer(1, 2, m.Sealed(1))
    story >> asks(1, 3, m.Retire("a", 0))
    story << e.Free(1, "GPU-0")
    story << answer(1, 3, m.Retirement(1, 0))


def test_whoever_may_write_and_waited_behind_a_private_draft_is_denied_its_turn(story: Story) -> None:
    story.publishes(1, "a", mode=0o646)
    story.quietly(creates(1, 1, "a", MIB, mode=0o640), e.Allocated(2, (b"2",)))
    story >> creates(2, 1, "a", MIB, wait=5.0)
    story << e.SetTimer(1, 5.0)
    story >> asks(1, 2, m.Seal(2))
    story << e.Free(1, "GPU-0")
    story << answer(1, 2, m.Sealed(2))
    story << e.CancelTimer(1)
    story << refused(2, 1, "denied", "may not publish or retire")


def test_names_of_private_pools_are_not_told_to_those_who_may_not_read_them(story: Story) -> None:
    story.publishes(1, "secret", nbytes=8 * MIB, mode=0o600)
    story.quietly(attaches(1, 1, "secret"))
    story >> attaches(2, 1, "secrets")
    story << refused(2, 1, "not_found", "no pool is named 'secrets'; `cubroker ls` lists")
    story >> creates(2, 2, "b", 8 * MIB)
    story << refused(2, 2, "over_budget", "0 bytes promised; private pools have 8 MiB; retire")
    story >> creates(6, 2, "b", 8 * MIB)
    story << refused(6, 2, "over_budget", "secret@1 8 MiB (current, user 1001, 1 lease)")
    assert [client.uid for client in story.tells(2, m.ListClients(), m.Clients).clients] == [BOB]


def test_the_policy_says_which_mode_a_pool_begins_with() -> None:
    story = Story(policy=Policy(mode=0o600))
    story.joins(1)
    story.joins(2, uid=BOB)
    story.publishes(1, "a")
    story >> attaches(2, 1, "a")
    story << refused(2, 1, "denied")
    story >> asks(2, 2, m.Watch("a", on=False))
    story << done(2, 2)
    story.end()


@pytest.mark.parametrize("uid", [ROOT, BROKER])
def test_a_number_that_is_not_verified_is_that_of_any_user(uid: int) -> None:
    story = Story(policy=Policy(admins=frozenset((ADMIN,))), store=32)
    story.joins(1)
    story.joins(2, uid=uid, gid=900, verified=False)
    story.joins(3, uid=ADMIN, gid=900, verified=False)
    story.publishes(1, "a", mode=0o600)
    assert (listed(story, 2), len(listed(story, 3))) == ((), 1)
    story >> attaches(2, 1, "a")
    story << refused(2, 1, "denied")
    story >> asks(2, 2, m.Drain(on=True))
    story << refused(2, 2, "denied", f"user {uid} may not drain the broker; it is not known to run in", "`admins`")
    assert story.ledger.admission_error(uid) is None
    story.joins(*range(4, 16), uid=BOB)
    assert story.ledger.admission_error(uid, verified=True) is None
    assert story.ledger.admission_error(uid) is not None
    story.end()


def test_root_administers_while_the_policy_trusts_it_and_verdicts_outlive_the_broker() -> None:
    story = Story(store=100)
    story.joins(1)
    story.joins(2, uid=ROOT)
    story.joins(3, uid=ROOT, verified=False)
    story.joins(4, uid=BROKER)
    story.publishes(1, "a", mode=0o600)
    assert [len(listed(story, session)) for session in (2, 3, 4)] == [1, 0, 1]
    story.restarts(1)
    story.publishes(1, "a", mode=0o600)
    assert [len(listed(story, session)) for session in (2, 3, 4)] == [1, 0, 1]
    story.quietly(e.Reconfigured(Policy(trust_root=False), Limits(), {"GPU-0": MIB, "GPU-1": MIB}))
    assert [len(listed(story, session)) for session in (2, 3, 4)] == [0, 0, 1]
    story >> asks(2, 2, m.Drain(on=True))
    story << refused(2, 2, "denied", "ask user 1000, who runs it, or root, or have 0 listed in its setting `admins`")
    story.end()


def test_a_session_that_was_recorded_without_a_verdict_is_not_verified() -> None:
    story = Story(store=100)
    story.joins(1, uid=ROOT)
    items = dict(story.ledger.snapshot())
    (key,) = [key for key in items if key.startswith(b"l/session/")]
    items[key] = msgspec.msgpack.encode(msgspec.msgpack.decode(items[key])[:-2])
    restored = Ledger.restore(story.devices, BROKER, Limits(), Policy(), items.items(), 100)
    assert [each.verified for each in restored.sessions()] == [False]


def test_an_attach_is_served_from_pools_of_the_owners_that_it_asks_for(story: Story) -> None:
    story.publishes(1, "a", mode=0o644)
    words = (f"a belongs to user {ALICE}, and a pool of user {MATE} was asked for", "$CUBROKER_OWNER")
    for version, wait in ((0, 0.0), (9, 5.0)):
        story >> asks(2, version + 1, m.Attach("a", version, None, wait, owners=(MATE, MATE)))  # named once
        story << refused(2, version + 1, "denied", *words)
    story >> asks(2, 3, m.Attach("a", 0, None, 0.0, owners=(MATE, ALICE)))
    story << attached(2, 3, 2, "a", 1, ticket=1)
    story >> asks(1, 4, m.Attach("a", 0, None, 0.0, owners=(MATE,)))  # its own
    story << attached(1, 4, 3, "a", 1, ticket=1)


def test_who_waited_for_a_pool_of_another_owner_is_denied_what_comes(story: Story) -> None:
    story.quietly(asks(2, 1, m.Attach("a", 0, None, 5.0, owners=(MATE,))))
    story.quietly(creates(1, 1, "a", MIB), e.Allocated(1, (b"1",)))
    effects = story.quietly(asks(1, 2, m.Seal(1)))
    refusals = [each.body for each in effects if isinstance(each, e.Respond) and isinstance(each.body, m.Failed)]
    assert [refusal.code for refusal in refusals] == ["denied"]


def test_reserved_names_are_published_by_those_whom_they_are_reserved_for() -> None:
    reserved = {
        "llm/": NameReservation(frozenset((ALICE,)), frozenset((200,))),
        "llm/x": NameReservation(frozenset((BOB,))),
    }
    story = Story(policy=Policy(reserved=reserved))
    story.joins(1)
    story.joins(2, uid=BOB, gid=300)
    story.joins(3, uid=MATE, gid=300, groups=(200,))
    story.joins(4, uid=ROOT)
    for session, name in ((1, "llm/a"), (3, "llm/b"), (2, "llm/x"), (4, "llm/c"), (2, "free")):
        story.publishes(session, name, mode=0o666)
    for session, name, prefix in ((2, "llm/a", "llm/"), (2, "llm/new", "llm/"), (1, "llm/x1", "llm/x")):
        story >> creates(session, 1, name, MIB)
        story << refused(session, 1, "denied", f"may not publish {name}", f"begin with '{prefix}'", "[names]")
    story >> creates(2, 2, "llm/new", MIB, wait=5.0, attach="GPU-0")
    story << refused(2, 2, "denied", "may not publish llm/new")
    story.end()


def test_refusals_tell_others_neither_whose_a_private_pool_is_nor_who_writes_it(story: Story) -> None:
    secrets = ("1001", "group 100", "mode 600", "session 1", "pid 101", "a@")

    def hides(effects: list[e.Effect]) -> None:
        (message,) = [
            each.body.message for each in effects if isinstance(each, e.Respond) and isinstance(each.body, m.Failed)
        ]
        assert not [secret for secret in secrets if secret in message], message

    story.quietly(attaches(2, 1, "a", wait=5.0))
    story.quietly(creates(1, 1, "a", MIB, mode=0o600))
    story.quietly(creates(2, 2, "a", MIB, wait=5.0, attach="GPU-0"))
    hides(story.quietly(e.TimerExpired(1)))
    hides(story.quietly(e.TimerExpired(2)))
    for request, body in enumerate((m.Describe("a", 0), m.Retire("a", 0), m.Watch("a", on=True), m.Tell("a", 0))):
        hides(story.quietly(asks(2, 10 + request, body)))
    story.quietly(e.Allocated(1, (b"1",)), asks(1, 2, m.Seal(1)), asks(1, 3, m.Retire("a", 0)), e.Freed(1))
    hides(story.quietly(attaches(2, 20, "a")))
    story >> attaches(1, 21, "a")
    story << refused(1, 21, "not_found", "no version of a is left: 1 was the last one")
