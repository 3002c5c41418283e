"""Who wrote a frame of the request socket, which a process carries that may be in a peer's hands.

Up to version 3 of the protocol a request has the session's secret in it (:class:`Bearer`): what carries it can ask in
the session's name. From version 4 on the secret never travels there, and both ends make keys of it (:class:`Keyed`),
one for each direction. A request begins with the session's number, in eight bytes; what follows, and every reply, has
one of two forms:

* ``WHOLE | tag | message``: the tag is BLAKE2b, under the key, of the message;
* ``ENCLOSED | tag | length | hidden | layout``: the tag is that of the mark, the layout's length, and a message of
  ``length`` bytes in which a long layout's digest stands for the layout. The message is hidden by a stream of SHAKE128
  that is made of the key and the tag, as in SIV (RFC 5297): two messages are never hidden by the same stream, whatever
  is sent again. Messages with handles travel like that, since a handle opens memory or an event for anybody; and those
  with long layouts, whose digests are worked out while they come, or once for all leases on a version.

What carries such frames can drop, delay and repeat them, and no more than that: a request that is repeated is answered
again and not done again, and an answer that is repeated answers nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b, shake_128
from hmac import compare_digest
from typing import Any, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from cubroker.protocol import wire
from cubroker.protocol.errors import Invalid
from cubroker.protocol.layout import MAX_ENCODED
from cubroker.protocol.messages import (
    AUTHENTICATED,
    Answer,
    Attached,
    Create,
    Created,
    Description,
    Envelope,
    EventOpened,
    Reply,
    Request,
    ShareEvent,
)
from cubroker.protocol.versions import for_version

WHOLE, ENCLOSED = b"\xc1", b"\xc2"
"""The two forms."""

TAG = 16
"""Bytes of a tag."""

NUMBER = 8
"""Bytes of a session's number before a request. The first is less than :data:`LEGACY`."""

LEGACY = 0x80
"""The least that the first byte of a request is up to version 3: that of a msgpack array."""

SHORT = 4 << 10
"""Bytes of a layout past which its digest stands for it."""

MAX_REQUEST = 128 << 10
"""Bytes of a request without the layout beside it. Its author is not known before all of them are looked at."""

_HEAD = 1 + TAG
_LENGTH = 4

_HANDLES = frozenset((Attached, Created, EventOpened, ShareEvent))
_LAYOUTS = frozenset((Attached, Description, Create))
_ENCLOSED = _HANDLES | _LAYOUTS

_DIGEST = blake2b(digest_size=32, person=b"cubroker layout")

M = TypeVar("M", Request, Reply)


class Digest:
    """The digest, of 32 bytes, of what comes in pieces; a megabyte takes one to two milliseconds."""

    def __init__(self, data: bytes | memoryview = b"") -> None:
        self._state = _DIGEST.copy()
        self.add = self._state.update
        self.add(data)

    def done(self) -> bytes:
        """Return it."""
        return self._state.digest()


def digest(data: bytes | memoryview) -> bytes:
    """Return the digest of what is there at once."""
    return Digest(data).done()


class Bearer:
    """A session of version 1 to 3: who shows its secret is its client, and its replies are whatever comes.

    Args:
        secret: what the broker handed out on the session socket.
        version: what both speak.

    Attributes:
        name: what its requests are known by.
        secret: what they carry.
    """

    def __init__(self, secret: bytes, version: int = 1) -> None:
        self.name: int | bytes = secret
        self.secret = secret
        self._version = version

    def request(self, envelope: Envelope) -> bytes:
        """Return the frame of a request."""
        parts = (getattr(envelope, name) for name in envelope.__struct_fields__)
        return wire.pack([for_version(part, self._version) if isinstance(part, Struct) else part for part in parts])

    def opened(self, frame: bytes) -> tuple[bytes, bytes] | None:
        """Return the message in a request and the layout beside it; None if its client did not write it."""
        return frame, b""

    def bulk(self, body: Reply) -> bytes:
        """Return the layout in a reply whose digest its frame needs; nothing if it needs none."""
        return b""

    def reply(self, answer: Answer, hashed: Callable[[bytes], bytes] = digest) -> bytes:
        """Return the frame of an answer; ``hashed`` returns the digest of a layout."""
        return wire.pack(answer)

    def read(self, frame: bytes) -> Answer | None:
        """Return the answer in a frame; None if the broker did not write it.

        Raises:
            Invalid: the broker wrote what is no answer.
        """
        return wire.unpack(frame, Answer)


