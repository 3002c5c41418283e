"""What the broker tells about itself: pools, sessions, devices, memory, and who waits."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from cubroker.protocol.bounds import MAX_DEVICES, Time
from cubroker.protocol.wire import MAX_ITEMS

NOBODY = 0xFFFF_FFFF
"""A uid and a gid that no process can have: of whom the receiver may not know."""


class PoolInfo(Struct, frozen=True):
    """One live version. ``state``: ``draft``, ``current``, ``superseded``, ``retired``, or ``lost``: ``why`` says how.

    ``nbytes`` is what its layout takes: on each device, or, if it is ``sharded``, on all of them together.
    ``owner`` made the version; ``group`` and ``mode`` are the pool's. Its readers may write it if it is ``writable``.
    ``how`` and ``why`` are those of a ``multicast`` version's :class:`Team`, and ``opened_by`` says what opens its
    memory: ``handle``, ``descriptor`` or ``fabric handle``; all are empty until that is there. It is ``protected`` if
    the device refuses what its readers write, by mistake, into their mappings. ``digest`` is the algorithm of the
    digests that it was sealed with, empty if there are none.
    """

    name: str
    version: int
    state: str
    nbytes: int
    tensors: int
    share: str
    devices: Annotated[tuple[str, ...], Meta(max_length=MAX_DEVICES)]
    durable: bool
    leases: int
    owner: int
    group: int
    mode: int
    sharded: bool
    writable: bool
    how: str
    why: str
    opened_by: str
    protected: bool = False
    digest: str = ""


class LeaseInfo(Struct, frozen=True):
    """One lease of a client."""

    pool: str
    version: int


class ClientInfo(Struct, frozen=True):
    """One session. ``state``: ``connected``, or ``detached`` while its process lives without a connection.

    ``leases`` are those on pools that the receiver may read. ``mapped_beyond_leases`` are the bytes of the broker's
    memory that its process has mapped or open although no session of its user has a lease on them; None: unknown.
    """

    session: int
    pid: int
    uid: int
    state: str
    leases: Annotated[tuple[LeaseInfo, ...], Meta(max_length=MAX_ITEMS)]
    mapped_beyond_leases: int | None = None


class DeviceInfo(Struct, frozen=True):
    """One device, in bytes. ``promised`` is granted to requests and not yet allocated."""

    index: int
    uuid: str
    name: str
    total: int
    budget: int
    allocated: int
    promised: int


class BlockInfo(Struct, frozen=True):
    """The memory of one version on one device: ``nbytes`` of it, which its ``owner`` has.

    ``state`` is the version's, and ``stage`` that of the memory: ``promised``, ``held``, ``given up`` or ``freeing``.
    Of pools that the receiver may not read it is the sum, for each stage, without ``pool`` and ``version``; the
    ``state`` is ``current`` then, and the ``owner`` :data:`NOBODY`.
    """

    device: str
    pool: str
    version: int
    state: str
    stage: str
    nbytes: int
    owner: int


class WaiterInfo(Struct, frozen=True):
    """One request that waits: what is asked for, ``attach``, ``create`` or ``event``, and what it ``awaits``.

    ``nbytes`` is what a create is to take, on all devices together. ``since`` is in seconds since 1970.
    It has no ``pool`` if the receiver may not see that.
    """

    session: int
    pid: int
    uid: int
    request: int
    what: str
    pool: str
    awaits: str
    nbytes: int
    since: Time


class Line(Struct, frozen=True):
    """What happened, and when, in seconds since 1970."""

    time: Time
    text: str
