"""The ledger's snapshot: what the next broker has to know, as keys and values of the journal (:mod:`.entries`).

Entries are outcomes, one for each thing that exists, never events to replay. Waiting requests, memory that is being
allocated or freed, and versions without memory have no entries: clients send their requests again, and memory without
an entry belongs to no version.

A change marks a key dirty (:meth:`Tables.mark_dirty`); :meth:`ChangeRecorder.changes` reads the value from the tables.
So a value is always that of the end of a batch of events, and a key marked too often does no harm.

Reading guesses nothing. If a value cannot be decoded, or no ledger writes it, it is corrupt, and the whole snapshot is
refused. But a ledger that made a mistake at one event writes what it has: a lease without its session, two current
versions. Then no entry is corrupt, but not all of them can be true. So

- an entry that refers to something that does not exist is dropped;
- a version whose state contradicts its leases, its name or the other versions is lost, as if its memory had gone; of
  two or more current versions, the one stays whose number is the last of the name.

Each of these is a finding. The restored tables must satisfy the invariants, and must write the entries from which they
were read, except those that were repaired. Otherwise the snapshot is refused. A running ledger is audited in the same
way after a mistake.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from msgspec import DecodeError, msgpack, structs

from cubroker.protocol.encoding import encode
from cubroker.protocol.errors import CorruptJournal
from cubroker.server.ledger import invariants, memory
from cubroker.server.ledger.entries import (
    FORMAT,
    GROWN,
    READABLE,
    SHARES,
    WRITERS,
    Counters,
    EventEntry,
    LeaseEntry,
    LockEntry,
    MemoryEntry,
    NameEntry,
    OwnPiece,
    Piece,
    SessionEntry,
    SnapshotEntry,
    Source,
    StateEntry,
    VersionEntry,
    WatchEntry,
)
from cubroker.server.ledger.leases import FABRIC, PUBLISHED, opened_by
from cubroker.server.ledger.lifecycle import accept_present
from cubroker.server.ledger.records import (
    SESSION_FDS,
    Allocation,
    IpcEvent,
    Lease,
    Loss,
    Past,
    Pool,
    PoolLock,
    Replica,
    Session,
    Ticket,
    Version,
)
from cubroker.server.ledger.states import MemoryState, VersionState
from cubroker.server.ledger.tables import DirtyKey, Kind, Tables

PREFIX = b"l/"
FORMAT_KEY = b"l/format"
COUNTERS_KEY = b"l/counters"

CONTRADICTED = "what the broker had written down of it contradicted itself"
"""The reason that holders of a version that is lost in this way read; the log has the details."""

UNRECORDED = (VersionState.ALLOCATING, VersionState.ENDED)
"""States of versions without memory, which have no entry; after a mistake an ended one may still be in the tables."""

_KEY = re.compile(rb"l/([a-z]+)/(0|[1-9][0-9]{0,18})/([!-~]*)")

T = TypeVar("T")

_COPIED = tuple(field for field in VersionEntry.__struct_fields__ if field not in ("uid", "pieces"))
"""The fields that a version and its entry have in common."""

# -- writing -------------------------------------------------------------------------------------------


class ChangeRecorder:
    """An encoder of the entries that changed."""

    def __init__(self, tables: Tables, counters: Counters | None = None) -> None:
        self._tables = tables
        self._counters = counters  # as they were written last

    def changes(self) -> list[tuple[bytes, bytes | None]]:
        """Return the keys changed since the last call, with their values; None: the entry is gone."""
        tables = self._tables
        assert tables.dirty_keys is not None
        found: list[tuple[bytes, bytes | None]] = []
        for kind, number, name in tables.dirty_keys:  # as encode_key and _entry do, with fewer calls: it runs often
            entry = _WRITERS[kind](tables, number, name)
            key = b"l/%s/%d/%s" % (kind.encode(), number, name.encode())
            found.append((key, None if entry is None else encode(entry)))
        if (now := counters(tables)) != self._counters:
            if self._counters is None:
                found.append((FORMAT_KEY, encode(FORMAT)))
            found.append((COUNTERS_KEY, encode(now)))
        # Not before: encoding a value may fail for lack of memory.
        tables.dirty_keys, self._counters = OrderedDict(), now
        return found


def full_snapshot(tables: Tables) -> dict[bytes, bytes]:
    """Return all keys and values; costs time in proportion to the tables."""
    found = {encode_key(key): encode(entry) for key, entry in entries(tables)}
    return found | {FORMAT_KEY: encode(FORMAT), COUNTERS_KEY: encode(counters(tables))}


def entries(tables: Tables) -> Iterator[tuple[DirtyKey, SnapshotEntry]]:
    """Return all entries except the counters."""
    keys: list[DirtyKey] = []
    for session in tables.sessions.values():
        keys.append((Kind.SESSION, session.id, ""))
        keys += [(Kind.WATCH, session.id, name) for name in session.watches]
    keys += [(Kind.NAME, 0, name) for name in (*tables.past_names, *tables.pools)]
    keys += [(Kind.MEMORY, ticket.id, ticket.pool.name) for ticket in tables.tickets.values()]
    for name, pool in tables.pools.items():
        keys += [(kind, number, name) for number in pool.versions for kind in (Kind.VERSION, Kind.STATE)]
    keys += [(Kind.LEASE, number, "") for number in tables.leases]
    keys += [(Kind.EVENT, number, "") for number in tables.ipc_events]
    keys += [(Kind.LOCK, number, held.pool.name) for number, held in tables.locks.items()]
    return ((key, found) for key in keys if (found := _entry(tables, key)) is not None)


def encode_key(key: DirtyKey) -> bytes:
    """Return the journal's key of an entry; names may contain slashes, and come last."""
    kind, number, name = key
    return f"l/{kind}/{number}/{name}".encode()


