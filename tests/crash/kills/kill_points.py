"""The table of points at which workers are killed.

Every scene with the obstacle that the observer puts in its way and the share kind of its pool, and the labels at which
it halts: those before the obstacle goes (the worker is in a line then), and those after.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tests import sampling
from tests.crash.content import BOTH, LINKS, SHARES, TEAM, TEAM_READ, Form
from tests.crash.kills.workloads import CHAINED, IN_LINE, SCRATCH, SHARDED

Obstacle = Literal["", "turn", "room", "publication", "failure", "retirement", "lock"]
"""A draft of the observer's: on the worker's pool, closed (``turn``, ``failure``; ``retirement``, after the pool's
version was retired) or sealed (``publication``) to let the worker go on; or one that takes all the room of its device,
closed. Or the lock of the pool's name."""


@dataclass(frozen=True)
class Point:
    """Where one worker dies."""

    scene: str
    label: str
    obstacle: Obstacle = ""
    share: str = "ipc"

    @property
    def form(self) -> Form:
        """What the observer publishes for the scene, and the next writer in line after it."""
        if self.share == "multicast":
            return TEAM_READ if self.scene in TEAM_READING else TEAM
        chain = self.scene in CHAINED
        if self.scene in SHARDED:
            return Form(self.share, BOTH, sharded=True, chain=chain)
        return Form(self.share, writable=self.scene in SCRATCH, chain=chain)

    @property
    def granted(self) -> bool:
        """Whether the obstacle has to go before the worker gets there."""
        return bool(self.obstacle) and self.label != IN_LINE and not self.label.endswith("Cancel")

    def __str__(self) -> str:
        return f"{self.share} {self.scene}{f' ({self.obstacle})' if self.obstacle else ''}: {self.label}"


TEAM_READING = ("switch_team", "follow_team")
"""Scenes of a multicast pool that nobody but its writer stores to."""

GREETING = ("connecting", "connected", "greeted", "welcomed")
HANDED_OVER = ("listening", "heard Descriptors", "delivered Descriptors")
WRITING = ("writing", "written")
FILLING = ("filling", "filled")

Labels = tuple[str, ...]


def message(kind: str) -> Labels:
    """Return the labels on both sides of a request and of its answer."""
    return f"asking {kind}", f"sending {kind}", f"sent {kind}", f"received {kind}", f"settled {kind}"


def mapping(share: str, count: int, first: int = 1) -> Labels:
    """Return the labels around the mapping of allocations up to so many, and around what comes before.

    After one step and before the next is the same point: nothing is done in between.
    """
    if share == "ipc":
        return *counted(count, "opening", first=first), f"opened {count}"
    return *HANDED_OVER, *counted(count, "reserving", "mapping", first=first), f"mapped {count}"


def unmapping(share: str, count: int) -> Labels:
    """Return the labels around the unmapping of so many allocations, and the freeing of their addresses."""
    if share == "ipc":
        return *counted(count, "unmapping"), f"unmapped {count}"
    return *counted(count, "unmapping", "unmapped"), f"freed {count}"


def counted(count: int, *names: str, first: int = 1) -> Labels:
    """Return labels with numbers up to ``count``."""
    return tuple(f"{name} {number}" for number in range(first, count + 1) for name in names)


def granted(share: str, kind: str) -> Labels:
    """Return the labels after a wait for a lease, up to the first allocation."""
    return f"received {kind}", f"settled {kind}", *mapping(share, 1)


def labels(share: str) -> dict[tuple[str, Obstacle], Labels]:
    """Return the labels of every scene."""
    closing = (*unmapping(share, 2), *message("Close"))
    pool, draft = granted(share, "Attach"), granted(share, "Create")
    copies = 4 if share == "ipc" else 6  # each device's own two, and the second reads those of the first
    changed = mapping(share, 5, first=4)  # after the base's three
    return {
        ("read", ""): (
            *GREETING,
            *message("Attach"),
            *mapping(share, 2),
            "reading",
            "holding",
            *closing,
            "closed",
            "left",
        ),
        ("read_peer", ""): (*mapping(share, 2), "reading", "holding", *unmapping(share, 2), "closed"),
        ("read_shards", ""): (*mapping(share, 2), "holding", *unmapping(share, 2), "closed"),
        ("write", ""): (
            *message("Create"),
            *mapping(share, copies),
            *WRITING,
            *unmapping(share, copies),
            *message("Seal"),
            "sealed",
        ),
        ("write_shards", ""): (*mapping(share, 2), *WRITING, *unmapping(share, 2), "sealed"),
        ("write_in_place", ""): (
            *message("SetLayout"),
            *(() if share == "ipc" else counted(2, "protecting", "protected")),
            *message("SealInPlace"),
            "sealed",
            "reading",
            "holding",
        ),
        ("update_once", ""): (
            *message("Describe"),
            *message("Attach"),
            *message("Create"),
            *changed,
            *FILLING,
            *message("Seal"),
            *unmapping(share, 5),
            *message("Close"),
            "updated",
        ),
        ("await_update", "retirement"): (IN_LINE, "received Create", *changed, *FILLING, *message("Seal"), "updated"),
        ("outlive_base", ""): ("filling", *message("Close"), "filled", *message("Seal"), "updated"),
        ("leave_chain", ""): ("settled Create", *message("Seal"), "updated", *counted(LINKS, "left")),
        ("discard", ""): (*closing, "discarded"),
        ("read_draft", "publication"): (IN_LINE, "reading", "holding", *unmapping(share, 2), "closed"),
        ("outlive_draft", ""): (
            *message("Attach"),
            *mapping(share, 4, first=3),
            "holding",
            *closing,
            "discarded",
            "reading",
            *unmapping(share, 4)[-1:],
            "closed",
        ),
        ("await_publication", "publication"): (IN_LINE, *pool, "holding"),
        ("await_turn", "turn"): (IN_LINE, *draft, *WRITING),
        ("await_room", "room"): (IN_LINE, *draft, *WRITING),
        ("await_either", "publication"): (IN_LINE, *draft, "holding"),
        ("await_either", "failure"): (IN_LINE, *draft, *WRITING),
        ("retire", ""): (*message("Retire"), "holding"),
        ("produce", ""): (*message("ShareEvent"), "writing", *message("Recorded"), "recorded", *message("DropEvent")),
        ("consume", ""): (*message("OpenEvent"), *message("AwaitEvent"), "reading", "waiting", "unmapping 1"),
    }


