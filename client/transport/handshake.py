"""The handshake with a broker: connect to its session socket and agree on a version; try again until it serves."""

from __future__ import annotations

import grp
import os
import socket
import stat
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from math import ceil
from pathlib import Path
from typing import TypeVar

from cubroker.protocol import wire
from cubroker.protocol.errors import Denied, Invalid, TimedOut, Unavailable, explain, from_code, reason
from cubroker.protocol.fields import MAX_NOTICE
from cubroker.protocol.messages import VERSIONS, Greeting, Hello, Pong, Refused, Welcome
from cubroker.protocol.paths import NAMED, SESSION_SOCKET, SYSTEM, check, directory_of

T = TypeVar("T")

ATTEMPTS = 5
"""Connections that are tried: when a broker is killed, those that it has not welcomed end."""

FIRST_PAUSE = 0.02
LAST_PAUSE = 1.0
"""Seconds between attempts to reach a broker that does not serve yet: the first pause, which doubles, and the longest.

The kernel has no notification for a socket that begins to listen, and an attempt costs a few system calls.
"""

SHORTEST = 0.001
"""Seconds to wait for the answer if connecting took all the time."""

MANAGER = Path("/run/systemd/system")
"""A folder that exists if systemd is the first process (sd_booted(3))."""

CREDENTIALS = struct.Struct("iII")
"""``struct ucred``: pid, uid and gid."""


class NotServing(Unavailable):
    """No broker serves there now; one may later."""


class Silent(NotServing):
    """A broker, or the holder of its socket during a restart, listens there and does not answer."""


class Patience:
    """The pauses between attempts to reach a broker within ``wait`` seconds; 0: a single attempt."""

    def __init__(self, wait: float) -> None:
        self._wait = wait
        self._deadline = time.monotonic() + wait
        self._length = FIRST_PAUSE
        self._denied = False

    def pause(self, error: NotServing | Denied) -> float:
        """Return the seconds to pause after ``error``; raise ``error`` itself, or ``TimedOut`` if the time is over."""
        if not self._wait or (self._denied and isinstance(error, Denied)):
            raise error
        self._denied = isinstance(error, Denied)
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimedOut(f"waited {self._wait:g} s for a broker: {error.message}") from None
        length, self._length = min(self._length, left), min(2 * self._length, LAST_PAUSE)
        return length


def until_served(attempt: Callable[[], T], wait: float, pause: Callable[[float], object]) -> T:
    """Call ``attempt`` until it finds a broker that serves, and return what it returns.

    Args:
        attempt: raises ``NotServing`` while no broker serves. ``Denied`` is final if it is raised twice in a row: for a
            moment a new socket admits its maker alone.
        wait: seconds until a broker has to serve; 0: a single attempt.
        pause: sleeps for so many seconds, or raises an error that ends the wait.

    Raises:
        TimedOut: no broker served in time.
    """
    patience = Patience(wait)
    while True:
        try:
            return attempt()
        except (NotServing, Denied) as error:
            length = patience.pause(error)
        pause(length)


def greet(directory: Path, timeout: float) -> tuple[socket.socket, Welcome]:
    """Open a session with the broker that serves ``directory``, and answers within ``timeout`` seconds.

    Raises:
        NotServing: no broker serves there, or it does not answer, or opens no sessions now.
        Unavailable: this process cannot connect.
        Denied: this user may not connect.
        Invalid: no socket can have the path.
        CubrokerError: the broker refused, with its own code.
    """
    channel, greeting = _insist(directory, timeout, Hello("cubroker", VERSIONS))
    if isinstance(greeting, Welcome):
        return channel, greeting
    hang_up(channel)
    if isinstance(greeting, Refused):
        if greeting.code == Unavailable.code:
            raise NotServing(greeting.message)
        raise from_code(greeting.code, greeting.message)
    raise Invalid(f"the broker on {directory} answered the greeting as if it were a ping, and opened no session")


def ping(directory: Path, timeout: float) -> str:
    """Ask the broker that serves ``directory``, without a session, why it lends nothing new; "" if it lends.

    Raises:
        Silent: a socket listens, but nothing answers in time, as during a restart.
        Unavailable: no socket listens.
        Denied: this user may not connect.
        Invalid: no socket can have the path, or what answers is no broker.
    """
    channel, greeting = _insist(directory, timeout, Hello("cubroker", VERSIONS, ping=True))
    hang_up(channel)
    match greeting:
        case Pong(_, obstacle) | Refused(_, obstacle):
            return obstacle
        case Welcome():  # an older broker opens a session
            return ""


def _insist(directory: Path, timeout: float, hello: Hello) -> tuple[socket.socket, Greeting]:
    """Greet within ``timeout`` seconds in all; greet again if the broker ended before it answered."""
    check(directory)
    _check_owner(directory)
    deadline = time.monotonic() + timeout
    try:
        for _ in range(ATTEMPTS):
            with suppress(EOFError):
                return _greet(directory, deadline, hello)
    except OSError as error:
        raise _explain(error, directory, timeout) from error
    raise Silent(f"the broker on {directory} closed the connection without an answer; see {_diagnosis(directory)}")


