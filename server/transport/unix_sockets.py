"""Unix sockets and the processes at their ends: who connects, who listens at a path, and sockets that listen there.

The kernel says which process connected: its credentials, pidfd and namespaces. /proc tells more of it. Refusals are
logged here, in a limited number of lines per user, so that no user can fill a disk.

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
import logging
import os
import re
import select
import socket
import stat
import struct
import time
from collections import OrderedDict
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from time import monotonic
from typing import NamedTuple

from cubroker.protocol.errors import Denied, Unsupported, about
from cubroker.protocol.fields import LATEST
from cubroker.protocol.status import MAX_CGROUP, MAX_PROCESS_NAME, ProcessInfo
from cubroker.server.logs import printable

log = logging.getLogger(__name__)

CREDENTIALS = struct.Struct("iII")  #: ``struct ucred``: pid, uid and gid.
SO_PEERPIDFD = 77  #: Linux 6.5: a pidfd of the process that connected (asm-generic/socket.h; Python does not name it).
SO_PEERGROUPS = 59  #: Linux 4.13: the supplementary groups of the process that connected, as ``gid_t[]``.

INIT = 1
ROOT = 0

STARTED = 19
"""The place of the start time in /proc/PID/stat, after the name (proc_pid_stat(5) counts 22 from 1)."""

UNIFIED, SYSTEMD = "", "name=systemd"
"""The controllers of the hierarchies that name a container or a unit: cgroup v2, and systemd's own in v1."""

BURST = 20  #: Lines about refusals that one user can cause in a burst.
REFILL = 10.0  #: Seconds after which a user can cause one more.
MAX_USERS = 1024  #: Users that are remembered; the least recently refused is forgotten first.

_GROUPS_BYTES = 1024  # the most that Python asks a socket option for
_EVERYBODY = 2**32 - 1


def is_ready(file: int | socket.socket, events: int) -> bool:
    """Whether ``poll`` reports one of the events, such as ``POLLIN``, or an end, without waiting."""
    poll = select.poll()
    poll.register(file, events)
    return bool(poll.poll(0))


# -- who connects --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Peer:
    """The process that connected, with the users and groups that it had then."""

    #: 0 if it is in a pid namespace that is not visible here.
    pid: int
    uid: int
    #: Its primary group.
    gid: int
    #: Turns readable when the process has ended. The owner of this record closes it.
    pidfd: int
    #: Its supplementary groups.
    groups: frozenset[int] = frozenset()
    #: Whether it is root, or of the broker's user, in the broker's own user and pid namespaces (:func:`verify`).
    verified: bool = False


def identify(connection: socket.socket) -> Peer:
    """Ask the kernel who connected.

    Raises:
        ProcessLookupError: that process is gone.
        Denied: this user namespace does not contain its user or group.
        Unsupported: it is in a pid namespace that is not visible here, and the kernel is too old to give a pidfd of it.
        OSError: no descriptor is left.
    """
    pid, uid, gid = CREDENTIALS.unpack(_credentials(connection))
    if uid == overflow_id("uid") or gid == overflow_id("gid"):
        raise Denied(
            f"the broker cannot tell who connects: its user namespace shows this process as user {uid} and group {gid},"
            f" as it shows everybody whom it does not know; run the broker in the host's user namespace (hostUsers:"
            f" true, --userns=host), or the process in that of the broker"
        )
    try:
        raw = connection.getsockopt(socket.SOL_SOCKET, SO_PEERGROUPS, _GROUPS_BYTES)
    except OSError:  # the kernel is too old, or there are more than 256 groups
        raw = b""
    groups = frozenset(group for (group,) in struct.iter_unpack("I", raw)) - {overflow_id("gid")}
    return Peer(pid, uid, gid, _peer_pidfd(connection, pid), groups)


