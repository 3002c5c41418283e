"""The messages between a host that fetches and a host that exports, and their frames; no sockets.

A connection is TLS over TCP. Each message is a frame: its length as four bytes, big-endian, and as many bytes of
msgpack. The fetching side begins with :class:`PeerHello` and then sends requests. The exporting side answers each
request with one message. After a :class:`WatchPool` it sends one more with every change. After the :class:`Open` of a
version that it has only in part, it sends an :class:`Available` whenever it has more. The bytes of pools are not part
of any message: the engines move them.

In the same frames, a host that fetches tells the exporter of its own host what it has (:class:`Announce`), and an
exporter tells its processes what to open (:class:`Serve`).

All input is bounded before it is decoded, and decoded into these types alone. The process that fetches
(:mod:`~cubroker.integrations.cluster.fetch_process`) receives an :class:`Order` as a line of JSON, and answers with
lines that are :class:`StatusLine`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from hashlib import blake2b
from typing import Annotated, BinaryIO, TypeAlias, TypeVar

import msgspec
from msgspec import Meta, Struct

from cubroker.integrations.cluster.striping import WIDTH
from cubroker.protocol.encoding import encode
from cubroker.protocol.errors import CubrokerError, Invalid, from_code
from cubroker.protocol.fields import MAX_DEVICES, MAX_ITEMS
from cubroker.protocol.messages import AUTO

VERSION = 2
"""The protocol that this build speaks."""

PARTS = 2
"""The first version of the protocol in which a host offers versions that it has only in part."""

PORT = 7411
"""The port at which an exporter listens by default."""

PATIENCE = 20.0
"""Seconds for which, by default, a source may deliver nothing, and a fetch continues without any source."""

MAX_REQUEST = 64 << 10
"""Bytes of the longest frame that an exporter reads: requests have no long fields."""

MAX_REPLY = 64 << 20
"""Bytes of the longest frame that a fetching host reads: a reply may have the layout of a pool."""

WATCH_BEAT = 20.0
"""Seconds after which an exporter repeats the current version to a peer that watches it."""

NEWS = 0.05
"""The least number of seconds between two :class:`Available`."""

MAX_LOCAL = 8 << 20
"""Bytes of the longest frame within a host, which has the digests of a version."""

MAX_ANNOUNCE = 4 << 10
"""Bytes of the longest :class:`Announce`: it is read before anything is known about its sender."""

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
"""Runs of bytes of a version as bits, lowest first, in the order of :func:`.striping.cut`."""


class PeerMessage(Struct, frozen=True, tag=True):
    """A message, with the name of its class in the field ``type``."""


# -- from the host that fetches ------------------------------------------------------------------------


class PeerHello(PeerMessage, frozen=True):
    """Begins a connection."""

    #: The newest protocol that this side speaks.
    version: Positive


class List(PeerMessage, frozen=True):
    """Asks for the versions that this peer may fetch. The answer is :class:`Offers`."""


class Open(PeerMessage, frozen=True):
    """Asks for the memory of a version. The answer is :class:`ExportedVersion`. A connection opens one version."""

    name: Name
    #: 0: the current one.
    version: Natural = 0
    #: The engine that this side reads with (:mod:`~cubroker.integrations.cluster.transfer_engine`).
    engine: Name = "nixl"


class WatchPool(PeerMessage, frozen=True):
    """Asks for the current version of a pool. A :class:`CurrentVersion` is sent now and after every change."""

    name: Name


class Progress(PeerMessage, frozen=True):
    """Reports that the peer is alive, and how many bytes it has read. The answer is :class:`Going`."""

    nbytes: Natural


# -- from the host that exports ------------------------------------------------------------------------


class PeerWelcome(PeerMessage, frozen=True):
    """Answers :class:`PeerHello`."""

    #: The protocol of this connection: the newest that both sides speak.
    version: Positive
    #: The user of this host whose permissions the peer has.
    user: Name
    #: The id of the broker that it exports from (:func:`.connection.host_id`); empty: unknown.
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
    #: The result of :func:`content`, which is equal for the same version on all hosts; None: it is not known yet.
    content: Digest | None = None
    #: Of a version that is being fetched: how many of its bytes the host has; None: all.
    there: Natural | None = None


class Offers(PeerMessage, frozen=True):
    """Answers :class:`List`."""

    offers: Annotated[tuple[Offer, ...], Meta(max_length=MAX_ITEMS)]
    #: How many peers read from this host now, and how many may read at the same time.
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
    #: As :meth:`cubroker.protocol.layout.Layout.encode` returns it.
    layout: bytes
    #: The name of the digests' definition (:data:`cubroker.driver.kernels.ALGORITHM`).
    algorithm: Name
    #: One for each allocation of the layout.
    places: Annotated[tuple[ExportedAllocation, ...], Meta(max_length=MAX_ITEMS)]
    #: The data with which the peer's engine connects: a secret.
    metadata: bytes
    #: The peer's place among those that read from this host, and how many places there are.
    slot: Natural = 0
    slots: Positive = 1
    #: Of a version that is being fetched: the runs that the host has, and the bytes of the largest run; None: all.
    runs: Runs | None = None
    piece: Natural = 0


class Available(PeerMessage, frozen=True):
    """Follows the :class:`ExportedVersion` of a version that the exporting host is fetching, whenever it has more."""

    #: All runs that the host has now; None: the version is published, and whole.
    runs: Runs | None = None


class CurrentVersion(PeerMessage, frozen=True):
    """Answers :class:`WatchPool`: after every change, and every ``WATCH_BEAT`` seconds; silence is a dead host."""

    #: 0: the pool has none.
    version: Natural


class Going(PeerMessage, frozen=True):
    """Answers :class:`Progress`."""


class PeerRefusal(PeerMessage, frozen=True):
    """Answers any request that cannot be fulfilled. The connection stays open."""

    #: As in :mod:`cubroker.protocol.errors`.
    code: Name
    message: Text


# -- within a host -------------------------------------------------------------------------------------


class Announce(PeerMessage, frozen=True):
    """Announces a draft that is being filled to the host's own exporter. The answer is :class:`Going` or a refusal.

    :class:`DraftContent` follows. When the connection ends, the version is published, or has ended.
    """

    #: The id of the broker that has the draft, as in :class:`PeerWelcome`.
    host: bytes
    name: Name
    version: Positive
    #: The mode that the pool gets with this version; None: the pool keeps its mode.
    mode: Annotated[int, Meta(ge=0, le=0o777)] | None = None


class DraftContent(PeerMessage, frozen=True):
    """Describes an announced draft: its digests, and the runs it has. The answer is :class:`Going` or a refusal.

    :class:`Available` messages follow.
    """

    #: The digest that each allocation will have, by the algorithm of this name.
    algorithm: Name
    digests: Digests
    #: Bytes of the largest run.
    piece: Positive
    runs: Runs


class Serve(PeerMessage, frozen=True):
    """Has a process of the exporter open a version for one peer. The answer is :class:`ExportedVersion`."""

    name: Name
    version: Positive
    engine: Name
    #: Whether it may be a draft.
    unsealed: bool = False
    #: The digest of each allocation, if they are known; otherwise the process obtains them.
    digests: Digests = ()


# -- between a caller and the process that fetches for it ----------------------------------------------


class Order(Struct, frozen=True):
    """What a process is to fetch, and where to: arguments of :func:`cubroker.integrations.cluster.fetch.fetch`."""

    name: str
    #: As :func:`~cubroker.integrations.cluster.connection.parse` accepts them.
    peers: tuple[str, ...]
    certificates: str
    #: 0: the current one.
    version: int = 0
    directory: str | None = None
    #: By UUID or ordinal; None: the first one.
    devices: tuple[str | int, ...] | None = None
    share: str = AUTO
    mode: int | None = None
    durable: bool | None = None
    #: Whether an existing current version is enough, and whose versions count in addition to this user's.
    if_absent: bool = False
    owners: tuple[int, ...] = ()
    #: Whether a current version with the same bytes is enough.
    if_changed: bool = False
    wait: float = 0.0
    width: int = WIDTH
    patience: float = PATIENCE
    connect_timeout: float | None = None
    #: The address of the source that defines which version is fetched; empty: the first source that has it.
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
    #: The part of ``seconds`` in which bytes were read.
    read_seconds: float
    #: The hosts that bytes came from.
    sources: tuple[str, ...]
    #: False if an existing version was enough.
    fetched: bool
    #: How many of one copy's bytes came from hosts that had only a part of the version themselves.
    from_parts: int = 0


class StatusLine(Struct, frozen=True):
    """A line that the process prints, with one of its fields set."""

    #: Bytes that are there, and bytes in all.
    progress: tuple[int, int] | None = None
    #: What the fetch waits for.
    awaits: str = ""
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
    """Return a message as a frame."""
    body = encode(message)
    return LENGTH.pack(len(body)) + body


def length(head: bytes, limit: int) -> int:
    """Return how many bytes follow the first four of a frame; raises ``Invalid`` if they are more than ``limit``."""
    (count,) = LENGTH.unpack(head)
    if not 0 < count <= limit:
        raise Invalid(
            f"received a frame of {count} bytes; 1 to {limit} are accepted; the other side does not speak this protocol"
        )
    return int(count)


def read(stream: BinaryIO, limit: int) -> bytes:
    """Return the message of the next frame, of at most ``limit`` bytes; empty if the stream ends before it does."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return b""
    body = stream.read(count := length(head, limit))
    return body if len(body) == count else b""


