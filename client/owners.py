"""Whose pools a process trusts: users by name or number, from an argument or the environment."""

from __future__ import annotations

import os
import pwd
from collections.abc import Sequence

from cubroker.protocol.errors import Invalid

Owner = int | str
"""A user, by number or by name."""

VARIABLE = "CUBROKER_OWNER"
"""The environment variable that has the default, users separated by commas."""


def uids(owner: Owner | Sequence[Owner] | None) -> tuple[int, ...]:
    """Return the numbers of users, of those in the environment for None; none means anybody.

    Raises:
        Invalid: there is no such user.
    """
    if owner is None:
        owner = [part.strip() for part in os.environ.get(VARIABLE, "").split(",") if part.strip()]
    return tuple(map(_uid, [owner] if isinstance(owner, int | str) else owner))


def _uid(owner: Owner) -> int:
    if isinstance(owner, str) and not (owner.isascii() and owner.isdecimal()):
        try:
            return pwd.getpwnam(owner).pw_uid
        except (KeyError, ValueError):  # a name with a zero byte is a ValueError
            raise Invalid(f"this system has no user {owner!r}; write a name that it has, or a number") from None
    if not 0 <= int(owner) < 1 << 32:
        raise Invalid(f"no user has the number {owner}")
    return int(owner)