def verify(peer: Peer, named: int | None) -> bool:
    """Whether a peer with root's or the broker's uid belongs to the broker's own user and pid namespaces.

    The user who starts a container chooses the uids in it, so a uid alone proves nothing. If it cannot be established
    that a peer belongs, it does not.

    - *Root* names process 1 in the credentials of its greeting, and ``named`` is that number as the kernel delivers it
      here. The kernel lets a process name another one only with CAP_SYS_ADMIN in the user namespace that owns its pid
      namespace, and delivers 1 here only if that pid namespace is the broker's. So one number proves the capability and
      both namespaces; this reads nothing in /proc, and the broker needs no rights over the peer.
    - *The broker's own user* cannot name process 1, but a broker of the same user can read its namespaces.

    Args:
        peer: the process that connected.
        named: the process that the peer's greeting names; None if it names none.
    """
    if peer.uid == ROOT and named == INIT != peer.pid:
        return True
    return peer.uid == os.geteuid() and _shares_namespaces(peer)


def _shares_namespaces(peer: Peer) -> bool:
    """Whether a process is known to be in the user and pid namespaces of this one."""
    if not peer.pid:
        return False
    try:
        same = all(Path(f"/proc/{peer.pid}/ns/{kind}").samefile(f"/proc/self/ns/{kind}") for kind in ("user", "pid"))
    except OSError:  # it has ended, or has more rights than this one
        return False
    # If the peer has not ended yet, nothing else had its pid, and these are its namespaces.
    return same and not is_ready(peer.pidfd, select.POLLIN)


@cache
def overflow_id(kind: str) -> int | None:
    """Return the number that stands for every user (``uid``) or group (``gid``) that is not of this user namespace.

    None if all of them are. A user of this namespace who has that very number cannot be told from those.
    """
    counts = (int(line.split()[2]) for line in Path(f"/proc/self/{kind}_map").read_text().splitlines())
    return None if sum(counts) >= _EVERYBODY else int(Path(f"/proc/sys/kernel/overflow{kind}").read_text())


def _peer_pidfd(connection: socket.socket, pid: int) -> int:
    try:
        pidfd = connection.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
    except OSError as error:
        if error.errno == errno.ENOPROTOOPT and not pid:
            raise Unsupported(
                "the broker cannot see the process that connects: it is in another pid namespace, and Linux before 6.5"
                " does not name such a process; run the broker in the host's pid namespace (hostPID: true, --pid=host)"
                " or both in one"
            ) from None
        if error.errno == errno.ENOPROTOOPT:
            return open_pidfd(connection, pid)
        if error.errno == errno.EINVAL:  # Linux 6.5 to 6.7, of a process that is gone
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
    from cubroker.driver import system_calls  # not above: what only reads /proc loads no driver

    pidfd = system_calls.pidfd_open(pid)
    if is_ready(connection, select.POLLRDHUP):
        os.close(pidfd)
        raise ProcessLookupError(errno.ESRCH, f"process {pid} hung up as it was identified")
    return pidfd


def _credentials(end: socket.socket) -> bytes:
    """Return the ``struct ucred`` of the process at the other end of an accepted connection.

    If ``end`` is a socket that listens, or was connected to one: of the process that made it listen.
    """
    return end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)


# -- what /proc tells ----------------------------------------------------------------------------------

# The command line is not read. It may hold secrets, and the read waits for a lock that a process can hold for as long
# as it likes (``mmap_lock``), which would stop a broker. Reads of the files here wait for no such lock.


def read_process(pid: int) -> ProcessInfo | None:
    """Return what /proc tells of a process, with control characters escaped; None if this user may not see it there.

    The name is what the process calls itself. Nothing ensures that the number is still that of the same process.
    """
    folder = Path("/proc") / str(pid)
    try:
        name = (folder / "comm").read_text(errors="replace").rstrip("\n")
        fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
        cgroups = (folder / "cgroup").read_text(errors="replace")
    except OSError:
        return None
    if len(fields) <= STARTED:
        return None
    return ProcessInfo(printable(name)[:MAX_PROCESS_NAME], _cgroup(cgroups), _since_1970(int(fields[STARTED])))


