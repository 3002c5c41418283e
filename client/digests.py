"""Digests of a pool's memory: computed before a draft is sealed, and again when a reader checks its mapping.

A process that has a descriptor or a legacy handle of memory chooses its own access, so read-only mappings do not stop
one that means to write. Digests show afterwards that it did. :data:`cubroker.driver.kernels.ALGORITHM` says what they
do not show.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, NamedTuple

from cubroker.client.devices import doing
from cubroker.client.memory.mapping import Spot
from cubroker.driver import Context, Device, device_names
from cubroker.driver.kernels import ALGORITHM, PIECE, add, finish, sums
from cubroker.protocol.errors import Corrupted, Unsupported, needing
from cubroker.protocol.layout import Layout
from cubroker.protocol.messages import DIGESTS, DigestList, Digests

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

    from cubroker.client.session import ClientSession

DEFINITION = ALGORITHM
"""The name of the definition of this build's digests."""

MAX_NAMED = 4
"""Tensors of an allocation that a message names."""


class PartialDigest:
    """The digest of an allocation in host memory, from parts that come in any order. Needs numpy."""

    def __init__(self) -> None:
        self._sums = 0, 0

    def add(self, data: ReadableBuffer, offset: int) -> None:
        """Add the bytes from ``offset`` on, a multiple of 16; only the last part may end at another offset."""
        self._sums = add(self._sums, sums(data, offset // PIECE))

    def finish(self, nbytes: int) -> bytes:
        """Return the digest of an allocation of ``nbytes`` bytes, all of which were added."""
        return finish(self._sums, nbytes)


class DigestRange(NamedTuple):
    """A mapped piece of a version's memory."""

    spot: Spot
    context: Context
    #: Whose memory it is.
    device: Device
    pointer: int
    nbytes: int


def need(session: ClientSession, name: str) -> None:
    """Check, before a pool of that name is filled, that its digests can be computed and kept.

    Raises:
        Unsupported: the broker is too old; or the devices are emulated, and numpy is not installed.
    """
    session.require(DIGESTS, f"pool {name!r}", "keep a digest", "publish without a digest")
    if session.driver.host:
        with _with_numpy(f"pool {name!r}"):
            import numpy as np  # noqa: F401


def _with_numpy(label: str) -> AbstractContextManager[None]:
    """Raise an error that says what to install if the block needs numpy, for emulated devices, and it is missing."""
    return needing(f"a digest on a host device, of {label},", "cubroker[numpy]")


def sealing(
    label: str, replicas: Sequence[str], pieces: Sequence[DigestRange], layout: Layout, shared: Mapping[Spot, bytes]
) -> Digests:
    """Return the digests of the replicas on these devices, by UUID, computed after all work of this process on them.

    ``shared`` has the digests of memory that an earlier version has, too.
    """
    found, numbers = {**shared, **compute(label, pieces, synchronize=True)}, range(len(layout.allocations))
    return Digests(ALGORITHM, tuple(tuple(found.get((uuid, number), b"") for number in numbers) for uuid in replicas))


def of_replicas(replicas: Sequence[str], digests: Sequence[bytes]) -> Digests:
    """Return the digests of a version that has the same allocations on each of these devices, by UUID."""
    return Digests(ALGORITHM, tuple(tuple(digests) for _ in replicas))


def sealed(label: str, pieces: Sequence[DigestRange], answer: DigestList) -> dict[int, bytes]:
    """Return the digest of each allocation of a mapped version: the one it was sealed with, or else computed here."""
    digests = answer.digests
    if digests is not None and digests.algorithm == ALGORITHM:
        columns = enumerate(zip(*digests.replicas, strict=True))
        return {number: next(filter(None, column), b"") for number, column in columns}
    return {number: digest for (_, number), digest in compute(label, pieces).items()}


def check(label: str, layout: Layout, pieces: Sequence[DigestRange], answer: DigestList) -> None:
    """Compare pieces of a version with the digests that it was sealed with.

    Raises:
        Unsupported: it was sealed with none, or by an algorithm that this build lacks.
        Corrupted: they differ; the text names all such pieces, and their tensors.
        DeviceFailure: the driver refused.
    """
    digests = answer.digests
    if digests is None:
        raise Unsupported(
            f"{label} cannot be checked: it was sealed without a digest; seal drafts with seal(digest=True), or load"
            f" with --digest. A version that its readers may write has no digest"
        )
    if digests.algorithm != ALGORITHM:
        raise Unsupported(
            f"{label} was sealed with a digest by {digests.algorithm}, and this build computes {ALGORITHM}; check it"
            f" with the build that sealed it"
        )
    rows = zip(answer.devices, digests.replicas, strict=True)
    wanted = {(uuid, number): digest for uuid, row in rows for number, digest in enumerate(row)}
    found = compute(label, pieces)
    names = {piece.spot[0]: device_names.label(piece.device) for piece in pieces}
    if differing := [spot for spot in found if found[spot] != wanted.get(spot)]:
        described = "; ".join(_describe(layout, spot, found[spot], names[spot[0]]) for spot in differing)
        raise Corrupted(
            f"{label} does not hold what was sealed: {described}. A process has written to it, or the memory is faulty;"
            f" close it, and have the version retired and loaded again"
        )


def compute(label: str, pieces: Sequence[DigestRange], *, synchronize: bool = False) -> dict[Spot, bytes]:
    """Return the digest of each piece, computed by its device; ``synchronize``: after all work of this process there.

    Raises:
        Unsupported: a piece is on a host device, and numpy is not installed.
        DeviceFailure: the driver refused.
    """
    by_context: defaultdict[Context, list[DigestRange]] = defaultdict(list)
    for piece in pieces:
        by_context[piece.context].append(piece)
    found: dict[Spot, bytes] = {}
    with doing(f"computing the digest of {label}"):
        for context in by_context if synchronize else ():
            context.synchronize()
        with _with_numpy(label):  # GPUs compute it themselves
            for context, group in by_context.items():
                values = context.digests([(piece.pointer, piece.nbytes) for piece in group])
                found.update(zip((piece.spot for piece in group), values, strict=True))
    return found


def _describe(layout: Layout, spot: Spot, found: bytes, device: str) -> str:
    _, number = spot
    names = [tensor.name for tensor in layout.tensors if tensor.allocation == number]
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    tensors = f", with {', '.join(map(repr, names[:MAX_NAMED]))}{more}," if names else ""
    return f"allocation {number} on {device}{tensors} has the digest {found.hex()}"
