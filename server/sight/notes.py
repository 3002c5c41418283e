"""The log of what sessions do: who, what, and why it went so, in one line each.

Publications, ends and refusals are at ``info``; everything else, which is most, at ``debug``. Users cause these
lines, so each has only so many of them at ``info``.
"""

from __future__ import annotations

import logging

from msgspec import Struct

from cubroker.protocol.errors import Denied
from cubroker.protocol.messages import (
    Attach,
    Attached,
    Create,
    Created,
    Describe,
    Failed,
    Find,
    ListDigests,
    Reply,
    Request,
    Retire,
    Retirement,
    Sealed,
    Tell,
    Watch,
)
from cubroker.server.denials import Allowance
from cubroker.server.ledger.reports import Holder

log = logging.getLogger(__name__)

BURST = 200
"""Lines at ``info`` that one user has at once."""

REFILL = 1.0
"""Seconds after which a user has one more."""


PLAIN = frozenset((Failed, Created, Sealed, Retirement))
"""Answers that are worth a line at ``info``."""


class Question(Struct, frozen=True):
    """A request that was not answered yet, and when it came; ``leased`` is the pool that a lease to be sealed is on."""

    body: Request
    leased: str
    since: float

    @property
    def kind(self) -> str:
        """What is asked for."""
        return type(self.body).__name__

    @property
    def pool(self) -> str:
        """The name of the pool that it is about, if it says so."""
        match self.body:
            case Attach(name=name) | Create(name=name) | Describe(name=name) | Retire(name=name):
                return name
            case Find(name=name) | ListDigests(name=name) | Watch(name=name):
                return name
            case Tell(pool=pool):
                return pool or ""
            case _:
                return self.leased


class Notes:
    """Writes what sessions do to the log."""

    def __init__(self) -> None:
        self._allowance = Allowance(BURST, REFILL)

    def joined(self, who: Holder) -> None:
        """A session was opened."""
        self._write(logging.DEBUG, who, "joined")

    def lost(self, who: Holder) -> None:
        """A session's connection has ended."""
        if who.leases:
            text = f"the connection has ended; {_count(who.leases)} until the process does"
            self._write(logging.INFO, who, text, why="the connection has ended")

    def gone(self, who: Holder) -> None:
        """A session's process has ended."""
        text = f"the process has ended, and with it {_count(who.leases)}" if who.leases else "the process has ended"
        self._write(logging.INFO if who.leases else logging.DEBUG, who, text, why="the process has ended")

    def drained(self, who: Holder, *, on: bool) -> None:
        """The broker is drained by hand, or no more."""
        text = "drains the broker, which lends nothing new" if on else "has the broker lend again"
        self._write(logging.INFO, who, text)

    def want(self, answer: Reply) -> bool:
        """Whether an answer is worth a line."""
        return type(answer) in PLAIN or log.isEnabledFor(logging.DEBUG)

    def answered(self, who: Holder, request: int, question: Question, answer: Reply) -> None:
        """A request was answered."""
        level, did, fields = _describe(question, answer)
        if not (isinstance(answer, Failed) and answer.code == Denied.code):  # that is in the log already
            self._write(level, who, did, request=request, **fields)

    def _write(self, level: int, who: Holder, text: str, **fields: object) -> None:
        if not log.isEnabledFor(level):
            return
        hushed = self._allowance.take(who.uid) if level >= logging.INFO else 0
        if hushed is None:
            return
        more = f" ({hushed} more lines about this user are not in the log)" if hushed else ""
        known = {"session": who.session, "pid": who.pid, "uid": who.uid, **fields}
        log.log(level, "%s: %s%s", who.label, text, more, extra=known)


def _count(leases: int) -> str:
    return f"{leases} lease{'' if leases == 1 else 's'}"


def _describe(question: Question, answer: Reply) -> tuple[int, str, dict[str, object]]:
    """Return the level, the words and the fields of an answer."""
    kind, pool = question.kind, question.pool
    match answer:
        case Failed(code, message):
            asked = f"{kind} of {pool}" if pool else kind
            return logging.INFO, f"{asked} was refused ({code}): {message}", _fields(pool, code=code, why=message)
        case Created():
            return logging.INFO, f"writes {answer.name}@{answer.version}", _fields(answer.name, version=answer.version)
        case Sealed(version):
            return logging.INFO, f"published {pool}@{version}", _fields(pool, version=version)
        case Retirement(version, leases):
            text = f"retired {pool}@{version}, with {_count(leases)} left on it"
            return logging.INFO, text, _fields(pool, version=version)
        case Attached():
            text = f"attached to {answer.name}@{answer.version}, lease {answer.lease}"
            return logging.DEBUG, text, _fields(answer.name, version=answer.version)
        case _:
            return logging.DEBUG, f"{kind} was done", _fields(pool)


def _fields(pool: str, **more: object) -> dict[str, object]:
    return {"pool": pool, **more} if pool else more
