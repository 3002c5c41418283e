"""Bytes to typed structs and back, as msgpack.

The type that is asked for drives the decoding: what does not fit is refused where it is met, before
anything is built for it. Every array in the protocol has a bound and no type contains itself, so a
peer costs no more than a small multiple of the bytes that it sent, and no depth of nesting.
"""

from __future__ import annotations

from functools import cache
from typing import Any, TypeVar, get_args, get_origin, overload

import msgspec

from cubroker.protocol.errors import Invalid

MAX_MESSAGE = 20 << 20
"""Bytes of one message, on either socket; the handles of the largest draft take 16.5 MiB, the largest layout 12."""

MAX_ITEMS = 400_000
"""Elements of any array that has no lower bound of its own."""

T = TypeVar("T")


def pack(value: object) -> bytes:
    """Encode a struct, or lists and scalars, as msgpack.

    Raises:
        Invalid: a string that is no Unicode text (lone surrogates), or a number of more than 64 bits.
    """
    try:
        return msgspec.msgpack.encode(value)
    except (UnicodeEncodeError, OverflowError) as error:
        raise Invalid(f"a {type(value).__name__} that cannot be sent: {error}") from None


@overload
def unpack(data: bytes | memoryview, shape: type[T]) -> T: ...
@overload
def unpack(data: bytes | memoryview, shape: object) -> Any: ...
def unpack(data: bytes | memoryview, shape: object) -> object:
    """Decode ``data`` as a ``shape``: a struct, or a union of them.

    Raises:
        Invalid: too long, no msgpack, trailing bytes, or another shape than asked for.
    """
    if len(data) > MAX_MESSAGE:
        raise Invalid(f"a message of {len(data)} bytes; the most is {MAX_MESSAGE}")
    try:
        return _decoder(shape).decode(data)
    # A DecodeError tells of bytes or types that do not fit; a UnicodeDecodeError of a string that is no UTF-8; a
    # RecursionError of deep nesting in a trailing element, which a later protocol may have and this one skips.
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Invalid(f"a message that cannot be read as {_name(shape)}: {str(error)[:200]}") from None


def prepare(*shapes: object) -> None:
    """Build what decodes ``shapes``: for the module that defines them, while it is imported.

    msgspec (0.22.0) notes on a struct's class what it knows of the fields before it knows them all. Another thread, or
    a signal handler, that decodes the struct for the first time meanwhile crashes the process.
    """
    for shape in shapes:
        _decoder(shape)


@cache
def _decoder(shape: object) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(shape)


def _name(shape: object) -> str:
    """The name of a struct, or of all members of a union."""
    members = get_args(shape) if get_origin(shape) is not None else (shape,)
    return " or ".join(getattr(member, "__name__", str(member)) for member in members)