def counters(tables: Tables) -> Counters:
    """Return the last numbers given out, and whether the broker is drained."""
    numbers = tables.lease_ids.last, tables.event_ids.last, tables.ticket_ids.last, tables.last_session
    return Counters(*numbers, tables.drained, tables.lock_ids.last)


def _entry(tables: Tables, key: DirtyKey) -> SnapshotEntry | None:
    """Return the entry of a key; None if the thing does not exist any more."""
    kind, number, name = key
    return _CODECS[kind].write(tables, number, name)


def _write_session(tables: Tables, number: int, _: str) -> SessionEntry | None:
    session = tables.sessions.get(number)
    if session is None:
        return None
    groups = tuple(sorted(session.groups))
    return SessionEntry(
        session.pid, session.uid, session.gid, groups, session.connected, session.verified, session.process
    )


def _write_watch(tables: Tables, number: int, name: str) -> WatchEntry | None:
    session = tables.sessions.get(number)
    return WatchEntry() if session is not None and name in session.watches else None


def _write_name(tables: Tables, _: int, name: str) -> NameEntry | None:
    last, loss, previous_owner, group, mode = tables.past(name)
    pool, (lost, why) = tables.pools.get(name), loss or (0, "")
    if pool is not None and any(version.state not in UNRECORDED for version in pool.versions.values()):
        return NameEntry(last, lost, why, pool.owner, pool.group, pool.mode)
    if pool is not None and pool.owner is not None:  # its first draft has no memory yet, and ends with the broker
        previous_owner = pool.owner
    return NameEntry(last, lost, why, None, group, mode, previous_owner) if last else None


def _find_version(tables: Tables, name: str, number: int) -> Version | None:
    pool = tables.pools.get(name)
    return None if pool is None else pool.versions.get(number)


def _write_memory(tables: Tables, number: int, _: str) -> MemoryEntry | None:
    ticket = tables.tickets.get(number)
    if ticket is None:
        return None
    versions = (version for allocation in ticket.allocations.values() for version in allocation.versions)
    if all(version.state in UNRECORDED for version in versions):
        return None
    return MemoryEntry(
        ticket.account.device.uuid,
        ticket.user.uid,
        ticket.version,
        ticket.share,
        ticket.durable,
        ticket.sizes,
        ticket.handles,
    )


