"""What the shell writes down beside the ledger, so that a broker that is started again goes on with its sessions.

Keys of the journal: ``s/SESSION`` the secret that its requests carry, or ``k/SESSION`` the one that they are
authenticated by (since version 4), ``r/SESSION`` what its client has received, ``a/SESSION/REQUEST`` an answer that
must not be worked out again, ``d/LEASE`` the session that may not have all descriptors of its lease yet; ``n`` is how
many brokers went on with it; what begins with ``l/`` is the ledger's. Any other key is refused, so what comes to mean
something else gets another letter: a broker of another version then says that it does not know it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec
from msgspec import Struct

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
    Reply,
    Retirement,
    Sealed,
)
from cubroker.server.answers import LEASES, NO_RECEIPTS, Answers, Frame, Receipts
from cubroker.server.ledger.restoring import PREFIX
from cubroker.server.sessions import Session
from cubroker.server.store.damaged import Damaged

LASTING = frozenset((Attached, Created, Sealed, Done, Retirement, EventShared, EventOpened, Generation, Failed))
"""Answers of requests that changed something or were refused: what was cancelled must not be asked for again, since the
cancel would not be. What was only told is worked out anew."""

RESTARTS = b"n"
"""The key of how often it was gone on with."""

_NUMBER = rb"/(?:0|[1-9][0-9]{0,18})"
_KEY = re.compile(rb"([skrd])(%s)|(a)(%s%s)" % (_NUMBER, _NUMBER, _NUMBER))

T = TypeVar("T")

_encode = msgspec.msgpack.Encoder().encode

Changes = list[tuple[bytes, bytes | None]]
_Key = tuple[str, tuple[int, ...]]


class _Session(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """``welcomed``: the welcome was sent."""

    secret: bytes
    version: int
    welcomed: bool


class _Answer(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """An encoded answer; or the lease that it grants, of which the ledger knows the rest."""

    frame: bytes
    lease: int = 0


class Scribe:
    """Gathers what is to be written with the next commit.

    Attributes:
        restarts: brokers before this one whose sessions and memory were taken over, one after the other.
    """

    def __init__(self) -> None:
        self.restarts = 0
        self._changes: dict[bytes, bytes | None] = {}
        self._asked: dict[Session, None] = {}

    def took_over(self, items: Mapping[bytes, bytes]) -> None:
        """This broker goes on with what is in a journal."""
        self.restarts = 1 + (_decode(items[RESTARTS], int) if RESTARTS in items else 0)
        self._changes[RESTARTS] = _encode(self.restarts)

    def opened(self, session: Session, *, welcomed: bool) -> None:
        """A session is open; its client knows that once it is ``welcomed``."""
        self._changes[_session_key(session)] = _encode(_Session(session.secret, session.version, welcomed))

    def asked(self, session: Session) -> None:
        """A session's receipts or answers may have changed."""
        self._asked[session] = None

    def closed(self, session: Session) -> None:
        """A session is over."""
        self._asked.pop(session, None)
        number = session.number
        for key in (
            _session_key(session),
            _key("r", number),
            *(_key("a", number, each) for each in (*session.answers.lasting, *session.answers.changes())),
        ):
            self._changes[key] = None

    def forget(self, keys: Iterable[bytes]) -> None:
        """Strike out what belongs to no session."""
        self._changes |= dict.fromkeys(keys)

    def owed(self, session: int, lease: int) -> None:
        """The descriptors of a lease are on their way."""
        self._changes[_key("d", lease)] = _encode(session)

    def sent(self, lease: int) -> None:
        """All descriptors of a lease are with its holder, or are not to be sent any more."""
        self._changes[_key("d", lease)] = None

    def changes(self) -> Changes:
        """Return what changed since the last call."""
        for session in self._asked:
            self._write(session)
        self._asked.clear()
        changes, self._changes = self._changes, {}
        return list(changes.items())

    def _write(self, session: Session) -> None:
        number, changes = session.number, self._changes  # so often that keys are put together at once, and not by _key
        changes[b"r/%d" % number] = _encode(session.answers.receipts)
        for request, answer in session.answers.changes().items():
            changes[b"a/%d/%d" % (number, request)] = None if answer is None else _encode(_entry(answer))


