"""What a process makes on first use and keeps, without a lock.

A signal handler or a finalizer may come into the middle of making it, and want the same. With a lock it would wait for
its own thread, for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


def keep_first(table: dict[K, V], key: K, make: Callable[[], V], discard: Callable[[V], None]) -> V:
    """Return ``table[key]``, made unless it is there.

    Several threads, or calls within each other, may make it at the same time: the first result stays, for all of them.

    Args:
        table: what there is; its keys are hashed and compared by C code, so that no other code comes in between.
        key: of what is wanted.
        make: makes it.
        discard: undoes ``make``, for a result that came later.
    """
    kept = table.get(key)
    if kept is None:
        made = make()
        kept = table.setdefault(key, made)
        if kept is not made:
            discard(made)
    return kept