def _write_version(tables: Tables, number: int, name: str) -> VersionEntry[Piece] | None:
    version = _find_version(tables, name, number)
    if version is None or version.state in UNRECORDED:
        return None
    pieces = tuple(
        Piece(uuid, tuple(Source(source.ticket, source.numbers) for source in replica.fd_sources))
        for uuid, replica in version.replicas.items()
    )
    copied: dict[str, Any] = {field: getattr(version, field) for field in _COPIED}
    return VersionEntry(uid=version.owner, pieces=pieces, **copied)


def _write_state(tables: Tables, number: int, name: str) -> StateEntry | None:
    version = _find_version(tables, name, number)
    if version is None or version.state in UNRECORDED:
        return None
    return StateEntry(
        version.state, version.why, version.digests, version.published, version.writer_lease, version.lent
    )


def _write_lease(tables: Tables, number: int, _: str) -> LeaseEntry | None:
    lease = tables.leases.get(number)
    if lease is None:
        return None
    version, pieces = lease.version, [*lease.version.replicas.values()]
    # Memory of another version is a mistake, which must not prevent the entry.
    given = tuple([pieces.index(each) for each in lease.replicas if each in pieces])
    head = lease.session.id, version.pool.name, version.number
    return LeaseEntry(*head, given, lease.bound, lease.unsent, lease.since)


def _write_event(tables: Tables, number: int, _: str) -> EventEntry | None:
    event = tables.ipc_events.get(number)
    if event is None:
        return None
    return EventEntry(event.lease.id, event.name, event.device, event.handle, event.generation)


def _write_lock(tables: Tables, number: int, _: str) -> LockEntry | None:
    held = tables.locks.get(number)
    return None if held is None else LockEntry(held.session.id)


# -- reading -------------------------------------------------------------------------------------------


def load(tables: Tables, items: Iterable[tuple[bytes, bytes]]) -> Counters | None:
    """Fill empty tables from the items of a journal, in the order in which they were written; return the counters.

    None: the format and the counters must be written again.

    Entries that were dropped or lost are among the findings, and dirty.

    Raises:
        CorruptJournal: the snapshot cannot be used; nor can the tables, then.
    """
    tables.resumed = False
    values = {key: value for key, value in items if key.startswith(PREFIX)}
    if not values:
        return None
    number = _decode(FORMAT_KEY, values.pop(FORMAT_KEY, b""), int)
    if number not in READABLE:
        known = " and ".join(map(str, READABLE))
        raise CorruptJournal(
            f"the ledger's record has format {number}, and this build knows {known}; start the build that wrote it"
        )
    found = _decode(COUNTERS_KEY, values.pop(COUNTERS_KEY, b""), Counters)
    order = list(_CODECS)
    read = dict(_read(*item, number) for item in values.items())
    if number < SHARES:
        read = _upgraded(tables, read)
    if number < WRITERS:
        read = _with_writers(read)
    loaded = dict(sorted(read.items(), key=lambda item: (order.index(item[0][0]), _place(item[0]))))
    tables.lease_ids.last, tables.event_ids.last = found.leases, found.events
    tables.ticket_ids.last, tables.last_session = found.tickets, found.sessions
    tables.lock_ids.last = found.locks
    tables.drained = found.drained
    for key, entry in loaded.items():
        _CODECS[key[0]].read(tables, key, entry)
    _count_memory(tables)
    _repair(tables)
    accept_present(tables)
    tables.grandfathered_store = tables.stored
    _check(tables, loaded)
    if number == FORMAT:
        return found
    for key in loaded:
        if key[0] in GROWN:
            tables.mark_dirty(*key)
    return None


def _place(key: DirtyKey) -> tuple[int, str]:
    """Return the sort key of an entry among those of its kind. Names keep their order: the oldest are forgotten."""
    kind, number, name = key
    return (0, "") if kind is Kind.NAME else (number, name)


def _decode(key: bytes, value: bytes, shape: type[T]) -> T:
    try:
        return msgpack.decode(value, type=shape)
    except (DecodeError, UnicodeDecodeError) as error:
        raise _corrupt(key, f"its value cannot be read: {error}") from None


def _corrupt(key: bytes, reason: str) -> CorruptJournal:
    return CorruptJournal(f"the ledger's record is damaged at {key.decode('ascii', 'replace')}: {reason}")


