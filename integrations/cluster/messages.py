"""What a host that fetches and a host that exports say to each other, and how it is framed; no sockets.

A connection is TLS over TCP, and each message is a frame: its length as four bytes, big-endian, and as many bytes of
msgpack. The fetching side begins with :class:`PeerHello` and then asks. The exporting side answers each request with
one message, a :class:`WatchPool` with one more after every change, and the :class:`Open` of a version that it has only
in part with an :class:`Available` whenever more of it is there. Bytes of pools never go this way: the engines move
them.

A host that fetches tells the exporter of its own host in the same frames what it has (:class:`Announce`), and an
exporter its processes what to open (:class:`Serve`).

All input is bounded before it is decoded, and decoded into these types alone. The process that fetches
(:mod:`~cubroker.integrations.cluster.fetch_process`) is told an :class:`Order`, as a line of JSON, and answers with
lines that are :class:`StatusLine`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from hashlib import blake2b
from typing import Annotated, TypeAlias, TypeVar

import msgspec
from msgspec import Meta, Struct

from cubroker.integrations.cluster.sources import WIDTH
from cubroker.protocol.encoding import encode
from cubroker.protocol.errors import CubrokerError, Invalid, from_code
from cubroker.protocol.fields import MAX_DEVICES, MAX_ITEMS
from cubroker.protocol.messages import AUTO

VERSION = 2
"""The protocol that this build speaks."""

PARTS = 2
"""The first version of the protocol in which versions are offered of which a host has a part."""

PORT = 7411
"""Where an exporter listens, if nothing else is said."""

PATIENCE = 20.0
"""Seconds that a source may bring nothing, and that a fetch goes on without any source, if nothing else is said."""

MAX_REQUEST = 64 << 10
"""Bytes of the longest frame that an exporter reads: requests have no long fields."""

MAX_REPLY = 64 << 20
"""Bytes of the longest frame that a fetching host reads: a reply may have the layout of a pool."""

WATCH_BEAT = 20.0
"""Seconds after which an exporter repeats the current version to a peer that watches it."""

NEWS = 0.05
"""Seconds between two :class:`Available`, at least."""

MAX_LOCAL = 8 << 20
"""Bytes of the longest frame within a host, which has the digests of a version."""

MAX_ANNOUNCE = 4 << 10
"""Bytes of the longest :class:`Announce`: it comes before anything is known of who sends it."""

OVERHEAD = 1 << 10
"""Bytes of a frame that are neither digests nor runs, at most."""

LENGTH = struct.Struct(">I")

DIGEST = 16
"""Bytes of a digest."""

Name = Annotated[str, Meta(min_length=1, max_length=255)]
Text = Annotated[str, Meta(max_length=2000)]
Natural = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
Positive = Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]
Digest = Annotated[bytes, Meta(min_length=DIGEST, max_length=DIGEST)]
Digests = Annotated[tuple[Digest, ...], Meta(max_length=MAX_ITEMS)]
Runs = Annotated[bytes, Meta(max_length=1 << 20)]
"""Runs of bytes of a version as bits, lowest first, as :func:`cubroker.integrations.cluster.sources.cut` makes them."""


class PeerMessage(Struct, frozen=True, tag=True):
    """Has its class's name in the field ``type``."""


# -- from the host that fetches ------------------------------------------------------------------------


class PeerHello(PeerMessage, frozen=True):
    """Begins a connection."""

    #: The newest protocol that this side speaks.
    version: Positive


class List(PeerMessage, frozen=True):
    """Asks for the versions that this peer may fetch: :class:`Offers`."""


class Open(PeerMessage, frozen=True):
    """Asks for the memory of a version: :class:`ExportedVersion`. A connection opens one version, once."""

    name: Name
    #: 0: the current one.
    version: Natural = 0
    #: What this side reads with (:mod:`~cubroker.integrations.cluster.engine`).
    engine: Name = "nixl"


class WatchPool(PeerMessage, frozen=True):
    """Asks for the current version of a pool, now and after every change: :class:`CurrentVersion`, again and again."""

    name: Name


class Progress(PeerMessage, frozen=True):
    """Says that the peer lives and how many bytes it has read: :class:`Going`."""

    nbytes: Natural


# -- from the host that exports ------------------------------------------------------------------------


class PeerWelcome(PeerMessage, frozen=True):
    """Answers :class:`PeerHello`."""

    #: The protocol of this connection: the newest that both sides speak.
    version: Positive
    #: The user of this host whose permissions the peer has.
    user: Name
    #: Which broker it exports from (:func:`cubroker.integrations.cluster.identity.host`); empty: it does not tell.
    host: Annotated[bytes, Meta(max_length=16)] = b""


