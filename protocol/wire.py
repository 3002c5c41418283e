"""The codec of a frame: from typed messages to bytes and back, authenticated on the request socket.

*Encoding.* Messages travel as msgpack. The requested type drives the decoding: the first byte that does not fit is
refused, before anything is built for it. Every array in the protocol has a bound and no type contains itself, so
decoding costs no more than a small multiple of the bytes received, and no depth of nesting.

*Authentication.* The gateway that carries requests and replies may be in an attacker's hands. Up to version 3 of the
protocol a request carries the session's secret (:class:`Bearer`), so the gateway can make requests in the session's
name. From version 4 on the secret never travels there: both ends derive a key for each direction from it
(:class:`Keyed`). A request begins with the session's number, in eight bytes. What follows, and every reply, has one of
three forms:

* ``WHOLE | tag | message``: the tag is keyed BLAKE2b of the message;
* ``BESIDE | tag | length | message | layout``: the message, of ``length`` bytes, has a digest in place of a long
  layout. The tag is that of the mark, the layout's length and the message. The digest is computed while the layout
  arrives, or once for all leases on a version;
* ``HIDDEN | tag | length | hidden | layout``: the same for a message with handles, since a handle opens memory or an
  event for any process; the layout may be empty. The message is XORed with a stream of SHAKE128 of key and tag, as in
  SIV (RFC 5297), so two messages never share a stream, even if one is sent again. Hiding takes several times as long
  as the tag; leases by descriptor have no handles, and pay nothing.

A gateway can therefore drop, delay and repeat frames, and nothing else: a repeated request is answered again and not
done again, and a repeated answer is ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from hashlib import blake2b, shake_128
from hmac import compare_digest
from operator import attrgetter
from typing import Any, TypeVar, get_args, get_origin, overload

import msgspec
from msgspec.structs import replace

from cubroker.protocol.encoding import encode_into
from cubroker.protocol.errors import Invalid
from cubroker.protocol.layout import MAX_ENCODED
from cubroker.protocol.messages import (
    AUTHENTICATED,
    DESCRIPTOR,
    VERSIONS,
    Answer,
    Attached,
    Create,
    Created,
    Description,
    Envelope,
    EventOpened,
    Greeting,
    Notice,
    Reply,
    Request,
    SetLayout,
    ShareEvent,
    Since,
)

# -- encoding ----------------------------------------------------------------------------------------

MAX_MESSAGE = 20 << 20
"""Bytes of one message, on either socket; the handles of the largest draft take 16.5 MiB, the largest layout 12."""

T = TypeVar("T")


def pack(value: object) -> bytes:
    """Encode a struct, or lists and scalars, as msgpack.

    Raises:
        Invalid: a string with lone surrogates, or a number of more than 64 bits.
    """
    data = bytearray()
    try:
        encode_into(value, data)  # as `encode`, which would be a call more for each message
    except (UnicodeEncodeError, OverflowError) as error:
        raise Invalid(f"a {type(value).__name__} that cannot be sent: {error}") from None
    return bytes(data)


@overload
def unpack(data: bytes | memoryview, shape: type[T]) -> T: ...
@overload
def unpack(data: bytes | memoryview, shape: object) -> Any: ...
def unpack(data: bytes | memoryview, shape: object) -> object:
    """Decode ``data`` as a ``shape``: a struct, or a union of them.

    Raises:
        Invalid: too long, no msgpack, trailing bytes, or another shape.
    """
    if len(data) > MAX_MESSAGE:
        raise Invalid(f"a message of {len(data)} bytes; the most is {MAX_MESSAGE}")
    try:
        return _decoder(shape).decode(data)
    # DecodeError: bytes or types that do not fit. UnicodeDecodeError: a string that is not UTF-8. RecursionError: deep
    # nesting in a trailing element, which a later protocol may have and this one skips.
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Invalid(f"a message that cannot be read as {_name(shape)}: {str(error)[:200]}") from None


def for_version(message: msgspec.Struct, version: int) -> object:
    """Return what to encode for a peer that speaks ``version``: the message, or an array of the fields that it knows.

    A message travels as an array of its fields, and a peer refuses one with more fields than it knows. So an added
    field is the last of its message, has a default, and is listed in the class's ``ADDED`` with its :class:`Since`. A
    message for an older peer ends before that field, so the peer acts on the default. If the field would matter, the
    sender first checks the peer's version, and refuses what the peer cannot do.

    Raises:
        AssertionError: the sender did not check the version, and the message needs a field that the peer lacks.
    """
    added: dict[str, Since] = getattr(message, "ADDED", {})
    values = {name: getattr(message, name) for name in message.__struct_fields__}
    known = {
        name: for_version(value, version) if isinstance(value, msgspec.Struct) else value
        for name, value in values.items()
        if name not in added or version >= added[name].version
    }
    for name in values.keys() - known.keys():
        assert added[name].informs or not values[name], f"{name} of {type(message).__name__} in version {version}"
    if len(known) == len(values) and all(known[name] is value for name, value in values.items()):
        return message
    tag = message.__struct_config__.tag
    return [tag] * (tag is not None) + list(known.values())


def prepare(*shapes: object) -> None:
    """Build the decoders of ``shapes``; the module that defines them calls this while it is imported.

    msgspec (0.22.0) stores what it knows of a struct's fields on the class before it knows all of them: a thread or a
    signal handler that decodes the struct for the first time meanwhile crashes the process.
    """
    for shape in shapes:
        _decoder(shape)


_decoder = cache(msgspec.msgpack.Decoder)


def _name(shape: object) -> str:
    """The name of a struct, or of all members of a union."""
    members = get_args(shape) if get_origin(shape) is not None else (shape,)
    return " or ".join(getattr(member, "__name__", str(member)) for member in members)


prepare(Greeting, Notice, Answer)  # those that a client reads, on any of its threads

# -- authentication ----------------------------------------------------------------------------------

WHOLE, BESIDE, HIDDEN = b"\xc1", b"\xc2", b"\xc3"  #: The three forms.
SECRET = 16  #: Bytes of a session's secret.
TAG = 16  #: Bytes of a tag.
NUMBER = 8  #: Bytes of the session's number before a request. The first byte is less than :data:`LEGACY`.
LEGACY = 0x80  #: The smallest first byte of a request up to version 3, where it is that of a msgpack array.
SHORT = 4 << 10  #: Bytes of a layout above which a digest takes its place in the message.
MAX_REQUEST = 128 << 10  #: Bytes of a request without the layout beside it, which are read before its author is known.

_HEAD = 1 + TAG
_LENGTH = 4

_LEASES = frozenset((Attached, Created))
_EVENTS = frozenset((EventOpened, ShareEvent))
_LAYOUTS = frozenset((Attached, Description, Create, SetLayout))
_LONG = _LEASES | _EVENTS | _LAYOUTS
_handles = attrgetter("handles")
_opens_nothing = frozenset((b"", DESCRIPTOR)).issuperset

_DIGEST = blake2b(digest_size=32, person=b"cubroker layout")

M = TypeVar("M", Request, Reply)


class Digest:
    """The digest, 32 bytes, of data that arrives in pieces; a megabyte takes one to two milliseconds."""

    def __init__(self, data: bytes | memoryview = b"") -> None:
        self._state = _DIGEST.copy()
        self.add = self._state.update
        self.add(data)

    def done(self) -> bytes:
        """Return the digest of all pieces so far."""
        return self._state.digest()


def digest(data: bytes | memoryview) -> bytes:
    """Return the digest of data in one piece."""
    return Digest(data).done()


class Bearer:
    """A session of version 1 to 3: a request with its secret is its client's, and every reply is the broker's."""

    def __init__(self, secret: bytes, version: int = 1) -> None:
        #: The bytes that assign a request to its session.
        self.name = secret
        #: What each request carries; empty if none.
        self.secret = secret
        self._version = version

    def request(self, envelope: Envelope) -> bytes:
        """Return the frame of a request."""
        return pack(self._known(envelope))

    def opened(self, frame: bytes) -> tuple[bytes, bytes] | None:
        """Return the message in a request and the layout beside it; None unless the session's client wrote it."""
        return frame, b""

    def bulk(self, body: Reply) -> bytes:
        """Return the layout whose digest the frame of a reply needs, if it needs one."""
        return b""

    def reply(self, answer: Answer, hashed: Callable[[bytes], bytes] = digest) -> bytes:
        """Return the frame of an answer; ``hashed`` returns the digest of a layout."""
        return pack(self._known(answer))

    def _known(self, message: msgspec.Struct) -> object:
        """Return a message with the fields that the peer knows."""
        return message if self._version >= VERSIONS[-1] else for_version(message, self._version)

    def read(self, frame: bytes) -> Answer | None:
        """Return the answer in a frame; None unless the broker wrote it.

        Raises:
            Invalid: the broker wrote something else than an answer.
        """
        return unpack(frame, Answer)