def _read(key: bytes, value: bytes, written: int) -> tuple[DirtyKey, SnapshotEntry]:
    parts = _KEY.fullmatch(key)
    kind, number, name = (part.decode() for part in parts.groups()) if parts else ("", "", "")
    if kind not in _CODECS:
        raise _corrupt(key, "this build does not know what that is")
    older = written < SHARES and kind == Kind.VERSION
    shape: type[SnapshotEntry] = VersionEntry[OwnPiece] if older else _CODECS[Kind(kind)].shape
    return (Kind(kind), int(number), name), _decode(key, value, shape)


def _upgraded(tables: Tables, read: Mapping[DirtyKey, SnapshotEntry]) -> dict[DirtyKey, SnapshotEntry]:
    """Return entries of an earlier format in the present one; those that differ are dirty."""
    found: dict[DirtyKey, SnapshotEntry] = {}
    for key, entry in read.items():
        if not isinstance(entry, VersionEntry):
            found[key] = entry
            continue
        _, number, name = key
        for piece in entry.pieces:
            own = Kind.MEMORY, piece.ticket, name
            if own in found:
                raise _corrupt(encode_key(key), f"memory {piece.ticket} is another version's as well")
            handles = tuple(filter(None, piece.handles))
            found[own] = MemoryEntry(piece.device, entry.uid, number, entry.share, entry.durable, piece.sizes, handles)
            tables.mark_dirty(*own)
        pieces = tuple(Piece(piece.device, (Source(piece.ticket, ()),)) for piece in entry.pieces)
        copied: dict[str, Any] = {field: getattr(entry, field) for field in _COPIED}
        found[key] = VersionEntry(uid=entry.uid, pieces=pieces, **copied)
        tables.mark_dirty(*key)
    return found


def _with_writers(read: Mapping[DirtyKey, SnapshotEntry]) -> dict[DirtyKey, SnapshotEntry]:
    """Return entries of an earlier format, with the writer's lease of each draft: its only lease."""
    leases = {(entry.version, entry.name): key[1] for key, entry in read.items() if isinstance(entry, LeaseEntry)}
    return {
        key: structs.replace(entry, writer_lease=leases.get(key[1:], 0))
        if isinstance(entry, StateEntry) and entry.state is VersionState.DRAFT
        else entry
        for key, entry in read.items()
    }


def _check(tables: Tables, before: Mapping[DirtyKey, SnapshotEntry]) -> None:
    """Raise ``CorruptJournal`` unless the tables satisfy the invariants and write the entries that they came from."""
    after = dict(entries(tables))
    for key in sorted({*before, *after} - (tables.dirty_keys or {}).keys()):
        if before.get(key) != after.get(key):
            raise _corrupt(encode_key(key), "the restored tables would write a different entry")
    try:
        invariants.check(tables)
    except invariants.MISTAKES as error:
        raise CorruptJournal(f"the ledger's record contradicts itself: {invariants.in_words(error)}") from None


def _lose(tables: Tables, version: Version, why: str) -> None:
    """Mark a version that contradicts the rest as lost; its memory stays until its last lease ends. Idempotent."""
    if (version.state, version.why) == (VersionState.LOST, CONTRADICTED):
        return
    pool = version.pool
    tables.findings.append(f"{version.label} is lost: {why}")
    version.state, version.why = VersionState.LOST, CONTRADICTED
    pool.remember(Loss(version.number, CONTRADICTED))
    tables.mark_dirty(Kind.STATE, version.number, pool.name)
    tables.mark_dirty(Kind.NAME, name=pool.name)


def _drop(tables: Tables, key: DirtyKey, what: str) -> None:
    """Leave out an entry that refers to something that does not exist."""
    tables.mark_dirty(*key)
    tables.findings.append(f"dropped {what}")


def _read_session(tables: Tables, key: DirtyKey, entry: SessionEntry) -> None:
    number, user = key[1], tables.user(entry.uid)
    groups = frozenset(entry.groups)
    session = Session(
        number, entry.pid, user, entry.gid, groups, entry.connected, verified=entry.verified, process=entry.process
    )
    tables.sessions[number] = user.sessions[number] = session
    tables.stored += SESSION_FDS


