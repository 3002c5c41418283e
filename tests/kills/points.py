"""The table of points at which workers are killed.

Every scene with the obstacle that the judge puts in its way, and the labels at which it halts: those before the
obstacle goes (the worker is in a line then), and those after.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tests.kills.scenes import IN_LINE

Obstacle = Literal["", "turn", "room", "publication", "failure"]
"""A draft of the judge's: on the worker's pool, closed (``turn``, ``failure``) or sealed (``publication``) to let the
worker go on; or one that takes all the room of its device, closed."""


@dataclass(frozen=True)
class Point:
    """Where one worker dies."""

    scene: str
    label: str
    obstacle: Obstacle = ""

    @property
    def granted(self) -> bool:
        """Whether the obstacle has to go before the worker gets there."""
        return bool(self.obstacle) and self.label != IN_LINE and not self.label.endswith("Cancel")

    def __str__(self) -> str:
        return f"{self.scene}{f' ({self.obstacle})' if self.obstacle else ''}: {self.label}"


GREETING = ("connecting", "connected", "greeted", "welcomed")


def message(kind: str) -> tuple[str, ...]:
    """Return the labels on both sides of a request and of its answer."""
    return f"asking {kind}", f"sending {kind}", f"sent {kind}", f"received {kind}", f"settled {kind}"


def mapping(count: int) -> tuple[str, ...]:
    """Return the labels around the opening of so many allocations."""
    return *(f"opening {number}" for number in range(1, count + 1)), f"opened {count}"


def unmapping(count: int) -> tuple[str, ...]:
    """Return the labels around the unmapping of so many allocations."""
    return *(f"unmapping {number}" for number in range(1, count + 1)), f"unmapped {count}"


WRITING = ("writing", "written")
GRANTED_POOL = ("received Attach", "settled Attach", "opening 1", "opened 1", "holding")
GRANTED_DRAFT = ("received Create", "settled Create", "opening 1", "opened 1", *WRITING)

LABELS: dict[tuple[str, Obstacle], tuple[str, ...]] = {
    ("read", ""): (
        *GREETING,
        *message("Attach"),
        *mapping(2),
        "reading",
        "holding",
        *unmapping(2),
        *message("Close"),
        "closed",
        "left",
    ),
    ("write", ""): (*message("Create"), *mapping(4), *WRITING, *unmapping(4), *message("Seal"), "sealed"),
    ("discard", ""): (*unmapping(2), *message("Close"), "discarded"),
    ("await_publication", "publication"): (IN_LINE, *GRANTED_POOL),
    ("await_turn", "turn"): (IN_LINE, *GRANTED_DRAFT),
    ("await_room", "room"): (IN_LINE, *GRANTED_DRAFT),
    ("await_either", "publication"): (IN_LINE, "received Create", "settled Create", "opening 1", "opened 1", "holding"),
    ("await_either", "failure"): (IN_LINE, *GRANTED_DRAFT),
    ("give_up", "publication"): (IN_LINE, "asking Cancel", "sending Cancel", "sent Cancel"),
    ("watch", ""): (*message("Watch"), "watching"),
    ("retire", ""): (*message("Retire"), "holding"),
}

POINTS = tuple(Point(scene, label, obstacle) for (scene, obstacle), labels in LABELS.items() for label in labels)
