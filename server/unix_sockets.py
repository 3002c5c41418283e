"""Unix sockets that have a path: who listens there, how one is made, and how one's own, and no other, is removed.

A path says nothing about the socket behind it: the file may be left from a process that is gone, or somebody else may
have replaced it. Both questions are asked of the kernel:

- *Who listens?* :func:`call` connects. The kernel tells the caller the name to which the listening socket was bound
  and the process that made it listen, and tells both to every holder of the listening socket, too. So a socket that was
  handed down can be compared with the one that clients reach.
- *Is this file mine?* :class:`BoundSocket` compares inodes. A bound socket keeps its inode in use, even after its name
  is gone, so no other file can have that number before the socket is closed.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
import struct
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

from cubroker.protocol.system_errors import about
from cubroker.server.config import Access

_CREDENTIALS = struct.Struct("iII")


class Answer(NamedTuple):
    """What a call to a path found.

    Attributes:
        listens: whether any process holds a socket that listens there.
        address: the name to which that socket was bound; None if its backlog is full, and the kernel does not tell.
        credentials: the process that made it listen, as ``struct ucred``; None likewise.
    """

    listens: bool
    address: str | bytes | None = None
    credentials: bytes | None = None

    @property
    def pid(self) -> int:
        """The process that made the socket listen; 0 if the kernel does not tell."""
        return _CREDENTIALS.unpack(self.credentials)[0] if self.credentials else 0

    @property
    def lives(self) -> bool:
        """Whether the process that made the socket listen may still be there; others may hold the socket after it."""
        return not self.pid or Path("/proc", str(self.pid)).exists()

    def came_from(self, listener: socket.socket, path: Path) -> bool:
        """Whether ``listener`` answered the call to ``path``; one with a full backlog is taken at its name."""
        if self.credentials is None:
            return self.listens and listener.getsockname() == os.fspath(path)
        return (self.address, self.credentials) == (listener.getsockname(), _credentials(listener))


def call(path: Path, kind: int) -> Answer:
    """Connect to the socket at ``path``, of a ``kind`` like ``SOCK_STREAM``, and hang up at once.

    Raises:
        OSError: what stands there cannot be connected to, such as a socket of another kind.
    """
    with about(path), socket.socket(socket.AF_UNIX, kind | socket.SOCK_NONBLOCK) as caller:
        try:
            caller.connect(os.fspath(path))
        except BlockingIOError:
            return Answer(listens=True)
        except (FileNotFoundError, ConnectionRefusedError):
            return Answer(listens=False)
        return Answer(True, caller.getpeername(), _credentials(caller))


def _credentials(end: socket.socket) -> bytes:
    """Return the process that made a socket listen, of that socket itself or of one that is connected to it."""
    return end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)


class BoundSocket:
    """A listening Unix socket, and the file by which clients reach it.

    A socket file that a process left behind when it ended is replaced. No other file is.

    Args:
        path: the file; its folder is no other user's to write.
        kind: ``SOCK_STREAM`` or ``SOCK_SEQPACKET``; the socket does not block.
        access: who may connect.
        backlog: connections that may wait to be accepted.

    Attributes:
        listener: the socket. The caller closes it, and calls :meth:`remove` or :meth:`leave` before.

    Raises:
        FileExistsError: what stands at the path is no socket.
        OSError: a living process listens there (``EADDRINUSE``), or the system refuses; the error names the path.
    """

    def __init__(self, path: Path, kind: int, access: Access, backlog: int) -> None:
        self._path = path
        with about(path), ExitStack() as undo:
            self._folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            undo.callback(os.close, self._folder)
            self.listener = undo.enter_context(socket.socket(socket.AF_UNIX, kind | socket.SOCK_NONBLOCK))
            self._bind(kind)
            self.listener.listen(backlog)  # at once: a bound socket that does not listen looks like one left behind
            self._file = self._stat()
            undo.callback(os.unlink, path.name, dir_fd=self._folder)
            let_in(path, access)
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
            raise FileExistsError(errno.EEXIST, "another file than a socket stands there", os.fspath(self._path))
        if (answer := call(self._path, kind)).listens and answer.lives:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        now = self._stat()
        if os.path.samestat(now, found) and now.st_ctime_ns == found.st_ctime_ns:  # inodes are used again
            os.unlink(self._path.name, dir_fd=self._folder)

    def _stat(self) -> os.stat_result:
        return os.stat(self._path.name, dir_fd=self._folder, follow_symlinks=False)


def let_in(path: Path, access: Access) -> None:
    """Let the users that ``access`` names connect to the socket at ``path``, and no others meanwhile."""
    here, group = path.lstat(), os.getegid() if access.group is None else access.group
    if here.st_gid != group:
        path.chmod(access.mode & 0o600)  # members of either group could connect in between
        os.chown(path, -1, group, follow_symlinks=False)
    path.chmod(access.mode)