class Offer(Struct, frozen=True):
    """A version that can be fetched."""

    name: Name
    version: Positive
    #: Bytes, padding included.
    nbytes: Natural
    tensors: Natural
    #: Whether it is its pool's current version.
    current: bool
    #: What it is (:func:`content`): equal for the same version on all hosts; None: that is not known yet.
    content: Digest | None = None
    #: How many of the bytes are there, of a version that is being fetched; None: all.
    there: Natural | None = None


class Offers(PeerMessage, frozen=True):
    """Answers :class:`List`."""

    offers: Annotated[tuple[Offer, ...], Meta(max_length=MAX_ITEMS)]
    #: How many peers read from this host now, and how many may at once.
    readers: Natural
    limit: Natural


class ExportedAllocation(Struct, frozen=True):
    """An allocation of a version, in the memory of the exporting process."""

    pointer: Natural
    nbytes: Positive
    #: The ordinal of its GPU in that process; None: host memory.
    device: Annotated[int, Meta(ge=0, lt=MAX_DEVICES)] | None
    #: The digest of its bytes, by the algorithm that :class:`ExportedVersion` names.
    digest: Digest


class ExportedVersion(PeerMessage, frozen=True):
    """Answers :class:`Open`. The version is leased until the connection ends."""

    name: Name
    version: Positive
    #: As :meth:`cubroker.protocol.layout.Layout.encode` has it.
    layout: bytes
    #: The name of the digests' definition (:mod:`cubroker.driver.digest`).
    algorithm: Name
    #: One for each allocation of the layout.
    places: Annotated[tuple[ExportedAllocation, ...], Meta(max_length=MAX_ITEMS)]
    #: What the engine's other end connects with: a secret.
    metadata: bytes
    #: The peer's place among those that read from this host, and how many places there are.
    slot: Natural = 0
    slots: Positive = 1
    #: The runs that are there, of a version that is being fetched, and how many bytes the largest has; None: all.
    runs: Runs | None = None
    piece: Natural = 0


class Available(PeerMessage, frozen=True):
    """Follows the :class:`ExportedVersion` of a version that is being fetched there, whenever more is there."""

    #: All that are there now; None: the version is published, and whole.
    runs: Runs | None = None


class CurrentVersion(PeerMessage, frozen=True):
    """Answers :class:`WatchPool`: after every change, and every ``WATCH_BEAT`` seconds; silence is a dead host."""

    #: 0: there is none.
    version: Natural


class Going(PeerMessage, frozen=True):
    """Answers :class:`Progress`."""


class PeerRefusal(PeerMessage, frozen=True):
    """Answers any request that cannot be fulfilled. The connection goes on."""

    #: As in :mod:`cubroker.protocol.errors`.
    code: Name
    message: Text


# -- within a host -------------------------------------------------------------------------------------


class Announce(PeerMessage, frozen=True):
    """Tells the exporter of the own host of a draft that is being filled: :class:`Going`, or a refusal.

    :class:`DraftContent` follows. With the end of the connection the version is published, or ends.
    """

    #: The broker that has it, as in :class:`PeerWelcome`.
    host: bytes
    name: Name
    version: Positive
    #: The mode that the pool will have with it; None: the one that it has.
    mode: Annotated[int, Meta(ge=0, le=0o777)] | None = None


class DraftContent(PeerMessage, frozen=True):
    """Says what a draft that was announced will be, and what is there: :class:`Going`, or a refusal.

    :class:`Available` follow.
    """

    #: The digest that each allocation will have, by the algorithm of this name.
    algorithm: Name
    digests: Digests
    #: Bytes of the largest run.
    piece: Positive
    runs: Runs


class Serve(PeerMessage, frozen=True):
    """Has a process of the exporter open a version for one peer: :class:`ExportedVersion`."""

    name: Name
    version: Positive
    engine: Name
    #: Whether it may be a draft.
    unsealed: bool = False
    #: The digest of each allocation, if they are known; else the process finds them out.
    digests: Digests = ()


# -- between a caller and the process that fetches for it ----------------------------------------------


class Order(Struct, frozen=True):
    """What a process is to fetch, and where to."""

    name: str
    #: As :func:`~cubroker.integrations.cluster.connection.parse` takes them.
    peers: tuple[str, ...]
    certificates: str
    #: 0: the current one.
    version: int = 0
    #: None: where clients find the broker.
    directory: str | None = None
    #: By UUID or ordinal; None: the first one.
    devices: tuple[str | int, ...] | None = None
    share: str = AUTO
    mode: int | None = None
    durable: bool | None = None
    #: Whether a current version that is there will do, and whose besides this user's.
    if_absent: bool = False
    owners: tuple[int, ...] = ()
    #: Whether a current version with the same bytes will do.
    if_changed: bool = False
    #: Seconds to wait for a source with room, for room here, and for other writers.
    wait: float = 0.0
    #: Sources to read from at once, at most.
    width: int = WIDTH
    #: Seconds that a source may bring nothing, and that the fetch goes on without any.
    patience: float = PATIENCE
    #: Seconds that the broker may take to open the session; None: as long as by default.
    connect_timeout: float | None = None
    #: The one of the sources whose version it is to be, as an address; empty: the first that has it.
    leader: str = ""


