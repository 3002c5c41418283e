"""The first words with a broker: connect to its session socket and agree on a protocol version."""

from __future__ import annotations

import grp
import os
import socket
import stat
import struct
import time
from contextlib import suppress
from math import ceil
from pathlib import Path

from cubroker.protocol import wire
from cubroker.protocol.bounds import MAX_NOTICE
from cubroker.protocol.directory import SESSION_SOCKET, SYSTEM, check, directory_of
from cubroker.protocol.errors import Denied, Invalid, Unavailable, from_code
from cubroker.protocol.messages import VERSIONS, Greeting, Hello, Pong, Refused, Welcome
from cubroker.protocol.system_errors import explain, reason

ATTEMPTS = 5
"""Connections that are tried: a broker that is killed takes those along that it has not welcomed."""


SHORTEST = 0.001
"""Seconds for the answer where the time was up with the connection."""

MANAGER = Path("/run/systemd/system")
"""A folder that is there where systemd is the first process (sd_booted(3))."""

CREDENTIALS = struct.Struct("iII")
"""``struct ucred``: pid, uid and gid."""

NAMED = "--directory, $CUBROKER_DIR or, in Python, the argument `directory`"
"""How whoever looks for a broker says where it is."""


class Silent(Unavailable):
    """Somebody listens there, a broker or whoever keeps its sockets while it is started again, and does not answer."""


def greet(directory: Path, timeout: float) -> tuple[socket.socket, Welcome]:
    """Open a session with the broker that serves ``directory``.

    Args:
        directory: where the broker listens.
        timeout: seconds that the broker may take to answer.

    Raises:
        Unavailable: nobody serves there, or the broker does not answer.
        Denied: this user may not connect.
        Invalid: no socket can have the path.
        CubrokerError: the broker refused, with its own code.
    """
    channel, greeting = _insist(directory, timeout, Hello("cubroker", VERSIONS))
    if isinstance(greeting, Welcome):
        return channel, greeting
    hang_up(channel)
    if isinstance(greeting, Refused):
        raise from_code(greeting.code, greeting.message)
    raise Invalid(f"the broker on {directory} opened no session, and answered as to a ping")


def ping(directory: Path, timeout: float) -> str:
    """Ask the broker that serves ``directory`` how it fares, without a session; return why it serves nobody new, or "".

    Raises:
        Silent: somebody listens, but does not answer in time, as during a restart.
        Unavailable: nobody listens.
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
    """Greet within ``timeout`` seconds in all, and again where the broker went before it answered."""
    check(directory)
    _check_owner(directory)
    deadline = time.monotonic() + timeout
    try:
        for _ in range(ATTEMPTS):
            with suppress(EOFError):
                return _greet(directory, deadline, hello)
    except OSError as error:
        raise _explain(error, directory, timeout) from error
    raise Silent(f"the broker on {directory} closed the connection without a word; see {_diagnosis(directory)}")


def _greet(directory: Path, deadline: float, hello: Hello) -> tuple[socket.socket, Greeting]:
    """Connect and greet; raises ``EOFError`` if the broker goes without a word."""
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        _connect(channel, str(directory / SESSION_SOCKET), deadline)
        channel.settimeout(max(deadline - time.monotonic(), SHORTEST))
        greeting = _answer(_ask(channel, hello))
        channel.settimeout(None)
        return channel, greeting
    except BaseException:
        hang_up(channel)
        raise


def _connect(channel: socket.socket, path: str, deadline: float) -> None:
    """Connect within the kernel's own time limit: with Python's, connect() gives up at once when the backlog is full.

    A signal ends it before; Python then takes the connection for one that is under way, which this kind never is.
    """
    while (left := deadline - time.monotonic()) > 0:
        limit = struct.pack("ll", *divmod(ceil(left * 1e6), 1_000_000))  # never 0, which is no limit
        channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        channel.connect(path)
        with suppress(OSError):
            channel.getpeername()
            return
    raise TimeoutError


def hang_up(channel: socket.socket) -> None:
    """Close a session socket. The broker sees its end, even if a child that was forked in between holds a copy."""
    channel.shutdown(socket.SHUT_RDWR)
    channel.close()


def _check_owner(directory: Path) -> None:
    """Refuse a directory that somebody else made where this user's broker would serve, and so poses as it."""
    if directory == directory_of(os.getuid()):
        with suppress(FileNotFoundError):
            owner = directory.lstat().st_uid
            if owner != os.getuid():
                raise Denied(
                    f"{directory} belongs to user {owner}, not to you; name the directory to use, or remove it"
                )


def _ask(channel: socket.socket, hello: Hello) -> bytes:
    """Greet, and return the answer. Who is refused before that finds the line broken, and the answer there to read."""
    with suppress(BrokenPipeError, ConnectionResetError):
        _say(channel, wire.pack(hello))
    try:
        return channel.recv(MAX_NOTICE)
    except ConnectionResetError:
        return channel.recv(MAX_NOTICE)


def _say(channel: socket.socket, data: bytes) -> None:
    """Send a greeting. Root names process 1 as its sender, where it may: that proves to the broker what it can do.

    The kernel lets only CAP_SYS_ADMIN over this process's pid namespace do so; others greet like everybody.
    """
    if os.geteuid() == 0:
        proof = CREDENTIALS.pack(1, os.geteuid(), os.getegid())
        with suppress(PermissionError):
            channel.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_CREDENTIALS, proof)])
            return
    channel.send(data)


def _answer(data: bytes) -> Greeting:
    if not data:
        raise EOFError
    greeting: Greeting = wire.unpack(data, Greeting)
    return greeting


def _explain(error: OSError, directory: Path, timeout: float) -> Unavailable | Denied:
    match error:
        case FileNotFoundError() | ConnectionRefusedError() | NotADirectoryError():
            return Unavailable(f"no broker serves {directory}; {_instead(directory)}")
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
    """Return what to do where no broker serves."""
    if directory != SYSTEM and os.access(SYSTEM / SESSION_SOCKET, os.F_OK):
        return f"there is one on {SYSTEM}: name that by {NAMED}"
    return f"start one with: cubroker serve --directory {directory} (another place is named by {NAMED})"


def _diagnosis(directory: Path) -> str:
    """Return where it stands why a broker does not answer."""
    log = "its log"
    if MANAGER.is_dir():
        personal = os.environ.get("XDG_RUNTIME_DIR")
        if directory == SYSTEM:
            log = "`systemctl status cubroker`"
        elif personal and directory == Path(personal) / SYSTEM.name:
            log = "`systemctl --user status cubroker`"
    return f"{log}, and check its settings with `cubroker config check FILE`"


def _admission(directory: Path) -> str:
    """Return how users are let in to a broker that turns this one away, as far as its socket can be seen."""
    with suppress(OSError):
        socket_file = (directory / SESSION_SOCKET).stat()
        if socket_file.st_mode & stat.S_IWGRP:
            group = _group(socket_file.st_gid)
            return (
                f"its socket is for the group {group}: join that (as root: usermod -aG {group} NAME), and log in anew"
            )
    return "whoever runs it lets others in by its settings sockets.group and sockets.mode"


def _group(number: int) -> str:
    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return str(number)
