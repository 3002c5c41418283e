"""When ``cubroker keep`` starts the next run: at once after a steady one, else later and later."""

from __future__ import annotations

STEADY = 10.0
"""Seconds that a run must have lasted for its end to be followed by a start at once."""

FIRST_PAUSE = 0.05
"""Seconds after the second of several short runs in a row, doubled after each that follows."""

LONGEST_PAUSE = 5.0


class Pace:
    """Counts short runs in a row.

    Args:
        longest: the longest time between two starts, in seconds.
    """

    def __init__(self, longest: float) -> None:
        self._longest = longest
        self._next = 0.0

    def after(self, lasted: float) -> float:
        """Return how long to wait after a run that lasted so many seconds."""
        if lasted >= STEADY:
            self._next = 0.0
            return 0.0
        delay = self._next
        self._next = min(max(2 * delay, FIRST_PAUSE), self._longest)
        return delay
