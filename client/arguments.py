"""What callers pass to the public functions, checked in one place: each function returns a value as requests carry it.

All raise ``Invalid``, with a text that says what was passed and what can be passed instead. Devices and plans are
checked where they are looked up (:mod:`.devices`), arrays where they are read (:mod:`.arrays`).
"""

from __future__ import annotations

import os
import pwd
from collections.abc import Iterable, Mapping, Sequence
from math import inf
from operator import index

from cubroker.protocol.errors import Invalid
from cubroker.protocol.fields import MAX_WAIT
from cubroker.protocol.layout import MAX_EXTENT
from cubroker.protocol.messages import AUTO, SHARES

MAX_UID = (1 << 32) - 1
"""The largest number that a user can have."""

Owner = int | str
"""A user, by number or by name."""

Owners = Owner | Sequence[Owner] | None
"""Users; None for those of the environment."""

VARIABLE = "CUBROKER_OWNER"
"""The environment variable that has the default, users separated by commas."""


def seconds(limit: float, what: str = "wait", *, zero: bool = True) -> float:
    """Return a time in seconds, which only with ``zero`` may be 0."""
    try:
        valid = not isinstance(limit, bool) and 0 <= limit <= MAX_WAIT and (zero or limit != 0)
    except TypeError:  # such as None, which other libraries take for no limit
        valid = False
    if not valid:
        raise Invalid(
            f"a {what} of {limit!r:.60} seconds; it can be {'0' if zero else 'more than 0, up'} to {MAX_WAIT:g}"
        )
    return float(limit)


def time_limit(timeout: float | None) -> float:
    """Return for how many seconds to wait: infinitely many for None."""
    return inf if timeout is None else seconds(timeout, "timeout")


def whole(value: object, least: int = 0, most: int = MAX_EXTENT) -> int | None:
    """Return an integer of any type, numpy's for example; None if it is out of range, a bool, or anything else."""
    try:
        number = -1 if isinstance(value, bool) else index(value)  # type: ignore[arg-type]
    except TypeError:
        return None
    return number if least <= number <= most else None


def version_number(version: int | None) -> int:
    """Return the number of a version, 0 for the current one."""
    if version is None:
        return 0
    number = whole(version, 1)
    if number is None:
        raise Invalid(
            f"version {version!r:.60} is no whole number from 1 to {MAX_EXTENT}; leave it out for the current one"
        )
    return number


def session_number(session: int) -> int:
    """Return the number of a session."""
    number = whole(session, 1)
    if number is None:
        raise Invalid(f"{session!r:.60} is no session: pass its number, as Broker.clients() lists it, from 1 on")
    return number


def flag(value: bool, what: str) -> bool:
    """Return a flag: what equals True or False, as 1 and numpy's do."""
    of_numpy = type(value).__module__ == "numpy" and type(value).__name__.startswith("bool")
    if (isinstance(value, int) or of_numpy) and value in (False, True):
        return bool(value)
    raise Invalid(f"{what}={value!r:.60} is neither True nor False; pass one of these, or leave it out")


def share_kind(share: str) -> str:
    """Return a share kind, or :data:`~cubroker.protocol.messages.AUTO`."""
    if isinstance(share, str) and share in (AUTO, *SHARES):
        return str.__str__(share)
    raise Invalid(f"unknown share kind {share!r:.60}; use {' or '.join((AUTO, *SHARES))}")


def file_mode(mode: int | None) -> int | None:
    """Return permissions like a file's; None for those that the pool has."""
    if mode is None:
        return None
    number = whole(mode, 0, 0o777)
    if number is None:
        what = f"0o{mode:o}" if type(mode) is int else "no whole number"
        raise Invalid(f"a mode of {mode!r:.60}, which is {what}; write it in octal, as in 0o640, from 0 to 0o777")
    return number


def uids(owner: Owners) -> tuple[int, ...]:
    """Return the numbers of users; for None, of the users in the environment. Empty stands for all users."""
    if owner is None:
        owner = [part.strip() for part in os.environ.get(VARIABLE, "").split(",") if part.strip()]
    if isinstance(owner, Iterable) and not isinstance(owner, str | bytes | Mapping):
        return tuple(map(_uid, owner))
    return (_uid(owner),)


def _uid(owner: object) -> int:
    if isinstance(owner, str):
        try:
            owner = int(owner) if owner.isascii() and owner.isdecimal() else pwd.getpwnam(owner).pw_uid
        except (KeyError, ValueError):  # a name with a zero byte is a ValueError
            raise Invalid(f"this system has no user {owner!r}; write a name that it has, or a number") from None
    number = whole(owner, 0, MAX_UID)
    if number is None:
        raise Invalid(f"{owner!r:.60} is no user: pass a name, a number from 0 to {MAX_UID}, or a list of these")
    return number
