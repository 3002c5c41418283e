"""How broker and gateway talk over their socketpair: batches of routing ids and frames.

One batch is four bytes of length (little-endian) and a msgpack array of byte strings, which
alternate: routing id, frame, routing id, frame. The gateway wrote what the broker reads here and
the other way round, so the shape is checked and the rest is trusted. The empty batch is the
gateway's word that it listens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from cubroker.protocol import wire

MAX_MESSAGES = 256
"""Messages of one batch that the gateway sends: enough to pay for a wake-up, few enough to answer soon."""

FULL = 1 << 20
"""Bytes of frames after which a batch takes no further message."""

MAX_BATCH = 4 * wire.MAX_MESSAGE
"""Bytes. No batch is larger, since none grows past ``FULL`` by more than one message."""

_HEADER = 4
_DECODER = msgspec.msgpack.Decoder(list[bytes])


def encode(frames: Sequence[bytes]) -> bytes:
    """Return ``frames`` as one batch."""
    payload = msgspec.msgpack.encode(frames)
    return len(payload).to_bytes(_HEADER, "little") + payload


def pairs(frames: Sequence[bytes]) -> Iterator[tuple[bytes, bytes]]:
    """Return the (routing id, frame) pairs of a batch."""
    iterator = iter(frames)
    return zip(iterator, iterator, strict=True)


class Batches:
    """Cuts a stream of bytes into batches."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[list[bytes]]:
        """Add what arrived and return the batches that are whole now.

        Raises:
            ValueError: these are no batches; the stream cannot be used any more.
        """
        buffer = self._buffer
        buffer += data
        batches: list[list[bytes]] = []
        start = 0
        while len(buffer) - start >= _HEADER:
            size = int.from_bytes(buffer[start : start + _HEADER], "little")
            if size > MAX_BATCH:
                raise ValueError(f"a batch of {size} bytes")
            if len(buffer) - start - _HEADER < size:
                break
            start += _HEADER
            with memoryview(buffer) as view:
                batches.append(_DECODER.decode(view[start : start + size]))
            start += size
        del buffer[:start]
        return batches