def lasts(body: Reply) -> bool:
    """Whether an answer is written down."""
    return type(body) in LASTING


def _entry(answer: Frame) -> _Answer:
    if isinstance(answer, bytes):
        return _Answer(answer)
    assert isinstance(answer.body, LEASES)
    return _Answer(b"", answer.body.lease)


@dataclass(slots=True)
class Remembered:
    """A session that an earlier broker wrote down. ``owed`` are the leases whose descriptors it may not have."""

    secret: bytes = b""
    version: int = 0
    welcomed: bool = True
    receipts: Receipts = NO_RECEIPTS
    answers: dict[int, _Answer] = field(default_factory=dict)
    owed: list[int] = field(default_factory=list)

    @property
    def mute(self) -> bool:
        """Whether nothing says what its requests carry, so that it cannot ask for anything any more."""
        return not self.secret

    def replies(self, grant: Callable[[int], Reply | None]) -> Answers:
        """Return its answers again; ``grant`` knows the one of a lease, and None if there is no such lease any more."""
        kept = {request: self._frame(request, answer, grant) for request, answer in sorted(self.answers.items())}
        return Answers(self.receipts, kept)

    def _frame(self, request: int, answer: _Answer, grant: Callable[[int], Reply | None]) -> Frame | None:
        if not answer.lease:
            return answer.frame
        body = grant(answer.lease)
        return None if body is None else Answer(request, body)


def recall(items: Mapping[bytes, bytes], known: Collection[int]) -> tuple[dict[int, Remembered], list[bytes]]:
    """Return what a journal has of the sessions that the ledger ``known`` has, and the keys that belong to no session.

    Of a session that the ledger has alone nothing else is believed: it is ``mute``. What the journal has of a session
    that the ledger has not belongs to none.

    Raises:
        Damaged: it says what nobody can have written.
    """
    entries = {_numbers(key): data for key, data in items.items() if key != RESTARTS and not key.startswith(PREFIX)}
    sessions: dict[int, Remembered] = {}
    owners: dict[_Key, int] = {}
    for key, data in entries.items():
        owners[key] = number = _decode(data, int) if key[0] == "d" else key[1][0]
        _remember(sessions.setdefault(number, Remembered()), key, data)
    whole = {number: sessions[number] for number in known if number in sessions and not sessions[number].mute}
    stray = [_key(kind, *numbers) for (kind, numbers), owner in owners.items() if owner not in whole]
    return {number: whole.get(number, Remembered()) for number in known}, stray


def _remember(session: Remembered, key: _Key, data: bytes) -> None:
    match key:
        case "s" | "k", _:
            opened = _decode(data, _Session)
            session.secret, session.version, session.welcomed = opened.secret, opened.version, opened.welcomed
        case "r", _:
            session.receipts = _decode(data, Receipts)
        case "a", (_, request):
            session.answers[request] = _decode(data, _Answer)
        case _, numbers:
            session.owed.append(numbers[0])


def _session_key(session: Session) -> bytes:
    return _key("k" if session.version >= AUTHENTICATED else "s", session.number)


def _key(kind: str, *numbers: int) -> bytes:
    return "/".join((kind, *map(str, numbers))).encode()


def _numbers(key: bytes) -> _Key:
    """Return the kind of a key, and the numbers in it."""
    parts = _KEY.fullmatch(key)
    if parts is None:
        raise Damaged(f"the journal has {key.decode('ascii', 'replace')}, and this build does not know what that is")
    kind, numbers = filter(None, parts.groups())
    return kind.decode(), tuple(map(int, numbers[1:].split(b"/")))


def _decode(data: bytes, kind: type[T]) -> T:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.DecodeError as error:
        raise Damaged(f"the journal has a {kind.__name__} that is none: {error}") from None
