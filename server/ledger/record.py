"""The ledger's record: what a broker that is started again has to know, as keys and values.

Recorded are outcomes, one value for each thing that there is, never events that would have to be replayed. What waits
is not: requests, memory that is on its way or being freed, and versions that have no memory yet. Clients ask
again, and memory of which no record tells belongs to nobody.

Whatever changes is marked in the books, and read from them when the changes are asked for; so a value is always that of
the end of a batch of events, and a mark too many does no harm. :mod:`cubroker.server.ledger.restoring` reads it all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Annotated

from msgspec import Meta, Struct, msgpack

from cubroker.protocol.bounds import Encoded, EventHandle, Handles, Mode, Name, Plan, Uuid
from cubroker.protocol.messages import Digests
from cubroker.server.ledger.books import Books, Kind, Mark
from cubroker.server.ledger.entries import Version
from cubroker.server.ledger.states import State

FORMAT = 2
"""The format of everything below. Format 1 had no digests, and no owners of pools that have ended."""

READABLE = (1, FORMAT)
"""The formats that are read; another one is refused. What is recorded from then on has the newest."""

FORMAT_KEY = b"l/format"
COUNTERS_KEY = b"l/counters"

Number = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
User = Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]
Words = Annotated[str, Meta(max_length=1 << 16)]
Sizes = Annotated[tuple[Number, ...], Meta(max_length=4096)]


class Entry(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of all values."""


class Counters(Entry, frozen=True):
    """The last numbers that were given out, and whether the broker is drained by hand."""

    leases: Number = 0
    events: Number = 0
    tickets: Number = 0
    sessions: Number = 0
    drained: bool = False


class SessionEntry(Entry, frozen=True):
    """``session``, by its id."""

    pid: Number
    uid: User
    gid: User
    groups: Annotated[tuple[User, ...], Meta(max_length=1 << 16)]
    connected: bool
    verified: bool = False


class WatchEntry(Entry, frozen=True):
    """``watch``, by the session and the name; there is nothing more to say."""


class NameEntry(Entry, frozen=True):
    """``name``: its past, and whose it is as long as a version of it lives. ``lost`` is 0 if none was lost.

    Without a version, ``group`` and ``mode`` are the last ones, and ``heir`` is the last owner; a broker before this
    build recorded none.
    """

    last: Number
    lost: Number
    why: Words
    owner: User | None
    group: User
    mode: Mode
    heir: User | None = None


class Piece(Entry, frozen=True):
    """The memory of a version on one device."""

    device: Uuid
    ticket: Number
    sizes: Sizes
    handles: Handles


class VersionEntry(Entry, frozen=True):
    """``version``, by number and name: what never changes of it; the layout makes it large."""

    uid: User
    writer: Words
    mode: Mode | None
    share: Annotated[str, Meta(max_length=16)]
    plan: Plan | None
    writable: bool
    durable: bool
    tensors: Number
    nbytes: Number
    pieces: Annotated[tuple[Piece, ...], Meta(max_length=64)]
    layout: Encoded


class StateEntry(Entry, frozen=True):
    """``state``, by number and name: what changes of a version."""

    state: State
    why: Words
    digests: Digests | None = None


class LeaseEntry(Entry, frozen=True):
    """``lease``, by its id. ``given`` are indices of the version's pieces."""

    session: Number
    name: Name
    version: Number
    given: Annotated[tuple[Number, ...], Meta(max_length=64)]
    bound: bool
    unsent: bool


class EventEntry(Entry, frozen=True):
    """``event``, by its id."""

    lease: Number
    name: Name
    device: Uuid
    handle: EventHandle
    generation: Number


UNRECORDED = (State.ALLOCATING, State.ENDED)
"""The states of versions that have no memory yet, or none any more; after a mistake an ended one may still be there."""

_encode = msgpack.Encoder().encode


class Recorder:
    """Tells what changed of books that are marked; ``counters`` are as they were recorded last, if they were."""

    def __init__(self, books: Books, counters: Counters | None = None) -> None:
        self._books = books
        self._counters = counters

    def changes(self) -> list[tuple[bytes, bytes | None]]:
        """Return what is to be recorded anew since the last call (None: no more)."""
        marks, self._books.marks = self._books.marks, {}
        assert marks is not None
        found = [(key(mark), self._value(mark)) for mark in marks]
        if (now := counters(self._books)) != self._counters:
            if self._counters is None:
                found.append((FORMAT_KEY, _encode(FORMAT)))
            self._counters = now
            found.append((COUNTERS_KEY, _encode(now)))
        return found

    def _value(self, mark: Mark) -> bytes | None:
        found = entry(self._books, mark)
        return None if found is None else _encode(found)


