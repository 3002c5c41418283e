"""The lives that the ledger follows, as tables: of a version, of a piece of memory, and of a team of such pieces.

Two rules hold for this module. Every change of state of any is in a table here, and nowhere
else; and nothing here knows who asked for the change.

A *version* begins while its memory is being allocated, becomes a draft once its writer has it, and
current once that writer seals it. Sealing the next one supersedes it; retiring takes it out of
service. A superseded or retired version ends with its last lease, but for the superseded ones that
the policy keeps; a current one never ends by itself. Whatever it is, it is lost when its memory went with
an earlier broker: nobody gets it any more, and it ends with its last lease, too.

An *allocation* is the memory of one version on one device, known by its ticket. Its bytes are
promised from the moment that it is asked for, allocated once the device has said so, and counted
until the device has said that they are back. It may be given up while the device still works on
it: then the outcome is awaited all the same, since only the outcome tells what there is to count.

A *team* is all memory of a multicast version. It begins when all of that is there, and is dissolved before any
of it is freed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import TypeVar


class State(Enum):
    """Where a version stands; the value is what users read."""

    ALLOCATING = "allocating"
    DRAFT = "draft"
    CURRENT = "current"
    SUPERSEDED = "superseded"
    RETIRED = "retired"
    LOST = "lost"
    ENDED = "ended"


class Cause(Enum):
    """What moves a version."""

    FILLED = "all its memory was allocated"
    DROPPED = "its writer gave it up"
    SEALED = "its writer sealed it"
    REPLACED = "the next version was sealed"
    RETIRED = "somebody retired it"
    VANISHED = "its memory cannot be reached any more"
    EMPTIED = "nobody holds it or is to have it any more"


VERSION: Mapping[State, Mapping[Cause, State]] = {
    State.ALLOCATING: {Cause.FILLED: State.DRAFT, Cause.DROPPED: State.ENDED},
    State.DRAFT: {Cause.SEALED: State.CURRENT, Cause.DROPPED: State.ENDED, Cause.VANISHED: State.LOST},
    State.CURRENT: {Cause.REPLACED: State.SUPERSEDED, Cause.RETIRED: State.RETIRED, Cause.VANISHED: State.LOST},
    State.SUPERSEDED: {Cause.RETIRED: State.RETIRED, Cause.EMPTIED: State.ENDED, Cause.VANISHED: State.LOST},
    State.RETIRED: {Cause.EMPTIED: State.ENDED, Cause.VANISHED: State.LOST},
    State.LOST: {Cause.EMPTIED: State.ENDED},
    State.ENDED: {},
}


class Stage(Enum):
    """Where an allocation stands."""

    PROMISED = "promised"
    HELD = "held"
    GIVEN_UP = "given up while being allocated"
    FREEING = "being freed"
    GONE = "gone"


class Report(Enum):
    """What moves an allocation: the ledger releases it, or its device reports."""

    ALLOCATED = "the device allocated it"
    FAILED = "the device could not allocate it"
    RELEASED = "nobody needs it any more"
    FREED = "the device freed it"


MEMORY: Mapping[Stage, Mapping[Report, Stage]] = {
    Stage.PROMISED: {Report.ALLOCATED: Stage.HELD, Report.FAILED: Stage.GONE, Report.RELEASED: Stage.GIVEN_UP},
    Stage.HELD: {Report.RELEASED: Stage.FREEING},
    Stage.GIVEN_UP: {Report.ALLOCATED: Stage.FREEING, Report.FAILED: Stage.GONE, Report.FREED: Stage.GONE},
    Stage.FREEING: {Report.FREED: Stage.GONE},
    Stage.GONE: {},
}


class Bond(Enum):
    """Where a team stands: the replicas of a multicast version, bound together."""

    ASSEMBLING = "being assembled"
    READY = "ready"
    GIVEN_UP = "given up while being assembled"
    DISSOLVING = "being dissolved"
    GONE = "gone"


class Turn(Enum):
    """What moves a team: the ledger releases it, or the shell reports."""

    ASSEMBLED = "it was assembled, or is to do without"
    RELEASED = "nobody needs it any more"
    DISSOLVED = "it was dissolved"


TEAM: Mapping[Bond, Mapping[Turn, Bond]] = {
    Bond.ASSEMBLING: {Turn.ASSEMBLED: Bond.READY, Turn.RELEASED: Bond.GIVEN_UP},
    Bond.READY: {Turn.RELEASED: Bond.DISSOLVING},
    Bond.GIVEN_UP: {Turn.ASSEMBLED: Bond.DISSOLVING, Turn.DISSOLVED: Bond.GONE},
    Bond.DISSOLVING: {Turn.DISSOLVED: Bond.GONE},
    Bond.GONE: {},
}

PROMISED = (Stage.PROMISED, Stage.GIVEN_UP)
"""The stages whose bytes count as promised."""

ALLOCATED = (Stage.HELD, Stage.FREEING)
"""The stages whose bytes count as allocated."""

S = TypeVar("S", bound=Enum)
C = TypeVar("C", bound=Enum)


class Impossible(RuntimeError):
    """The ledger was told what cannot follow from what it knows: a fault of ours, not of a client."""

    def __init__(self, what: str, story: Iterable[str] = ()) -> None:
        super().__init__("\n  ".join((what, *story)))


def step(table: Mapping[S, Mapping[C, S]], state: S, cause: C, story: Iterable[str]) -> S:
    """Return the state after ``cause``; raises :class:`Impossible`, with ``story``, if the table has none."""
    after = table[state].get(cause)
    if after is None:
        raise Impossible(f"{cause.name} cannot follow {state.name}; what happened before:", story)
    return after