def _read_name(tables: Tables, key: DirtyKey, entry: NameEntry) -> None:
    name = key[2]
    loss = Loss(entry.lost, entry.why) if entry.lost else None
    tables.past_names[name] = Past(entry.last, loss, entry.previous_owner, entry.group, entry.mode)
    if entry.owner is not None:
        pool = tables.pool(name)
        pool.owner, pool.group, pool.mode = entry.owner, entry.group, entry.mode


def _read_memory(tables: Tables, key: DirtyKey, entry: MemoryEntry) -> None:
    _, number, name = key
    if number in tables.tickets:
        raise _corrupt(encode_key(key), f"memory {number} is another pool's as well")
    if len(entry.handles) != len(entry.sizes) or not entry.sizes:
        raise _corrupt(encode_key(key), f"it has {len(entry.sizes)} sizes and {len(entry.handles)} handles")
    account, user = tables.account(entry.device), tables.user(entry.uid)
    ticket = Ticket(number, account, tables.pool(name), entry.version, user, entry.share, entry.durable, entry.sizes)
    ticket.state, ticket.handles = MemoryState.HELD, entry.handles
    tables.tickets[number] = account.tickets[number] = user.tickets[number] = ticket


def _read_version(tables: Tables, key: DirtyKey, entry: VersionEntry[Piece]) -> None:
    _, number, name = key
    pool = tables.pool(name)
    copied: dict[str, Any] = {field: getattr(entry, field) for field in _COPIED}
    version = Version(pool=pool, number=number, user=tables.user(entry.uid), **copied)
    for index, piece in enumerate(entry.pieces):
        found = tuple(_find_memory(tables, version, piece))
        mine = [version.plan is None or device == index for device in version.plan or (0,) * len(found)]
        if None in found or sum(mine) != len(found):
            _drop(tables, key, f"{name}@{number}, whose memory on {piece.device} is not there")
            tables.drop_idle_user(version.user)
            return
        here = iter(found)
        allocations = tuple(next(here) if each else None for each in mine)
        version.replicas[piece.device] = Replica(tables.account(piece.device), allocations)
    pool.versions[number] = version
    version.user.layouts += len(version.layout)
    memory.has(version, version.allocations)
    memory.assemble(version)


def _find_memory(tables: Tables, version: Version, piece: Piece) -> Iterator[Allocation | None]:
    """Yield the allocations of a piece, None for one that does not exist or that the version cannot have."""
    for source in piece.sources:
        ticket = tables.tickets.get(source.ticket)
        if ticket is None or _lacks(version, ticket, piece):
            yield None
        else:
            for number in source.numbers or tuple(ticket.allocations):
                yield ticket.allocations.get(number)


def _lacks(version: Version, ticket: Ticket, piece: Piece) -> bool:
    """Whether a version cannot have memory of a ticket on the device of a piece."""
    there = ticket.pool, ticket.account.device.uuid, ticket.share, ticket.durable
    return there != (version.pool, piece.device, version.share, version.durable)


def _count_memory(tables: Tables) -> None:
    """Drop the allocations that no version has, which were being freed, and count the others."""
    for ticket in tuple(tables.tickets.values()):
        account, user = ticket.account, ticket.user
        ticket.allocations = {each.number: each for each in ticket.allocations.values() if each.oldest}
        ticket.nbytes = sum(each.nbytes for each in ticket.allocations.values())
        if not ticket.allocations:
            _drop(tables, (Kind.MEMORY, ticket.id, ticket.pool.name), f"memory {ticket.id}, which no version has")
            del tables.tickets[ticket.id], account.tickets[ticket.id], user.tickets[ticket.id]
            tables.drop_idle_user(user)
        if not account.tickets:
            tables.absent.pop(account.device.uuid, None)
        account.allocated += ticket.nbytes
        user.memory += ticket.nbytes
        user.memory_descriptors += ticket.descriptors
        tables.stored += ticket.stored


