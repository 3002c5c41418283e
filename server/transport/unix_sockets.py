"""Unix sockets with a path: make one, find the process that listens at one, and remove only one's own.

A path says nothing about the socket behind it: a process that is gone may have left the file, or another process may
have replaced it. The kernel answers both questions:

- *Which process listens?* :func:`probe` connects; the kernel then tells the name to which the listening socket is bound
  and the process that made it listen. Every holder of the listening socket can ask the kernel for both, too. So an
  inherited socket can be compared with the one that clients reach.
- *Is this file mine?* :class:`BoundSocket` compares inodes. A bound socket keeps its inode in use, even after its name
  is gone, so no other file can have that number before the socket is closed.
"""

from __future__ import annotations

import errno
import grp
import os
import select
import socket
import stat
import struct
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

from cubroker.protocol.errors import about

CREDENTIALS = struct.Struct("iII")  #: ``struct ucred``: pid, uid and gid.


def is_ready(file: int | socket.socket, events: int) -> bool:
    """Whether ``poll`` reports one of the events, such as ``POLLIN``, or an end, without waiting."""
    poll = select.poll()
    poll.register(file, events)
    return bool(poll.poll(0))


class Access(NamedTuple):
    """Who may connect to a socket that has a path; by default the user who made it (and root) alone."""

    mode: int = 0o600
    #: The group that the socket belongs to; None: that of the process.
    group: int | None = None


class ProbeResult(NamedTuple):
    """What :func:`probe` found at a path."""

    #: Whether any process holds a socket that listens there.
    listens: bool
    #: The name to which that socket was bound; None if its backlog is full: the kernel does not tell then.
    address: str | bytes | None = None
    #: The process that made it listen, as ``struct ucred``; None in the same case.
    credentials: bytes | None = None

    @property
    def pid(self) -> int:
        """The process that made the socket listen; 0 if the kernel does not tell."""
        return CREDENTIALS.unpack(self.credentials)[0] if self.credentials else 0

    @property
    def lives(self) -> bool:
        """Whether the process that made the socket listen may still exist; others may hold the socket after its end."""
        try:
            if self.pid:
                os.kill(self.pid, 0)  # it may only be hidden in /proc (proc(5), hidepid)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass  # it is another user's
        return True

    def came_from(self, listener: socket.socket, path: Path) -> bool:
        """Whether ``listener`` answered the probe of ``path``; with a full backlog its name alone decides."""
        if self.credentials is None:
            return self.listens and listener.getsockname() == os.fspath(path)
        return (self.address, self.credentials) == (listener.getsockname(), _credentials(listener))


def probe(path: Path, kind: int) -> ProbeResult:
    """Connect to the socket at ``path``, of a ``kind`` like ``SOCK_STREAM``, and hang up immediately.

    Raises:
        OSError: the file cannot be connected to; it may be a socket of another kind.
    """
    with about(path), socket.socket(socket.AF_UNIX, kind | socket.SOCK_NONBLOCK) as caller:
        try:
            caller.connect(os.fspath(path))
        except BlockingIOError:
            return ProbeResult(listens=True)
        except (FileNotFoundError, ConnectionRefusedError):
            return ProbeResult(listens=False)
        return ProbeResult(True, caller.getpeername(), _credentials(caller))


def _credentials(end: socket.socket) -> bytes:
    """Return the process that made a socket listen; ``end`` is that socket, or one connected to it."""
    return end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)


class BoundSocket:
    """A listening Unix socket, and the file by which clients reach it.

    It replaces a socket file that an ended process left behind, and no other file.

    Args:
        path: the file; no other user may write its folder.
        kind: ``SOCK_STREAM`` or ``SOCK_SEQPACKET``; the socket does not block.
        access: who may connect.
        backlog: connections that may wait to be accepted.

    Attributes:
        listener: the socket. The caller closes it, and calls :meth:`remove` or :meth:`leave` before.

    Raises:
        FileExistsError: the file at the path is no socket.
        OSError: a living process listens there (``EADDRINUSE``), or the system refuses; the error names the path.
    """

    def __init__(self, path: Path, kind: int, access: Access, backlog: int) -> None:
        self._path = path
        with about(path), ExitStack() as undo:
            self._folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            undo.callback(os.close, self._folder)
            self.listener = undo.enter_context(socket.socket(socket.AF_UNIX, kind | socket.SOCK_NONBLOCK))
            self._bind(kind)
            self.listener.listen(backlog)  # immediately: a bound socket that does not listen looks like a leftover
            self._file = self._stat()
            undo.callback(os.unlink, path.name, dir_fd=self._folder)
            set_access(path, access)
            undo.pop_all()

    def remove(self) -> None:
        """Remove the file, unless it is gone or another one stands in its place; the socket must still be open."""
        with suppress(FileNotFoundError):
            if os.path.samestat(self._stat(), self._file):
                os.unlink(self._path.name, dir_fd=self._folder)
        self.leave()

    def leave(self) -> None:
        """Let the file stay."""
        os.close(self._folder)

    def _bind(self, kind: int) -> None:
        before = os.umask(0o177)
        try:
            self.listener.bind(os.fspath(self._path))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            self._remove_leftover(kind)
            self.listener.bind(os.fspath(self._path))
        finally:
            os.umask(before)

    def _remove_leftover(self, kind: int) -> None:
        found = self._stat()
        if not stat.S_ISSOCK(found.st_mode):
            raise FileExistsError(errno.EEXIST, "there is a file that is not a socket", os.fspath(self._path))
        if (answer := probe(self._path, kind)).listens and answer.lives:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        now = self._stat()
        if os.path.samestat(now, found) and now.st_ctime_ns == found.st_ctime_ns:  # inode numbers are reused
            os.unlink(self._path.name, dir_fd=self._folder)

    def _stat(self) -> os.stat_result:
        return os.stat(self._path.name, dir_fd=self._folder, follow_symlinks=False)


def set_access(path: Path, access: Access) -> None:
    """Let the users of ``access`` connect to the socket at ``path``, and at no moment any others."""
    here, group = path.lstat(), os.getegid() if access.group is None else access.group
    if here.st_gid != group:
        path.chmod(access.mode & 0o600)  # members of either group could connect in between
        give_to_group(path, group)
    path.chmod(access.mode)


def give_to_group(path: Path, group: int) -> None:
    """Change the group of a file; if that is not allowed, the error says who may do so."""
    try:
        os.chown(path, -1, group, follow_symlinks=False)
    except PermissionError as error:
        try:
            name = grp.getgrgid(group).gr_name
        except KeyError:
            name = str(group)
        who = f"only root, and its owner as a member of group {name}, may give it to that group"
        raise PermissionError(error.errno, who, os.fspath(path)) from None
