"""How the C library gets memory from the system, so that it goes back there when it is freed."""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
"""Parameters of ``mallopt`` (malloc.h)."""

BLOCK = 256 << 10
"""Bytes from which a block is mapped by itself, and unmapped when it is freed."""


def give_back_freed_blocks() -> None:
    """Have every large block given back when it is freed, where the C library would keep it.

    glibc maps large blocks at first, too, but raises what it calls large to the largest that was freed, up to 32 MiB.
    After one message of 10 MiB all others came from its heap, and that shrinks at its end alone: the broker kept 30 MiB
    more after a flood of them. Setting the limit keeps it. Other C libraries do not do this, and have no ``mallopt``.
    """
    if mallopt := getattr(ctypes.CDLL(None), "mallopt", None):
        mallopt(M_MMAP_THRESHOLD, BLOCK)
        mallopt(M_TRIM_THRESHOLD, BLOCK)