def _read_state(tables: Tables, key: DirtyKey, entry: StateEntry) -> None:
    _, number, name = key
    if entry.state in UNRECORDED:
        raise _corrupt(encode_key(key), f"no version that is {entry.state.value} is recorded")
    version = _find_version(tables, name, number)
    if version is None:
        _drop(tables, key, f"a state of {name}@{number}, which does not exist")
    else:
        version.state, version.why = entry.state, entry.why
        version.digests, version.published = entry.digests, entry.published
        version.writer_lease, version.lent = entry.writer_lease, entry.lent


def _read_lease(tables: Tables, key: DirtyKey, entry: LeaseEntry) -> None:
    number, label = key[1], f"{entry.name}@{entry.version}"
    session, version = tables.sessions.get(entry.session), _find_version(tables, entry.name, entry.version)
    if session is None or version is None:
        missing = label if version is None else f"session {entry.session}"
        _drop(tables, key, f"lease {number} of session {entry.session} on {label}: {missing} is not there")
        return
    pieces = dict(enumerate(version.replicas.values()))
    given = tuple(pieces[index] for index in entry.given if index in pieces)
    lease = Lease(number, session, version, given, entry.bound, unsent=entry.unsent, since=entry.since)
    tables.leases[number] = session.leases[number] = version.holders[number] = lease
    session.user.leases += 1
    if not given or len(given) < len(entry.given):
        tables.mark_dirty(*key)
        _lose(tables, version, f"lease {number} names memory that the version does not have")


def _read_event(tables: Tables, key: DirtyKey, entry: EventEntry) -> None:
    number, lease = key[1], tables.leases.get(entry.lease)
    if lease is None or not lease.version.writable or entry.name in lease.version.ipc_events:
        _drop(tables, key, f"event {number}, {entry.name!r}, which lease {entry.lease} cannot have")
        return
    event = IpcEvent(number, entry.name, lease, entry.device, entry.handle, entry.generation)
    tables.ipc_events[number] = lease.ipc_events[number] = lease.session.ipc_events[number] = event
    lease.version.ipc_events[entry.name] = event
    lease.session.user.events += 1


def _read_watch(tables: Tables, key: DirtyKey, _: WatchEntry) -> None:
    number, name = key[1:]
    session = tables.sessions.get(number)
    if session is None or not session.connected:
        _drop(tables, key, f"a watch on {name} of session {number}, which has no connection to be told by")
        return
    pool = session.watches[name] = tables.pool(name)
    pool.watchers[session] = None
    session.user.watches += 1


def _read_lock(tables: Tables, key: DirtyKey, entry: LockEntry) -> None:
    _, number, name = key
    session, pool = tables.sessions.get(entry.session), tables.pools.get(name)
    if session is None or (pool is not None and pool.lock is not None):
        why = "which is not there" if session is None else "while another one is there"
        _drop(tables, key, f"lock {number} of {name}, of session {entry.session}, {why}")
        return
    pool = tables.pool(name)
    held = pool.lock = PoolLock(number, session, pool)
    tables.locks[number] = session.locks[number] = held
    session.user.locks += 1


class _Codec(NamedTuple):
    shape: type[SnapshotEntry]
    write: Callable[[Tables, int, str], SnapshotEntry | None]
    read: Callable[[Tables, DirtyKey, Any], None]


_CODECS: Mapping[Kind, _Codec] = {
    Kind.SESSION: _Codec(SessionEntry, _write_session, _read_session),
    Kind.NAME: _Codec(NameEntry, _write_name, _read_name),
    Kind.MEMORY: _Codec(MemoryEntry, _write_memory, _read_memory),
    Kind.VERSION: _Codec(VersionEntry[Piece], _write_version, _read_version),
    Kind.STATE: _Codec(StateEntry, _write_state, _read_state),
    Kind.LEASE: _Codec(LeaseEntry, _write_lease, _read_lease),
    Kind.EVENT: _Codec(EventEntry, _write_event, _read_event),
    Kind.WATCH: _Codec(WatchEntry, _write_watch, _read_watch),
    Kind.LOCK: _Codec(LockEntry, _write_lock, _read_lock),
}
"""The kinds of entries, in the order in which the tables can be filled."""

_WRITERS = {kind: codec.write for kind, codec in _CODECS.items()}

# -- repair --------------------------------------------------------------------------------------------


