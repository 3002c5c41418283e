"""Who is at the other end of a connection, by the kernel's word."""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
from dataclasses import dataclass

SO_PEERPIDFD = 77
"""Linux 6.5: a pidfd of the process that connected (asm-generic/socket.h; Python does not name it)."""

SO_PEERGROUPS = 59
"""Linux 4.13: the supplementary groups of the process that connected, as ``gid_t[]``."""

_CREDENTIALS = struct.Struct("iII")
_GROUPS_BYTES = 1024  # the most that Python asks a socket option for


@dataclass(frozen=True, slots=True)
class Peer:
    """The process that connected. ``pidfd`` turns readable when it has ended; its holder closes it.

    ``gid`` is its primary group and ``groups`` are the supplementary ones, as they were when it connected.
    """

    pid: int
    uid: int
    gid: int
    pidfd: int
    groups: frozenset[int] = frozenset()


def identify(connection: socket.socket) -> Peer:
    """Ask the kernel who connected.

    Raises:
        ProcessLookupError: that process is gone.
        OSError: no descriptor is left, or the process is in no pid namespace that is visible here.
    """
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, gid = _CREDENTIALS.unpack(raw)
    groups = _peer_groups(connection)
    return Peer(pid, uid, gid, _peer_pidfd(connection, pid), groups)


def _peer_groups(connection: socket.socket) -> frozenset[int]:
    """Return the peer's supplementary groups; none where the kernel does not tell, or there are more than 256."""
    try:
        raw = connection.getsockopt(socket.SOL_SOCKET, SO_PEERGROUPS, _GROUPS_BYTES)
    except OSError:
        return frozenset()
    return frozenset(group for (group,) in struct.iter_unpack("I", raw))


def _peer_pidfd(connection: socket.socket, pid: int) -> int:
    try:
        pidfd = connection.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
    except OSError as error:
        if error.errno == errno.ENOPROTOOPT:
            return open_pidfd(connection, pid)
        if error.errno == errno.EINVAL:  # what Linux 6.5 to 6.7 say of a process that is gone
            raise ProcessLookupError(errno.ESRCH, "the process that connected is gone") from None
        raise
    os.set_inheritable(pidfd, False)
    return pidfd


def open_pidfd(connection: socket.socket, pid: int) -> int:
    """Return a pidfd of the peer on kernels that hand none out with the connection.

    Between connect and here the peer may have died and its pid may be another process's. A process
    that ends closes its sockets before its pid is free, so a connection that has not hung up when
    the pidfd is open proves that the pidfd is the peer's (or that the peer's child inherited the
    connection, which the kernel gives no means to tell on these versions).
    """
    pidfd = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    if poll.poll(0):
        os.close(pidfd)
        raise ProcessLookupError(errno.ESRCH, f"process {pid} hung up as it was identified")
    return pidfd
