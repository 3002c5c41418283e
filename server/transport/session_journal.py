"""The journal's entries about sessions and replies, with which the next broker continues the sessions.

Keys of the journal:

- ``s/SESSION``: the secret that the session's requests carry; since version 4 of the protocol ``k/SESSION``: the secret
  that authenticates them
- ``r/SESSION``: what its client has received
- ``a/SESSION/REQUEST``: a reply to a request that must not be done again
- ``d/LEASE``: the session of a lease some of whose descriptors may not have been sent yet
- ``n``: how many brokers continued with the journal
- ``l/…``: the ledger's

Any other key is refused. A new meaning gets a new letter, so that a broker of another version reports the unknown key.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec
from msgspec import Struct

from cubroker.protocol.encoding import encode as _encode
from cubroker.protocol.errors import CorruptJournal
from cubroker.protocol.messages import (
    AUTHENTICATED,
    Answer,
    Attached,
    Created,
    Done,
    EventOpened,
    EventShared,
    Failed,
    Generation,
    Locked,
    Reply,
    Retirement,
    Sealed,
)
from cubroker.server.ledger.snapshot import PREFIX
from cubroker.server.transport.reply_cache import LEASES, NO_RECEIPTS, Frame, Receipts, ReplyCache
from cubroker.server.transport.session import SessionConnection

log = logging.getLogger(__name__)

LASTING = frozenset((Attached, Created, Sealed, Done, Retirement, Locked, EventShared, EventOpened, Generation, Failed))
"""Replies to requests that changed something or were refused: a cancelled request must not be done when a copy arrives,
since the cancel would not be repeated. Requests whose replies only report something are done again."""

RESTARTS = b"n"  #: The key of the number of brokers that continued with the journal.

_NUMBER = rb"/(?:0|[1-9][0-9]{0,18})"
_KEY = re.compile(rb"([skrd])(%s)|(a)(%s%s)" % (_NUMBER, _NUMBER, _NUMBER))

T = TypeVar("T")


Changes = list[tuple[bytes, bytes | None]]
_Key = tuple[str, tuple[int, ...]]


class _Session(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    secret: bytes
    #: The protocol version.
    version: int
    #: Whether the welcome was sent.
    welcomed: bool


class _Reply(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    #: The encoded reply; empty if it grants a lease.
    frame: bytes
    #: The lease that it grants, or 0; the ledger has the rest of such a reply.
    lease: int = 0


class SessionLog:
    """Gathers what the next commit writes in addition to the ledger's changes.

    Args:
        items: the content of the journal, if this broker continues an earlier one's.

    Attributes:
        restarts: how many earlier brokers had their sessions and memory taken over, one after the other.

    Raises:
        CorruptJournal: no broker can have written it.
    """

    def __init__(self, items: Mapping[bytes, bytes] | None = None) -> None:
        self.restarts = 0
        self._changes: dict[bytes, bytes | None] = {}
        self._asked: dict[SessionConnection, None] = {}
        if items is not None:
            self.restarts = 1 + (_decode(items[RESTARTS], int) if RESTARTS in items else 0)
            self._changes[RESTARTS] = _encode(self.restarts)

    def opened(self, session: SessionConnection, *, welcomed: bool) -> None:
        """Record a session; ``welcomed``: its client was told that it is open."""
        self._changes[_session_key(session)] = _encode(_Session(session.secret, session.version, welcomed))

    def asked(self, session: SessionConnection) -> None:
        """Note that a session's receipts or replies may have changed."""
        self._asked[session] = None

    def closed(self, session: SessionConnection) -> None:
        """Remove the entries of a session."""
        self._asked.pop(session, None)
        number = session.number
        for key in (
            _session_key(session),
            _key("r", number),
            *(_key("a", number, each) for each in (*session.replies.lasting, *session.replies.changes)),
        ):
            self._changes[key] = None

    def forget(self, keys: Iterable[bytes]) -> None:
        """Remove keys that belong to no session."""
        self._changes |= dict.fromkeys(keys)

    def undelivered(self, session: int, lease: int) -> None:
        """Note that the descriptors of a lease are yet to be sent."""
        self._changes[_key("d", lease)] = _encode(session)

    def delivered(self, lease: int) -> None:
        """Note that all descriptors of a lease were sent, or are not to be sent any more."""
        self._changes[_key("d", lease)] = None

    def changes(self) -> Changes:
        """Return the changes since the last call."""
        for session in self._asked:
            self._write(session)
        self._asked.clear()
        changes = list(self._changes.items())
        self._changes = {}
        return changes

    def _write(self, session: SessionConnection) -> None:
        number, changes = session.number, self._changes  # keys are formatted here and not by _key: this runs often
        changes[b"r/%d" % number] = _encode(session.replies.receipts)
        for request, reply in session.replies.changes.items():
            changes[b"a/%d/%d" % (number, request)] = None if reply is None else _encode(_entry(reply))
        session.replies.written()  # not before: there may be no memory for a value


