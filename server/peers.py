"""Who is at the other end of a connection, by the kernel's word."""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from cubroker.driver import linux
from cubroker.protocol.errors import Denied, Unsupported

SO_PEERPIDFD = 77
"""Linux 6.5: a pidfd of the process that connected (asm-generic/socket.h; Python does not name it)."""

SO_PEERGROUPS = 59
"""Linux 4.13: the supplementary groups of the process that connected, as ``gid_t[]``."""

CREDENTIALS = struct.Struct("iII")
"""``struct ucred``: pid, uid and gid."""

INIT = 1
ROOT = 0

_GROUPS_BYTES = 1024  # the most that Python asks a socket option for
_EVERYBODY = 2**32 - 1


@dataclass(frozen=True, slots=True)
class Peer:
    """The process that connected. ``pidfd`` turns readable when it has ended; its holder closes it.

    ``gid`` is its primary group and ``groups`` are the supplementary ones, as they were when it connected.
    ``pid`` is 0 if it is in a pid namespace that is not visible here. ``verified``, which :func:`verify` finds out,
    says that it is a root, or of the broker's user, of the broker's own user and pid namespaces.
    """

    pid: int
    uid: int
    gid: int
    pidfd: int
    groups: frozenset[int] = frozenset()
    verified: bool = False


def identify(connection: socket.socket) -> Peer:
    """Ask the kernel who connected.

    Raises:
        ProcessLookupError: that process is gone.
        Denied: its user or group is none of this user namespace.
        Unsupported: it is in no pid namespace that is visible here, and the kernel is too old to name it nevertheless.
        OSError: no descriptor is left.
    """
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    pid, uid, gid = CREDENTIALS.unpack(raw)
    if uid == outsider("uid") or gid == outsider("gid"):
        raise Denied(
            f"the broker cannot tell who connects: to its user namespace this process is of user {uid} and group {gid},"
            f" as is everybody whom that does not know; run the broker in the host's user namespace (hostUsers: true,"
            f" --userns=host), or the process in that of the broker"
        )
    groups = _peer_groups(connection)
    return Peer(pid, uid, gid, _peer_pidfd(connection, pid), groups)


def verify(peer: Peer, named: int | None) -> bool:
    """Say whether a peer with root's or the broker's number is one of the broker's own user and pid namespaces.

    Whoever starts a container chooses its numbers, so these alone mean nothing. Whatever cannot be established counts
    as not so.

    - *Root* names process 1 in the credentials of its greeting, and ``named`` is what the kernel made of that. It lets
      a process name another one than itself only with CAP_SYS_ADMIN in the user namespace that owns its pid namespace,
      and delivers 1 here only where that pid namespace is the broker's. So one number proves the capability and both
      namespaces; no /proc is read, nor need the broker have any right over the peer.
    - *The broker's own user* cannot do that. Its namespaces can be read, though, by a broker of the same user.

    Args:
        peer: who connected.
        named: the process that the peer's greeting names; None if it names none.
    """
    if peer.uid == ROOT and named == INIT != peer.pid:
        return True
    return peer.uid == os.geteuid() and _shares_namespaces(peer)


def _shares_namespaces(peer: Peer) -> bool:
    """Say whether a process is known to be in the user and pid namespaces of this one."""
    if not peer.pid:
        return False
    try:
        same = all(Path(f"/proc/{peer.pid}/ns/{kind}").samefile(f"/proc/self/ns/{kind}") for kind in ("user", "pid"))
    except OSError:  # it has ended, or has more rights than this one
        return False
    # It was this process all along, and not another one with its number, if it has not ended yet.
    return same and not _has_ended(peer.pidfd)


def _has_ended(pidfd: int) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


@cache
def outsider(kind: str) -> int | None:
    """Return the number that stands for every user (``uid``) or group (``gid``) that is not of this user namespace.

    None if all of them are. Where one that is of this namespace has that number as well, nobody can tell them apart.
    """
    counts = (int(line.split()[2]) for line in Path(f"/proc/self/{kind}_map").read_text().splitlines())
    return None if sum(counts) >= _EVERYBODY else int(Path(f"/proc/sys/kernel/overflow{kind}").read_text())


def _peer_groups(connection: socket.socket) -> frozenset[int]:
    """Return the peer's supplementary groups; none where the kernel does not tell, or there are more than 256."""
    try:
        raw = connection.getsockopt(socket.SOL_SOCKET, SO_PEERGROUPS, _GROUPS_BYTES)
    except OSError:
        return frozenset()
    return frozenset(group for (group,) in struct.iter_unpack("I", raw)) - {outsider("gid")}


def _peer_pidfd(connection: socket.socket, pid: int) -> int:
    try:
        pidfd = connection.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
    except OSError as error:
        if error.errno == errno.ENOPROTOOPT and not pid:
            raise Unsupported(
                "the broker cannot see the process that connects, which is in another pid namespace, and Linux names it"
                " nevertheless only from 6.5 on; run the broker in the host's pid namespace (hostPID: true, --pid=host)"
                " or both in one"
            ) from None
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
    pidfd = linux.pidfd_open(pid)
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    if poll.poll(0):
        os.close(pidfd)
        raise ProcessLookupError(errno.ESRCH, f"process {pid} hung up as it was identified")
    return pidfd
