"""Digests of layouts, worked out once: every reply with a layout of more than a few kilobytes is authenticated by one.

All leases on a version have the same layout, of megabytes perhaps, and a digest takes a millisecond for each of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator

from cubroker.protocol.authentication import Digest

MAX_BYTES = 32 << 20
"""Bytes of the layouts whose digests are remembered. Most of them are those of versions, which have them anyway."""

STEP = 256 << 10
"""Bytes of a layout that are hashed between two looks at the clock."""


class LayoutHashes:
    """The digests of the layouts that were asked for last, the first of which is forgotten first."""

    def __init__(self) -> None:
        self._known: dict[bytes, bytes] = {}
        self._nbytes = 0

    def of(self, layout: bytes) -> bytes:
        """Return a layout's digest, at once."""
        deque(self.steps(layout), maxlen=0)
        return self._known[layout]

    def steps(self, layout: bytes) -> Generator[None, None, None]:
        """Work out a layout's digest in short steps, unless it is known."""
        if layout in self._known:
            return
        digest, view = Digest(), memoryview(layout)
        for start in range(0, len(layout), STEP):
            digest.add(view[start : start + STEP])
            yield
        if layout not in self._known:  # by another's steps
            self._known[layout] = digest.done()
            self._nbytes += len(layout)
        while self._nbytes > MAX_BYTES and len(self._known) > 1:
            oldest = next(iter(self._known))
            del self._known[oldest]
            self._nbytes -= len(oldest)
