"""What pools and sessions remember of themselves: their last events, in words, and when they were."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

STORY = 32
"""Events that a pool and a session remember, in words, for whoever has to explain an impossible one."""


@dataclass(slots=True)
class Clock:
    """When the event came that is being handled, as the shell says, in seconds since 1970."""

    now: float = 0.0


class Story:
    """The last events of a pool or a session, in words, and when each happened."""

    __slots__ = ("_clock", "lines")

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or Clock()
        self.lines: deque[tuple[float, str]] = deque(maxlen=STORY)

    def __iter__(self) -> Iterator[str]:
        return (text for _, text in self.lines)

    def append(self, text: str) -> None:
        """Add what has just happened."""
        self.lines.append((self._clock.now, text))
