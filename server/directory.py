"""The directory where a broker serves: one broker at a time, and what a killed one left is swept away."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
from collections.abc import Container, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

from cubroker.protocol.directory import LOCK, REQUEST_SOCKET, SESSION_SOCKET, check
from cubroker.protocol.errors import Denied, Unavailable
from cubroker.server.config import Access

SO_PASSRIGHTS = 83
"""Linux 6.16: whether a Unix socket takes descriptors (asm-generic/socket.h; Python does not name it)."""

BACKLOG = 512
"""Connections that may wait to be accepted."""


DOOR = "door"
"""The name under which the listening session socket is handed over."""

REQUESTS = "requests"
"""That of the listening request socket."""


class Directory:
    """The directory, locked and with its two sockets listening, for as long as the context lasts.

    Args:
        path: the directory; made if it is not there.
        access: who may connect; by default the broker's own user (and root) alone. It does not change sockets that
            others have made.
        listening: sockets that listen there already, by name; owned by this object from now on.
        own: the names of those that an earlier broker made.
        lasting: leave the sockets in the directory at the end: others have them too, and clients may wait there.

    Attributes:
        sessions: the listening session socket.
        requests: the listening request socket.
        fresh: those of them that were made here, by name.

    Raises:
        Invalid: no socket can have the path.
        Denied: the directory is another user's, cannot be written, or can be by others than its owner.
        Unavailable: another broker serves there, or the directory cannot be made.
    """

    def __init__(
        self,
        path: Path,
        access: Access | None = None,
        listening: Mapping[str, int] | None = None,
        own: Container[str] = (),
        *,
        lasting: bool = False,
    ) -> None:
        self.path = path.absolute()
        self._access = access or Access()
        self._listening = dict(listening or {})
        self._own = own
        self._lasting = lasting
        self.fresh: dict[str, socket.socket] = {}
        self.sessions: socket.socket
        self.requests: socket.socket
        self._undo = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as undo:
            try:
                _make(self.path)
                _lock(self.path, undo)
                _let_in(self.path, self._access)
                self.sessions = self._socket(DOOR, self.path / SESSION_SOCKET, socket.SOCK_SEQPACKET, undo)
                self.requests = self._socket(REQUESTS, self.path / REQUEST_SOCKET, socket.SOCK_STREAM, undo)
            except PermissionError as error:
                raise Denied(
                    f"cannot serve in {self.path}: {error.strerror}; choose another directory or user"
                ) from None
            except OSError as error:
                raise Unavailable(f"cannot serve in {self.path}: {error.strerror}; choose another directory") from None
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def _socket(self, name: str, path: Path, kind: int, undo: ExitStack) -> socket.socket:
        """Return the socket that listens at ``path``: the one that was handed over, or a new one."""
        if (descriptor := self._listening.pop(name, None)) is not None:
            listener = undo.enter_context(socket.socket(fileno=descriptor))
            if _listens(listener, path, kind):
                listener.setblocking(False)
                _refuse_descriptors(listener)
                if name in self._own:
                    _open(path, self._access)
                return listener
        listener = self.fresh[name] = _listen(path, kind, self._access, undo, lasting=self._lasting)
        return listener


def _listens(listener: socket.socket, path: Path, kind: int) -> bool:
    """Whether a socket is reached through ``path``, which somebody may have removed in the meantime."""
    try:
        there = stat.S_ISSOCK(path.lstat().st_mode)
    except FileNotFoundError:
        there = False
    return there and listener.type == kind and listener.getsockname() == os.fspath(path)


def _refuse_descriptors(listener: socket.socket) -> None:
    """Have the system refuse descriptors that peers push at this socket; older systems deliver them, to be dropped.

    To drop one is to close it, which may take as long as the peer likes: a TCP socket that lingers, a file on a server
    that does not answer.
    """
    with suppress(OSError):
        listener.setsockopt(socket.SOL_SOCKET, SO_PASSRIGHTS, 0)


def _make(path: Path) -> None:
    check(path)
    before = os.umask(0o022)
    os.umask(before | 0o022)  # what is made on the way is nobody else's to write either
    try:
        path.mkdir(parents=True, exist_ok=True)
    finally:
        os.umask(before)
    here = path.stat()
    # Whoever owns the directory, or may write in it, can put sockets of their own in it, and so pose as the broker.
    if here.st_uid not in (0, os.geteuid()):
        raise Denied(
            f"{path} belongs to user {here.st_uid}, who could pose as the broker; choose a directory of your own"
        )
    # The sticky bit keeps them from removing ours, but not from putting theirs there while no broker runs.
    writers = [who for bit, who in ((stat.S_IWGRP, "its group"), (stat.S_IWOTH, "everybody")) if here.st_mode & bit]
    if writers:
        raise Denied(
            f"{' and '.join(writers)} may write in {path} (mode {stat.S_IMODE(here.st_mode):04o}), and so could pose as"
            f" the broker; chmod go-w {path}, or choose another directory: sockets.group says who may connect"
        )


def _lock(path: Path, undo: ExitStack) -> None:
    """Take the lock that one broker holds, and write its process id for the next one to name."""
    file = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    lock = undo.enter_context(os.fdopen(file, "r+"))
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise Unavailable(
            f"another broker (process {lock.read(20).strip() or 'unknown'}) serves in {path}; use that one, stop it,"
            f" or choose another directory"
        ) from None
    lock.truncate(0)
    lock.write(f"{os.getpid()}\n")
    lock.flush()


def _let_in(path: Path, access: Access) -> None:
    """Let whoever may connect to the sockets pass through the directory as well."""
    here = path.stat()
    if access.group is not None and not here.st_mode & stat.S_IXOTH:
        os.chown(path, -1, access.group)
    through = (stat.S_IXGRP if access.mode & 0o060 else 0) | (stat.S_IXOTH if access.mode & 0o006 else 0)
    if through & ~here.st_mode:
        path.chmod(stat.S_IMODE(here.st_mode) | through)


def _listen(path: Path, kind: int, access: Access, undo: ExitStack, *, lasting: bool) -> socket.socket:
    """Return a listening socket at ``path``. What stands there is a dead broker's: the lock says so."""
    path.unlink(missing_ok=True)
    listener = undo.enter_context(socket.socket(socket.AF_UNIX, kind | socket.SOCK_NONBLOCK))
    before = os.umask(0o177)
    try:
        listener.bind(os.fspath(path))
    finally:
        os.umask(before)
    if not lasting:
        undo.callback(path.unlink, missing_ok=True)
    _open(path, access)
    _refuse_descriptors(listener)
    listener.listen(BACKLOG)
    return listener


def _open(path: Path, access: Access) -> None:
    """Let whoever may connect do so. The directory is ours or root's, so nobody can have put another file there."""
    here, group = path.lstat(), os.getegid() if access.group is None else access.group
    if here.st_gid != group:
        path.chmod(access.mode & 0o600)  # nobody of either group gets in meanwhile who may not
        os.chown(path, -1, group, follow_symlinks=False)
    path.chmod(access.mode)