LABELS: dict[tuple[str, Obstacle, str], Labels] = {
    **{(*key, share): points for share in SHARES for key, points in labels(share).items()},
    ("give_up", "publication", "ipc"): (IN_LINE, "asking Cancel", "sending Cancel", "sent Cancel"),
    ("watch", "", "ipc"): (*message("Watch"), "watching"),
    ("follow", "", "ipc"): ("following", "followed", "left"),
    ("lock", "", "ipc"): (*message("Lock"), "locked", *message("Unlock"), "unlocked"),
    ("await_lock", "lock", "ipc"): (IN_LINE, "received Lock", "settled Lock", "locked", *message("Unlock")),
    ("refuse_switch", "", "ipc"): ("refused", "reading", "holding", "unmapping 1", "closed"),
    ("update_shards", "", "vmm"): ("settled Create", *FILLING, *message("Seal"), "updated"),
    ("write_shards_in_place", "", "vmm"): (*message("SealInPlace"), "sealed", "reading", "holding"),
    ("sleep", "", "vmm"): ("sleeping", *counted(2, "unmapping"), "unmapped 2", *message("Close"), "asleep"),
    ("wake", "", "vmm"): (*message("Attach"), *HANDED_OVER, "mapping 3", "mapping 4", "mapped 4", "awake", "reading"),
}


def replacing(count: int, before: int) -> Labels:
    """Return the labels around the replacing of so many allocations, and the end of the lease before.

    Args:
        count: allocations.
        before: those that the process has unmapped before: of drafts, and of bases.
    """
    pairs = ((f"unmapping {before + number}", f"unmapped {before + number}") for number in range(1, count + 1))
    return *(each for pair in pairs for each in pair), *counted(count, "replaced"), *message("Close"), "reading"


for scene, share, count, before in (
    ("switch", "vmm", 2, 2),
    ("switch_shards", "vmm", 2, 2),
    ("switch_chain", "vmm", 3, 5),
    ("switch_team", "multicast", 2, 8),
):
    LABELS[scene, "", share] = (*message("Attach"), *HANDED_OVER, *replacing(count, before), "switched")
LABELS["follow_chain", "", "vmm"] = (*replacing(3, 5), "followed", "holding")
LABELS["follow_team", "", "multicast"] = (*replacing(2, 8), "followed", "holding")

TEAM_MAPPED = (*HANDED_OVER, *counted(2, "opening window"), "opened window 2", "broadcasting", "broadcast")
MAPPED_AGAIN = (*(f"mapping {number}" for number in range(5, 9)), "mapped 8")
LABELS |= {
    ("broadcast", "", "multicast"): (*TEAM_MAPPED, *unmapping("multicast", 4), "closed"),
    ("sleep", "", "multicast"): ("sleeping", *counted(4, "unmapping"), "unmapped 4", *message("Close"), "asleep"),
    ("wake", "", "multicast"): (*message("Attach"), *HANDED_OVER, *MAPPED_AGAIN, "awake", "reading"),
    ("write_team", "", "multicast"): (*message("Create"), *TEAM_MAPPED, *unmapping("multicast", 8), "sealed"),
}
POINTS = tuple(
    Point(scene, label, obstacle, share) for (scene, obstacle, share), labels in LABELS.items() for label in labels
)

_FIRST, _STEP = sampling.stride(9)
SOME = POINTS[_FIRST - 1 :: _STEP]
"""Every ninth one, others every day, for the short form: of most scenes one in each kind."""
