"""The client's side of systemd's notify protocol, which ``cubroker keep`` speaks too.

One datagram is one message: lines of ``NAME=value`` (:mod:`cubroker.server.store.words`), and the descriptors that
belong to it. What was stored comes back with the next start at the numbers from 3 on. Sources: sd_notify(3),
sd_pid_notify_with_fds(3), sd_listen_fds(3), sd_notify_barrier(3), sd_watchdog_enabled(3).
"""

from __future__ import annotations

import errno
import os
import re
import select
import socket
import struct
import time
from collections.abc import Mapping, MutableMapping, Sequence

from cubroker.protocol.errors import Invalid, TimedOut, Unavailable
from cubroker.protocol.system_errors import explain
from cubroker.server.store import words

PATIENCE = 5.0
"""Seconds that a message may wait for room in the queue of whoever takes it."""

PAUSE = 0.005
"""Seconds between two attempts to send what there is no memory for, or more descriptors than may be under way."""

MOST_DESCRIPTORS = 253
"""Descriptors that one message can carry (SCM_MAX_FD)."""

FIRST = 3
"""The number of the first descriptor that is inherited (SD_LISTEN_FDS_START)."""

VARIABLES = (
    *("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "FDSTORE"),
    *("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "LISTEN_PIDFDID"),
)
"""What the protocol has in the environment, for one process and not for its children."""

SCARCE = (errno.ETOOMANYREFS, errno.ENOBUFS, errno.ENOMEM)
"""What it says where too many descriptors are under way, or there is no memory: for now."""

GONE = (errno.ECONNREFUSED, errno.ECONNRESET, errno.ENOTCONN)
"""What the system says of a socket whose other end was closed."""


class Manager:
    """Whoever started this process and is told how it fares. Its methods may be called from any thread.

    Args:
        address: of its socket, as ``$NOTIFY_SOCKET`` says it: a path, or ``@`` and an abstract name.
        watchdog_interval: seconds between signs of life that keep it content; None: it does not watch.
        limit: descriptors that its store takes; None: not known, or no store.

    Raises:
        Invalid: the address is none of a Unix socket.
    """

    def __init__(self, address: str, *, watchdog_interval: float | None = None, limit: int | None = None) -> None:
        if not address.startswith(("/", "@")) or len(address) < 2:
            raise Invalid(f"NOTIFY_SOCKET is {address!r}, which is neither an absolute path nor @ and a name")
        self.watchdog_interval = watchdog_interval
        self.limit = limit
        self._address = address
        # One socket for all: a process without a descriptor left has to be able to say that it lives.
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _timeval(PATIENCE))
        # The kernel says of a socket that is connected, and of no other, when whoever reads it has room again.
        self._connected = False

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Manager | None:
        """Return the manager that the environment names; None if there is none.

        Raises:
            Invalid: a variable of the protocol is not what the protocol says.
        """
        address = environ.get("NOTIFY_SOCKET")
        if not address:
            return None
        return cls(address, watchdog_interval=_watchdog_interval(environ), limit=places(environ))

    def fileno(self) -> int:
        """Return the descriptor of the socket, which becomes writable when there is room after :meth:`offer`."""
        return self._socket.fileno()

    def offer(self, message: str, descriptors: Sequence[int] = ()) -> bool:
        """Send one of the messages of :mod:`cubroker.server.store.words`, if that can be done now; False if it cannot.

        Once sent it, and its descriptors, are safe from this process's death.

        Raises:
            Unavailable: nobody takes messages.
        """
        try:
            self._transmit(message, descriptors, socket.MSG_DONTWAIT)
        except OSError as error:
            if error.errno in (errno.EAGAIN, *SCARCE):
                return False
            raise self._unreachable(message, error) from error
        return True

    def say(self, message: str, descriptors: Sequence[int] = ()) -> None:
        """Send a message, and wait for room if there is none; for the rest as :meth:`offer`.

        Raises:
            Unavailable: nobody takes it, or not in time.
        """
        try:
            self._wait_for_room(message, descriptors)
        except BlockingIOError:
            raise self.late(message) from None
        except OSError as error:
            raise self._unreachable(message, error) from error

    def store(self, name: str, descriptors: Sequence[int], *, poll: bool) -> None:
        """Have duplicates of descriptors kept under a name until :meth:`remove`, or until they hang up.

        A store that is full drops them without a word: whoever stores counts. One that is there already is not
        stored twice. They are safe from this process's death as soon as this returns.

        Args:
            name: 1 to 24 characters of printable ASCII, without space and colon.
            descriptors: any number of them.
            poll: remove those that hang up, as connections do. Never for memory.

        Raises:
            Invalid: the name.
            Unavailable: nobody takes the message, or not in time.
        """
        message = words.storing(name, poll=poll)
        for first in range(0, len(descriptors), MOST_DESCRIPTORS):
            self.say(message, descriptors[first : first + MOST_DESCRIPTORS])

    def remove(self, name: str) -> None:
        """Have everything that is stored under a name closed. Raises as :meth:`store`."""
        self.say(words.removing(name))

    def barrier(self, timeout: float) -> None:
        """Return when all that was sent before has been acted upon.

        Args:
            timeout: seconds.

        Raises:
            TimedOut: it was not by then.
            Unavailable: nobody takes the message, or not in time.
        """
        ours, theirs = os.pipe2(os.O_CLOEXEC)
        try:
            try:
                self.say(words.BARRIER, [theirs])
            finally:
                os.close(theirs)
            if not _hung_up(ours, timeout):
                raise TimedOut(f"the service manager at {self._address} did not catch up within {timeout:g} s")
        finally:
            os.close(ours)

    def close(self) -> None:
        """Close the socket. What is stored stays."""
        self._socket.close()

    def late(self, message: str) -> Unavailable:
        """Return what to say of a message that there was no room for in time."""
        return Unavailable(
            f"the service manager at {self._address} did not take {message.splitlines()[0]} within "
            f"{PATIENCE:g} s; it hangs, or is flooded"
        )

    def _unreachable(self, message: str, error: OSError) -> Unavailable:
        return Unavailable(
            f"the service manager at {self._address} cannot be told {message.splitlines()[0]}: {explain(error)}"
        )

    def _wait_for_room(self, message: str, descriptors: Sequence[int]) -> None:
        """Send. For room in the queue, and under the limit on descriptors under way, it waits only so long."""
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                self._transmit(message, descriptors)
            except OSError as error:
                if error.errno not in SCARCE or time.monotonic() > deadline:
                    raise
                time.sleep(PAUSE)  # the kernel tells nobody when it can be done
            else:
                return

    def _transmit(self, message: str, descriptors: Sequence[int], flags: int = 0) -> None:
        """Send, and connect before that if need be; once more where the other end was closed, and may be open again."""
        rights = struct.pack(f"{len(descriptors)}i", *descriptors)
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if descriptors else []
        if self._connected:
            try:
                self._socket.sendmsg([message.encode()], ancillary, flags)
            except OSError as error:
                if error.errno not in GONE:
                    raise
                self._connected = False
            else:
                return
        self._socket.connect(f"\0{self._address[1:]}" if self._address.startswith("@") else self._address)
        self._connected = True
        self._socket.sendmsg([message.encode()], ancillary, flags)


def inherit(environ: MutableMapping[str, str]) -> dict[str, list[int]]:
    """Take over the descriptors that this process was started with, once, by name.

    They are closed on exec from now on, and their variables are taken out of the environment, so that no child of
    this process believes them its own.

    Raises:
        Invalid: the variables contradict each other, or a descriptor is not open.
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
        _close_on_exec(number, label)
        inherited.setdefault(label, []).append(number)
    return inherited


def _close_on_exec(number: int, label: str) -> None:
    try:
        os.set_inheritable(number, False)
    except OSError as error:
        raise Invalid(f"descriptor {number}, {label!r} of LISTEN_FDNAMES, cannot be had: {explain(error)}") from error


def _watchdog_interval(environ: Mapping[str, str]) -> float | None:
    """Return half of the time that a watchdog allows, if it is this process that it watches."""
    usec = environ.get("WATCHDOG_USEC")
    pid = environ.get("WATCHDOG_PID")
    if not usec or (pid and _number("WATCHDOG_PID", pid) != os.getpid()):
        return None
    return _number("WATCHDOG_USEC", usec) / 2e6 or None


def places(environ: Mapping[str, str]) -> int | None:
    """Return how many descriptors the store takes, None if that is not known, or there is none.

    systemd says so from version 254 on, else the unit has to.

    Raises:
        Invalid: it is no number.
    """
    for name in ("FDSTORE", "CUBROKER_STORE"):
        if value := environ.get(name):
            return _number(name, value)
    return None


def _number(name: str, value: str) -> int:
    if not re.fullmatch(r"[0-9]{1,18}", value, re.ASCII):
        raise Invalid(f"{name} is {value!r} in the environment, which is no number")
    return int(value)


def _hung_up(descriptor: int, timeout: float) -> bool:
    poll = select.poll()
    poll.register(descriptor, 0)
    return bool(poll.poll(timeout * 1000))


def _timeval(seconds: float) -> bytes:
    return struct.pack("ll", int(seconds), int(seconds % 1 * 1_000_000))
