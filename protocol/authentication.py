"""Who wrote a frame of the request socket, which a process carries that may be in a peer's hands.

Up to version 3 of the protocol a request has the session's secret in it (:class:`Bearer`): what carries it can ask in
the session's name. From version 4 on the secret never travels there, and both ends make keys of it (:class:`Keyed`),
one for each direction. A request begins with the session's number, in eight bytes; what follows, and every reply, has
one of three forms:

* ``WHOLE | tag | message``: the tag is BLAKE2b, under the key, of the message;
* ``BESIDE | tag | length | message | layout``: a long layout's digest stands for it in the message, which has
  ``length`` bytes. The tag is that of the mark, the layout's length and the message. The digest is worked out while
  the layout comes, or once for all leases on a version;
* ``HIDDEN | tag | length | hidden | layout``: the same of a message with handles, since a handle opens memory or an
  event for anybody; the layout may be empty. The message is hidden by a stream of SHAKE128 that is made of the key and
  the tag, as in SIV (RFC 5297): two messages are never hidden by the same stream, whatever is sent again. It takes
  several times as long as the tag, and leases by descriptor have no handles: what opens their memory never comes here.

What carries such frames can drop, delay and repeat them, and no more than that: a request that is repeated is answered
again and not done again, and an answer that is repeated answers nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b, shake_128
from hmac import compare_digest
from operator import attrgetter
from typing import Any, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from cubroker.protocol import wire
from cubroker.protocol.errors import Invalid
from cubroker.protocol.layout import MAX_ENCODED
from cubroker.protocol.messages import (
    AUTHENTICATED,
    DESCRIPTOR,
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
from cubroker.protocol.versions import NEWEST, for_version

WHOLE, BESIDE, HIDDEN = b"\xc1", b"\xc2", b"\xc3"
"""The three forms."""

SECRET = 16
"""Bytes of a session's secret."""

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

_LEASES = frozenset((Attached, Created))
_EVENTS = frozenset((EventOpened, ShareEvent))
_LAYOUTS = frozenset((Attached, Description, Create))
_LONG = _LEASES | _EVENTS | _LAYOUTS
_handles = attrgetter("handles")
_opens_nothing = frozenset((b"", DESCRIPTOR)).issuperset

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
        self.name = secret
        self.secret = secret
        self._version = version

    def request(self, envelope: Envelope) -> bytes:
        """Return the frame of a request."""
        if self._version >= NEWEST:
            return wire.pack(envelope)
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
        self.name = number.to_bytes(NUMBER)
        self._requests = _Key(secret, b"requests", self.name, MAX_REQUEST)
        self._replies = _Key(secret, b"replies", b"", wire.MAX_MESSAGE)

    def request(self, envelope: Envelope) -> bytes:
        """Return the frame of a request."""
        body = envelope.body
        if type(body) not in _LONG:
            return self._requests.sign(wire.pack(envelope))
        layout = long_layout(body)
        if layout:
            envelope = replace(envelope, body=_with(body, digest(layout)))
        return self._requests.wrap(wire.pack(envelope), layout, hidden=opens(body))

    def sign(self, data: bytes) -> bytes:
        """Return a frame with ``data`` as its message."""
        return self._requests.sign(data)

    def opened(self, frame: bytes) -> tuple[bytes, bytes] | None:
        """Return the message in a request and the layout beside it; None if its client did not write it."""
        return self._requests.opened(frame)

    def bulk(self, body: Reply) -> bytes:
        """Return the layout in a reply whose digest its frame needs; nothing if it needs none."""
        return long_layout(body)

    def reply(self, answer: Answer, hashed: Callable[[bytes], bytes] = digest) -> bytes:
        """Return the frame of an answer; ``hashed`` returns the digest of a layout."""
        body = answer.body
        if type(body) not in _LONG:
            return self._replies.sign(wire.pack(answer))
        layout = long_layout(body)
        if layout:
            answer = Answer(answer.id, _with(body, hashed(layout)))
        return self._replies.wrap(wire.pack(answer), layout, hidden=opens(body))

    def read(self, frame: bytes) -> Answer | None:
        """Return the answer in a frame; None if the broker did not write it.

        Raises:
            Invalid: the broker wrote what is no answer.
        """
        opened = self._replies.opened(frame)
        if opened is None:
            return None
        data, layout = opened
        answer = wire.unpack(data, Answer)
        if not layout:
            return answer
        body = complete(answer.body, layout, digest(layout))
        return None if body is None else Answer(answer.id, body)


class _Key:
    """What one direction of a session is authenticated and hidden with.

    Args:
        secret: the session's.
        person: which direction it is.
        before: what stands before each frame.
        limit: bytes of a message that are looked at before its author is known.
    """

    def __init__(self, secret: bytes, person: bytes, before: bytes, limit: int) -> None:
        # Setting a key takes as long as hashing a small message: a state that has one is copied for each.
        self._state = blake2b(key=secret, digest_size=TAG, person=person)
        self._stream = blake2b(key=secret, digest_size=32, person=person, salt=b"hidden").digest()
        self._before = before
        self._whole = before + WHOLE
        self._start = len(self._whole)
        self._head = self._start + TAG
        self._most = self._head + limit

    def sign(self, data: bytes) -> bytes:
        state = self._state.copy()
        state.update(data)
        return self._whole + state.digest() + data

    def wrap(self, data: bytes, layout: bytes, *, hidden: bool) -> bytes:
        """Return the frame of a message that may have a layout beside it, or is to be hidden."""
        if not layout and not hidden:
            return self.sign(data)
        mark = HIDDEN if hidden else BESIDE
        tag = self._tag(mark, data, len(layout))
        length = len(data).to_bytes(_LENGTH)
        return b"".join((self._before, mark, tag, length, self._hide(data, tag) if hidden else data, layout))

    def opened(self, frame: bytes) -> tuple[bytes, bytes] | None:
        """Return the message, up to the limit, and the layout in a frame; None if no holder of the key wrote it."""
        head = self._head
        tag = frame[self._start : head]
        if frame.startswith(self._whole) and len(frame) <= self._most:
            data = frame[head:]
            state = self._state.copy()
            state.update(data)
            return (data, b"") if compare_digest(state.digest(), tag) else None
        end = layout_start(frame, len(self._before))
        if not 0 < end <= min(len(frame), self._most + _LENGTH):
            return None
        mark, data, layout = frame[self._start - 1 : self._start], frame[head + _LENGTH : end], frame[end:]
        if mark == HIDDEN:
            data = self._hide(data, tag)
        return (data, layout) if compare_digest(self._tag(mark, data, len(layout)), tag) else None

    def _tag(self, mark: bytes, data: bytes, beside: int) -> bytes:
        state = self._state.copy()
        state.update(mark + beside.to_bytes(_LENGTH))
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
    if frame[start : start + 1] not in (BESIDE, HIDDEN):
        return 0
    return head + _LENGTH + int.from_bytes(frame[head : head + _LENGTH])


def long_layout(body: Request | Reply) -> bytes:
    """Return the layout in a message if its digest stands for it, else nothing."""
    if type(body) not in _LAYOUTS:
        return b""
    layout: bytes = body.layout  # type: ignore[union-attr]
    return layout if len(layout) > SHORT else b""


def opens(body: Request | Reply) -> bool:
    """Return whether a message has a handle in it, which opens memory or an event for anybody."""
    if type(body) not in _LEASES:
        return type(body) in _EVENTS
    return not all(map(_opens_nothing, map(_handles, body.replicas)))  # type: ignore[union-attr]


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
