"""A ledger out of its record: every value is read as what it has to be, and put where it belongs.

Nothing is guessed. A value that cannot be read, or that no ledger could have written, whatever else there was, is
damage, and refuses the whole record. Values that can be, but not all together, were written by a ledger that made a
mistake: :mod:`cubroker.server.ledger.confining` gives up what contradicts the rest, and nothing else. What comes of
it must hold together as every ledger does, and have the very same record but for what was given up; else that is
refused, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeVar

import msgspec

from cubroker.server.ledger import confining, invariants, record
from cubroker.server.ledger.books import Books, Kind, Mark
from cubroker.server.ledger.chronicle import Story
from cubroker.server.ledger.entries import SESSION, Allocation, Lease, Loss, Past, Session, Signal, Version
from cubroker.server.ledger.reconfiguring import tolerate
from cubroker.server.ledger.record import (
    COUNTERS_KEY,
    FORMAT,
    FORMAT_KEY,
    READABLE,
    Counters,
    Entry,
    EventEntry,
    LeaseEntry,
    NameEntry,
    Piece,
    SessionEntry,
    StateEntry,
    VersionEntry,
    WatchEntry,
)
from cubroker.server.ledger.states import Stage
from cubroker.server.store.damaged import Damaged

PREFIX = b"l/"

SHAPES: Mapping[str, type[Entry]] = {
    Kind.SESSION: SessionEntry,
    Kind.NAME: NameEntry,
    Kind.VERSION: VersionEntry,
    Kind.STATE: StateEntry,
    Kind.LEASE: LeaseEntry,
    Kind.EVENT: EventEntry,
    Kind.WATCH: WatchEntry,
}
"""What is recorded, in the order in which it can be put together."""

_KEY = re.compile(rb"l/([a-z]+)/(0|[1-9][0-9]{0,18})/([!-~]*)")

K = TypeVar("K")
V = TypeVar("V")


def restore(books: Books, items: Iterable[tuple[bytes, bytes]]) -> Counters | None:
    """Fill new books with what was recorded; return the counters, None if they and the format are to be recorded anew.

    What contradicted the rest is among the books' ``findings``, and marked to be recorded anew.

    Raises:
        Damaged: the record cannot be used; nor can the books.
    """
    books.resumed = False
    values = {key: value for key, value in items if key.startswith(PREFIX)}
    if not values:
        return None
    number = _decode(FORMAT_KEY, values.pop(FORMAT_KEY, b""), int)
    if number not in READABLE:
        known = " and ".join(map(str, READABLE))
        raise Damaged(
            f"the ledger's record has format {number}, and this build knows {known}; start the build that wrote it"
        )
    counters = _decode(COUNTERS_KEY, values.pop(COUNTERS_KEY, b""), Counters)
    entries = dict(_read(key, value) for key, value in values.items())
    _count(books, counters)
    _fill(books, entries)
    confining.confine(books)
    tolerate(books)
    books.tolerated_store = books.stored
    _check(books, entries)
    return counters if number == FORMAT else None


def _decode(key: bytes, value: bytes, shape: type[V]) -> V:
    try:
        return msgspec.msgpack.decode(value, type=shape)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _damaged(key, f"its value cannot be read: {error}") from None


def _damaged(key: bytes, reason: str) -> Damaged:
    return Damaged(f"the ledger's record is damaged at {key.decode('ascii', 'replace')}: {reason}")


def _read(key: bytes, value: bytes) -> tuple[Mark, Entry]:
    parts = _KEY.fullmatch(key)
    kind, number, name = parts.groups() if parts else (b"", b"", b"")
    shape = SHAPES.get(kind.decode())
    if shape is None:
        raise _damaged(key, "this build does not know what that is")
    return (Kind(kind.decode()), int(number), name.decode()), _decode(key, value, shape)


def _count(books: Books, counters: Counters) -> None:
    books.lease_ids.last, books.signal_ids.last = counters.leases, counters.events
    books.tickets.last, books.last_session = counters.tickets, counters.sessions
    books.drained = counters.drained


def _fill(books: Books, entries: Mapping[Mark, Entry]) -> None:
    order = list(SHAPES)
    for mark in sorted(entries, key=lambda mark: (order.index(mark[0]), *mark)):
        _, number, name = mark
        match entries[mark]:
            case SessionEntry() as entry:
                _session(books, number, entry)
            case NameEntry() as entry:
                _name(books, name, entry)
            case VersionEntry() as entry:
                _version(books, mark, entry)
            case StateEntry() as entry:
                _state(books, mark, entry)
            case LeaseEntry() as entry:
                _lease(books, mark, entry)
            case EventEntry() as entry:
                _event(books, mark, entry)
            case _:
                _watch(books, mark)


def _session(books: Books, number: int, entry: SessionEntry) -> None:
    user = books.user(entry.uid)
    groups, story = frozenset(entry.groups), Story(books.clock)
    session = Session(number, entry.pid, user, entry.gid, groups, entry.connected, story=story, verified=entry.verified)
    books.sessions[number] = user.sessions[number] = session
    books.stored += SESSION


def _name(books: Books, name: str, entry: NameEntry) -> None:
    loss = Loss(entry.lost, entry.why) if entry.lost else None
    books.numbers[name] = Past(entry.last, loss, entry.heir, entry.group, entry.mode)
    if entry.owner is not None:
        pool = books.pool(name)
        pool.owner, pool.group, pool.mode = entry.owner, entry.group, entry.mode


def _version(books: Books, mark: Mark, entry: VersionEntry) -> None:
    _, number, name = mark
    pool, user = books.pool(name), books.user(entry.uid)
    version = pool.versions[number] = Version(
        pool=pool,
        number=number,
        user=user,
        writer=entry.writer,
        mode=entry.mode,
        share=entry.share,
        plan=entry.plan,
        writable=entry.writable,
        durable=entry.durable,
        layout=entry.layout,
        tensors=entry.tensors,
        nbytes=entry.nbytes,
    )
    user.layouts += len(version.layout)
    for piece in entry.pieces:
        _memory(books, mark, version, piece)


def _memory(books: Books, mark: Mark, version: Version, piece: Piece) -> None:
    if piece.ticket in books.allocations:
        raise _damaged(record.key(mark), f"memory {piece.ticket} is another version's as well")
    account, user, nbytes = books.account(piece.device), version.user, sum(piece.sizes)
    allocation = Allocation(piece.ticket, account, version, piece.sizes, nbytes, Stage.HELD, piece.handles)
    version.replicas[piece.device] = allocation
    books.allocations[piece.ticket] = account.allocations[piece.ticket] = user.allocations[piece.ticket] = allocation
    account.allocated += nbytes
    user.memory += nbytes
    user.pieces += allocation.descriptors
    books.stored += allocation.stored


def _state(books: Books, mark: Mark, entry: StateEntry) -> None:
    _, number, name = mark
    if entry.state in record.UNRECORDED:
        raise _damaged(record.key(mark), f"no version that is {entry.state.value} is recorded")
    version = _published(books, name, number)
    if version is None:
        return confining.forget(books, mark, f"a state of {name}@{number}, which there is not")
    version.state, version.why, version.digests = entry.state, entry.why, entry.digests
    return None


def _published(books: Books, name: str, number: int) -> Version | None:
    pool = books.pools.get(name)
    return None if pool is None else pool.versions.get(number)


def _lease(books: Books, mark: Mark, entry: LeaseEntry) -> None:
    _, number, _ = mark
    label = f"{entry.name}@{entry.version}"
    session, version = books.sessions.get(entry.session), _published(books, entry.name, entry.version)
    if session is None or version is None:
        missing = label if version is None else f"session {entry.session}"
        return confining.forget(
            books, mark, f"lease {number} of session {entry.session} on {label}: {missing} is not there"
        )
    pieces = dict(enumerate(version.replicas.values()))
    given = tuple(pieces[index] for index in entry.given if index in pieces)
    lease = Lease(number, session, version, given, entry.bound, unsent=entry.unsent)
    books.leases[number] = session.leases[number] = version.holders[number] = lease
    session.user.leases += 1
    if not given or len(given) < len(entry.given):
        books.mark(*mark)
        confining.lose(books, version, f"lease {number} is on memory that it has not")
    return None


def _event(books: Books, mark: Mark, entry: EventEntry) -> None:
    _, number, _ = mark
    lease = books.leases.get(entry.lease)
    if lease is None or not lease.version.writable or entry.name in lease.version.signals:
        return confining.forget(books, mark, f"event {number}, {entry.name!r}, which lease {entry.lease} cannot have")
    signal = Signal(number, entry.name, lease, entry.device, entry.handle, entry.generation)
    books.signals[number] = lease.signals[number] = lease.session.signals[number] = signal
    lease.version.signals[entry.name] = signal
    lease.session.user.events += 1
    return None


def _watch(books: Books, mark: Mark) -> None:
    _, number, name = mark
    session = books.sessions.get(number)
    if session is None or not session.connected:
        return confining.forget(books, mark, f"a watch on {name} of session {number}, which nobody can be told by")
    pool = session.watches[name] = books.pool(name)
    pool.watchers[session] = None
    session.user.watches += 1
    return None


def _check(books: Books, entries: Mapping[Mark, Entry]) -> None:
    """Raise ``Damaged`` unless the books hold together, and have the record that they were made of."""
    given_up = books.marks or {}
    for mark in _differing(entries, dict(record.entries(books))):
        if mark not in given_up:
            raise _damaged(record.key(mark), "what was made of it would be recorded in another way")
    try:
        invariants.check(books)
    except invariants.MISTAKES as error:
        raise Damaged(f"the ledger's record contradicts itself: {invariants.in_words(error)}") from None


def _differing(one: Mapping[Mark, Entry], other: Mapping[Mark, Entry]) -> Iterator[Mark]:
    return (mark for mark in sorted({*one, *other}) if one.get(mark) != other.get(mark))
