"""Ledgers that were restored from their record, and records that no ledger can be restored from."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest

from cubroker.protocol import messages as m
from cubroker.protocol.errors import CorruptJournal
from cubroker.protocol.status import ProcessInfo
from cubroker.server.ledger import Budget, Impossible, Ledger, Limits, entries, invariants, snapshot, tables
from cubroker.server.ledger import events as e
from cubroker.server.ledger.policy import Policy, Quota
from tests.faults import fail_nth
from tests.forkserver import unmeasured
from tests.unit.server.ledger.story import (
    ALICE,
    BOB,
    BROKER,
    GPU0,
    GPU1,
    MIB,
    Story,
    answer,
    asks,
    attached,
    attaches,
    changed,
    creates,
    done,
    layout,
    refused,
)

BOTH = ("GPU-0", "GPU-1")
D = m.DESCRIPTOR


def multicast(group: e.MulticastBound) -> Story:
    """Version 1 of ``a`` on both devices, tickets 1 and 2, group 3; session 2 may write it by lease 2, from GPU-1."""
    story = Story(store=100)
    story.joins(1, 2)
    story.quietly(
        creates(1, 1, "a", MIB, devices=BOTH, share="multicast", writable=True, durable=True),
        e.Allocated(1, (D,)),
        e.Allocated(2, (D,)),
        group,
        asks(1, 2, m.Seal(1)),
        attaches(2, 1, "a", device="GPU-1"),
    )
    return story


def replicas(*devices: str) -> tuple[m.ReplicaHandles, ...]:
    return tuple(m.ReplicaHandles(device, (D,)) for device in devices)


def with_multicast(group: int) -> e.MulticastBound:
    return e.MulticastBound(group, "multicast", "it works", (4 * MIB,), (77,))


def by_copies(group: int) -> e.MulticastBound:
    return e.MulticastBound(group, "copies", "no slots left")


def varied() -> Story:
    """A ledger that has something of everything."""
    story = multicast(with_multicast(3))
    story.joins(3, uid=BOB, groups=(7, 5))
    story.publishes(3, "b", mode=0o600)
    story.publishes(3, "b")
    story.quietly(
        attaches(3, 1, "b"),
        asks(2, 2, m.ShareEvent(2, "ready", "GPU-1", bytes(64))),
        asks(2, 3, m.Recorded(1)),
        asks(1, 3, m.Watch("a/b", True)),
        creates(1, 4, "c", MIB, MIB, devices=BOTH, share="vmm", plan=(1, 0), durable=True),
        e.Allocated(6, (D,)),
        e.Allocated(7, (D,)),
        e.ConnectionLost(3),
    )
    story.publishes(1, "gone")
    story.quietly(asks(1, 5, m.Retire("gone", 1)), e.Freed(8), e.Freed(4))
    return story


def seen(story: Story) -> tuple[m.Reply, ...]:
    return (
        story.tells(1, m.ListPools(), m.Pools),
        story.tells(1, m.ListClients(), m.Clients),
        story.tells(1, m.ListDevices(), m.DeviceList),
    )


def timeless(replies: tuple[m.Reply, ...]) -> str:
    """Replies in words, without the times of leases and publications, which earlier formats have not."""
    return re.sub(r"(held_since|published)=(None|0\.0)", "", repr(replies))


def restored(items: dict[bytes, bytes], *devices: Budget) -> Ledger:
    return Ledger.restore(devices or (GPU0, GPU1), BROKER, Limits(), Policy(), items.items(), 100)


def test_processes_and_the_times_of_leases_and_publications_are_restored() -> None:
    story = Story(store=100)
    told = ProcessInfo("vllm", "/system.slice/vllm.service", 1e9)
    story >> e.SessionOpened(1, 101, ALICE, 100, process=told)
    story.quietly(creates(1, 1, "a", MIB), e.Allocated(1, (b"1",)))
    assert [pool.published for pool in story.tells(1, m.ListPools(), m.Pools).pools] == [None]
    story.effects.extend(story.ledger.handle(asks(1, 2, m.Seal(1)), 1.5e9))
    story.effects.extend(story.ledger.handle(attaches(1, 3, "a"), 2e9))
    story.effects.clear()
    before = story.tells(1, m.ListClients(), m.Clients)
    assert [(each.process, [lease.held_since for lease in each.leases]) for each in before.clients] == [(told, [2e9])]
    assert [pool.published for pool in story.tells(1, m.ListPools(), m.Pools).pools] == [1.5e9]
    items = story.ledger.snapshot()
    story.ledger = restored(items)
    assert story.ledger.snapshot() == items
    assert story.ledger.sessions()[0].process == told
    assert story.tells(1, m.ListClients(), m.Clients) == before


def test_a_restored_ledger_knows_all_that_there_was_and_goes_on() -> None:
    story = varied()
    before = seen(story)
    items = story.ledger.snapshot()
    story.ledger = restored(items)
    assert story.ledger.snapshot() == items
    assert story.ledger.last_session == 3
    assert [(known.id, not known.connected) for known in story.ledger.sessions()] == [
        (1, False),
        (2, False),
        (3, True),
    ]
    third = story.ledger.sessions()[2]
    assert (third.id, third.pid, third.uid, third.gid, third.groups) == (3, 103, BOB, 100, frozenset((5, 7)))
    assert third.verified
    story >> e.Resumed() << e.BindMulticast(9, (2 * MIB,), (("GPU-0", 1), ("GPU-1", 2))) << changed(1, "a/b", 0)
    story.quietly(with_multicast(9))
    assert seen(story) == before
    story >> asks(2, 4, m.Recorded(1)) << answer(2, 4, m.Generation(2))
    story >> asks(3, 2, m.Close(5)) << done(3, 2) << e.ForgetSession(3)
    story >> attaches(1, 6, "gone", 1) << refused(1, 6, "retired", "gone@1")
    assert story.publishes(1, "gone") == 2


def test_ids_are_not_given_out_twice() -> None:
    story = Story(store=100)
    story.joins(1)
    story.publishes(1, "a")
    story.quietly(attaches(1, 1, "a"), asks(1, 2, m.Close(2)), creates(1, 3, "b", MIB))
    story.restarts()
    story >> attaches(1, 4, "a") << attached(1, 4, 3, "a", 1, ticket=1)
    story >> creates(1, 3, "b", MIB) << e.Allocate(3, "GPU-0", (2 * MIB,), "ipc")
    with pytest.raises(Impossible, match="session 1 joined twice"):
        story >> e.SessionOpened(1, 1, ALICE, 100)


def test_what_waited_is_forgotten_and_can_be_asked_again() -> None:
    story = Story(store=100)
    story.joins(1, 2)
    story.quietly(creates(1, 1, "a", 8 * MIB), attaches(2, 1, "a", wait=5.0), creates(2, 2, "b", 8 * MIB, wait=5.0))
    story.restarts()
    assert not story.ledger.held_memory()
    assert story.tells(1, m.ListPools(), m.Pools).pools == ()
    story >> attaches(2, 1, "a", wait=5.0) << e.SetTimer(1, 5.0)
    story >> creates(2, 2, "b", 8 * MIB, wait=5.0) << e.Allocate(2, "GPU-0", (8 * MIB,), "ipc")


def test_memory_and_leases_can_be_asked_for_as_they_are() -> None:
    story = multicast(by_copies(3))
    story.joins(3)
    story.publishes(3, "b")
    story.quietly(attaches(3, 1, "b"), creates(3, 2, "c", MIB, share="vmm"), e.Allocated(5, (b"fabric",)))
    assert [(held.ticket, held.device, held.share, held.durable) for held in story.ledger.held_memory()] == [
        (1, "GPU-0", "multicast", True),
        (2, "GPU-1", "multicast", True),
        (4, "GPU-0", "ipc", False),
        (5, "GPU-0", "vmm", False),
    ]
    lent = story.ledger.granted(2, 2)
    assert isinstance(lent, m.Attached)
    assert lent.replicas == replicas("GPU-1", "GPU-0")
    sent = e.SendFds(2, 2, (("GPU-1", 2, ()), ("GPU-0", 1, ())), writable=True)
    assert story.ledger.sent_fds(2, 2) == sent
    assert story.ledger.granted(3, 4) is not None
    assert story.ledger.sent_fds(3, 4) is None
    draft = m.Created(5, "c", 1, "vmm", (m.ReplicaHandles("GPU-0", (b"fabric",)),))
    assert story.ledger.granted(3, 5) == draft
    assert story.ledger.sent_fds(3, 5) is None
    story.quietly(asks(3, 3, m.SendDescriptors(5)))
    assert story.ledger.sent_fds(3, 5) == e.SendFds(3, 5, (("GPU-0", 5, ()),), writable=True)
    for unknown in ((3, 2), (3, 99)):
        assert story.ledger.granted(*unknown) is None
        assert story.ledger.sent_fds(*unknown) is None


def test_a_group_is_bound_again_and_its_writers_get_its_new_objects() -> None:
    story = multicast(with_multicast(3))
    story.restarts()
    story >> attaches(1, 3, "a", device="GPU-0") << e.SendFds(1, 3, (("GPU-0", 1, ()),), writable=True)
    body = m.Attached(3, "a", 1, "multicast", layout(MIB).encode(), replicas("GPU-0"), True, m.Team("", ""))
    story << answer(1, 3, body)
    story >> attaches(1, 4, "a", device="GPU-9", wait=0) << refused(1, 4, "not_found")
    group = m.Team("multicast", "it works", (4 * MIB,))
    story >> with_multicast(4)
    story << e.Notify(2, m.Rebound(2, (), group)) << e.SendFds(2, 2, (), 4, rebound=True, writable=True)
    story << e.Notify(1, m.Rebound(3, (), group)) << e.SendFds(1, 3, (), 4, rebound=True, writable=True)
    assert story.ledger.sent_fds(2, 2) == e.SendFds(2, 2, (("GPU-1", 2, ()),), 4, writable=True)


def test_writers_get_the_other_replicas_where_copies_take_the_place_of_a_group() -> None:
    story = multicast(with_multicast(3))
    story.restarts()
    story >> by_copies(4)
    story << e.Notify(2, m.Rebound(2, replicas("GPU-0"), m.Team("copies", "no slots left")))
    story << e.SendFds(2, 2, (("GPU-0", 1, ()),), rebound=True, writable=True)
    story.restarts()
    story.quietly(e.ConnectionLost(2))
    story >> with_multicast(5)
    assert story.ledger.sent_fds(2, 2) == e.SendFds(2, 2, (("GPU-1", 2, ()),), 5, writable=True)


@pytest.mark.parametrize("anew", [with_multicast, by_copies])
def test_the_writer_of_a_draft_has_all_replicas_already(anew: Callable[[int], e.MulticastBound]) -> None:
    story = Story(store=100)
    story.joins(1)
    story.quietly(
        creates(1, 1, "a", MIB, devices=BOTH, share="multicast", durable=True),
        e.Allocated(1, (D,)),
        e.Allocated(2, (D,)),
        with_multicast(3),
    )
    story.restarts()
    event = anew(4)
    story >> event << e.Notify(1, m.Rebound(1, (), m.Team(event.how, event.why, event.sizes)))
    if event.sizes:
        story << e.SendFds(1, 1, (), 4, rebound=True, writable=True)
    story >> asks(1, 2, m.Seal(1)) << e.CancelFds(1, 1) << answer(1, 2, m.Sealed(1))


def test_who_only_reads_a_multicast_version_is_not_told_of_its_new_group() -> None:
    story = multicast(with_multicast(3))
    story.quietly(asks(2, 2, m.Close(2)), attaches(2, 3, "a", device="GPU-9"))
    story.quietly(e.RequestReceived(2, 4, m.Attach("a", 0, "GPU-9", 0.0, ("GPU-1",))))
    story.restarts()
    story >> with_multicast(4)


def test_a_version_that_ends_before_its_group_is_bound_again_ends_as_ever() -> None:
    story = multicast(with_multicast(3))
    story.restarts()
    story.quietly(asks(1, 3, m.Retire("a", 1)))
    story >> e.ProcessExited(2) << e.CancelFds(2, 2) << e.UnbindMulticast(4) << e.ForgetSession(2)
    story >> with_multicast(4)
    story >> e.MulticastUnbound(4) << e.Free(1, "GPU-0") << e.Free(2, "GPU-1")


def test_who_cannot_open_the_fabric_handles_of_a_version_that_was_lost_gets_no_descriptors_instead() -> None:
    story = Story(store=100)
    story.joins(1)
    story.quietly(creates(1, 1, "a", MIB, share="vmm"), e.Allocated(1, (b"fabric",), (7,)))
    story.restarts(1)
    story >> asks(1, 2, m.SendDescriptors(1))
    story << refused(1, 2, "unavailable", "a@1 was lost: it went with the broker", "close it")


def test_how_the_last_version_of_a_name_was_lost_is_remembered_whatever_is_lost_after_it() -> None:
    story = Story(store=100)
    story.joins(1)
    story.quietly(creates(1, 1, "a", MIB, share="vmm", durable=True), e.Allocated(1, (D,)), asks(1, 2, m.Seal(1)))
    story.quietly(attaches(1, 3, "a"), creates(1, 4, "a", MIB), e.Allocated(2, (b"handle",)), asks(1, 5, m.Seal(3)))
    story.restarts(2)
    story.restarts(1)
    story >> attaches(1, 6, "a", 2) << refused(1, 6, "retired", "a@2 was lost: it went with the broker")
    story >> attaches(1, 7, "a") << refused(1, 7, "not_found", "it was lost", "2 was the last one")


def test_a_multicast_version_that_is_lost_gets_no_group() -> None:
    story = multicast(with_multicast(3))
    story.restarts(2)
    story >> asks(2, 2, m.Close(2)) << e.CancelFds(2, 2) << e.Free(1, "GPU-0") << e.Free(2, "GPU-1") << done(2, 2)


def test_a_version_that_is_lost_while_its_group_is_bound_has_no_use_for_it() -> None:
    story = multicast(with_multicast(3))
    story.restarts()
    story >> e.MemoryLost(1, "it went") << e.Notify(2, m.PoolLost("a", 1, "it went"))
    story >> with_multicast(4)
    story >> asks(2, 2, m.Close(2)) << e.CancelFds(2, 2) << e.UnbindMulticast(4) << done(2, 2)


def test_more_than_the_rules_allow_now_stays_and_nothing_is_granted_until_enough_has_ended() -> None:
    story = Story(store=100)
    story.joins(1)
    story.publishes(1, "a", nbytes=6 * MIB)
    story.devices = (replace(GPU0, budget=4 * MIB), GPU1)
    story.restarts(policy=Policy(quotas={ALICE: Quota(memory=4 * MIB, sessions=1)}), store=1)
    story >> creates(1, 1, "b", MIB) << refused(1, 1, "over_quota", "6 MiB are used")
    assert story.ledger.admission_error(ALICE) is not None
    assert story.ledger.admission_error(BOB) is not None
    story >> asks(1, 2, m.Retire("a", 1)) << e.Free(1, "GPU-0") << answer(1, 2, m.Retirement(1, 0))


def test_versions_that_other_rules_kept_end_when_the_ledger_goes_on() -> None:
    story = Story(store=100, policy=Policy(keep=2))
    story.joins(1)
    for _ in range(3):
        story.publishes(1, "a")
    ledger = Ledger.restore(story.devices, BROKER, Limits(), Policy(keep=1), story.ledger.snapshot().items(), 100)
    ledger.check()
    assert ledger.handle(e.Resumed()) == [e.Free(1, "GPU-0")]
    ledger.check()


def test_the_stories_of_a_restored_ledger_say_that_it_was() -> None:
    story = Story(store=100)
    story.joins(1)
    story.publishes(1, "a")
    story.restarts()
    assert story.log(1, "a") == story.log(1, 1) == ["the broker was started again"]


def test_without_a_record_there_is_a_new_ledger() -> None:
    ledger = Ledger.restore((GPU0,), BROKER, Limits(), Policy(), [(b"a/1/2", b"somebody else's")], 100)
    assert ledger.handle(e.Resumed()) == []
    assert dict(ledger.changes()) == ledger.snapshot()
    with pytest.raises(Impossible, match="already resumed"):
        ledger.handle(e.Resumed())


def test_names_that_are_forgotten_leave_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "MAX_PAST_NAMES", 1)
    story = Story(store=100)
    story.joins(1)
    kept: dict[bytes, bytes | None] = {}
    for ticket, name in enumerate(("a", "b"), 1):
        story.publishes(1, name)
        story.quietly(asks(1, ticket, m.Retire(name, 1)), e.Freed(ticket))
        kept |= dict(story.ledger.changes())
    assert {key: value for key, value in kept.items() if value is not None} == story.ledger.snapshot()
    assert b"l/name/0/a" not in story.ledger.snapshot()


def test_the_record_has_names_without_versions_in_the_order_in_which_they_are_forgotten() -> None:
    """Also names that a request only waited for, and names whose last versions end together."""
    story = Story(store=100)
    story.joins(1, 2)
    kept: dict[bytes, bytes] = {}

    def names() -> str:
        """The names, in the order of the record."""
        for key, value in story.ledger.changes():
            kept.pop(key, None)
            if value is not None:
                kept[key] = value
        assert kept == story.ledger.snapshot()
        orders = [[key for key in items if key.startswith(b"l/name/")] for items in (kept, story.ledger.snapshot())]
        assert orders[0] == orders[1]
        return "".join(key.decode()[-1] for key in orders[0])

    for ticket, name in enumerate("abc", 1):
        story.publishes(1, name)
        story.quietly(attaches(2, ticket, name), asks(1, ticket, m.Retire(name, 1)))
    story.quietly(e.ProcessExited(2), *map(e.Freed, (1, 2, 3)))
    first, second, third = names()
    story.quietly(attaches(1, 4, first, wait=5.0), asks(1, 5, m.Cancel(4)))
    assert names() == second + third + first


NOTED_AGAIN = """
from _testcapi import remove_mem_hooks, set_nomemory