class Fetched(Struct, frozen=True):
    """What :func:`cubroker.integrations.cluster.fetch.fetch` did."""

    name: str
    #: The version's number here.
    version: int
    #: Bytes of one device's copy, padding included.
    nbytes: int
    #: How many tensors it has.
    tensors: int
    #: From the call to the published version, everything included.
    seconds: float
    #: The part of it in which bytes came.
    read_seconds: float
    #: The hosts that bytes came from.
    sources: tuple[str, ...]
    #: False if a version that was there would do.
    fetched: bool
    #: How many of one copy's bytes came from hosts which had not all of it themselves.
    from_parts: int = 0


class StatusLine(Struct, frozen=True):
    """A line that the process prints: one of its fields."""

    #: Bytes that are there, and bytes in all.
    progress: tuple[int, int] | None = None
    fetched: Fetched | None = None
    #: The code and the text of an error.
    error: tuple[str, str] | None = None
    #: Whether it is that the broker here has not answered in time.
    silent: bool = False


Request: TypeAlias = PeerHello | List | Open | WatchPool | Progress
Reply: TypeAlias = PeerWelcome | Offers | ExportedVersion | Available | CurrentVersion | Going | PeerRefusal
Local: TypeAlias = Announce | DraftContent | Available | Serve

M = TypeVar("M", bound=PeerMessage)
T = TypeVar("T")

_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)
_locals: msgspec.msgpack.Decoder[Local] = msgspec.msgpack.Decoder(Local)


def frame(message: Request | Reply | Local) -> bytes:
    """Return a message as it goes over a connection."""
    body = encode(message)
    return LENGTH.pack(len(body)) + body


def length(head: bytes, limit: int) -> int:
    """Return how many bytes follow the first four of a frame; raises ``Invalid`` if they are more than ``limit``."""
    (count,) = LENGTH.unpack(head)
    if not 0 < count <= limit:
        raise Invalid(
            f"a frame of {count} bytes came, and 1 to {limit} are read; the other side speaks no such protocol"
        )
    return int(count)


def request(body: bytes) -> Request:
    """Decode what an exporter received; raises ``Invalid``."""
    return _decoded(_requests, body)


def reply(body: bytes) -> Reply:
    """Decode what a fetching host received; raises ``Invalid``."""
    return _decoded(_replies, body)


def local(body: bytes) -> Local:
    """Decode what came from a process of the own host; raises ``Invalid``."""
    return _decoded(_locals, body)


def content(layout: bytes, algorithm: str, digests: Iterable[bytes]) -> bytes:
    """Return what stands for a version on all hosts: its layout, as it is encoded, and the digests of its bytes."""
    found = blake2b(layout, digest_size=16, key=algorithm.encode()[:64])
    for digest in digests:
        found.update(digest)
    return found.digest()


def to_runs(bits: int) -> bytes:
    """Return runs as they travel."""
    return bits.to_bytes(-(-bits.bit_length() // 8), "little")


def from_runs(runs: bytes | None, count: int) -> int | None:
    """Return runs as bits of a number; None: all. Raises ``Invalid`` if they are not among ``count``."""
    if runs is None:
        return None
    if len(runs) > -(-count // 8) or (bits := int.from_bytes(runs, "little")).bit_length() > count:
        raise Invalid(f"runs of bytes were named that a version of {count} has not")
    return bits


def content_limit(allocations: int, runs: int) -> int:
    """Return how many bytes a :class:`DraftContent` has at most, for a version of so many allocations and runs."""
    return OVERHEAD + (2 + DIGEST) * allocations + runs_limit(runs)


def runs_limit(runs: int) -> int:
    """Return how many bytes an :class:`Available` has at most, for a version of so many runs."""
    return OVERHEAD + -(-runs // 8)


def _decoded(decoder: msgspec.msgpack.Decoder[T], body: bytes) -> T:
    try:
        return decoder.decode(body)
    # The latter two: a string that is not UTF-8, and deep nesting in a field that this build does not know.
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Invalid(f"a message came that cannot be read: {str(error)[:200]}") from None


def expect(answer: Reply, kind: type[M]) -> M:
    """Return an answer of the kind that was asked for.

    Raises:
        CubrokerError: the other side refused, with its code and text.
        Invalid: the answer is of another kind.
    """
    if isinstance(answer, PeerRefusal):
        raise from_code(answer.code, answer.message)
    if not isinstance(answer, kind):
        raise Invalid(f"the exporter answered with {type(answer).__name__} where {kind.__name__} was due")
    return answer


def refusal(error: CubrokerError) -> PeerRefusal:
    """Return an error as the answer to a request."""
    return PeerRefusal(error.code, error.message[:2000])
