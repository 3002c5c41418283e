"""systemd's notify protocol: its messages, the service's side, and the manager's side, which ``cubroker keep`` takes.

One datagram is one message: lines of ``NAME=value``, and the descriptors that belong to it. The next start of the
service inherits the stored descriptors, at the numbers from 3 on. Sources: sd_notify(3), sd_pid_notify_with_fds(3),
sd_listen_fds(3), sd_notify_barrier(3), sd_watchdog_enabled(3).
"""

from __future__ import annotations

import array
import contextlib
import errno
import os
import re
import socket
import struct
import time
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from typing import NamedTuple

from cubroker.protocol.errors import Invalid, Unavailable, explain

PATIENCE = 5.0  #: Seconds that a message may wait for room in the manager's queue.
PAUSE = 0.005  #: Seconds between two attempts while the kernel lacks memory, or too many descriptors are in flight.
SCM_MAX_FD = 253  #: Descriptors that one message can carry (net/scm.h).
FIRST = 3  #: The number of the first inherited descriptor (SD_LISTEN_FDS_START).
LONGEST = 4096  #: Bytes of a message; systemd takes no longer ones either.
LONGEST_STATUS = 2000  #: Bytes of a status: a message of 4096 bytes or more would be dropped.
LONGEST_NAME = 24  #: Characters of a stored descriptor's name: all names have to fit in one variable of 128 KiB.
WATCHDOG = "WATCHDOG=1"  #: The message: this process lives.

STANDBY, COMMAND = "KEEPER_STANDBY", "KEEPER_COMMAND"
"""The variables of :mod:`cubroker.server.standby`, which are for one process as well."""