def request(body: bytes) -> Request:
    """Decode what an exporter received; raises ``Invalid``."""
    return _decoded(_requests, body)


def reply(body: bytes) -> Reply:
    """Decode what a fetching host received; raises ``Invalid``."""
    return _decoded(_replies, body)


def local(body: bytes) -> Local:
    """Decode what was received from a process of this host; raises ``Invalid``."""
    return _decoded(_locals, body)


def content(layout: bytes, algorithm: str, digests: Iterable[bytes]) -> bytes:
    """Return a digest that identifies a version on all hosts, of its encoded layout and the digests of its bytes."""
    found = blake2b(layout, digest_size=16, key=algorithm.encode()[:64])
    for digest in digests:
        found.update(digest)
    return found.digest()


def to_runs(bits: int) -> bytes:
    """Return runs, which are bits of a number, as messages contain them."""
    return bits.to_bytes(-(-bits.bit_length() // 8), "little")


def from_runs(runs: bytes | None, count: int) -> int | None:
    """Return a message's runs as bits of a number; None: all. Raises ``Invalid`` if they are not among ``count``."""
    if runs is None:
        return None
    if len(runs) > -(-count // 8) or (bits := int.from_bytes(runs, "little")).bit_length() > count:
        raise Invalid(f"the message names runs beyond the {count} of this version")
    return bits


def content_limit(allocations: int, runs: int) -> int:
    """Return the most bytes that a :class:`DraftContent` has, for these numbers of allocations and runs."""
    return OVERHEAD + (2 + DIGEST) * allocations + runs_limit(runs)


def runs_limit(runs: int) -> int:
    """Return the most bytes that an :class:`Available` has, for this number of runs."""
    return OVERHEAD + -(-runs // 8)


def _decoded(decoder: msgspec.msgpack.Decoder[T], body: bytes) -> T:
    try:
        return decoder.decode(body)
    # The latter two: a string that is not UTF-8, and deep nesting in a field that this build does not know.
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Invalid(f"received a message that cannot be decoded: {str(error)[:200]}") from None


def expect(answer: Reply, kind: type[M]) -> M:
    """Return an answer of the kind that was asked for.

    Raises:
        CubrokerError: the other side refused, with its code and text.
        Invalid: the answer is of another kind.
    """
    if isinstance(answer, PeerRefusal):
        raise from_code(answer.code, answer.message)
    if not isinstance(answer, kind):
        raise Invalid(f"the exporter answered with {type(answer).__name__} instead of {kind.__name__}")
    return answer


def refusal(error: CubrokerError) -> PeerRefusal:
    """Return an error as the answer to a request."""
    return PeerRefusal(error.code, error.message[:2000])
