"""What an earlier broker left behind: a journal, and the ledger's record in one."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import closing

from cubroker.protocol import messages as m
from cubroker.protocol import wire
from cubroker.protocol.errors import CorruptJournal, Invalid
from cubroker.server.ledger import Ledger, Limits
from cubroker.server.ledger import events as e
from cubroker.server.ledger.policy import Policy
from cubroker.server.store.store import Journal
from tests.unit.server.ledger.story import BROKER, GPU0, GPU1, MIB, Story, asks, attaches, creates

Items = list[tuple[bytes, bytes]]

LOST = re.compile(r"(?P<name>\S+)@(?P<number>[0-9]+) is lost: ")
"""What a finding says of a version that is given up; names have no spaces."""


def journal(data: bytes) -> None:
    """A journal is refused, or its content is there, and there again once more was committed."""
    descriptor = os.memfd_create("fuzz", os.MFD_CLOEXEC)
    try:
        os.write(descriptor, data)
        with closing(_opened(os.dup(descriptor))) as kept:
            content = dict(kept.items())
            kept.commit([(b"new", b"value"), *((key, None) for key in list(content)[:1])])
            expected = dict(kept.items())
        with closing(_opened(os.dup(descriptor))) as kept:
            assert dict(kept.items()) == expected
    finally:
        os.close(descriptor)


def _opened(descriptor: int) -> Journal:
    try:
        return Journal.open(descriptor)
    except CorruptJournal as error:
        os.close(descriptor)
        raise Invalid(str(error)) from None


def record(data: bytes) -> None:
    """A record is refused, or makes a ledger that has the very same record, in other bytes perhaps, and goes on.

    What it has not any more contradicted the rest, and is named; nothing does that in the record that it makes of it.
    """
    items = wire.unpack(data, Items)
    ledger = _restored(items)
    if recorded := [key for key, _ in items if key.startswith(b"l/")]:
        assert ledger.snapshot().keys() - set(recorded) <= set(_written_anew(recorded, ledger.findings))
        assert ledger.findings or ledger.snapshot().keys() == set(recorded)
        again = _restored(list(ledger.snapshot().items()))
        assert again.snapshot() == ledger.snapshot()
        assert not again.findings
    for held in ledger.held_memory():
        if not held.durable or not held.served:
            ledger.handle(e.MemoryLost(held.ticket, "it went with the broker"))
    ledger.handle(e.Resumed())
    ledger.check()


def _written_anew(recorded: Collection[bytes], findings: Iterable[str]) -> Iterator[bytes]:
    """The keys that a record may have for the first time: state and name of versions of it that a finding calls lost.

    Nothing else says why nobody gets such a version, so both are written where they were missing.
    """
    for lost in filter(None, map(LOST.match, findings)):
        name, number = lost["name"].encode(), lost["number"].encode()
        if b"l/version/%b/%b" % (number, name) in recorded:
            yield from (b"l/state/%b/%b" % (number, name), b"l/name/0/%b" % name)


def _restored(items: Items) -> Ledger:
    try:
        return Ledger.restore((GPU0, GPU1), BROKER, Limits(), Policy(), items, 100)
    except CorruptJournal as error:
        raise Invalid(str(error)[:1000]) from None


def _journal() -> bytes:
    with closing(Journal.create()) as kept:
        kept.commit([(b"a", b"1"), (b"b", bytes(40)), (b"c", b"")])
        kept.commit([(b"a", None), (b"b", b"2")])
        return os.pread(kept.descriptor, 1 << 20, 0)


def _record() -> Items:
    story = Story(store=100)
    story.joins(1, 2)
    story.publishes(1, "a")
    story.quietly(
        attaches(2, 1, "a"),
        creates(1, 1, "b", MIB, devices=("GPU-0", "GPU-1"), share="multicast", writable=True, durable=True),
        e.Allocated(2, (m.DESCRIPTOR,)),
        e.Allocated(3, (m.DESCRIPTOR,)),
        e.MulticastBound(4, "copies", "no slots left"),
        asks(1, 2, m.Seal(3)),
        attaches(2, 2, "b", device="GPU-1"),
        asks(2, 3, m.ShareEvent(4, "ready", "GPU-1", bytes(64))),
        asks(2, 4, m.Watch("c", True)),
        e.ConnectionLost(1),
    )
    return list(story.ledger.snapshot().items())


def _without(key: bytes) -> Items:
    return [item for item in _record() if item[0] != key]


JOURNALS = (_journal(),)
DAMAGED = (_without(b"l/state/1/a"), _without(b"l/name/0/b"))
RECORDS = tuple(wire.pack(items) for items in (_record(), *DAMAGED, _record()[-2:], []))
TOKENS = tuple(part for item in _record() for part in (wire.pack(item), *map(wire.pack, item), *item))
