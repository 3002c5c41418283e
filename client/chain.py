"""From device to device: what the first one has been filled with goes on to the others, over the links between them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack

from cubroker.client.rings import Target, held
from cubroker.driver import Event

PIECE = 64 << 20
"""Bytes of one copy. While a piece goes on to the next device, the one after it arrives."""


def spread(targets: Sequence[Target], sizes: Sequence[int]) -> float:
    """Copy every allocation to each target that reads the one before it; return the seconds that it took.

    Args:
        targets: filled already, but for those with an ``upstream``.
        sizes: bytes of each allocation.
    """
    with ExitStack() as undo:
        undo.enter_context(held(targets))
        links = [_link(undo, target) for target in targets]
        began = time.perf_counter()
        for allocation, nbytes in enumerate(sizes):
            for start in range(0, nbytes, PIECE):
                before: Event | None = None
                for target, link in zip(targets, links, strict=True):
                    before = link.copy(target, allocation, start, min(PIECE, nbytes - start), before) if link else None
        for link in links:
            if link:
                link.stream.synchronize()
        return time.perf_counter() - began


class _Link:
    """A device's stream of copies from the one before it, and the event that marks the end of the last."""

    def __init__(self, undo: ExitStack, target: Target) -> None:
        self.stream = undo.enter_context(target.context.stream())
        self._copied = undo.enter_context(target.context.event())

    def copy(self, target: Target, allocation: int, start: int, nbytes: int, before: Event | None) -> Event:
        """Start the copy of one piece, to be made after ``before``; return its end."""
        pointer = target.pointers[allocation]
        assert target.upstream
        assert pointer is not None
        if before:
            self.stream.wait(before)
        self.stream.copy(pointer + start, target.upstream[allocation] + start, nbytes)
        self.stream.record(self._copied)
        return self._copied


def _link(undo: ExitStack, target: Target) -> _Link | None:
    return _Link(undo, target) if target.upstream else None