def _repair(tables: Tables) -> None:
    """Mark every version that contradicts the rest of the tables as lost."""
    for pool in tuple(tables.pools.values()):
        if pool.owner is not None and not pool.versions:
            tables.findings.append(f"{pool.name} has no owner any more: there is no version of it")
            pool.owner = None
            tables.mark_dirty(Kind.NAME, name=pool.name)
        elif pool.owner is None and pool.versions:
            for version in pool.versions.values():
                _lose(tables, version, "no entry names the owner of the pool")
            pool.owner, pool.group, pool.mode = version.owner, 0, 0
        for version in pool.versions.values():
            _repair_version(tables, version)
        _repair_numbers(tables, pool)
        _repair_current(tables, pool)
        if pool.idle:
            tables.drop_pool(pool)


def _repair_version(tables: Tables, version: Version) -> None:
    """Mark a version as lost if its state contradicts its leases."""
    if version.state is VersionState.ALLOCATING:
        _lose(tables, version, "it has no state entry")
    elif version.state is VersionState.LOST and not version.why:
        _lose(tables, version, "its state entry gives no reason for the loss")
    elif version.state is VersionState.DRAFT and version.writer_lease not in version.holders:
        _lose(tables, version, "it is a draft, and there is no lease of its writer")
    elif version.state is VersionState.DRAFT and version.leases > 1 and not version.lent:
        _lose(tables, version, f"it is a draft that was not lent, and there are {version.leases} leases")
    elif version.lent and version.state in PUBLISHED:
        _lose(tables, version, "it was published, and lent as a draft that is not")
    for lease in version.holders.values():
        if lease.unsent and opened_by(version) != FABRIC:
            _lose(tables, version, f"lease {lease.id} got fabric handles, and it has none")
            lease.unsent = False
            tables.mark_dirty(Kind.LEASE, lease.id)


def _repair_numbers(tables: Tables, pool: Pool) -> None:
    """Find the draft; mark as lost all other drafts, and all other versions past the last published one."""
    beyond = [version for version in pool.versions.values() if version.number > pool.last]
    if [(version.number, version.state) for version in beyond] == [(pool.last + 1, VersionState.DRAFT)]:
        pool.draft = beyond.pop()
    for version in pool.versions.values():
        if version.state is VersionState.DRAFT and version is not pool.draft:
            why = f"it is a draft, and not the only one, or not the next after version {pool.last}"
            _lose(tables, version, why)
    for version in beyond:
        _lose(tables, version, f"it is no draft, and {pool.last} was the last one that was published")
        pool.last = max(pool.last, version.number)  # clients may know the number, so it is not given out again
        tables.mark_dirty(Kind.NAME, name=pool.name)


def _repair_current(tables: Tables, pool: Pool) -> None:
    """Find the current version; if there are two or more, mark all as lost except the last published one."""
    current = [version for version in pool.versions.values() if version.state is VersionState.CURRENT]
    if len(current) > 1:
        for version in current:
            if version.number != pool.last:
                why = f"{len(current)} versions are current, and {pool.last} was published last"
                _lose(tables, version, why)
    pool.current = next((version for version in current if version.state is VersionState.CURRENT), None)


# -- audit ---------------------------------------------------------------------------------------------


class Audit(NamedTuple):
    """The damage that a mistake did to the tables."""

    #: Parts of the tables that contradict the rest.
    disagreements: Sequence[str]
    #: What the next broker would drop or lose if it loaded the snapshot now.
    given_up: Sequence[str]
    #: Why the next broker would refuse the snapshot; empty if it would not.
    refused: str


def audit(tables: Tables) -> Audit:
    """Check the tables, and load their snapshot on trial; costs time in proportion to the tables."""
    disagreements = invariants.disagreements(tables)
    if tables.store is None:
        return Audit(disagreements, (), "")
    devices = [account.device for account in tables.accounts.values()]
    later = Tables(devices, tables.uid, tables.limits, tables.policy, tables.store)
    try:
        load(later, full_snapshot(tables).items())
    except CorruptJournal as error:
        return Audit(disagreements, (), str(error))
    return Audit(disagreements, later.findings, "")
