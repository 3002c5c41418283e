"""The encoders of all that travels or is written down.

msgspec's own ``encode`` ends the process where there is no memory: it writes to a ``bytes`` that could not grow
(0.22.0). Into a ``bytearray`` it checks, and raises ``MemoryError``. That takes 0.2 microseconds more, and a copy.
"""

from __future__ import annotations

import msgspec

encode_into = msgspec.msgpack.Encoder().encode_into
_encode_json_into = msgspec.json.Encoder().encode_into


def encode(value: object) -> bytes:
    """Return a struct, or lists and scalars, as msgpack."""
    buffer = bytearray()
    encode_into(value, buffer)
    return bytes(buffer)


def encode_json(value: object) -> bytes:
    """Return the same as JSON, in one line."""
    buffer = bytearray()
    _encode_json_into(value, buffer)
    return bytes(buffer)
