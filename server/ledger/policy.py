"""What users may do and have, as plain data: quotas, administrators, defaults of pools, and how many versions stay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from cubroker.protocol.messages import AUTO

MODE = 0o644  #: The default mode: every user may attach, and only the owner may publish and retire.
MAX_KEEP = 1000  #: The most superseded versions of a pool that a policy can keep.

ADMIN_RESERVE = 16
"""Places of the store that only sessions of administrators may take, so that a full store does not keep them out; in a
small store, a sixteenth of its places."""


@dataclass(frozen=True, slots=True)
class Quota:
    """What one user may have at a time, all sessions together; None: no limit."""

    #: Bytes of all devices together: allocated, promised, and set aside for a create that waits for room.
    memory: int | None = None
    #: Detached ones included.
    sessions: int | None = None
    leases: int | None = None
    #: Requests that wait.
    requests: int | None = None
    watches: int | None = None
    #: IPC events that its sessions made.
    events: int | None = None
    locks: int | None = None
    #: Bytes of the encoded layouts of its versions and waiting creates, in the broker's own memory.
    layouts: int | None = None
    #: Descriptors of the broker: two for every session, and those of memory that is emulated or shared by descriptor.
    descriptors: int | None = None
    #: Bytes of the broker's memory that its processes refer to without a lease, as far as the broker can see. Such
    #: memory was not granted; a user that exceeds this gets no further lease.
    mapped_beyond_leases: int | None = None


@dataclass(frozen=True, slots=True)
class NameReservation:
    """Who may publish names with one prefix, by uid and by gid; administrators may too."""

    users: frozenset[int] = frozenset()
    groups: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Limits:
    """What one session may have at a time, so that a flood of requests cannot grow the ledger."""

    leases: int = 4096
    #: Requests that wait.
    requests: int = 1024
    watches: int = 1024
    #: IPC events.
    events: int = 1024
    locks: int = 1024


NOTHING = Quota(**{each.name: 0 for each in fields(Quota)})
NO_LIMITS = Limits(**{each.name: 0 for each in fields(Limits)})


@dataclass(frozen=True, slots=True)
class Policy:
    """The rules of one broker."""

    #: How many superseded versions of each pool, the newest ones, stay without leases.
    keep: int = 0
    #: The mode of a pool whose creator gave none.
    mode: int = MODE
    #: Users who may do everything, by their numbers alone.
    admins: frozenset[int] = frozenset()
    #: What every user may have, except those in ``quotas``, which has the quotas of certain users by uid.
    quota: Quota = Quota()
    quotas: Mapping[int, Quota] = field(default_factory=dict)
    #: The share kind of a version whose creator named none: ``ipc``, ``vmm``, or :data:`AUTO`, which is ``vmm`` if all
    #: its devices can share memory so, else ``ipc``.
    share: str = AUTO
    #: Whether root may do everything if it is verified to be root in the broker's own namespaces.
    trust_root: bool = True
    #: By the beginning of a pool's name, who alone may publish such pools.
    reserved: Mapping[str, NameReservation] = field(default_factory=dict)

    def quota_of(self, uid: int) -> Quota:
        """Return what a user may have."""
        return self.quotas.get(uid, self.quota)


def admin_reserve(store: int | None) -> int:
    """Return how many places of a store are reserved for administrators."""
    return min(ADMIN_RESERVE, (store or 0) // ADMIN_RESERVE)


def exceeds(used: int, more: int, limit: int | None) -> bool:
    """Whether ``more`` on top of ``used`` is over a limit (None: there is none); zero more never is."""
    return limit is not None and more > 0 and used + more > limit