from cubroker.server.ledger.entries import Kind
from tests.unit.server.ledger.story import Story

for count in range(1, 100):
    for spared in range(3):
        tables = Story(store=100).ledger._tables
        for number in range(count):
            tables.mark_dirty(Kind.NAME, name=f"n{number}")
        set_nomemory(spared, spared + 1)
        try:
            tables.mark_dirty(Kind.NAME, name="n0")
        except MemoryError:
            pass
        remove_mem_hooks()
        assert (Kind.NAME, 0, "n0") in tables.dirty_keys, (count, spared)
"""
"""A script, since whatever allocates at that moment has no memory: a measurement of coverage would, too."""


def test_a_change_noted_again_without_memory_is_written_all_the_same() -> None:
    pytest.importorskip("_testcapi")
    subprocess.run([sys.executable, "-c", NOTED_AGAIN], check=True, env=unmeasured())


def test_a_batch_is_recorded_as_it_ended() -> None:
    story = Story(store=100)
    story.joins(1)
    story.publishes(1, "a")
    story.quietly(asks(1, 1, m.Retire("a", 1)), e.Freed(1))
    changes = dict(story.ledger.changes())
    assert changes[b"l/version/1/a"] is changes[b"l/state/1/a"] is changes[b"l/lease/1/"] is None
    assert story.ledger.changes() == []
    story.quietly(e.ProcessExited(1))
    assert story.ledger.changes() == [(b"l/session/1/", None)]


def test_what_there_was_no_memory_to_encode_is_recorded_the_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    story = Story(store=100)
    story.joins(1)
    story.publishes(1, "a")
    for at in range(1, 100):
        with monkeypatch.context() as patch:
            calls = fail_nth(patch, snapshot, "encode", at, MemoryError())
            try:
                changes = story.ledger.changes()
            except MemoryError:
                continue
            break
    assert calls() == at - 1 > 1
    assert {key: value for key, value in changes if value is not None} == story.ledger.snapshot()
    assert story.ledger.changes() == []


# -- devices that are not there any more -----------------------------------------------------------


def test_memory_on_a_device_that_is_not_served_is_kept_apart_until_it_is_freed() -> None:
    story = Story(store=100)
    story.joins(1)
    story.publishes(1, "a")
    story.publishes(1, "b", devices=BOTH)
    story.quietly(attaches(1, 1, "b", device="GPU-1"))
    story.devices = (GPU0,)
    story.restarts(3)
    assert [(held.ticket, held.device, held.served) for held in story.ledger.held_memory()] == [
        (1, "GPU-0", True),
        (2, "GPU-0", True),
        (3, "GPU-1", False),
    ]
    assert [info.state for info in story.tells(1, m.ListPools(), m.Pools).pools] == ["current", "lost"]
    assert [info.allocated for info in story.tells(1, m.ListDevices(), m.DeviceList).devices] == [4 * MIB]
    assert {block.device for block in story.tells(1, m.Look(), m.View).blocks} == {"GPU-0"}
    story >> creates(1, 2, "c", MIB, devices=("GPU-1",)) << refused(1, 2, "not_found", "GPU-1", "GPU-0")
    story >> e.Reconfigured(Policy(), Limits(), {"GPU-0": MIB})
    story >> asks(1, 3, m.Close(3)) << e.Free(2, "GPU-0") << e.Free(3, "GPU-1") << done(1, 3)
    story >> e.Freed(3)
    story >> e.Freed(2)


def test_a_device_that_comes_back_has_what_was_lost_with_it_and_is_lent_again() -> None:
    story = Story(store=100)
    story.joins(1)
    story.publishes(1, "a", devices=("GPU-1",))
    story.quietly(attaches(1, 1, "a"))
    story.devices = (GPU0,)
    story.restarts(1)
    story.devices = (GPU0, GPU1)
    story.restarts()
    assert [info.allocated for info in story.tells(1, m.ListDevices(), m.DeviceList).devices] == [0, 2 * MIB]
    assert story.publishes(1, "a", devices=("GPU-1",)) == 2
    story >> asks(1, 3, m.Close(2)) << e.Free(1, "GPU-1") << done(1, 3)
    story >> e.Freed(1)
    assert [info.allocated for info in story.tells(1, m.ListDevices(), m.DeviceList).devices] == [0, 2 * MIB]


# -- damage ----------------------------------------------------------------------------------------


def test_of_a_restored_multicast_pool_nothing_is_known_until_it_is_bound_again() -> None:
    story = multicast(with_multicast(3))
    ledger = restored(story.ledger.snapshot())
    assert [(pool.how, pool.why) for pool in ledger.view(everything=True).pools] == [("", "")]


def test_the_pool_of_a_lease_is_known_by_name() -> None:
    story = varied()
    assert story.ledger.holder(99) is None
    assert [story.ledger.leased_pool(2, 2), story.ledger.leased_pool(2, 99), story.ledger.leased_pool(99, 2)] == [
        "a",
        "",
        "",
    ]


def test_a_record_of_an_unknown_format_is_refused() -> None:
    items = varied().ledger.snapshot() | {b"l/format": msgspec.msgpack.encode(7)}
    with pytest.raises(CorruptJournal, match="format 7, and this build knows 1 and 2 and 3 and 4 and 5 and 6"):
        restored(items)


EARLIER = {
    b"l/session/1/": "9665cd03e96490c3c3",
    b"l/watch/1/a/b": "90",
    b"l/session/2/": "9666cd03e96490c3c3",
    b"l/session/3/": "9667cd03ea64920507c2c3",
    b"l/name/0/gone": "970100a0c064cd01a4cd03e9",
    b"l/name/0/a": "970100a0cd03e964cd01a4c0",
    b"l/name/0/b": "970200a0cd03ea64cd0180c0",
    b"l/name/0/c": "970000a0cd03e964cd01a4c0",
    b"l/version/1/a": (
        "9bcd03e9bd73657373696f6e20312028706964203130312c20756964203130303129c0a96d756c746963617374c0c3c300ce"
        "001000009294a54750552d300191ce0020000091c40a64657363726970746f7294a54750552d310291ce0020000091c40a64"
        "657363726970746f72c408929091ce00100000"
    ),
    b"l/state/1/a": "93a763757272656e74a0c0",
    b"l/version/2/b": (
        "9bcd03eabd73657373696f6e20332028706964203130332c20756964203130303229c0a3697063c0c2c200ce001000009194"
        "a54750552d300591ce0020000091c40868616e646c652035c408929091ce00100000"
    ),
    b"l/state/2/b": "93a763757272656e74a0c0",
    b"l/version/1/c": (
        "9bcd03e9bd73657373696f6e20312028706964203130312c20756964203130303129c0a3766d6d920100c2c300ce00200000"
        "9294a54750552d300691ce0020000092c400c40a64657363726970746f7294a54750552d310791ce0020000092c40a646573"
        "63726970746f72c400c40d929092ce00100000ce00100000"
    ),
    b"l/state/1/c": "93a56472616674a0c0",
    b"l/lease/2/": "9602a161019101c3c2",
    b"l/lease/5/": "9603a162029100c2c2",
    b"l/lease/6/": "9601a16301920001c2c2",
    b"l/event/1/": (
        "9502a57265616479a54750552d31c44000000000000000000000000000000000000000000000000000000000000000000000"
        "00000000000000000000000000000000000000000000000000000000000001"
    ),
    b"l/counters": "9507010803c2",
}
"""What a ledger of format 2 wrote of :func:`varied`, as hexadecimal digits; formats 1 and 3 had the same entries."""


SHARED = EARLIER | {
    b"l/memory/1/a": "97a54750552d30cd03e901a96d756c746963617374c391ce0020000091c40a64657363726970746f72",
    b"l/memory/2/a": "97a54750552d31cd03e901a96d756c746963617374c391ce0020000091c40a64657363726970746f72",
    b"l/memory/5/b": "97a54750552d30cd03ea02a3697063c291ce0020000091c40868616e646c652035",
    b"l/memory/6/c": "97a54750552d30cd03e901a3766d6dc391ce0020000091c40a64657363726970746f72",
    b"l/memory/7/c": "97a54750552d31cd03e901a3766d6dc391ce0020000091c40a64657363726970746f72",
    b"l/version/1/a": (
        "9bcd03e9bd73657373696f6e20312028706964203130312c20756964203130303129c0a96d756c746963617374c0c3c300ce"
        "001000009292a54750552d309192019092a54750552d3191920290c408929091ce00100000"
    ),
    b"l/version/2/b": (
        "9bcd03eabd73657373696f6e20332028706964203130332c20756964203130303229c0a3697063c0c2c200ce001000009192"
        "a54750552d3091920590c408929091ce00100000"
    ),
    b"l/version/1/c": (
        "9bcd03e9bd73657373696f6e20312028706964203130312c20756964203130303129c0a3766d6d920100c2c300ce00200000"
        "9292a54750552d309192069092a54750552d3191920790c40d929092ce00100000ce00100000"
    ),
    b"l/counters": "9607010803c200",
}
"""The same of format 4, in which memory has entries of its own."""

TIMED = SHARED | {
    b"l/session/1/": "9765cd03e96490c3c3c0",
    b"l/session/2/": "9766cd03e96490c3c3c0",
    b"l/session/3/": "9767cd03ea64920507c2c3c0",
    b"l/state/1/a": "94a763757272656e74a0c0cb0000000000000000",
    b"l/state/2/b": "94a763757272656e74a0c0cb0000000000000000",
    b"l/state/1/c": "94a56472616674a0c0c0",
    b"l/lease/2/": "9702a161019101c3c2cb0000000000000000",
    b"l/lease/5/": "9703a162029100c2c2cb0000000000000000",
    b"l/lease/6/": "9701a16301920001c2c2cb0000000000000000",
}
"""The same of format 5, in which there are processes, and times of leases and publications."""


def earlier(number: int) -> dict[bytes, bytes]:
    items = {4: SHARED, 5: TIMED}.get(number, EARLIER)
    return {key: bytes.fromhex(value) for key, value in items.items()} | {b"l/format": msgspec.msgpack.encode(number)}


@pytest.mark.parametrize("number", entries.READABLE[:-1])
def test_a_record_of_an_earlier_format_is_taken_up_and_has_the_newest_from_the_next_change_on(number: int) -> None:
    items = earlier(number)
    ledger = restored(items)
    ledger.check()
    assert not ledger.findings
    written = dict(ledger.changes())
    assert written[b"l/format"] == msgspec.msgpack.encode(entries.FORMAT)
    assert {**items, **written} == ledger.snapshot()
    restarted = varied()
    before = seen(restarted)
    restarted.ledger = ledger
    restarted.quietly(e.Resumed())
    again = varied()
    again.ledger = restored(again.ledger.snapshot())
    again.quietly(e.Resumed())
    assert timeless(seen(restarted)) == timeless(seen(again)) != timeless(before), (
        "they know the same, and that the connections are gone"
    )


def test_memory_that_two_versions_of_an_earlier_format_have_is_refused() -> None:
    items = earlier(2)
    items[b"l/version/3/b"] = items[b"l/version/2/b"]
    with pytest.raises(CorruptJournal, match="memory 5 is another version's as well"):
        restored(items)


@pytest.mark.parametrize("key", [b"l/format", b"l/counters"])
def test_a_record_without_its_head_is_refused(key: bytes) -> None:
    items = varied().ledger.snapshot()
    del items[key]
    with pytest.raises(CorruptJournal, match=key.decode()):
        restored(items)


@pytest.mark.parametrize(
    "key",
    [
        b"l/",
        b"l/session/1",
        b"l/session/01/",
        b"l/session/1/name",
        b"l/session/x/",
        b"l/lease/99999999999999999999/",
        b"l/name/1/a",
        b"l/wish/1/",
        b"l/name/0/\xff",
        b"l/counters/0/",
    ],
)
def test_a_record_with_a_key_that_is_not_known_is_refused(key: bytes) -> None:
    items = varied().ledger.snapshot()
    like = next((known for known in items if known.split(b"/")[1] == key.split(b"/")[1]), b"l/format")
    items[key] = items[like]
    with pytest.raises(CorruptJournal):
        restored(items)


def test_a_record_that_the_check_itself_cannot_bear_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(tables: object) -> None:
        raise KeyError("m7")

    items = varied().ledger.snapshot()
    monkeypatch.setattr(invariants, "check", lost)
    with pytest.raises(CorruptJournal, match=r"contradicts itself: .*m7"):
        restored(items)


def test_a_record_that_contradicts_itself_is_refused() -> None:
    story = varied()
    items = story.ledger.snapshot()
    items[b"l/counters"] = msgspec.msgpack.encode(entries.Counters(leases=1, events=9, tickets=99, sessions=9))
    with pytest.raises(CorruptJournal, match=r"contradicts itself: failed: .*lease_ids.last"):
        restored(items)


@pytest.mark.slow
def test_whatever_is_wrong_with_a_value_it_is_damage_or_what_contradicts_it_is_named_and_given_up() -> None:
    items = varied().ledger.snapshot()
    values = [*items.values(), b"", b"\xc1", b"\x90", b"\xa1\xff"]
    refused = 0
    for key, value in items.items():
        for other in (*values, value[:-1], value[1:]):
            try:
                ledger = restored(items | {key: other})
            except CorruptJournal:
                refused += 1
            else:
                given_up = ledger.changes()
                assert bool(given_up) <= bool(ledger.findings)
                kept = items | {key: other} | dict(given_up)
                assert ledger.snapshot() == {key: value for key, value in kept.items() if value is not None}
    assert refused > len(items) * len(items) // 2


def test_whatever_is_missing_the_rest_goes_on() -> None:
    items = varied().ledger.snapshot()
    for missing in items.keys() - {b"l/format", b"l/counters"}:
        ledger = restored({key: value for key, value in items.items() if key != missing})
        for joined in ledger.sessions():
            if not joined.connected:
                ledger.handle(e.ConnectionLost(joined.id))
        ledger.handle(e.Resumed())
        ledger.check()
