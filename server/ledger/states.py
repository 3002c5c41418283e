"""State tables of versions, of their memory, and of multicast groups.

Two rules. Every change of state of these three is in a table here, and nowhere else. This module does not know who
asked for a change.

A *version* is allocating until all its memory is allocated. It is a draft until its writer seals it, and then current.
Sealing the next version supersedes it; retiring it takes it out of service. A superseded or retired version ends with
its last lease, except for superseded ones that the policy keeps; a current version does not end. A version whose
memory ended with an earlier broker is lost: no more leases on it are granted, and it ends with its last lease too. A
draft that readers have attached to is retired, not ended, if its writer gives it up.

A *ticket* stands for the memory that one draft was given on one device. Its bytes are promised when the ledger requests
them, allocated once the device reports that, and counted until the device reports them free. A ticket that is cancelled
while the device works on it still awaits the outcome: only the outcome says how many bytes to count.

A *multicast group* binds all memory of a multicast version. It begins when all that memory is allocated, and is unbound
before any of the memory is freed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import TypeVar


class VersionState(Enum):
    """The states of a version. Users read the value, and the journal has it."""

    ALLOCATING = "allocating"
    DRAFT = "draft"
    CURRENT = "current"
    SUPERSEDED = "superseded"
    RETIRED = "retired"
    LOST = "lost"
    ENDED = "ended"


class VersionEvent(Enum):
    """The events that change a version's state. The value is the text for event logs."""

    FILLED = "all its memory was allocated"
    DROPPED = "its writer gave it up"
    ABANDONED = "its writer gave it up, and it was lent"
    SEALED = "its writer sealed it"
    REPLACED = "the next version was sealed"
    RETIRED = "a user retired it"
    LOST = "its memory cannot be reached any more"
    UNUSED = "no lease holds it, and it is not to be kept"


VERSION: Mapping[VersionState, Mapping[VersionEvent, VersionState]] = {
    VersionState.ALLOCATING: {
        VersionEvent.FILLED: VersionState.DRAFT,
        VersionEvent.DROPPED: VersionState.ENDED,
    },
    VersionState.DRAFT: {
        VersionEvent.SEALED: VersionState.CURRENT,
        VersionEvent.DROPPED: VersionState.ENDED,
        VersionEvent.ABANDONED: VersionState.RETIRED,
        VersionEvent.LOST: VersionState.LOST,
    },
    VersionState.CURRENT: {
        VersionEvent.REPLACED: VersionState.SUPERSEDED,
        VersionEvent.RETIRED: VersionState.RETIRED,
        VersionEvent.LOST: VersionState.LOST,
    },
    VersionState.SUPERSEDED: {
        VersionEvent.RETIRED: VersionState.RETIRED,
        VersionEvent.UNUSED: VersionState.ENDED,
        VersionEvent.LOST: VersionState.LOST,
    },
    VersionState.RETIRED: {
        VersionEvent.UNUSED: VersionState.ENDED,
        VersionEvent.LOST: VersionState.LOST,
    },
    VersionState.LOST: {VersionEvent.UNUSED: VersionState.ENDED},
    VersionState.ENDED: {},
}


class MemoryState(Enum):
    """The states of a ticket. The value is the text for event logs and errors."""

    PROMISED = "promised"
    HELD = "held"
    CANCELLED = "given up while being allocated"
    FREEING = "being freed"
    GONE = "gone"


class MemoryEvent(Enum):
    """The events that change a ticket's state. The value is the text for event logs."""

    ALLOCATED = "the device allocated it"
    FAILED = "the device could not allocate it"
    RELEASED = "its version ended"
    FREED = "the device freed it"


MEMORY: Mapping[MemoryState, Mapping[MemoryEvent, MemoryState]] = {
    MemoryState.PROMISED: {
        MemoryEvent.ALLOCATED: MemoryState.HELD,
        MemoryEvent.FAILED: MemoryState.GONE,
        MemoryEvent.RELEASED: MemoryState.CANCELLED,
    },
    MemoryState.HELD: {MemoryEvent.RELEASED: MemoryState.FREEING},
    MemoryState.CANCELLED: {
        MemoryEvent.ALLOCATED: MemoryState.FREEING,
        MemoryEvent.FAILED: MemoryState.GONE,
        MemoryEvent.FREED: MemoryState.GONE,
    },
    MemoryState.FREEING: {MemoryEvent.FREED: MemoryState.GONE},
    MemoryState.GONE: {},
}

PROMISED = (MemoryState.PROMISED, MemoryState.CANCELLED)  #: The states in which bytes count as promised.
ALLOCATED = (MemoryState.HELD, MemoryState.FREEING)  #: The states in which bytes count as allocated.


class GroupState(Enum):
    """The states of a multicast group. The value is the text for event logs."""

    BINDING = "being bound"
    BOUND = "bound"
    CANCELLED = "given up while being bound"
    UNBINDING = "being unbound"
    GONE = "gone"


class GroupEvent(Enum):
    """The events that change a multicast group's state. The value is the text for event logs."""

    BOUND = "its replicas are bound, or written by copies"
    RELEASED = "its version ended"
    UNBOUND = "nothing is bound to its memory"


GROUP: Mapping[GroupState, Mapping[GroupEvent, GroupState]] = {
    GroupState.BINDING: {GroupEvent.BOUND: GroupState.BOUND, GroupEvent.RELEASED: GroupState.CANCELLED},
    GroupState.BOUND: {GroupEvent.RELEASED: GroupState.UNBINDING},
    GroupState.CANCELLED: {GroupEvent.BOUND: GroupState.UNBINDING, GroupEvent.UNBOUND: GroupState.GONE},
    GroupState.UNBINDING: {GroupEvent.UNBOUND: GroupState.GONE},
    GroupState.GONE: {},
}

S = TypeVar("S", bound=Enum)
E = TypeVar("E", bound=Enum)


class Impossible(RuntimeError):
    """An event that cannot follow from what the ledger knows: a mistake of the broker, not of a client."""

    def __init__(self, what: str, log: Iterable[tuple[float, str]] = ()) -> None:
        super().__init__("\n  ".join((what, *(text for _, text in log))))


def step(table: Mapping[S, Mapping[E, S]], state: S, event: E, log: Iterable[tuple[float, str]]) -> S:
    """Return the state after ``event``; raises :class:`Impossible`, with ``log``, if the table has none."""
    after = table[state].get(event)
    if after is None:
        raise Impossible(f"{event.name} cannot follow {state.name}; what happened before:", log)
    return after
