"""Records of ledgers that made a mistake: what contradicts the rest is given up, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec
import pytest

from cubroker.protocol import messages as m
from cubroker.protocol.errors import CorruptJournal
from cubroker.server.ledger import Ledger, Limits, entries, snapshot
from cubroker.server.ledger import events as e
from cubroker.server.ledger.policy import Policy
from tests.unit.server.ledger.story import (
    ALICE,
    BOB,
    BROKER,
    GPU0,
    GPU1,
    MIB,
    Story,
    asks,
    attaches,
    changed,
    creates,
    done,
)

Items = dict[bytes, bytes]


def several() -> Story:
    """Versions 1 and 2 of ``a``, held by leases 2 and 4; 1 of ``b``, held by 6 and 7; and the draft of ``c``, by 8."""
    story = Story(store=100)
    story.joins(1, 2)
    story.joins(3, uid=BOB)
    story.publishes(1, "a")
    story.quietly(attaches(2, 1, "a"))
    story.publishes(1, "a")
    story.quietly(
        attaches(2, 2, "a"),
        creates(1, 1, "b", MIB, share="vmm", durable=True, writable=True, mode=0o640),
        e.Allocated(3, (b"fabric",)),
        asks(1, 2, m.Seal(5)),
        attaches(3, 1, "b"),
        attaches(1, 3, "b"),
        creates(1, 4, "c", MIB, devices=("GPU-1",), share="vmm", durable=True),
        e.Allocated(4, (m.DESCRIPTOR,)),
        asks(2, 3, m.Watch("a", True)),
        asks(1, 5, m.ShareEvent(7, "ready", "GPU-0", bytes(64))),
    )
    return story


def entry(items: Mapping[bytes, bytes], key: bytes, kind: type[entries.SnapshotEntry], **changes: object) -> bytes:
    """Return a value with other fields than it has."""
    return msgspec.msgpack.encode(msgspec.structs.replace(msgspec.msgpack.decode(items[key], type=kind), **changes))


def state(which: str) -> bytes:
    return msgspec.msgpack.encode([which, "" if which != "lost" else "it went"])


def lease(session: int, name: str, version: int, *given: int) -> bytes:
    return msgspec.msgpack.encode(entries.LeaseEntry(session, name, version, given, False, False))


def event(lease: int, name: str) -> bytes:
    return msgspec.msgpack.encode(entries.EventEntry(lease, name, "GPU-0", bytes(64), 0))


def name(items: Mapping[bytes, bytes], which: str, **changes: object) -> Items:
    key = f"l/name/0/{which}".encode()
    return {key: entry(items, key, entries.NameEntry, **changes)}


Change = Callable[[Items], Mapping[bytes, bytes | None]]

LOST: Mapping[str, tuple[Change, set[str], str]] = {
    "a version without a state": (lambda _: {b"l/state/1/a": None}, {"a@1"}, "a@1 is lost: it has no state entry"),
    "a name without a record": (lambda _: {b"l/name/0/b": None}, {"b@1"}, "b@1 is lost: no entry names the owner"),
    "a name that is nobody's": (
        lambda i: name(i, "a", owner=None),
        {"a@1", "a@2"},
        "a@2 is lost: no entry names the owner",
    ),
    "two current versions": (lambda _: {b"l/state/1/a": state("current")}, {"a@1"}, "a@1 is lost: 2 versions"),
    "two current versions, and neither is the last": (
        lambda i: {b"l/state/1/a": state("current"), **name(i, "a", last=3)},
        {"a@1", "a@2"},
        "a@2 is lost: 2 versions are current, and 3",
    ),
    "a version beyond the last": (lambda i: name(i, "a", last=1), {"a@2"}, "a@2 is lost: it is no draft"),
    "a draft that was published": (lambda i: name(i, "c", last=1), {"c@1"}, "c@1 is lost: it is a draft"),
    "a published version that is a draft": (lambda _: {b"l/state/2/a": state("draft")}, {"a@2"}, "a@2 is lost: it is"),
    "a draft without its writer": (lambda _: {b"l/lease/8/": None}, {"c@1"}, "no lease of its writer"),
    "a draft whose writer is not known": (
        lambda i: {b"l/state/1/c": entry(i, b"l/state/1/c", entries.StateEntry, writer_lease=0)},
        {"c@1"},
        "no lease of its writer",
    ),
    "a draft that was not lent and has a reader": (
        lambda _: {b"l/lease/3/": lease(2, "c", 1, 0)},
        {"c@1"},
        "there are 2 leases",
    ),
    "a version that was published, and lent as if it was not": (
        lambda i: {b"l/state/2/a": entry(i, b"l/state/2/a", entries.StateEntry, lent=True)},
        {"a@2"},
        "a@2 is lost: it was published",
    ),
    "a lost version, and nothing says how": (
        lambda _: {b"l/state/1/b": msgspec.msgpack.encode(["lost", ""])},
        {"b@1"},
        "b@1 is lost: its state entry gives no reason",
    ),
    "a lease on memory that is not there": (
        lambda _: {b"l/lease/2/": lease(2, "a", 1, 7)},
        {"a@1"},
        "lease 2 names memory",
    ),
    "a lease on no memory": (lambda _: {b"l/lease/2/": lease(2, "a", 1)}, {"a@1"}, "lease 2 names memory"),
    "a lease that waits for what there is not": (
        lambda i: {b"l/lease/2/": entry(i, b"l/lease/2/", entries.LeaseEntry, unsent=True)},
        {"a@1"},
        "a@1 is lost: lease 2 got fabric handles",
    ),
}
"""What contradicts the rest, which versions go, and what is said."""

FORGOTTEN: Mapping[str, tuple[Change, str]] = {
    "a lease of nobody": (lambda _: {b"l/lease/3/": lease(9, "a", 1, 0)}, "lease 3 of session 9 on a@1: session 9"),
    "a lease on nothing": (lambda _: {b"l/lease/3/": lease(2, "a", 7, 0)}, "lease 3 of session 2 on a@7: a@7"),
    "a lease on no name": (lambda _: {b"l/lease/3/": lease(2, "z", 1, 0)}, "lease 3 of session 2 on z@1: z@1"),
    "a state of nothing": (lambda _: {b"l/state/7/a": state("current")}, "state of a@7"),
    "a state of no name": (lambda _: {b"l/state/1/z": state("current")}, "state of z@1"),
    "an event of nobody": (lambda _: {b"l/event/1/": event(9, "ready")}, "event 1, 'ready'"),
    "an event on what is read": (lambda _: {b"l/event/1/": event(2, "ready")}, "event 1, 'ready'"),
    "an event of a name that is taken": (
        lambda i: {
            b"l/event/2/": event(7, "ready"),
            b"l/counters": entry(i, b"l/counters", entries.Counters, events=2),
        },
        "event 2, 'ready'",
    ),
    "a watch of nobody": (lambda _: {b"l/watch/9/a": b"\x90"}, "a watch on a of session 9"),
    "a version of what another pool has": (
        lambda i: {b"l/version/7/a": i[b"l/version/1/b"]},
        "a@7, whose memory on GPU-0 is not there",
    ),
    "a version of more than there is": (
        lambda i: {
            b"l/version/7/b": entry(
                i,
                b"l/version/1/b",
                entries.VersionEntry[entries.Piece],
                pieces=(entries.Piece("GPU-0", (entries.Source(3, (0, 1)),)),),
            )
        },
        "b@7, whose memory on GPU-0 is not there",
    ),
    "a version of what is shared in another way": (
        lambda i: {b"l/version/7/b": entry(i, b"l/version/1/b", entries.VersionEntry[entries.Piece], durable=False)},
        "b@7, whose memory on GPU-0 is not there",
    ),
    "memory of nothing": (
        lambda i: {
            b"l/memory/9/a": i[b"l/memory/3/b"],
            b"l/counters": entry(i, b"l/counters", entries.Counters, tickets=9),
        },
        "memory 9, which no version has",
    ),
    "memory of nobody on a device that is gone": (
        lambda i: {
            b"l/memory/9/a": entry(i, b"l/memory/3/b", entries.MemoryEntry, device="GPU-7", uid=77),
            b"l/counters": entry(i, b"l/counters", entries.Counters, tickets=9),
        },
        "memory 9, which no version has",
    ),
    "a name without versions": (
        lambda _: {b"l/name/0/z": msgspec.msgpack.encode(entries.NameEntry(3, 0, "", ALICE, 0, 0o640))},
        "z has no owner",
    ),
}


def altered(change: Change) -> tuple[Items, Items]:
    """Return a record as it is, and with a change."""
    items = several().ledger.snapshot()
    other = {**items, **change(items)}
    return items, {key: value for key, value in other.items() if value is not None}


def restored(items: Items) -> Ledger:
    return Ledger.restore((GPU0, GPU1), BROKER, Limits(), Policy(keep=2), items.items(), 100)


def states(ledger: Ledger) -> dict[str, str]:
    return {f"{pool.name}@{pool.version}": pool.state for pool in ledger.view(everything=True).pools}


def gone_on(ledger: Ledger, items: Items) -> None:
    """Have a ledger go on, and a later one after it; and everything end that there is."""
    ledger.check()
    kept = dict(items)
    ledger.handle(e.Resumed())
    ledger.check()
    for key, value in ledger.changes():
        kept.pop(key, None)
        if value is not None:
            kept[key] = value
    assert kept == ledger.snapshot()
    later = restored(kept)
    assert not later.findings
    assert states(later) == states(ledger)
    todo: list[e.LedgerEvent] = [e.ProcessExited(session.id) for session in ledger.sessions()]
    todo += [e.SessionOpened(99, 1, BROKER, BROKER, verified=True)]
    todo += [e.RequestReceived(99, 1, m.Retire(pool.name, pool.version)) for pool in ledger.view(everything=True).pools]
    for each in todo:
        for effect in ledger.handle(each):
            if isinstance(effect, e.Free):
                todo.append(e.Freed(effect.ticket, effect.numbers))
        ledger.check()
    assert not ledger.held_memory()
    assert not states(ledger)


@pytest.mark.parametrize("what", LOST)
def test_a_version_that_contradicts_the_rest_is_lost_alone_and_by_name(what: str) -> None:
    change, lost, says = LOST[what]
    before, items = altered(change)
    ledger = restored(items)
    assert any(says in finding for finding in ledger.findings)
    assert {label for label, state in states(ledger).items() if state == "lost"} == lost
    others = {label: state for label, state in states(restored(before)).items() if label not in lost}
    assert others.items() <= states(ledger).items()
    gone_on(ledger, items)


@pytest.mark.parametrize("what", FORGOTTEN)
def test_what_refers_to_what_there_is_not_is_forgotten_alone_and_by_name(what: str) -> None:
    change, says = FORGOTTEN[what]
    before, items = altered(change)
    ledger = restored(items)
    assert any(says in finding for finding in ledger.findings)
    assert states(ledger) == states(restored(before))
    gone_on(ledger, items)


def test_a_version_that_is_given_up_ends_with_its_last_lease_and_its_holders_are_told() -> None:
    story = several()
    items = story.ledger.snapshot() | {b"l/state/1/a": state("current")}
    story.ledger = Ledger.restore((GPU0, GPU1), BROKER, Limits(), Policy(), items.items(), 100)
    told = [effect for effect in story.quietly(e.Resumed()) if isinstance(effect, e.Notify)]
    assert told == [e.Notify(2, m.PoolLost("a", 1, snapshot.CONTRADICTED)), changed(2, "a", 2)]
    story >> asks(2, 9, m.Close(2)) << e.Free(1, "GPU-0") << changed(2, "a", 2) << done(2, 9)
    story.quietly(e.Freed(1))
    assert story.publishes(1, "a") == 3


def test_the_name_of_a_version_that_nothing_says_whose_it_is_is_for_its_maker_alone() -> None:
    story = several()
    items = story.ledger.snapshot()
    del items[b"l/name/0/b"]
    story.ledger = restored(items)
    story.quietly(e.Resumed())
    assert "b" in [pool.name for pool in story.tells(1, m.ListPools(), m.Pools).pools]
    assert "b" not in [pool.name for pool in story.tells(3, m.ListPools(), m.Pools).pools]
    story.quietly(asks(1, 7, m.Close(7)), e.ProcessExited(3), e.Freed(3))
    assert story.publishes(1, "b") == 2


def test_what_should_have_ended_before_ends_when_the_ledger_goes_on() -> None:
    story = several()
    items = story.ledger.snapshot() | {b"l/state/1/a": state("retired")}
    del items[b"l/lease/2/"]
    items[b"l/session/2/"] = entry(items, b"l/session/2/", entries.SessionEntry, connected=False)
    del items[b"l/lease/4/"]
    story.ledger = restored(items)
    assert story.ledger.findings == ["dropped a watch on a of session 2, which has no connection to be told by"]
    story.ledger.check()
    assert story.quietly(e.ConnectionLost(2)) == [e.ForgetSession(2)]
    assert e.Free(1, "GPU-0") in story.quietly(e.Resumed())
    assert "a@1" not in states(story.ledger)


def test_a_version_without_its_memory_is_forgotten_with_its_leases() -> None:
    story = several()
    items = story.ledger.snapshot()
    del items[b"l/memory/3/b"]
    ledger = restored(items)
    assert "dropped b@1, whose memory on GPU-0 is not there" in ledger.findings
    assert "b@1" not in states(ledger)
    assert any("lease 6 of session 3 on b@1" in finding for finding in ledger.findings)
    gone_on(ledger, items)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda _: {b"l/state/1/a": state("ended")}, "no version that is ended"),
        (lambda _: {b"l/state/1/a": state("allocating")}, "no version that is allocating"),
        (lambda i: {b"l/memory/3/z": i[b"l/memory/3/b"]}, "memory 3 is another pool's as well"),
        (lambda i: {b"l/memory/3/b": entry(i, b"l/memory/3/b", entries.MemoryEntry, handles=())}, "1 sizes and 0"),
        (lambda i: {b"l/counters": entry(i, b"l/counters", entries.Counters, tickets=3)}, "ticket_ids.last"),
        (
            lambda i: {b"l/version/1/b": entry(i, b"l/version/1/b", entries.VersionEntry[entries.Piece], plan=(0, 1))},
            "version.plan",
        ),
        (lambda i: {b"l/session/4/": i[b"l/session/3/"]}, "last_session"),
    ],
)
def test_what_no_ledger_writes_or_nobody_can_tell_apart_is_refused_whole(change: Change, says: str) -> None:
    with pytest.raises(CorruptJournal, match=says):
        restored(altered(change)[1])