VARIABLES = (
    *("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "FDSTORE"),
    *("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "LISTEN_PIDFDID"),
    *(STANDBY, COMMAND),
)
"""The protocol's environment variables, which are for one process and not for its children."""

SCARCE = (errno.ETOOMANYREFS, errno.ENOBUFS, errno.ENOMEM)  #: Errors that pass: too many in flight, or no memory.
GONE = (errno.ECONNREFUSED, errno.ECONNRESET, errno.ENOTCONN)  #: The other end was closed, or not connected to yet.

_NAME = re.compile(rf"[!-9;-~]{{1,{LONGEST_NAME}}}")
_FIELD = re.compile(r"[A-Z0-9_]+=.*")
_CREDENTIALS = struct.Struct("iII")
_ANCILLARY = socket.CMSG_SPACE(SCM_MAX_FD * 4) + socket.CMSG_SPACE(_CREDENTIALS.size)


def ready(text: str, *also: str) -> str:
    """Return the message: this process serves, with this status; ``also`` are further fields."""
    return "\n".join(("READY=1", *also, status(text)))


def status(text: str) -> str:
    """Return the message with a status, in one line: a line end would begin another field."""
    line = " ".join(text.split()).encode(errors="replace")
    return "STATUS=" + line[:LONGEST_STATUS].decode(errors="ignore")


def stopping(seconds: float = 0.0) -> str:
    """Return the message: this process is about to end, and may take ``seconds``."""
    return "STOPPING=1" + (f"\nEXTEND_TIMEOUT_USEC={seconds * 1e6:.0f}" if seconds else "")


def reloading() -> str:
    """Return the message: settings are read again; :func:`ready` ends that."""
    return f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}"


def storing(name: str, *, poll: bool) -> str:
    """Return the message: store duplicates of its descriptors under a name until :func:`removing`.

    A full store drops them silently: the sender has to count. A descriptor that is stored already is not stored twice.

    Args:
        name: 1 to 24 characters of printable ASCII, without space and colon; ``Invalid`` is raised otherwise.
        poll: whether those that hang up are removed, as for connections. Never for memory.
    """
    return f"FDSTORE=1\nFDNAME={_checked(name)}" + ("" if poll else "\nFDPOLL=0")


def removing(name: str) -> str:
    """Return the message: close all descriptors of a name. Raises as :func:`storing`."""
    return f"FDSTOREREMOVE=1\nFDNAME={_checked(name)}"


def _checked(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise Invalid(
            f"{name!r} is no name to store under: that is 1 to {LONGEST_NAME} printable ASCII characters, "
            "without space and colon"
        )
    return name


class Manager:
    """The service manager of this process. Its methods may be called from any thread.

    Args:
        address: of its socket, as in ``$NOTIFY_SOCKET``: a path, or ``@`` and an abstract name; ``Invalid`` is raised
            otherwise.
        watchdog_interval: seconds between signs of life that satisfy it; None if it does not watch.
        limit: how many descriptors its store takes; None if that is unknown, or there is no store.
    """

    def __init__(self, address: str, *, watchdog_interval: float | None = None, limit: int | None = None) -> None:
        if not address.startswith(("/", "@")) or len(address) < 2:
            raise Invalid(f"NOTIFY_SOCKET is {address!r}, which is neither an absolute path nor @ and a name")
        self.watchdog_interval = watchdog_interval
        self.limit = limit
        self._address = address
        # One socket for all messages: a process without free descriptors must be able to say that it lives.
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        seconds, microseconds = divmod(round(PATIENCE * 1e6), 1_000_000)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", seconds, microseconds))

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Manager | None:
        """Return the manager that the environment names, if any; raises ``Invalid`` if a variable is malformed."""
        address = environ.get("NOTIFY_SOCKET")
        if not address:
            return None
        usec, pid = environ.get("WATCHDOG_USEC"), environ.get("WATCHDOG_PID")
        interval = None
        if usec and (not pid or _number("WATCHDOG_PID", pid) == os.getpid()):
            interval = _number("WATCHDOG_USEC", usec) / 2e6 or None
        return cls(address, watchdog_interval=interval, limit=places(environ))

    def fileno(self) -> int:
        """Return the descriptor of the socket; once connected, it becomes writable when there is room."""
        return self._socket.fileno()

    def offer(self, message: str, descriptors: Sequence[int] = ()) -> bool:
        """Send a message now; False if there is no room. Once sent, it and its descriptors survive this process.

        Raises ``Unavailable`` if the manager is gone.
        """
        try:
            self._transmit(message, descriptors, socket.MSG_DONTWAIT)
        except (OSError, MemoryError) as error:
            if isinstance(error, BlockingIOError) or _passes(error):
                return False
            raise self._unreachable(message, error) from error
        return True

    def say(self, message: str, descriptors: Sequence[int] = ()) -> None:
        """Send a message, and wait for room; raises ``Unavailable`` if the manager is gone or too slow."""
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                return self._transmit(message, descriptors)
            except BlockingIOError:
                raise self.late(message) from None
            except (OSError, MemoryError) as error:
                if not _passes(error) or time.monotonic() > deadline:
                    raise self._unreachable(message, error) from error
            time.sleep(PAUSE)  # the kernel does not report when there is room

    def close(self) -> None:
        """Close the socket. Stored descriptors stay."""
        self._socket.close()

    def late(self, message: str) -> Unavailable:
        """Return the error of a message for which there was no room in time."""
        return Unavailable(
            f"the service manager at {self._address} did not take {message.splitlines()[0]} within "
            f"{PATIENCE:g} s; it hangs, or is flooded"
        )

    def _unreachable(self, message: str, error: OSError | MemoryError) -> Unavailable:
        return Unavailable(
            f"the service manager at {self._address} cannot be told {message.splitlines()[0]}: {explain(error)}"
        )

    def _transmit(self, message: str, descriptors: Sequence[int], flags: int = 0) -> None:
        """Send; if the other end was closed, or there is no connection yet, connect and send again."""
        rights = struct.pack(f"{len(descriptors)}i", *descriptors)
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if descriptors else []
        try:
            self._socket.sendmsg([message.encode()], ancillary, flags)
        except OSError as error:
            if error.errno not in GONE:
                raise
            self._socket.connect(f"\0{self._address[1:]}" if self._address.startswith("@") else self._address)
            self._socket.sendmsg([message.encode()], ancillary, flags)


def _passes(error: OSError | MemoryError) -> bool:
    """Whether only for now something is scarce."""
    return isinstance(error, MemoryError) or error.errno in SCARCE


def inherit(environ: MutableMapping[str, str]) -> dict[str, list[int]]:
    """Return the descriptors that this process was started with, by name; only the first call returns any.

    They are closed on exec from now on, and their variables are removed from the environment, so that no child takes
    them for its own. Raises ``Invalid`` if the variables contradict each other, or a descriptor is not open.
    """
    pid, count, names = (environ.pop(name, None) for name in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"))
    environ.pop("LISTEN_PIDFDID", None)
    if pid is None or count is None or _number("LISTEN_PID", pid) != os.getpid():
        return {}
    numbers = range(FIRST, FIRST + _number("LISTEN_FDS", count))
    labels = ["unknown"] * len(numbers) if names is None else names.split(":") if numbers else []
    if len(labels) != len(numbers):
        raise Invalid(f"LISTEN_FDNAMES has {len(labels)} names for the {len(numbers)} descriptors of LISTEN_FDS")
    inherited: dict[str, list[int]] = {}
    for number, label in zip(numbers, labels, strict=True):
        try:
            os.set_inheritable(number, False)
        except OSError as error:
            raise Invalid(
                f"descriptor {number}, {label!r} of LISTEN_FDNAMES, cannot be used: {explain(error)}"
            ) from error
        inherited.setdefault(label, []).append(number)
    return inherited


def places(environ: Mapping[str, str]) -> int | None:
    """Return how many descriptors the store takes; None if that is unknown, or there is no store.

    systemd sets ``FDSTORE`` from version 254 on; before that the unit sets ``CUBROKER_STORE``. Raises ``Invalid`` if
    the value is no number.
    """
    for name in ("FDSTORE", "CUBROKER_STORE"):
        if value := environ.get(name):
            return _number(name, value)
    return None


def _number(name: str, value: str) -> int:
    if not re.fullmatch(r"[0-9]{1,18}", value, re.ASCII):
        raise Invalid(f"{name} is {value!r} in the environment, which is no number")
    return int(value)


class Malformed(ValueError):
    """A message does not follow the protocol; the text says how."""


class Datagram(NamedTuple):
    """One message. The receiver closes its descriptors."""

    #: The sender, from the kernel; 0 if its pid namespace is not visible here.
    pid: int
    data: bytes
    descriptors: list[int]
    #: Whether neither text nor descriptors were cut off.
    whole: bool


def listen(path: str) -> socket.socket:
    """Return a socket at ``path`` that receives messages."""
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    try:
        channel.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        channel.bind(path)
    except OSError:
        channel.close()
        raise
    return channel


def receive(channel: socket.socket, longest: int = LONGEST) -> Datagram | None:
    """Return the next message, of at most ``longest`` bytes; None if there is none."""
    try:
        data, ancillary, flags, _ = channel.recvmsg(longest, _ANCILLARY, socket.MSG_CMSG_CLOEXEC)
    except BlockingIOError:
        return None
    pid = 0
    descriptors = array.array("i")
    for _, kind, content in ancillary:
        if kind == socket.SCM_RIGHTS:
            descriptors.frombytes(content[: len(content) // 4 * 4])
        elif kind == socket.SCM_CREDENTIALS:
            pid = _CREDENTIALS.unpack_from(content)[0]
    return Datagram(pid, data, descriptors.tolist(), not flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC))


def parse(datagram: Datagram) -> dict[str, str]:
    """Return the fields of a message, the first of each name; raises ``Malformed`` if it is cut off or malformed."""
    if not datagram.whole:
        raise Malformed(f"it is truncated: it has over {LONGEST} bytes of text, or this process has no descriptor left")
    try:
        lines = datagram.data.decode().split("\n")
    except UnicodeDecodeError:
        raise Malformed("it is not UTF-8") from None
    fields: dict[str, str] = {}
    for line in filter(None, lines):
        if not _FIELD.fullmatch(line) or "\0" in line:
            raise Malformed(f"{line[:80]!r} is no NAME=value")
        name, _, value = line.partition("=")
        fields.setdefault(name, value)
    return fields


def close_all(descriptors: Iterable[int]) -> None:
    """Close descriptors, and ignore their errors."""
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)
