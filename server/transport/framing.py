"""How broker and gateway talk over their socketpair: batches of routing ids and frames.

One batch is a msgpack array of byte strings, which alternate: routing id, frame, routing id, frame. A large request
comes in pieces, so that small ones get in between: three byte strings, routing id, piece, and whether it is the last.
Each side reads only what the other one wrote, so the shape is checked and the rest is trusted. The empty batch says
that the gateway listens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import call

import msgpack

from cubroker.protocol import wire
from cubroker.protocol.wire import Digest, layout_start, session_of

MAX_MESSAGES = 256
"""Messages of one batch that the gateway sends: enough to pay for a wake-up, few enough to answer soon."""

FULL = 1 << 20  #: Bytes of frames after which a batch takes no further message.
PIECE = 128 << 10  #: Bytes of a piece: as much as the kernel takes at once.

MORE, LAST = b"more", b"last"

MAX_BATCH = 64 << 20  #: Bytes. No honest batch is larger: both sides begin another once one is full.

MAX_FRAMES = 1 << 19
"""Frames of one batch, which room is made for as soon as one promises them. An answer has 8 bytes at least."""

assert FULL // 8 * 2 < MAX_FRAMES
assert MAX_BATCH > FULL + wire.MAX_MESSAGE

Part = bytes | memoryview | Callable[[], bytes]
"""A routing id or a frame; or a function that makes a long frame when it is sent."""


class Gathered(bytes):
    """A request that came in pieces.

    Attributes:
        digest: the digest of the layout beside its message, if there is one.
    """

    digest: bytes = b""


def encode(frames: Sequence[Part]) -> bytes:
    """Return ``frames`` as one batch."""
    return bytes(msgpack.packb(frames, default=call))


def pairs(frames: Iterable[bytes]) -> Iterator[tuple[bytes, bytes]]:
    """Return the (routing id, frame) pairs of a batch."""
    iterator = iter(frames)
    return zip(iterator, iterator, strict=True)


class BatchDecoder:
    """Cuts a stream of bytes into batches."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []  # of the request that comes in pieces now
        self._gathered = 0  # bytes of those
        self._digest: Digest | None = None  # of the layout in it
        self._start = 0  # where that begins
        self._begin()

    def _begin(self) -> None:
        self._unpacker = msgpack.Unpacker(
            max_buffer_size=MAX_BATCH, max_array_len=MAX_FRAMES, max_str_len=0, max_map_len=0, max_ext_len=0
        )
        self._fed = self._read = 0  # bytes: all of them, and those of whole batches

    @property
    def within(self) -> bool:
        """Whether the stream has come to the middle of a batch that is larger than most."""
        return self._fed - self._read > FULL

    def feed(self, data: bytes) -> list[list[bytes]]:
        """Add received bytes and return the batches that are whole now; a request that came in pieces is one of them.

        Raises:
            ValueError: these are no batches; the stream cannot be used any more.
        """
        try:
            self._unpacker.feed(data)
            batches = []
            for batch in self._unpacker:
                batches.append(batch)
                self._read = self._unpacker.tell()
        except msgpack.UnpackException as error:
            raise ValueError(f"no batches: {error!r}") from None
        for batch in batches:
            if not isinstance(batch, list) or not all(type(frame) is bytes for frame in batch):
                raise ValueError(f"no batch of byte strings, but {type(batch).__name__}")
        self._fed += len(data)
        if self._fed > FULL and self._fed == self._read:
            self._begin()  # its buffer is as large as the largest batch was, and does not shrink
        return [whole for batch in batches if (whole := self._put_together(batch)) is not None]

    def _put_together(self, batch: list[bytes]) -> list[bytes] | None:
        """Return a batch, or the request that it ends; None after any other piece of a request."""
        if len(batch) != 3:
            return batch
        routing, piece, which = batch
        if not self._pieces:
            self._start = layout_start(piece) if session_of(piece) else 0
            self._digest = Digest() if self._start else None
        if self._digest:  # while it comes: 12 MiB at once would take the broker's loop for 20 milliseconds
            self._digest.add(memoryview(piece)[max(0, self._start - self._gathered) :])
        self._pieces.append(piece)
        self._gathered += len(piece)
        if self._gathered > wire.MAX_MESSAGE:
            raise ValueError(f"no batches: pieces of {self._gathered} bytes; a request has {wire.MAX_MESSAGE} at most")
        if which != LAST:
            return None
        pieces, self._pieces, self._gathered = self._pieces, [], 0
        whole = Gathered(b"".join(pieces))
        if self._digest:
            whole.digest = self._digest.done()
        return [routing, whole]
