"""Digests of a pool's memory: computed before a draft is sealed, and again when a reader checks what it has.

Whoever has a descriptor or a legacy handle of memory chooses its own access, so no mapping keeps a process from writing
that means to. Digests show afterwards that it did; see :mod:`cubroker.driver.digest` for what they do not show.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from cubroker.client.replica import Replica
from cubroker.driver import Context
from cubroker.driver.digest import ALGORITHM
from cubroker.protocol.errors import Corrupted, Unsupported
from cubroker.protocol.layout import Layout
from cubroker.protocol.messages import DigestList, Digests

NAMED = 4
"""Tensors of an allocation that a message names."""

Spot = tuple[str, int]
"""One piece of a version's memory: the UUID of the device that has it, and the number of the allocation."""


class Span(NamedTuple):
    """Where this process reads a piece of memory."""

    spot: Spot
    context: Context
    pointer: int
    nbytes: int


def spans(replica: Replica) -> list[Span]:
    """Return where the allocations of a replica are; raises ``Invalid`` if the memory was given back."""
    slabs = zip(replica.allocations, replica.slabs, strict=True)
    return [Span((slab.memory_device.uuid, number), slab.context, slab.pointer, slab.nbytes) for number, slab in slabs]


def compute(pieces: Iterable[Span]) -> dict[Spot, bytes]:
    """Return the digest of each piece, which the device that uses it computes; raises ``DriverError``."""
    by_context: defaultdict[Context, list[Span]] = defaultdict(list)
    for piece in pieces:
        by_context[piece.context].append(piece)
    found: dict[Spot, bytes] = {}
    for context, group in by_context.items():
        values = context.digests([(piece.pointer, piece.nbytes) for piece in group])
        found.update(zip((piece.spot for piece in group), values, strict=True))
    return found


def sealing(replicas: Sequence[str], pieces: Sequence[Span], layout: Layout) -> Digests:
    """Return the digests of a draft as they travel, once all work of this process on its devices is done.

    Args:
        replicas: the device of each, by UUID.
        pieces: where their memory is.
        layout: the draft's.

    Raises:
        DriverError: the driver refused.
    """
    for context in {piece.context for piece in pieces}:
        context.synchronize()
    found, numbers = compute(pieces), range(len(layout.allocations))
    return Digests(ALGORITHM, tuple(tuple(found.get((uuid, number), b"") for number in numbers) for uuid in replicas))


def expected(label: str, answer: DigestList) -> dict[Spot, bytes]:
    """Return the digests that a version was sealed with.

    Raises:
        Unsupported: it was sealed with none, or with such as this build cannot compute.
    """
    digests = answer.digests
    if digests is None:
        raise Unsupported(
            f"{label} cannot be checked: it was sealed without a digest; seal drafts with seal(digest=True), or load"
            f" with --digest. What readers may write has none"
        )
    if digests.algorithm != ALGORITHM:
        raise Unsupported(
            f"{label} was sealed with a digest by {digests.algorithm}, and this build computes {ALGORITHM}; check it"
            f" with the build that sealed it"
        )
    rows = zip(answer.devices, digests.replicas, strict=True)
    return {(uuid, number): digest for uuid, row in rows for number, digest in enumerate(row)}


def compare(label: str, layout: Layout, found: Mapping[Spot, bytes], wanted: Mapping[Spot, bytes]) -> None:
    """Raise ``Corrupted``, with all pieces that differ and their tensors, unless the digests agree."""
    differing = [spot for spot in found if found[spot] != wanted.get(spot)]
    if differing:
        pieces = "; ".join(_in_words(layout, spot, found[spot]) for spot in differing)
        raise Corrupted(
            f"{label} does not hold what was sealed: {pieces}. A process has written to it, or the memory is faulty;"
            f" close it, and have the version retired and loaded again"
        )


def _in_words(layout: Layout, spot: Spot, found: bytes) -> str:
    uuid, number = spot
    names = [tensor.name for tensor in layout.tensors if tensor.allocation == number]
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    tensors = f", with {', '.join(map(repr, names[:NAMED]))}{more}," if names else ""
    return f"allocation {number} on {uuid}{tensors} has the digest {found.hex()}"