class Keyed(Bearer):
    """A session since version 4: keys derived from its secret authenticate its frames."""

    def __init__(self, number: int, secret: bytes, version: int = VERSIONS[-1]) -> None:
        super().__init__(b"", version)
        self.name = number.to_bytes(NUMBER)
        self._requests = _Key(secret, b"requests", self.name, MAX_REQUEST)
        self._replies = _Key(secret, b"replies", b"", MAX_MESSAGE)

    def request(self, envelope: Envelope) -> bytes:
        """Return the frame of a request."""
        body = envelope.body
        if type(body) not in _LONG:
            return self._requests.sign(pack(self._known(envelope)))
        layout = long_layout(body)
        if layout:
            envelope = replace(envelope, body=_with(body, digest(layout)))
        return self._requests.wrap(pack(self._known(envelope)), layout, hidden=opens(body))

    def opened(self, frame: bytes) -> tuple[bytes, bytes] | None:
        """Return the message in a request and the layout beside it; None unless the session's client wrote it."""
        return self._requests.opened(frame)

    def bulk(self, body: Reply) -> bytes:
        """Return the layout whose digest the frame of a reply needs, if it needs one."""
        return long_layout(body)

    def reply(self, answer: Answer, hashed: Callable[[bytes], bytes] = digest) -> bytes:
        """Return the frame of an answer; ``hashed`` returns the digest of a layout."""
        body = answer.body
        if type(body) not in _LONG:
            return self._replies.sign(pack(self._known(answer)))
        layout = long_layout(body)
        if layout:
            answer = Answer(answer.id, _with(body, hashed(layout)))
        return self._replies.wrap(pack(self._known(answer)), layout, hidden=opens(body))

    def read(self, frame: bytes) -> Answer | None:
        """Return the answer in a frame; None unless the broker wrote it.

        Raises:
            Invalid: the broker wrote something else than an answer.
        """
        opened = self._replies.opened(frame)
        if opened is None:
            return None
        data, layout = opened
        answer = unpack(data, Answer)
        if not layout:
            return answer
        body = complete(answer.body, layout, digest(layout))
        return None if body is None else Answer(answer.id, body)


