"""Where a broker and its clients meet: the directory and the names in it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from cubroker.protocol.errors import Invalid

SESSION_SOCKET = "session.sock"
REQUEST_SOCKET = "broker.zmq"
LOCK = "lock"

SYSTEM = Path("/run/cubroker")
"""Where the broker of a host serves."""

MAX_PATH = 107
"""Bytes that the path of a Unix socket may have, the closing zero left out (sun_path, unix(7))."""


def check(directory: Path) -> None:
    """Raise ``Invalid`` if no socket can have an address in ``directory``; ZeroMQ's addresses are UTF-8."""
    longest = str(directory / max(SESSION_SOCKET, REQUEST_SOCKET, key=len))
    try:
        length = len(longest.encode())
    except UnicodeEncodeError:
        raise Invalid(
            f"{str(directory)!r} is not UTF-8, as a socket's path must be; choose another directory"
        ) from None
    if length > MAX_PATH:
        raise Invalid(f"{longest} is longer than the {MAX_PATH} bytes of a socket's path; choose a shorter directory")


def default_directory(environ: Mapping[str, str] = os.environ, uid: int | None = None) -> Path:
    """Return ``$CUBROKER_DIR``, else ``/run/cubroker`` for root, else a folder in ``$XDG_RUNTIME_DIR`` or ``/tmp``."""
    if directory := environ.get("CUBROKER_DIR"):
        return Path(directory)
    uid = os.getuid() if uid is None else uid
    if uid == 0:
        return SYSTEM
    if runtime := environ.get("XDG_RUNTIME_DIR"):
        return Path(runtime) / "cubroker"
    return directory_of(uid)


def directory_of(uid: int) -> Path:
    """Return the directory of a user without a runtime directory. Everybody may make one of that name."""
    return Path(f"/tmp/cubroker-{uid}")
