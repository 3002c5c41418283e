"""Make a failing history as short as it gets: leave out parts, larger ones first, as long as it still fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def shrink(history: Sequence[T], fails: Callable[[Sequence[T]], bool]) -> list[T]:
    """Return a failing history from which no single action can be left out; the first one always stays."""
    world, actions = history[0], list(history[1:])
    size = len(actions)
    while size:
        shorter = _without(world, actions, size, fails)
        if size == 1 and len(shorter) == len(actions):
            break
        actions, size = shorter, max(1, size // 2)
    return [world, *actions]


def _without(world: T, actions: list[T], size: int, fails: Callable[[Sequence[T]], bool]) -> list[T]:
    """Leave out every part of ``size`` actions that the failure does not need."""
    start = 0
    while start < len(actions):
        shorter = actions[:start] + actions[start + size :]
        if fails([world, *shorter]):
            actions = shorter
        else:
            start += size
    return actions