class Keyed(Bearer):
    """A session since version 4, whose frames are authenticated by keys that are made of its secret.

    Args:
        number: the session.
        secret: what the broker handed out on the session socket.
    """

    def __init__(self, number: int, secret: bytes) -> None:
        super().__init__(b"")
        self.name = number
        self._number = number.to_bytes(NUMBER)
        self._requests, self._replies = _Key(secret, b"requests"), _Key(secret, b"replies")

    def request(self, envelope: Envelope) -> bytes:
        """Return the frame of a request."""
        body = envelope.body
        if type(body) not in _ENCLOSED:
            return self.sign(wire.pack(envelope))
        layout = long_layout(body)
        if layout:
            envelope = replace(envelope, body=_with(body, digest(layout)))
        return self._number + self._requests.enclose(wire.pack(envelope), layout)

    def sign(self, data: bytes) -> bytes:
        """Return a frame with ``data`` as its message."""
        return self._number + self._requests.sign(data)

    def opened(self, frame: bytes) -> tuple[bytes, bytes] | None:
        """Return the message in a request and the layout beside it; None if its client did not write it."""
        return self._requests.opened(frame, NUMBER, MAX_REQUEST)

    def bulk(self, body: Reply) -> bytes:
        """Return the layout in a reply whose digest its frame needs; nothing if it needs none."""
        return long_layout(body)

    def reply(self, answer: Answer, hashed: Callable[[bytes], bytes] = digest) -> bytes:
        """Return the frame of an answer; ``hashed`` returns the digest of a layout."""
        body = answer.body
        if type(body) not in _ENCLOSED:
            return self._replies.sign(wire.pack(answer))
        layout = long_layout(body)
        if layout:
            answer = Answer(answer.id, _with(body, hashed(layout)))
        return self._replies.enclose(wire.pack(answer), layout)

    def read(self, frame: bytes) -> Answer | None:
        """Return the answer in a frame; None if the broker did not write it.

        Raises:
            Invalid: the broker wrote what is no answer.
        """
        opened = self._replies.opened(frame, 0, wire.MAX_MESSAGE)
        if opened is None:
            return None
        data, layout = opened
        answer = wire.unpack(data, Answer)
        if not layout:
            return answer
        body = complete(answer.body, layout, digest(layout))
        return None if body is None else Answer(answer.id, body)


class _Key:
    """What one direction of a session is authenticated and hidden with."""

    def __init__(self, secret: bytes, person: bytes) -> None:
        # Setting a key takes as long as hashing a small message: a state that has one is copied for each.
        self._state = blake2b(key=secret, digest_size=TAG, person=person)
        self._stream = blake2b(key=secret, digest_size=32, person=person, salt=b"hidden").digest()

    def sign(self, data: bytes) -> bytes:
        state = self._state.copy()
        state.update(data)
        return WHOLE + state.digest() + data

    def enclose(self, data: bytes, layout: bytes) -> bytes:
        tag = self._tag(data, len(layout))
        return b"".join((ENCLOSED, tag, len(data).to_bytes(_LENGTH), self._hide(data, tag), layout))

    def opened(self, frame: bytes, start: int, limit: int) -> tuple[bytes, bytes] | None:
        """Return the message, up to a limit, and the layout in a frame; None if no holder of the key wrote it."""
        head = start + _HEAD
        mark, tag = frame[start : start + 1], frame[start + 1 : head]
        if mark == WHOLE and len(frame) <= head + limit:
            data = frame[head:]
            state = self._state.copy()
            state.update(data)
            return (data, b"") if compare_digest(state.digest(), tag) else None
        end = layout_start(frame, start)
        if not 0 < end <= min(len(frame), head + _LENGTH + limit):
            return None
        data, layout = self._hide(frame[head + _LENGTH : end], tag), frame[end:]
        return (data, layout) if compare_digest(self._tag(data, len(layout)), tag) else None

    def _tag(self, data: bytes, beside: int) -> bytes:
        state = self._state.copy()
        state.update(ENCLOSED + beside.to_bytes(_LENGTH))
        state.update(data)
        return state.digest()

    def _hide(self, data: bytes, tag: bytes) -> bytes:
        """Hide a message, or show what was hidden."""
        size = len(data)
        stream = shake_128(self._stream + tag).digest(size)
        return (int.from_bytes(data) ^ int.from_bytes(stream)).to_bytes(size)


def authentication(version: int, session: int, secret: bytes) -> Bearer:
    """Return how the frames of a session are authenticated that speaks ``version``."""
    return Keyed(session, secret) if version >= AUTHENTICATED else Bearer(secret, version)


def session_of(frame: bytes) -> int:
    """Return the session in whose name a request comes, whoever wrote it; 0 if it is one of version 1 to 3, or none."""
    return int.from_bytes(frame[:NUMBER]) if frame and frame[0] < LEGACY else 0


def layout_start(frame: bytes, start: int = NUMBER) -> int:
    """Return where the layout begins that is beside a message; 0 if there is none."""
    head = start + _HEAD
    if frame[start : start + 1] != ENCLOSED:
        return 0
    return head + _LENGTH + int.from_bytes(frame[head : head + _LENGTH])


def long_layout(body: Request | Reply) -> bytes:
    """Return the layout in a message if its digest stands for it, else nothing."""
    if type(body) not in _LAYOUTS:
        return b""
    layout: bytes = body.layout  # type: ignore[union-attr]
    return layout if len(layout) > SHORT else b""


def complete(body: M, layout: bytes, hashed: bytes) -> M | None:
    """Put the layout into a message that its digest stood for; None if it is another one.

    Args:
        body: from the message that came, whose author is known.
        layout: what came beside it.
        hashed: the digest of ``layout``.

    Raises:
        Invalid: there may be no layout as long as that.
    """
    if len(layout) > MAX_ENCODED:
        raise Invalid(f"a layout of {len(layout)} bytes; the most is {MAX_ENCODED}")
    stands = type(body) in _LAYOUTS and compare_digest(body.layout, hashed)  # type: ignore[union-attr]
    return _with(body, layout) if stands else None


def _with(body: M, layout: bytes) -> M:
    changed: Any = replace(body, layout=layout)
    found: M = changed
    return found
