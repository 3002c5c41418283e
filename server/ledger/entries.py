"""The format of the ledger's snapshot: the fields of each kind of entry, and the formats that can be read.

Entries are encoded as arrays, so the order of the fields is the format. A new field comes last, has a default, and
needs a new number (:data:`FORMAT`). :mod:`~cubroker.server.ledger.snapshot` writes and reads the entries.
"""

from __future__ import annotations

from typing import Annotated, Generic, TypeVar

from msgspec import Meta, Struct

from cubroker.protocol.fields import Encoded, EventHandle, Handles, Mode, Name, Plan, Time, Uuid
from cubroker.protocol.messages import Digests
from cubroker.protocol.status import ProcessInfo
from cubroker.server.ledger.states import VersionState
from cubroker.server.ledger.tables import Kind

FORMAT = 6
"""The format of everything below. In format 5 a draft had one lease, and no entry named its writer. Format 4 had no
processes, and no times of leases and publications. Up to format 3 the entry of each version had the version's own
memory. Format 1 had no digests, and no owners of pools that have ended; format 2 had no locks."""

SHARES = 4  #: The first format in which versions can share memory, and memory has entries of its own.
WRITERS = 6  #: The first format that records which lease writes a draft.

GROWN = (Kind.SESSION, Kind.STATE, Kind.LEASE)
"""Entries that got fields in later formats; those of an earlier format are written again with the next changes."""

READABLE = (1, 2, 3, 4, 5, FORMAT)  #: The formats that can be read. Entries are always written in the newest.

Number = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Uid = Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]
Words = Annotated[str, Meta(max_length=1 << 16)]
Sizes = Annotated[tuple[Number, ...], Meta(max_length=4096)]
P = TypeVar("P")


class SnapshotEntry(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Base of all values."""


class Counters(SnapshotEntry, frozen=True):
    """The last numbers given out, and whether the broker is drained by hand."""

    leases: Number = 0
    events: Number = 0
    tickets: Number = 0
    sessions: Number = 0
    drained: bool = False
    locks: Number = 0


class SessionEntry(SnapshotEntry, frozen=True):
    """A session, by its number."""

    pid: Number
    uid: Uid
    gid: Uid
    groups: Annotated[tuple[Uid, ...], Meta(max_length=1 << 16)]
    connected: bool
    verified: bool = False
    process: ProcessInfo | None = None


class WatchEntry(SnapshotEntry, frozen=True):
    """A watch, by the session and the name."""


class NameEntry(SnapshotEntry, frozen=True):
    """The past of a name, and its owner while a version of it lives."""

    last: Number
    #: Number of the version that was lost last; 0: none was.
    lost: Number
    why: Words
    owner: Uid | None
    #: If no version lives, the last group and the last mode; format 1 had 0.
    group: Uid
    mode: Mode
    previous_owner: Uid | None = None


class MemoryEntry(SnapshotEntry, frozen=True):
    """A ticket, by its number and the pool; the entries of versions say which of its allocations still exist."""

    device: Uuid
    uid: Uid
    #: Number of the version whose draft was given it.
    version: Number
    share: Annotated[str, Meta(max_length=16)]
    durable: bool
    sizes: Sizes
    handles: Handles


class Source(SnapshotEntry, frozen=True):
    """Allocations of one ticket."""

    ticket: Number
    #: Empty: all.
    numbers: Sizes


class Piece(SnapshotEntry, frozen=True):
    """The memory of a version on one device, in the order of its layout."""

    device: Uuid
    sources: Annotated[tuple[Source, ...], Meta(max_length=4096)]


class OwnPiece(SnapshotEntry, frozen=True):
    """A piece up to format 3: one ticket, which no other version had."""

    device: Uuid
    ticket: Number
    sizes: Sizes
    #: One for each allocation of the layout; empty for those on other devices.
    handles: Handles


class VersionEntry(SnapshotEntry, Generic[P], frozen=True):
    """The part of a version that does not change once it is published, by number and name; its layout is large."""

    uid: Uid
    writer: Words
    mode: Mode | None
    share: Annotated[str, Meta(max_length=16)]
    plan: Plan | None
    writable: bool
    durable: bool
    tensors: Number
    nbytes: Number
    #: Up to format 3 :class:`OwnPiece`, now :class:`Piece`.
    pieces: Annotated[tuple[P, ...], Meta(max_length=64)]
    layout: Encoded


class StateEntry(SnapshotEntry, frozen=True):
    """The part of a version that changes, by number and name."""

    state: VersionState
    why: Words
    digests: Digests | None = None
    published: Time | None = None
    #: Number of the lease that writes it as a draft, or wrote it; 0: not known.
    writer_lease: Number = 0
    lent: bool = False


class LeaseEntry(SnapshotEntry, frozen=True):
    """A lease, by its number."""

    session: Number
    name: Name
    version: Number
    #: Indices of the version's pieces.
    given: Annotated[tuple[Number, ...], Meta(max_length=64)]
    bound: bool
    unsent: bool
    since: Time | None = None


class EventEntry(SnapshotEntry, frozen=True):
    """An IPC event, by its number."""

    lease: Number
    name: Name
    device: Uuid
    handle: EventHandle
    generation: Number


class LockEntry(SnapshotEntry, frozen=True):
    """A lock, by its number and the name."""

    session: Number
