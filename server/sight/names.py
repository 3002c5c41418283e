"""Labels of metrics that users choose: so many at once and per time, so that nobody can fill a database with them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

OTHER = "(other)"
"""Stands for all that have no label of their own. No pool can be named so."""

HIDDEN = "(private)"
"""Stands for pools and users whose names are not for whoever asks."""

MAX_NAMES = 200
"""Names that have a label at once."""

LINGER = 3600.0
"""Seconds for which a name that is gone keeps its label; only then another one may have its place."""


class Names:
    """The names that have a label of their own. Once a name has one it keeps it for as long as it is there.

    Args:
        clock: the time in seconds, from any beginning.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: dict[str, float] = {}

    def update(self, names: Iterable[str]) -> None:
        """Note which names there are now, the most important first."""
        now = self._clock()
        there = dict.fromkeys(names, now)
        self._seen = {name: then for name, then in self._seen.items() if name in there or now - then < LINGER}
        for name in there:
            if name in self._seen or len(self._seen) < MAX_NAMES:
                self._seen[name] = now

    def label(self, name: str) -> str:
        """Return what stands for a name."""
        if not name:
            return HIDDEN
        return name if name in self._seen else OTHER