def _entry(reply: Frame) -> tuple[bytes, int]:
    """Return a tuple with the encoding of a :class:`_Reply`, but made in less time."""
    if isinstance(reply, bytes):
        return reply, 0
    assert isinstance(reply.body, LEASES)
    return b"", reply.body.lease


@dataclass(slots=True)
class LoggedSession:
    """A session that an earlier broker wrote down."""

    #: Empty if the journal has none.
    secret: bytes = b""
    #: The protocol version.
    version: int = 0
    #: Whether the welcome was sent.
    welcomed: bool = True
    #: What its client has received.
    receipts: Receipts = NO_RECEIPTS
    #: Replies by request.
    replies: dict[int, _Reply] = field(default_factory=dict)
    #: Leases whose descriptors the client may not have.
    undelivered_fds: list[int] = field(default_factory=list)

    @property
    def no_secret(self) -> bool:
        """Whether the journal has no secret for the session, so that it cannot send requests any more."""
        return not self.secret

    def reply_cache(self, grant: Callable[[int], Reply | None]) -> ReplyCache:
        """Return its replies; ``grant`` returns the one that grants a lease, None if there is no such lease now."""
        kept = {request: _frame(request, reply, grant) for request, reply in sorted(self.replies.items())}
        return ReplyCache(self.receipts, kept)


def _frame(request: int, reply: _Reply, grant: Callable[[int], Reply | None]) -> Frame | None:
    if not reply.lease:
        return reply.frame
    body = grant(reply.lease)
    return None if body is None else Answer(request, body)


def recall(items: Mapping[bytes, bytes], known: Collection[int]) -> tuple[dict[int, LoggedSession], list[bytes]]:
    """Return what a journal has of the ``known`` sessions, those of the ledger, and the keys that belong to no session.

    If the journal has no secret of a session, the session is :attr:`~LoggedSession.no_secret`, and its other keys are
    ignored. They belong to no session, and neither do keys of a session that the ledger does not know.

    Raises:
        CorruptJournal: no broker can have written it.
    """
    entries = {_numbers(key): data for key, data in items.items() if key != RESTARTS and not key.startswith(PREFIX)}
    sessions: dict[int, LoggedSession] = {}
    owners: dict[_Key, int] = {}
    for key, data in entries.items():
        owners[key] = number = _decode(data, int) if key[0] == "d" else key[1][0]
        _remember(sessions.setdefault(number, LoggedSession()), key, data)
    whole = {number: sessions[number] for number in known if number in sessions and not sessions[number].no_secret}
    stray = [_key(kind, *numbers) for (kind, numbers), owner in owners.items() if owner not in whole]
    return {number: whole.get(number, LoggedSession()) for number in known}, stray


def _remember(session: LoggedSession, key: _Key, data: bytes) -> None:
    match key:
        case "s" | "k", _:
            opened = _decode(data, _Session)
            session.secret, session.version, session.welcomed = opened.secret, opened.version, opened.welcomed
        case "r", _:
            session.receipts = _decode(data, Receipts)
        case "a", (_, request):
            session.replies[request] = _decode(data, _Reply)
        case _, numbers:
            session.undelivered_fds.append(numbers[0])


def _session_key(session: SessionConnection) -> bytes:
    return _key("k" if session.version >= AUTHENTICATED else "s", session.number)


def _key(kind: str, *numbers: int) -> bytes:
    return "/".join((kind, *map(str, numbers))).encode()


def _numbers(key: bytes) -> _Key:
    """Return the kind of a key, and the numbers in it."""
    parts = _KEY.fullmatch(key)
    if parts is None:
        raise CorruptJournal(
            f"the journal has {key.decode('ascii', 'replace')}, and this build does not know what that is"
        )
    kind, numbers = filter(None, parts.groups())
    return kind.decode(), tuple(map(int, numbers[1:].split(b"/")))


def _decode(data: bytes, kind: type[T]) -> T:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.DecodeError as error:
        raise CorruptJournal(f"the journal has an invalid {kind.__name__}: {error}") from None
