"""How broker and gateway talk over their socketpair: batches of routing ids and frames.

One batch is a msgpack array of byte strings, which alternate: routing id, frame, routing id, frame. A large request
comes in pieces, so that small ones get in between: three byte strings, routing id, piece, and whether it is the last.
Each side reads only what the other one wrote, so the shape is checked and the rest is trusted. The empty batch says
that the gateway listens.

The gateway forwards frames and reads none, so nothing here imports the protocol: that would double what a gateway
takes to start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import call

import msgpack

MAX_MESSAGES = 256
"""Messages of one batch that the gateway sends: enough to pay for a wake-up, few enough to answer soon."""

FULL = 1 << 20  #: Bytes of frames after which a batch takes no further message.
PIECE = 128 << 10  #: Bytes of a piece: as much as the kernel takes at once.

READ = 256 << 10  #: Bytes that are read at once: the kernel has less, unless somebody raised its ``wmem_default``.

MORE, LAST = b"more", b"last"

MAX_FRAME = 20 << 20  #: Bytes of a frame: ``MAX_MESSAGE`` of the protocol.
MAX_BATCH = 64 << 20  #: Bytes. No honest batch is larger: both sides begin another once one is full.

MAX_FRAMES = 1 << 19
"""Frames of one batch, which room is made for as soon as one promises them. An answer has 8 bytes at least."""

assert FULL // 8 * 2 < MAX_FRAMES
assert MAX_BATCH > FULL + MAX_FRAME

_BUFFER = 2 * READ  #: Bytes that a decoder has room for at first, and keeps.

Part = bytes | memoryview | Callable[[], bytes]
"""A routing id or a frame; or a function that makes a long frame when it is sent."""


def encode(frames: Sequence[Part]) -> bytes:
    """Return ``frames`` as one batch."""
    return bytes(msgpack.packb(frames, default=call))


def room() -> memoryview:
    """Return room for :data:`READ` bytes, which a reader keeps for all its reads.

    A block of its own for each read is cut to what came, and lies at the start of a free one. glibc keeps hundreds of
    small blocks for the next of their size and joins none of them to what is free beside it: its heap grew by holes.
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
        self._fed = self._read = 0  # bytes: all of them, and those of whole batches
        self._grown = False  # whether the buffer may be larger than it was

    @property
    def within(self) -> bool:
        """Whether the stream has come to the middle of a batch that is larger than most."""
        return self._fed - self._read > FULL

    def feed(self, data: bytes | memoryview) -> list[list[bytes]]:
        """Add received bytes and return the batches that are whole now.

        Raises:
            ValueError: these are no batches; the stream cannot be used any more.
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
            raise ValueError(f"no batches: {error!r}") from None
        for batch in batches:
            if not isinstance(batch, list) or not all(type(frame) is bytes for frame in batch):
                raise ValueError(f"no batch of byte strings, but {type(batch).__name__}")
        if self._grown and self._fed == self._read:
            self._begin()  # the buffer is as large as the largest batch was, and does not shrink
        return batches
