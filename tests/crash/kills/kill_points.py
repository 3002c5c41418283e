"""The table of points at which workers are killed.

Every scene with the obstacle that the observer puts in its way and the share kind of its pool, and the labels at which
it halts: those before the obstacle goes (the worker is in a line then), and those after.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tests import sampling
from tests.crash.content import BOTH, SHARES, TEAM, Form
from tests.crash.kills.workloads import IN_LINE, SCRATCH, SHARDED

Obstacle = Literal["", "turn", "room", "publication", "failure"]
"""A draft of the observer's: on the worker's pool, closed (``turn``, ``failure``) or sealed (``publication``) to let
the worker go on; or one that takes all the room of its device, closed."""


@dataclass(frozen=True)
class Point:
    """Where one worker dies."""

    scene: str
    label: str
    obstacle: Obstacle = ""
    share: str = "ipc"

    @property
    def key(self) -> tuple[str, Obstacle, str]:
        """Of its labels in :data:`LABELS`."""
        return self.scene, self.obstacle, self.share

    @property
    def form(self) -> Form:
        """What the observer publishes for the scene, and the next writer in line after it."""
        if self.share == "multicast":
            return TEAM
        if self.scene in SHARDED:
            return Form(self.share, BOTH, sharded=True)
        return Form(self.share, writable=self.scene in SCRATCH)

    @property
    def granted(self) -> bool:
        """Whether the obstacle has to go before the worker gets there."""
        return bool(self.obstacle) and self.label != IN_LINE and not self.label.endswith("Cancel")

    def __str__(self) -> str:
        return f"{self.share} {self.scene}{f' ({self.obstacle})' if self.obstacle else ''}: {self.label}"


GREETING = ("connecting", "connected", "greeted", "welcomed")
HANDED_OVER = ("listening", "heard Descriptors", "delivered Descriptors")
WRITING = ("writing", "written")

Labels = tuple[str, ...]


def message(kind: str) -> Labels:
    """Return the labels on both sides of a request and of its answer."""
    return f"asking {kind}", f"sending {kind}", f"sent {kind}", f"received {kind}", f"settled {kind}"


def mapping(share: str, count: int) -> Labels:
    """Return the labels around the mapping of so many allocations, and around what comes before.

    After one step and before the next is the same point: nothing is done in between.
    """
    if share == "ipc":
        return *counted(count, "opening"), f"opened {count}"
    return *HANDED_OVER, *counted(count, "reserving", "mapping"), f"mapped {count}"


def unmapping(share: str, count: int) -> Labels:
    """Return the labels around the unmapping of so many allocations, and the freeing of their addresses."""
    if share == "ipc":
        return *counted(count, "unmapping"), f"unmapped {count}"
    return *counted(count, "unmapping", "unmapped"), f"freed {count}"


def counted(count: int, *names: str) -> Labels:
    """Return so many of each label."""
    return tuple(f"{name} {number}" for number in range(1, count + 1) for name in names)


def granted(share: str, kind: str) -> Labels:
    """Return the labels after a wait for a lease, up to the first allocation."""
    return f"received {kind}", f"settled {kind}", *mapping(share, 1)


def labels(share: str) -> dict[tuple[str, Obstacle], Labels]:
    """Return the labels of every scene."""
    closing = (*unmapping(share, 2), *message("Close"))
    pool, draft = granted(share, "Attach"), granted(share, "Create")
    copies = 4 if share == "ipc" else 6  # each device's own two, and the second reads those of the first
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
        ("discard", ""): (*closing, "discarded"),
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
    ("sleep", "", "vmm"): ("sleeping", *counted(2, "unmapping"), "unmapped 2", *message("Close"), "asleep"),
    ("wake", "", "vmm"): (*message("Attach"), *HANDED_OVER, "mapping 3", "mapping 4", "mapped 4", "awake", "reading"),
}

SWITCHING = (
    *message("Attach"),
    *HANDED_OVER,
    *("unmapping 3", "unmapped 3", "replaced 1", "unmapped 4", "replaced 2"),
    *message("Close"),
    "switched",
    "reading",
)
"""What comes before is the end of a draft, with two allocations."""
LABELS |= {("switch", "", "vmm"): SWITCHING, ("switch_shards", "", "vmm"): SWITCHING}

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

_FIRST, _STEP = sampling.stride(3)
SOME = POINTS[_FIRST - 1 :: _STEP]
"""Every third one, others every day, for the short form: some of each scene in each kind."""
