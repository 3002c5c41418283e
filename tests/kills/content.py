"""What the pools of these tests hold: bytes that follow from name and version, so that any reader can tell."""

from __future__ import annotations

import hashlib

from cubroker.client import Draft, Pool
from cubroker.protocol import Layout

NBYTES = 1 << 15
LAYOUT = Layout.pack([("first", "U8", (NBYTES,)), ("second", "U8", (NBYTES,))], slab=NBYTES)
"""Two tensors, each in an allocation of its own: there is a moment between opening one and the other."""


def content(pool: str, version: int, tensor: str) -> bytes:
    """Return what a tensor holds."""
    return hashlib.shake_128(f"{pool} {version} {tensor}".encode()).digest(NBYTES)


def fill(draft: Draft) -> None:
    """Check that the memory of a draft is clear, and fill it."""
    for replica in draft.replicas:
        for tensor in replica.values():
            assert not any(tensor.tobytes()), f"{tensor!r} is not clear"
            tensor.copy_from(content(draft.name, draft.version, tensor.name))


def check(pool: Pool) -> None:
    """Check every byte of a pool."""
    for tensor in pool.values():
        right = tensor.tobytes() == content(pool.name, pool.version, tensor.name)
        assert right, f"{tensor!r} does not hold what was written"
