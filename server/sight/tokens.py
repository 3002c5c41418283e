"""The token that readers of metrics show, and what they see with it and without.

Programs send it as ``Authorization: Bearer TOKEN`` (RFC 6750), browsers as the password of HTTP Basic (RFC 7617), with
any user name. Browsers keep such a password for one scheme, host and port, so another user's port on this host gets
none of it; a cookie would go to every port.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from cubroker.protocol.errors import Invalid
from cubroker.protocol.system_errors import explain
from cubroker.server.peers import outsider

T = TypeVar("T")

MOST = 1024
"""Bytes of a token file."""

TOKEN = re.compile(rb"[!-~]{16,}")
"""What can be a token: printable, without spaces, and too long to be guessed if it is random."""

OTHERS = stat.S_IRWXO | stat.S_IWGRP
"""What the mode of a token file must not have."""

CHALLENGE = (("WWW-Authenticate", 'Basic realm="cubroker", charset="UTF-8"'), ("WWW-Authenticate", "Bearer"))
"""What asks a reader for the token: a browser its user."""


@dataclass(frozen=True, slots=True)
class TokenCheck(Generic[T]):
    """Says what a reader gets.

    Attributes:
        token: what opens everything; None: no token is asked for.
        everything: what its bearer gets.
        otherwise: what others get, unless they show another token; None: they are to show it.
    """

    token: bytes | None
    everything: T
    otherwise: T | None

    def admit(self, headers: Mapping[bytes, bytes]) -> T | None:
        """Return what the sender of a request with these headers gets; None: it has to show the token."""
        shown = headers.get(b"authorization")
        if self.token is None or shown is None:
            return self.otherwise
        return self.everything if hmac.compare_digest(_token(shown), self.token) else None


def _token(authorization: bytes) -> bytes:
    """Return the token of a header, an empty one if it has none."""
    scheme, _, credentials = authorization.partition(b" ")
    if scheme.lower() == b"bearer":
        return credentials.strip()
    if scheme.lower() != b"basic":
        return b""
    try:
        return base64.b64decode(credentials.strip(), validate=True).partition(b":")[2]
    except binascii.Error:
        return b""


def read(path: Path) -> bytes:
    """Return the token in a file that this process's user, or root, has written, and that strangers cannot read.

    Raises:
        Invalid: it cannot be read, others can read or write it, or it has no token.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            content = file.read(MOST + 1)
    except OSError as error:
        raise Invalid(f"cannot read the token in {path}: {explain(error, path)}") from None
    if not stat.S_ISREG(status.st_mode):
        raise Invalid(f"the token file {path} is no regular file")
    if status.st_uid not in (0, os.geteuid(), outsider("uid")):
        raise Invalid(f"the token file {path} belongs to user {status.st_uid}; have root or the broker's user own it")
    if (mode := stat.S_IMODE(status.st_mode)) & OTHERS:
        raise Invalid(f"the token file {path} has mode {mode:03o}, which is for others too; `chmod 600 {path}`")
    token = content.strip()
    if len(content) > MOST or not TOKEN.fullmatch(token):
        raise Invalid(
            f"the token file {path} has no token of 16 to {MOST} printable characters without spaces; write one with"
            f" `head -c 24 /dev/urandom | base64`"
        )
    return token