class _Key:
    """The key of one direction (``person``) of a session, whose frames have the bytes ``before`` in front.

    Of a message ``limit`` bytes are read before its author is known.
    """

    def __init__(self, secret: bytes, person: bytes, before: bytes, limit: int) -> None:
        # Setting a key takes as long as hashing a small message, so each message copies a state that has the key.
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
        """Return the frame of a message with an optional layout beside it."""
        if not layout and not hidden:
            return self.sign(data)
        mark = HIDDEN if hidden else BESIDE
        tag = self._tag(mark, data, len(layout))
        length = len(data).to_bytes(_LENGTH)
        return b"".join((self._before, mark, tag, length, self._hide(data, tag) if hidden else data, layout))

    def opened(self, frame: bytes) -> tuple[bytes, bytes] | None:
        """Return the message, up to the limit, and the layout in a frame; None unless a holder of the key wrote it."""
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
        """Hide a message, or reveal a hidden one."""
        size = len(data)
        stream = shake_128(self._stream + tag).digest(size)
        return (int.from_bytes(data) ^ int.from_bytes(stream)).to_bytes(size)


def authentication(version: int, session: int, secret: bytes) -> Bearer:
    """Return the authentication of a session that speaks ``version``."""
    return Keyed(session, secret, version) if version >= AUTHENTICATED else Bearer(secret, version)


def session_of(frame: bytes) -> int:
    """Return the session that a request names, unverified; 0 for a request of version 1 to 3, or no request."""
    return int.from_bytes(frame[:NUMBER]) if frame and frame[0] < LEGACY else 0


def layout_start(frame: bytes, start: int = NUMBER) -> int:
    """Return where the layout beside a message begins; 0 if there is none."""
    head = start + _HEAD
    if frame[start : start + 1] not in (BESIDE, HIDDEN):
        return 0
    return head + _LENGTH + int.from_bytes(frame[head : head + _LENGTH])


def long_layout(body: Request | Reply) -> bytes:
    """Return the layout in a message if it is long enough for a digest to take its place, else nothing."""
    if type(body) not in _LAYOUTS:
        return b""
    layout: bytes = body.layout  # type: ignore[union-attr]
    return layout if len(layout) > SHORT else b""


def opens(body: Request | Reply) -> bool:
    """Return whether a message has a handle, which opens memory or an event for any process."""
    if type(body) not in _LEASES:
        return type(body) in _EVENTS
    return not all(map(_opens_nothing, map(_handles, body.replicas)))  # type: ignore[union-attr]


def complete(body: M, layout: bytes, hashed: bytes) -> M | None:
    """Put the layout in place of its digest in a message; None if that is not its digest.

    Args:
        body: from an authenticated message.
        layout: the layout beside the message.
        hashed: the digest of ``layout``.

    Raises:
        Invalid: the layout is too long.
    """
    if len(layout) > MAX_ENCODED:
        raise Invalid(f"a layout of {len(layout)} bytes; the most is {MAX_ENCODED}")
    stands = type(body) in _LAYOUTS and compare_digest(body.layout, hashed)  # type: ignore[union-attr]
    return _with(body, layout) if stands else None


def _with(body: M, layout: bytes) -> M:
    changed: Any = replace(body, layout=layout)
    found: M = changed
    return found