def _greet(directory: Path, deadline: float, hello: Hello) -> tuple[socket.socket, Greeting]:
    """Connect and greet; raises ``EOFError`` if the broker ends the connection without an answer."""
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        _connect(channel, str(directory / SESSION_SOCKET), deadline)
        channel.settimeout(max(deadline - time.monotonic(), SHORTEST))
        data = _ask(channel, wire.pack(hello))
        if not data:
            raise EOFError
        greeting: Greeting = wire.unpack(data, Greeting)
        channel.settimeout(None)
        return channel, greeting
    except BaseException:
        hang_up(channel)
        raise


def _connect(channel: socket.socket, path: str, deadline: float) -> None:
    """Connect under the kernel's own time limit: under Python's, connect() fails immediately if the backlog is full.

    A signal ends the call early. Python then returns as if the connection were in progress, which a socket of this type
    never is, so this function connects again.
    """
    while (left := deadline - time.monotonic()) > 0:
        limit = struct.pack("ll", *divmod(ceil(left * 1e6), 1_000_000))  # never 0, which would be no limit
        channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        channel.connect(path)
        with suppress(OSError):
            channel.getpeername()
            return
    raise TimeoutError


def hang_up(channel: socket.socket) -> None:
    """Close a session socket. The broker sees its end, even if a forked child holds a copy."""
    channel.shutdown(socket.SHUT_RDWR)
    channel.close()


def _check_owner(directory: Path) -> None:
    """Refuse the directory of this user's broker if another user made it, who may pose as the broker."""
    if directory == directory_of(os.getuid()):
        with suppress(FileNotFoundError):
            owner = directory.lstat().st_uid
            if owner != os.getuid():
                raise Denied(
                    f"{directory} belongs to user {owner}, not to you; name the directory to use, or remove it"
                )


def _ask(channel: socket.socket, hello: bytes) -> bytes:
    """Greet, and return the answer. A broker that refuses before the greeting hangs up; its refusal can be read."""
    with suppress(BrokenPipeError, ConnectionResetError):
        _say(channel, hello)
    try:
        return channel.recv(MAX_NOTICE)
    except ConnectionResetError:
        return channel.recv(MAX_NOTICE)


def _say(channel: socket.socket, data: bytes) -> None:
    """Send a greeting. Root names process 1 as the sender if it may, which proves its capabilities to the broker.

    The kernel allows that only with CAP_SYS_ADMIN over this process's pid namespace.
    """
    if os.geteuid() == 0:
        proof = CREDENTIALS.pack(1, os.geteuid(), os.getegid())
        with suppress(PermissionError):
            channel.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_CREDENTIALS, proof)])
            return
    channel.send(data)


def _explain(error: OSError, directory: Path, timeout: float) -> Unavailable | Denied:
    match error:
        case FileNotFoundError() | ConnectionRefusedError() | NotADirectoryError():
            return NotServing(f"no broker serves {directory}; {_instead(directory)}")
        case PermissionError():
            return Denied(
                f"this user may not connect to the broker on {directory}: {reason(error)}; {_admission(directory)}"
            )
        case BlockingIOError() | TimeoutError():
            return Silent(
                f"the broker on {directory} did not answer within {timeout:g} s: its socket listens, but it is still"
                f" starting, does not start, is stopped or is busy; see {_diagnosis(directory)}"
            )
    return Unavailable(f"no session with the broker on {directory}: {explain(error)}")


def _instead(directory: Path) -> str:
    """Return the advice for a directory that no broker serves."""
    if directory != SYSTEM and os.access(SYSTEM / SESSION_SOCKET, os.F_OK):
        return f"a socket is on {SYSTEM}: name that by {NAMED}"
    if directory == SYSTEM and os.getuid():
        return "as root, start the host's with `systemctl start cubroker`; as this user, start one with: cubroker serve"
    start = f"cubroker serve --directory {directory}"
    return f"start one with: {start} (without a GPU: --devices host:2; another place is named by {NAMED})"


def _diagnosis(directory: Path) -> str:
    """Return where to read why a broker does not answer."""
    log = "its log"
    if MANAGER.is_dir():
        personal = os.environ.get("XDG_RUNTIME_DIR")
        if directory == SYSTEM:
            log = "`systemctl status cubroker`"
        elif personal and directory == Path(personal) / SYSTEM.name:
            log = "`systemctl --user status cubroker`"
    return f"{log}, and check its settings with `cubroker config check FILE`"


def _admission(directory: Path) -> str:
    """Return how this user is admitted to a broker that denies it, as far as its socket tells."""
    with suppress(OSError):
        socket_file = (directory / SESSION_SOCKET).stat()
        if socket_file.st_mode & stat.S_IWGRP:
            try:
                group = grp.getgrgid(socket_file.st_gid).gr_name
            except KeyError:
                group = str(socket_file.st_gid)
            return (
                f"its socket is for the group {group}: join that (as root: usermod -aG {group} NAME), and log in anew"
            )
    return "the user who runs the broker can admit others with its settings sockets.group and sockets.mode"
