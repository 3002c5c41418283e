"""Bytes to typed structs and back: msgpack under size limits, then ``msgspec.convert``.

``msgpack`` refuses what is larger than its limits before it builds anything; ``convert`` refuses
what has the wrong shape. A peer can so cost no more than a small multiple of the bytes it sent.
"""

from __future__ import annotations

from typing import TypeVar

import msgpack
import msgspec

from cubroker.protocol.errors import Invalid

MAX_MESSAGE = 16 << 20
"""Bytes of one message, on either socket; a layout of 100,000 tensors has about 10 MiB."""

MAX_ITEMS = 400_000
"""Elements of one array or map."""

T = TypeVar("T")


def pack(value: object) -> bytes:
    """Encode a struct, or lists and scalars, as msgpack."""
    return msgspec.msgpack.encode(value)


def unpack(data: bytes | memoryview, shape: type[T]) -> T:
    """Decode ``data`` as a ``shape``.

    Raises:
        Invalid: too long, no msgpack, too deep, trailing bytes, or another shape than asked for.
    """
    if len(data) > MAX_MESSAGE:
        raise Invalid(f"a message of {len(data)} bytes; the most is {MAX_MESSAGE}")
    try:
        plain = msgpack.unpackb(
            data,
            use_list=True,
            strict_map_key=True,
            max_str_len=1 << 16,
            max_bin_len=MAX_MESSAGE,
            max_array_len=MAX_ITEMS,
            max_map_len=MAX_ITEMS,
            max_ext_len=0,
        )
        return msgspec.convert(plain, shape)
    # msgpack reports malformed input as ValueError and its subclasses, and the rest as its own classes.
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException) as error:
        raise Invalid(f"a message that cannot be read as {_name(shape)}: {str(error)[:200]}") from None


def _name(shape: object) -> str:
    return str(getattr(shape, "__name__", shape))
