"""The format of the socketpair between broker and gateway: batches of routing ids and frames.

One batch is a msgpack array of byte strings, which alternate: routing id, frame, routing id, frame. The gateway sends a
large request in pieces, so that small requests can be sent between them. A piece is a batch of three byte strings:
routing id, piece, and whether it is the last. Only broker and gateway write to the socketpair, so each checks the shape
of a batch and trusts the rest. An empty batch reports that the gateway listens.

The gateway forwards frames without decoding them, so this module does not import the protocol: the import would double
the time that a gateway takes to start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import call

import msgpack

MAX_MESSAGES = 256
"""Most messages in a batch that the gateway sends: enough to be worth a wake-up, few enough to answer soon."""

FULL = 1 << 20  #: Bytes of frames after which a batch takes no further message.
PIECE = 128 << 10  #: Bytes of a piece: as many as the kernel accepts in one call.

READ = 256 << 10  #: Bytes of one read: the kernel buffers fewer, unless somebody raised its ``wmem_default``.

MORE, LAST = b"more", b"last"

MAX_FRAME = 20 << 20  #: Bytes of a frame: ``MAX_MESSAGE`` of the protocol.
MAX_BATCH = 64 << 20  #: Bytes. No honest batch is larger: both sides begin another once one is full.

MAX_FRAMES = 1 << 19
"""Most byte strings in a batch: the decoder allocates as many places as the header announces. A reply has 8 bytes or
more."""

assert FULL // 8 * 2 < MAX_FRAMES
assert MAX_BATCH > FULL + MAX_FRAME

_BUFFER = 2 * READ  #: Bytes of a decoder's buffer at first, and again after a larger batch.

Part = bytes | memoryview | Callable[[], bytes]
"""A routing id or a frame; or a function that makes a long frame when it is sent."""


def encode(frames: Sequence[Part]) -> bytes:
    """Return ``frames`` as one batch."""
    return bytes(msgpack.packb(frames, default=call))


def room() -> memoryview:
    """Return a buffer of :data:`READ` bytes, which a reader uses for all its reads.

    A new buffer for each read would be cut to the bytes received, and leave a small block at the start of a free one.
    glibc caches hundreds of small blocks by size and does not merge them with free neighbours: its heap fragmented.
    """
    return memoryview(bytearray(READ))


def pairs(frames: Iterable[bytes]) -> Iterator[tuple[bytes, bytes]]:
    """Return the (routing id, frame) pairs of a batch."""
    iterator = iter(frames)
    return zip(iterator, iterator, strict=True)


class BatchDecoder:
    """Cuts a stream of bytes into batches."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._unpacker = msgpack.Unpacker(
            read_size=_BUFFER,
            max_buffer_size=MAX_BATCH,
            max_array_len=MAX_FRAMES,
            max_str_len=0,
            max_map_len=0,
            max_ext_len=0,
        )
        self._fed = self._read = 0  # bytes: all that were fed, and those of whole batches
        self._grown = False  # whether the buffer may be larger than at first

    @property
    def within(self) -> bool:
        """Whether more than :data:`FULL` bytes of an incomplete batch have been fed."""
        return self._fed - self._read > FULL

    def feed(self, data: bytes | memoryview) -> list[list[bytes]]:
        """Add received bytes and return the batches that are whole now.

        Raises:
            ValueError: the bytes are not batches; the stream cannot be used any more.
        """
        self._fed += len(data)
        self._grown = self._grown or self._fed - self._read > _BUFFER
        try:
            self._unpacker.feed(data)
            batches: list[list[bytes]] = []
            for batch in self._unpacker:
                batches.append(batch)
                self._read = self._unpacker.tell()
        except msgpack.UnpackException as error:
            raise ValueError(f"not msgpack: {error!r}") from None
        for batch in batches:
            if not isinstance(batch, list) or not {bytes}.issuperset(map(type, batch)):
                raise ValueError(f"not a list of byte strings, but {type(batch).__name__}")
        if self._grown and self._fed == self._read:
            self._begin()  # the buffer has grown to the largest batch, and does not shrink
        return batches
