"""Digests of what a version held when it was sealed.

They are the writer's word: the broker does not read what it lends. It keeps them with the version, and checks no more
than that there is one for each piece of memory.
"""

from __future__ import annotations

from cubroker.protocol.bounds import DIGEST_BYTES
from cubroker.protocol.errors import Invalid, Unsupported
from cubroker.protocol.messages import Digests, Seal, SealDigested
from cubroker.server.ledger.entries import Version


def taken(version: Version, body: Seal) -> Digests | None:
    """Return the digests with which a draft is to be sealed, if it is with any.

    Raises:
        Unsupported: its readers may write it.
        Invalid: they are not those of its allocations.
    """
    if not isinstance(body, SealDigested):
        return None
    if version.writable:
        raise Unsupported(
            f"{version.label} is writable by its readers, so a digest would not tell what it holds; seal it without"
        )
    if not fit(version, body.digests):
        raise Invalid(
            f"{version.label} was to be sealed with digests that are not one of {DIGEST_BYTES} bytes for each"
            f" allocation of each of its {len(version.replicas)} replicas"
        )
    return body.digests


def fit(version: Version, digests: Digests) -> bool:
    """Say whether there is one digest for each piece of memory of a version, and no other."""
    wanted = [[DIGEST_BYTES * bool(handle) for handle in there.handles] for there in version.replicas.values()]
    return wanted == [list(map(len, replica)) for replica in digests.replicas]
