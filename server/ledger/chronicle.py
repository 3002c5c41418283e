"""What pools and sessions remember of themselves: their last events, in words, and when they were."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from cubroker.protocol.bounds import LATEST

STORY = 32
"""Events that a pool and a session remember, in words, for whoever has to explain an impossible one."""


@dataclass(slots=True)
class Clock:
    """When the event came that is being handled, in seconds since 1970: a time that messages can carry."""

    now: float = 0.0

    def set(self, now: float) -> None:
        """Take the time of the host's clock, or the nearest that a message can carry: a clock may show any."""
        self.now = min(max(0.0, now), LATEST)


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
