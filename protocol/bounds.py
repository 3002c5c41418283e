"""What values may be, and how many of them there may be: the types of the fields of messages."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from cubroker.protocol.layout import MAX_ALLOCATIONS, MAX_ENCODED, MAX_EXTENT

MAX_WAIT = 7 * 86_400.0
"""Seconds: the longest that a request may wait."""

MAX_RECEIVED = 256
"""Answers whose receipt one request tells."""

MAX_DEVICES = 64
"""Devices of one pool."""

MAX_DESCRIPTORS = 16
"""Descriptors that one :class:`Descriptors` carries."""

DIGEST_BYTES = 16
"""Bytes of a digest."""

MAX_NOTICE = 1 << 16
"""Bytes of a message on the session socket; what is longer is not sent."""

LATEST = 1e11
"""Seconds since 1970 of the latest moment that a message can name, in the year 5138; the earliest is 0."""

Natural = Annotated[int, Meta(ge=0, le=MAX_EXTENT)]
Identifier = Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]
Name = Annotated[str, Meta(min_length=1, max_length=256)]
Uuid = Annotated[str, Meta(min_length=1, max_length=64)]
Seconds = Annotated[float, Meta(ge=0, le=MAX_WAIT)]
Time = Annotated[float, Meta(ge=0, le=LATEST)]
Encoded = Annotated[bytes, Meta(max_length=MAX_ENCODED)]
Handle = Annotated[bytes, Meta(max_length=64)]
EventHandle = Annotated[bytes, Meta(min_length=64, max_length=64)]
Handles = Annotated[tuple[Handle, ...], Meta(max_length=MAX_ALLOCATIONS)]
Algorithm = Annotated[str, Meta(min_length=1, max_length=32)]
Digest = Annotated[bytes, Meta(max_length=DIGEST_BYTES)]
DigestsOfReplica = Annotated[tuple[Digest, ...], Meta(max_length=MAX_ALLOCATIONS)]
Mode = Annotated[int, Meta(ge=0, le=0o777)]
Devices = Annotated[tuple[Uuid, ...], Meta(min_length=1, max_length=MAX_DEVICES)]
Peers = Annotated[tuple[Uuid, ...], Meta(max_length=MAX_DEVICES)]
Plan = Annotated[tuple[Natural, ...], Meta(max_length=MAX_ALLOCATIONS)]

User = Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]
"""The number of a user."""

Users = Annotated[tuple[User, ...], Meta(max_length=64)]
