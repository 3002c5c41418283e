"""What the broker reports: pools, sessions, devices, memory, waiting requests. These structs travel as maps.

They are also the documents that the command line prints with ``--json``, so fields are added at the end.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from cubroker.protocol.fields import MAX_DEVICES, MAX_ITEMS, Time

HIDDEN_ID = 0xFFFF_FFFF  #: A uid and a gid that no process can have: stands for a user whom the receiver may not know.


class PoolInfo(Struct, frozen=True):
    """One live version."""

    name: str
    version: int
    #: ``draft``, ``current``, ``superseded``, ``retired`` or ``lost``.
    state: str
    #: Bytes of its layout: on each device, or if it is ``sharded`` on all devices together.
    nbytes: int
    #: The number of its tensors.
    tensors: int
    share: str
    #: Their UUIDs.
    devices: Annotated[tuple[str, ...], Meta(max_length=MAX_DEVICES)]
    durable: bool
    #: The number of leases on it.
    leases: int
    #: The user who made the version.
    owner: int
    #: The pool's group.
    group: int
    #: The pool's permissions, like a file's.
    mode: int
    sharded: bool
    #: Whether clients that attach may write it.
    writable: bool
    #: Of a ``multicast`` version, as in :class:`~cubroker.protocol.messages.Team`; empty until its memory is allocated.
    how: str
    #: Likewise; of a ``lost`` version, how it was lost.
    why: str
    #: What opens its memory: ``handle``, ``descriptor`` or ``fabric handle``; empty until it is allocated.
    opened_by: str
    #: Whether the device refuses accidental writes through its readers' mappings.
    protected: bool = False
    #: The algorithm of the digests that it was sealed with; empty without digests.
    digest: str = ""
    #: Bytes of device memory that it has, on all devices together; 0 from a broker that does not tell.
    memory: int = 0
    #: How many of these bytes an older live version has, too; they are shown with that one.
    shared: int = 0
    #: When it was published, in seconds since 1970; None if it was not, or the broker does not tell.
    published: Time | None = None


class SharingInfo(Struct, frozen=True):
    """What a version shares with another live one of its pool."""

    #: The number of the other version.
    version: int
    #: How many allocations both have, on all devices together.
    allocations: int
    #: Their bytes of device memory.
    nbytes: int


class LeaseInfo(Struct, frozen=True):
    """One lease of a client."""

    pool: str
    version: int
    #: When it began, in seconds since 1970; None from a broker that does not tell.
    held_since: Time | None = None


MAX_PROCESS_NAME = 64  #: Characters of a process's name; a longer one loses its end.
MAX_CGROUP = 512  #: Characters of the path of a process's cgroup; a longer one loses its beginning.


class ProcessInfo(Struct, frozen=True):
    """A process as /proc showed it when it connected; escaped, so that it can be printed."""

    #: What it calls itself, which proves nothing.
    name: Annotated[str, Meta(max_length=MAX_PROCESS_NAME)]
    #: The path of its cgroup, which names its container or unit; None for the root.
    cgroup: Annotated[str, Meta(max_length=MAX_CGROUP)] | None
    #: When it started, in seconds since 1970.
    started: Time


class ClientInfo(Struct, frozen=True):
    """One session."""

    session: int
    pid: int
    uid: int
    #: ``connected``, or ``detached`` while its process lives without a connection.
    state: str
    #: Its leases on pools that the receiver may read.
    leases: Annotated[tuple[LeaseInfo, ...], Meta(max_length=MAX_ITEMS)]
    #: Bytes of the broker's memory that its process has mapped or open without a lease of its user; None if unknown.
    mapped_beyond_leases: int | None = None
    #: Names whose locks it has, of those that the receiver may read.
    locks: Annotated[tuple[str, ...], Meta(max_length=MAX_ITEMS)] = ()
    #: None if the broker could not see it, or does not tell.
    process: ProcessInfo | None = None


class DeviceInfo(Struct, frozen=True):
    """One device; sizes are bytes."""

    index: int
    uuid: str
    name: str
    total: int
    #: How much of ``total`` pools may use.
    budget: int
    allocated: int
    #: Granted to requests and not allocated yet.
    promised: int


MAX_SHARERS = 16  #: Versions that one :class:`SharedBytes` names, and such sets of one block: users make any number.


class SharedBytes(Struct, frozen=True):
    """Memory on one device that several live versions of one pool have; it is freed with the last of them."""

    #: Their numbers, oldest first; empty if there are too many sets of versions, or too large ones, to be listed.
    versions: Annotated[tuple[int, ...], Meta(max_length=MAX_SHARERS)]
    #: Bytes that these versions have, and no other.
    nbytes: int


class BlockInfo(Struct, frozen=True):
    """The memory of one version on one device, without the part that an older live version has, too.

    Memory of pools that the receiver may not read is summed up, one block for each ``stage``: such a block has no
    ``pool``, version 0, the state ``current`` and the owner :data:`HIDDEN_ID`.
    """

    #: The UUID.
    device: str
    pool: str
    version: int
    #: The state of the version.
    state: str
    #: ``promised``, ``held``, ``given up`` or ``freeing``.
    stage: str
    nbytes: int
    owner: int
    #: The part of ``nbytes`` that later live versions have, too.
    shared: Annotated[tuple[SharedBytes, ...], Meta(max_length=MAX_SHARERS + 1)] = ()


WAITS = ("attach", "create", "event", "lock")  #: The requests that wait.


class WaiterInfo(Struct, frozen=True):
    """One waiting request."""

    session: int
    pid: int
    uid: int
    #: The id of the request.
    request: int
    #: One of :data:`WAITS`.
    what: str
    #: Empty if the receiver may not know it.
    pool: str
    #: What it waits for, in words.
    awaits: str
    #: Bytes that a create will allocate, on all devices together.
    nbytes: int
    #: When it began, in seconds since 1970.
    since: Time


class Line(Struct, frozen=True):
    """One event of a story."""

    #: When it happened, in seconds since 1970.
    time: Time
    text: str
