"""Where a broker and its clients meet: the directory and the names in it."""

from __future__ import annotations

import errno
import os
import pwd
import stat
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from cubroker.protocol.errors import Denied, Invalid

SESSION_SOCKET = "session.sock"
REQUEST_SOCKET = "broker.zmq"
LOCK = "lock"

SYSTEM = Path("/run/cubroker")  #: The directory of the host's broker: root's own, and that of the service.
SERVICE = "cubroker"  #: The account that the service runs as.
NAMED = "--directory, $CUBROKER_DIR or, in Python, the argument `directory`"  #: How a user names a broker's directory.
MAX_PATH = 107  #: Bytes of a Unix socket's path without the closing zero (sun_path, unix(7)).
MAX_LINKS = 40  #: Symbolic links that the kernel follows on one path (path_resolution(7)).


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


def absolute(directory: str | os.PathLike[str]) -> Path:
    """Return the absolute path of a directory that a caller names; raises ``Invalid`` if it is empty, or no path."""
    if not isinstance(directory, str | os.PathLike):
        raise Invalid(f"{directory!r:.60} is no directory of a broker; pass its path, as text or as a Path")
    if not os.fspath(directory):  # Path("") is the current folder
        raise Invalid("an empty path as the directory of the broker; has the variable that it comes from a value?")
    return Path(directory).absolute()


def find_directory(environ: Mapping[str, str] = os.environ, uid: int | None = None) -> Path:
    """Return the directory to which a client connects by default: the user's or the host's, whichever has a socket.

    ``$CUBROKER_DIR`` has precedence. Otherwise it is the user's own directory if that has a socket, whether or not a
    broker serves there now, and no other user made it. Else it is ``/run/cubroker`` if that has a socket, and the
    user's directory if neither has.

    Raises:
        Denied: the host's directory is neither root's nor the service's, or others could replace what is in it.
    """
    own, user = default_directory(environ, uid), os.getuid() if uid is None else uid
    if environ.get("CUBROKER_DIR") or own == SYSTEM or not _has_socket(SYSTEM):
        return own
    stranger = _stranger(own, user)
    if stranger is None and _has_socket(own):
        return own
    if doubt := _doubt(SYSTEM, user):
        here = f"no socket is in {own}" if stranger is None else f"{own} belongs to user {stranger}"
        raise Denied(
            f"{here}, and {SYSTEM} is not trusted as the host's: {doubt}; to use it anyway, name it by {NAMED}"
        )
    return SYSTEM


def _stranger(directory: Path, user: int) -> int | None:
    """Return the user who made a directory, or a link in its place, unless that is ``user`` or root."""
    with suppress(OSError):  # it does not exist, or cannot be looked at
        owner = directory.lstat().st_uid
        return None if owner in (0, user) else owner
    return None


def _has_socket(directory: Path) -> bool:
    """Whether a broker's socket is there, or may be: a folder that this user may not search does not tell."""
    try:
        (directory / SESSION_SOCKET).lstat()
    except PermissionError:
        return True
    except OSError:
        return False
    return True


def _doubt(directory: Path, uid: int) -> str:
    """Return why the host's directory may be another user's; empty if only root, the service or ``uid`` made it."""
    owner = directory.stat().st_uid
    trusted = {0, uid}
    with suppress(KeyError):  # no service is installed here
        trusted.add(pwd.getpwnam(SERVICE).pw_uid)
    if owner in trusted:
        return exposure(directory, owner).partition(";")[0]
    try:
        name = f"{pwd.getpwuid(owner).pw_name} (user {owner})"
    except KeyError:
        name = f"user {owner}"
    return f"it belongs to {name}, and neither to root nor to the service's account, {SERVICE}"


def default_directory(environ: Mapping[str, str] = os.environ, uid: int | None = None) -> Path:
    """Return where this user's broker serves, or would.

    It is ``$CUBROKER_DIR``, else ``/run/cubroker`` for root, else a folder in ``$XDG_RUNTIME_DIR`` or ``/tmp``.
    """
    if directory := environ.get("CUBROKER_DIR"):
        return Path(directory)
    uid = os.getuid() if uid is None else uid
    if uid == 0:
        return SYSTEM
    if runtime := environ.get("XDG_RUNTIME_DIR"):
        return Path(runtime) / "cubroker"
    return directory_of(uid)


def directory_of(uid: int) -> Path:
    """Return the directory of a user without a runtime directory; any user may create that path first."""
    return Path(f"/tmp/cubroker-{uid}")


def exposure(directory: Path, owner: int, outsider: int | None = None) -> str:
    """Return which user other than ``owner`` and root could pose as the broker of a directory, and what to do.

    Such a user may put sockets into the directory, or replace it, or a folder or link on the way to it. Parts of the
    path that do not exist yet are skipped. The text is empty if there is no such user.

    Args:
        directory: an absolute path.
        owner: the user who serves there, or would.
        outsider: the uid that stands for every user outside of this user namespace. Folders above the directory that
            belong to it count as root's.

    Raises:
        OSError: a part of the path cannot be looked at, or symbolic links lead to each other.
    """
    for place, found, last in _way(directory):
        how = "" if last else f"replace {directory} and "
        if found.st_uid not in (0, owner) and (last or found.st_uid != outsider):
            return (
                f"{place} belongs to user {found.st_uid}, who could {how}pose as the broker; choose a directory of"
                f" your own"
            )
        # Under the sticky bit only a name's owner may replace it, and the next step checks that owner. A free name,
        # such as a socket's while no broker runs, is open to everybody.
        if (writers := _writers(found)) and (last or not found.st_mode & stat.S_ISVTX):
            return (
                f"{writers} may write in {place} (mode {stat.S_IMODE(found.st_mode):04o}), and so could {how}pose as"
                f" the broker; chmod go-w {place}, or choose another directory: sockets.group says who may connect"
            )
    return ""


def _writers(found: os.stat_result) -> str:
    """Return who, other than its owner, may create names in a folder; the mode of a symbolic link means nothing."""
    if stat.S_ISLNK(found.st_mode):
        return ""
    classes = ((stat.S_IWGRP, "its group"), (stat.S_IWOTH, "everybody"))
    return " and ".join(who for bit, who in classes if found.st_mode & bit)


def _way(path: Path) -> Iterator[tuple[Path, os.stat_result, bool]]:
    """Yield the folders and links that the kernel passes on its way to ``path``, and whether each is the end of it."""
    here, rest, links = Path("/"), list(path.parts[:0:-1]), 0
    yield here, here.lstat(), not rest
    while rest:
        step = Path(os.path.normpath(here / rest.pop()))  # no link leads to `here`, so ".." is the folder above it
        try:
            found = step.lstat()
        except FileNotFoundError:
            return
        link = stat.S_ISLNK(found.st_mode)
        yield step, found, not (link or rest)
        if not link:
            here = step
            continue
        links += 1
        if links > MAX_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), os.fspath(path))
        rest += step.readlink().parts[::-1]  # an absolute target begins with "/", which leads back to the root