def whole(books: Books) -> dict[bytes, bytes]:
    """Return all that there is to record."""
    found = {key(mark): _encode(entry) for mark, entry in entries(books)}
    return found | {FORMAT_KEY: _encode(FORMAT), COUNTERS_KEY: _encode(counters(books))}


def entries(books: Books) -> Iterator[tuple[Mark, Entry]]:
    """Return all that there is to record, but for the numbers that were given out."""
    return ((mark, found) for mark in _marks(books) if (found := entry(books, mark)) is not None)


def key(mark: Mark) -> bytes:
    """Return the key of what a mark names; names may have slashes, and come last."""
    kind, number, name = mark
    return f"l/{kind}/{number}/{name}".encode()


def entry(books: Books, mark: Mark) -> Entry | None:
    """Return what is recorded of what a mark names; None if there is no such thing, or not any more."""
    kind, number, name = mark
    return _ENTRIES[kind](books, number, name)


def counters(books: Books) -> Counters:
    """Return the last numbers that were given out, and what concerns all of the ledger."""
    numbers = books.lease_ids.last, books.signal_ids.last, books.tickets.last, books.last_session
    return Counters(*numbers, books.drained)


def _marks(books: Books) -> Iterator[Mark]:
    """Return a mark for everything that there is."""
    for session in books.sessions.values():
        yield Kind.SESSION, session.id, ""
        for name in session.watches:
            yield Kind.WATCH, session.id, name
    for name in (*books.numbers, *books.pools):
        yield Kind.NAME, 0, name
    for pool in books.pools.values():
        for number in pool.versions:
            yield Kind.VERSION, number, pool.name
            yield Kind.STATE, number, pool.name
    for lease in books.leases:
        yield Kind.LEASE, lease, ""
    for event in books.signals:
        yield Kind.EVENT, event, ""


def _session(books: Books, number: int, _: str) -> SessionEntry | None:
    session = books.sessions.get(number)
    if session is None:
        return None
    groups = tuple(sorted(session.groups))
    return SessionEntry(session.pid, session.uid, session.gid, groups, session.connected, session.verified)


def _watch(books: Books, number: int, name: str) -> WatchEntry | None:
    session = books.sessions.get(number)
    return WatchEntry() if session is not None and name in session.watches else None


def _name(books: Books, _: int, name: str) -> NameEntry | None:
    last, loss, heir, group, mode = books.past(name)
    pool, (lost, why) = books.pools.get(name), loss or (0, "")
    if pool is not None and any(version.state not in UNRECORDED for version in pool.versions.values()):
        return NameEntry(last, lost, why, pool.owner, pool.group, pool.mode)
    if pool is not None and pool.owner is not None:  # of a first draft without memory, which ends with the broker
        heir = pool.owner
    return NameEntry(last, lost, why, None, group, mode, heir) if last else None


def _version(books: Books, number: int, name: str) -> Version | None:
    """Return a version that has all its memory."""
    pool = books.pools.get(name)
    version = None if pool is None else pool.versions.get(number)
    return None if version is None or version.state in UNRECORDED else version


def _made(books: Books, number: int, name: str) -> VersionEntry | None:
    version = _version(books, number, name)
    if version is None:
        return None
    return VersionEntry(
        uid=version.owner,
        writer=version.writer,
        mode=version.mode,
        share=version.share,
        plan=version.plan,
        writable=version.writable,
        durable=version.durable,
        tensors=version.tensors,
        nbytes=version.nbytes,
        pieces=tuple(Piece(uuid, a.ticket, a.sizes, a.handles) for uuid, a in version.replicas.items()),
        layout=version.layout,
    )


def _state(books: Books, number: int, name: str) -> StateEntry | None:
    version = _version(books, number, name)
    return None if version is None else StateEntry(version.state, version.why, version.digests)


def _lease(books: Books, number: int, _: str) -> LeaseEntry | None:
    lease = books.leases.get(number)
    if lease is None:
        return None
    version, pieces = lease.version, list(lease.version.replicas.values())
    # Any others are a mistake, which must keep nothing from being recorded.
    given = tuple(pieces.index(each) for each in lease.allocations if each in pieces)
    return LeaseEntry(lease.session.id, version.pool.name, version.number, given, lease.bound, lease.unsent)


def _event(books: Books, number: int, _: str) -> EventEntry | None:
    signal = books.signals.get(number)
    if signal is None:
        return None
    return EventEntry(signal.lease.id, signal.name, signal.device, signal.handle, signal.generation)


_ENTRIES: Mapping[Kind, Callable[[Books, int, str], Entry | None]] = {
    Kind.SESSION: _session,
    Kind.WATCH: _watch,
    Kind.NAME: _name,
    Kind.VERSION: _made,
    Kind.STATE: _state,
    Kind.LEASE: _lease,
    Kind.EVENT: _event,
}