def read_process_by_pidfd(pidfd: int) -> ProcessInfo | None:
    """Like :func:`read_process`, for exactly the process that a pidfd refers to; None, too, if that has ended."""
    try:
        before, info, after = _number(pidfd), read_process(_number(pidfd)), _number(pidfd)
    except OSError:  # no /proc, or one of another pid namespace
        return None
    return info if before == after > 0 else None


def _number(pidfd: int) -> int:
    """Return the number that a pidfd's process has in this /proc; -1 once it has ended, 0 if it has none there."""
    found = re.search(r"^Pid:\s*(-?\d+)$", Path(f"/proc/self/fdinfo/{pidfd}").read_text(), re.MULTILINE)
    return int(found[1]) if found else -1


def _cgroup(text: str) -> str | None:
    """Return the path in cgroup v2, or else in systemd's hierarchy, or else in any; None if it is the root in all."""
    lines = [line.split(":", 2) for line in text.splitlines()]
    paths = {controllers: path for _, controllers, path in lines if path != "/"}
    path = paths.get(UNIFIED) or paths.get(SYSTEMD) or next(iter(paths.values()), "")
    return printable(path)[-MAX_CGROUP:] or None  # its end names the container


def _since_1970(ticks: int) -> float:
    """Return when a process began, ``ticks`` after boot; the result is bounded, as a host's clock may show anything."""
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return min(max(0.0, round(time.time() - age, 2)), LATEST)


# -- sockets at a path ---------------------------------------------------------------------------------


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
        OSError: the file at the path is no socket (``EPROTOTYPE``), a living process listens there (``EADDRINUSE``),
            or the system refuses; the error names the path.
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
            raise OSError(errno.EPROTOTYPE, "there is a file that is not a socket", os.fspath(self._path))
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


# -- refusals in the log -------------------------------------------------------------------------------


@dataclass(slots=True)
class _Bucket:
    """The lines of one user."""

    #: Lines left, as of ``since``.
    left: float
    #: When ``left`` was counted, in seconds of the monotonic clock.
    since: float
    #: Lines dropped since the last one that was written.
    suppressed: int = 0


class RateLimiter:
    """Bounds how many lines of the log each user can cause.

    Args:
        burst: lines that a user can cause in a burst.
        refill: seconds after which a user can cause one more.
    """

    def __init__(self, burst: int, refill: float) -> None:
        self._burst = burst
        self._refill = refill
        self._buckets: OrderedDict[int, _Bucket] = OrderedDict()

    def take(self, uid: int) -> int | None:
        """Take a line; return how many were suppressed since the last one, or None to suppress this one too."""
        now = monotonic()
        bucket = self._buckets.pop(uid, None) or _Bucket(self._burst, now)
        self._buckets[uid] = bucket
        if len(self._buckets) > MAX_USERS:
            self._buckets.popitem(last=False)
        bucket.left = min(self._burst, bucket.left + (now - bucket.since) / self._refill)
        bucket.since = now
        if bucket.left < 1:
            bucket.suppressed += 1
            return None
        bucket.left -= 1
        suppressed, bucket.suppressed = bucket.suppressed, 0
        return suppressed


class RejectionLog:
    """Logs which process was refused what, within the limit of its user."""

    def __init__(self) -> None:
        self._limiter = RateLimiter(BURST, REFILL)

    def log(self, pid: int, uid: int, reason: str, **fields: object) -> None:
        """Log that a process was refused something, unless its user had too many lines lately; JSON has the fields."""
        suppressed = self._limiter.take(uid)
        if suppressed is None:
            return
        more = f" ({suppressed} more refusals of this user are not in the log)" if suppressed else ""
        known = {"pid": pid, "uid": uid, "why": reason, **fields}
        log.warning("process %d (user %d) was refused: %s%s", pid, uid, reason, more, extra=known)
