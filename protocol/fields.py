"""Bounds of what messages carry, the types of their fields, and the rule for names of pools."""

from __future__ import annotations

import re
from typing import Annotated

from msgspec import Meta

from cubroker.protocol.errors import Invalid
from cubroker.protocol.layout import MAX_ALLOCATIONS, MAX_ENCODED, MAX_EXTENT

MAX_WAIT = 7 * 86_400.0  #: Seconds that a request may wait at most.
MAX_RECEIVED = 256  #: Answers that one request can list as received.
MAX_ITEMS = 400_000  #: Elements of an array without a lower bound of its own.
MAX_DEVICES = 64  #: Devices of one pool.
MAX_DESCRIPTORS = 16  #: Descriptors that one :class:`.messages.Descriptors` carries.
DIGEST_BYTES = 16  #: Bytes of a digest.
MAX_NOTICE = 1 << 16  #: Bytes of a message on the session socket; longer ones are not sent.
LATEST = 1e11  #: Seconds since 1970 of the latest moment that a message can name, in the year 5138; the earliest is 0.

#: A count, a version, or bytes.
Natural = Annotated[int, Meta(ge=0, le=MAX_EXTENT)]
#: A number that the broker or a client counts up from 1: of sessions, leases, requests, events.
Identifier = Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]
#: The name of a pool or an event; :func:`check_pool_name` has the rule.
Name = Annotated[str, Meta(min_length=1, max_length=256)]
#: The UUID of a device.
Uuid = Annotated[str, Meta(min_length=1, max_length=64)]
#: How long a request may wait.
Seconds = Annotated[float, Meta(ge=0, le=MAX_WAIT)]
#: A moment, in seconds since 1970.
Time = Annotated[float, Meta(ge=0, le=LATEST)]
#: A layout, as :meth:`~cubroker.protocol.layout.Layout.encode` returns it.
Encoded = Annotated[bytes, Meta(max_length=MAX_ENCODED)]
#: What opens one allocation.
Handle = Annotated[bytes, Meta(max_length=64)]
EventHandle = Annotated[bytes, Meta(min_length=64, max_length=64)]
#: One per allocation of a layout.
Handles = Annotated[tuple[Handle, ...], Meta(max_length=MAX_ALLOCATIONS)]
Algorithm = Annotated[str, Meta(min_length=1, max_length=32)]
Digest = Annotated[bytes, Meta(max_length=DIGEST_BYTES)]
#: One per allocation of a layout.
DigestsOfReplica = Annotated[tuple[Digest, ...], Meta(max_length=MAX_ALLOCATIONS)]
#: Permissions, like a file's.
Mode = Annotated[int, Meta(ge=0, le=0o777)]
Devices = Annotated[tuple[Uuid, ...], Meta(min_length=1, max_length=MAX_DEVICES)]
Peers = Annotated[tuple[Uuid, ...], Meta(max_length=MAX_DEVICES)]
#: One number per allocation of a layout.
Plan = Annotated[tuple[Natural, ...], Meta(max_length=MAX_ALLOCATIONS)]
#: A user id.
User = Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]
Users = Annotated[tuple[User, ...], Meta(max_length=64)]

MODE = r"(?a:(0o?)?[0-7]{3})"  #: What :func:`parse_mode` takes.
_POOL_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:/+-]{0,254}")


def check_pool_name(name: str, what: str = "a pool") -> str:
    """Return ``name`` as a plain ``str``; raise ``Invalid`` unless it is valid in a table, a URL and ``NAME@VERSION``.

    ``what`` says what it is to name. It may be of a subclass of ``str``, such as numpy's, which messages cannot carry.
    """
    rule = "use 1 to 255 letters, digits and _ . : / + - and begin with a letter, a digit or _"
    if not isinstance(name, str):  # such as None, from a variable of the environment that is not set
        raise Invalid(f"an object of type {type(name).__name__} cannot name {what}: {rule}")
    if not _POOL_NAME.fullmatch(name):
        bare, at, _ = name.partition("@")
        hint = f"; give the version separately from the name {bare[:64]!r}" if at and _POOL_NAME.fullmatch(bare) else ""
        raise Invalid(f"{name[:64]!r} cannot name {what}: {rule}{hint}")
    return str.__str__(name)


def parse_mode(text: str) -> int:
    """Return a mode that is written in octal, as ``640``, ``0640`` or ``0o640``; raises ``Invalid`` for other texts."""
    if not re.fullmatch(MODE, text):
        raise Invalid(f"{text!r} is no mode: write three octal digits, as in 640")
    return int(text, 8)
