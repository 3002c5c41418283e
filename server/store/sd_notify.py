"""What a broker and its service manager say to each other: systemd's notify protocol, and the keeper's for a standby.

In the notify protocol one datagram is one message: lines of ``NAME=value``, and the descriptors that belong to it. The
next start of the service inherits the stored descriptors, at the numbers from 3 on. Sources: sd_notify(3),
sd_pid_notify_with_fds(3), sd_listen_fds(3), sd_notify_barrier(3), sd_watchdog_enabled(3). ``cubroker keep`` takes the
manager's side.

It also has the next broker ready in advance. A process that *stands by* was started like any other run, has imported
everything, and has touched neither devices nor files of the broker; so it may be killed at any time. It and the keeper
share a socket, whose messages are::

    keeper                               the process that stands by
                              <- READY   it has imported everything, and waits
    NAMES, with descriptors ->           a part of the stored descriptors; repeated until all are sent
    GO ->                                all are sent, and the process before has ended
                              <- TAKEN   it is the broker from here on

A side that reads the end of the socket knows that the other side has ended. If the code of the process is not the
installed code any more, the process does not answer GO but ends; the keeper starts another one, as it does when none
stands by. The process also checks its code once in a while, and ends to make room for a newer one.

The keeper starts a command in advance only if the command has sent :data:`SPEAKS` when it was ready: any other command
would begin to work. A command that a script started does not send it, because a second run of the script would repeat
its first steps while the broker serves. The process itself has to find that out: if ``/proc`` hides processes, the
keeper cannot read its command line.
"""

from __future__ import annotations

import array
import contextlib
import errno
import os
import re
import select
import socket
import struct
import sys
import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
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
"""The variables by which the keeper has a process stand by, which are for one process as well."""

ABOVE = "KEEPER_NOTIFY_SOCKET"
"""The variable with the address of the service manager above the keeper, if there is one."""

VARIABLES = (
    *("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "FDSTORE"),
    *("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "LISTEN_PIDFDID"),
    *(STANDBY, COMMAND, ABOVE),
)
"""The environment variables of both protocols, which are for one process and not for its children."""

SCARCE = (errno.ETOOMANYREFS, errno.ENOBUFS, errno.ENOMEM)  #: Errors that pass: too many in flight, or no memory.
GONE = (errno.ECONNREFUSED, errno.ECONNRESET, errno.ENOTCONN)  #: The other end was closed, or not connected to yet.

OFFER = "offer"
"""The value of the variable ``STANDBY`` in a run that does not stand by: the keeper can have another process do so."""

SPEAKS = "X_STANDS_BY"
"""The field of a notify message, with the value 1, by which a command says that it knows this protocol. Earlier builds,
which could not tell whether a script had started them, sent ``X_STANDBY``."""

REMOVES = "FDSTOREREMOVE="
"""The beginning of a message that removes descriptors."""

NEAREST = ("WATCHDOG=", "STOPPING=", f"{SPEAKS}=")
"""The beginnings of lines for the nearest manager alone. One above it watches the keeper, and goes on when it does."""

READY, GO, TAKEN = b"ready", b"go", b"taken"
NAMES = b"names "
"""The beginning of a message with descriptors. Their names follow, separated by colons."""

LONGEST_NAMES = len(NAMES) + SCM_MAX_FD * 256
"""Bytes of the longest message to a process that stands by: one name, of 255 characters at most, for each descriptor
that a message can have."""

LOOKS = 30.0  #: Seconds between two checks whether the code of a process that stands by is still the installed code.

EXECUTABLE = Path("/proc/self/exe")

OUTDATED = 75  #: The exit status of a process that stood by and whose code is outdated (EX_TEMPFAIL of sysexits.h).

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
    return f"{REMOVES}1\nFDNAME={_checked(name)}"


def _checked(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise Invalid(
            f"{name!r} is no name to store under: that is 1 to {LONGEST_NAME} printable ASCII characters, "
            "without space and colon"
        )
    return name


# -- the service's side --------------------------------------------------------------------------------


class Manager:
    """The service manager of this process. Its methods may be called from any thread.

    If the manager is a keeper with a manager of its own, that one is sent the same messages, except what concerns this
    process alone. So what is stored outlives the keeper, too, from the moment at which :meth:`offer` or :meth:`say`
    returns, and the keeper has nothing to pass on.

    Args:
        address: of its socket, as in ``$NOTIFY_SOCKET``: a path, or ``@`` and an abstract name; ``Invalid`` is raised
            otherwise.
        above: the address of the manager above it; None if there is none.
        watchdog_interval: seconds between signs of life that satisfy it; None if it does not watch.
        limit: how many descriptors its store takes; None if that is unknown, or there is no store.
    """

    def __init__(
        self,
        address: str,
        *,
        above: str | None = None,
        watchdog_interval: float | None = None,
        limit: int | None = None,
    ) -> None:
        self.watchdog_interval = watchdog_interval
        self.limit = limit
        #: Whether there is one above it. A message that was not sent may then have reached the nearest.
        self.has_above = above is not None
        addresses = {"NOTIFY_SOCKET": address} | ({ABOVE: above} if above is not None else {})
        for name, each in addresses.items():
            if not each.startswith(("/", "@")) or len(each) < 2:
                raise Invalid(f"{name} is {each!r}, which is neither an absolute path nor @ and a name")
        self._sockets = [NotifySocket(each) for each in addresses.values()]
        self._full = self._sockets[0]

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
        return cls(address, above=environ.get(ABOVE) or None, watchdog_interval=interval, limit=places(environ))

    @property
    def address(self) -> str:
        """The address of its socket."""
        return self._sockets[0].address

    def fileno(self) -> int:
        """Return the descriptor of the socket that had no room last; once connected, it becomes writable with room."""
        return self._full.fileno()

    def offer(self, message: str, descriptors: Sequence[int] = ()) -> bool:
        """Send a message now; False if there is no room. Once sent, it and its descriptors survive this process.

        After False a keeper may have it, and gets it once more when it is offered again, which changes nothing there.
        Raises ``Unavailable`` if the manager is gone, and there is none above it.
        """
        for destination, text in self._addressed(message):
            with self._unless_outlived(destination):
                if not destination.offer(text, descriptors):
                    self._full = destination
                    return False
        return True

    def say(self, message: str, descriptors: Sequence[int] = ()) -> None:
        """Send a message, and wait for room. Raises as :meth:`offer`, and if the manager is too slow."""
        for destination, text in self._addressed(message):
            with self._unless_outlived(destination):
                destination.say(text, descriptors)

    def close(self) -> None:
        """Close the socket. Stored descriptors stay."""
        for each in self._sockets:
            each.close()

    def late(self, message: str) -> Unavailable:
        """Return the error of a message for which there was no room in time."""
        return self._full.late(message)

    @contextlib.contextmanager
    def _unless_outlived(self, destination: NotifySocket) -> Iterator[None]:
        """Ignore that a keeper is gone: the next one starts with what the manager above has."""
        try:
            yield
        except Unavailable as error:
            gone = isinstance(error.__cause__, (ConnectionRefusedError, FileNotFoundError))
            if not gone or destination is self._sockets[-1]:
                raise

    def _addressed(self, message: str) -> Iterable[tuple[NotifySocket, str]]:
        """Return to whom a message is sent, in order, and its text for each.

        Whatever the manager above stores, the nearest stores too, also if this process is killed between the two: the
        next process gets all of it, removes what its journal does not know, and stores what the manager above may lack
        again: the journal, and sessions whose clients were not welcomed.
        """
        rest = "\n".join(line for line in message.split("\n") if not line.startswith(NEAREST))
        both = [pair for pair in zip(self._sockets, (message, rest), strict=False) if pair[1]]
        return reversed(both) if message.startswith(REMOVES) else both


class NotifySocket:
    """A socket that sends to the manager at one address; used as :class:`Manager` is."""

    def __init__(self, address: str) -> None:
        self.address = address
        # One socket for all messages: a process without free descriptors must be able to say that it lives.
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        seconds, microseconds = divmod(round(PATIENCE * 1e6), 1_000_000)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", seconds, microseconds))

    def fileno(self) -> int:
        """Return its descriptor."""
        return self._socket.fileno()

    def offer(self, message: str, descriptors: Sequence[int]) -> bool:
        """Send a message now; False if there is no room."""
        try:
            self._transmit(message, descriptors, socket.MSG_DONTWAIT)
        except (OSError, MemoryError) as error:
            if isinstance(error, BlockingIOError) or _passes(error):
                return False
            raise self._unreachable(message, error) from error
        return True

    def say(self, message: str, descriptors: Sequence[int]) -> None:
        """Send a message, and wait for room."""
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
        """Close it."""
        self._socket.close()

    def late(self, message: str) -> Unavailable:
        """Return the error of a message for which there was no room in time."""
        return Unavailable(
            f"the service manager at {self.address} did not take {message.splitlines()[0]} within "
            f"{PATIENCE:g} s; it hangs, or is flooded"
        )

    def _unreachable(self, message: str, error: OSError | MemoryError) -> Unavailable:
        return Unavailable(
            f"the service manager at {self.address} cannot be told {message.splitlines()[0]}: {explain(error)}"
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
            self._socket.connect(f"\0{self.address[1:]}" if self.address.startswith("@") else self.address)
            self._socket.sendmsg([message.encode()], ancillary, flags)


class Barrier:
    """Tells when a manager has handled all messages that were sent to it before, by any process.

    The manager closes the descriptor that this message carries (sd_notify_barrier(3)); one that does not know the
    message closes it as well. ``epoll`` reports that.
    """

    def __init__(self, manager: Manager, epoll: select.epoll) -> None:
        self._manager = manager
        self._epoll = epoll
        #: Whether the message was sent; :meth:`passed` sends it when there is room.
        self.sent = False
        self._reader, self._writer = os.pipe()
        with contextlib.ExitStack() as undo:
            undo.callback(close_all, [self._reader, self._writer])
            epoll.register(self._reader, select.EPOLLIN)  # fails if this user may watch no more files
            undo.pop_all()

    def passed(self) -> bool:
        """Whether all was handled, or the manager is gone."""
        if not self.sent:
            try:
                self.sent = self._manager.offer("BARRIER=1", [self._writer])
            except Unavailable:
                return True
            if self.sent:
                close_all([self._writer])
        poll = select.poll()
        poll.register(self._reader, select.POLLIN)
        return self.sent and bool(poll.poll(0))

    def close(self) -> None:
        """Close it, whether it has passed or not."""
        self._epoll.unregister(self._reader)
        close_all([self._reader] if self.sent else [self._reader, self._writer])


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


# -- the manager's side --------------------------------------------------------------------------------


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


# -- standing by ---------------------------------------------------------------------------------------


def hand_over(channel: socket.socket, stored: Mapping[int, str]) -> bool:
    """Send the stored descriptors, by number and name, and :data:`GO`; return False if that fails or would block."""
    numbers = list(stored)
    try:
        for start in range(0, len(numbers), SCM_MAX_FD):
            part = numbers[start : start + SCM_MAX_FD]
            names = ":".join(stored[number] for number in part).encode()
            socket.send_fds(channel, [NAMES + names], part, socket.MSG_DONTWAIT)
        channel.send(GO, socket.MSG_DONTWAIT)
    except OSError:
        return False
    return True


def checksum(command: Sequence[str]) -> str:
    """Return a checksum of a command, without its program's folder: the program may be looked for in ``PATH``."""
    words = (Path(command[0]).name, *command[1:])
    return f"{zlib.crc32(os.fsencode(chr(0).join(words))):08x}"


def is_offered(environ: Mapping[str, str]) -> bool:
    """Whether the service manager can have a process stand by, and a new run of its command would be like this process.

    It would if this process is the program that the command names, or the interpreter of that, and not a program that
    a script has started in its own place.
    """
    line = sys.orig_argv
    return STANDBY in environ and environ.get(COMMAND) in {checksum(line[start:]) for start in range(len(line))}


class Standby:
    """A process that stands by, from its start until it takes over.

    Args:
        number: the descriptor of the socket to the keeper; this object owns it.

    Raises:
        OSError: it is no socket.
    """

    def __init__(self, number: int) -> None:
        self._channel = socket.socket(fileno=number)
        self._channel.setblocking(True)
        self._code = _Code()

    @classmethod
    def of(cls, environ: MutableMapping[str, str]) -> Standby | None:
        """Return this process if it stands by, else None; raises ``Invalid`` if ``environ`` breaks the protocol."""
        number = environ.get(STANDBY, OFFER)
        if number == OFFER:
            return None
        if not re.fullmatch("[0-9]{1,9}", number):
            raise Invalid(f"{STANDBY} is {number!r} in the environment, and no process but `cubroker keep` may set it")
        environ[STANDBY] = OFFER  # once this process serves, another may stand by
        return cls(int(number))

    def wait(self, also: Iterable[str] = ()) -> dict[str, list[int]]:
        """Wait until this process is to be the broker; return the stored descriptors by name. Call after all imports.

        Args:
            also: paths of code that a child of this process has imported.

        Raises:
            SystemExit: the keeper has ended, or the imported code is not the installed code any more.
        """
        self._code.note(also)
        received: dict[str, list[int]] = {}
        poll = select.poll()  # select() refuses numbers from 1024 on, and the keeper may have stored as many
        with self._channel as channel:
            poll.register(channel, select.POLLIN)
            self._send(READY)
            while True:
                while not poll.poll(None if received else LOOKS * 1000):
                    self._check()
                try:
                    message = receive(channel, LONGEST_NAMES)
                except ConnectionError:  # the keeper has ended, and had not read READY
                    sys.exit(0)
                assert message
                if message.data.startswith(NAMES) and message.whole:
                    names = message.data[len(NAMES) :].decode().split(":")
                    for name, descriptor in zip(names, message.descriptors, strict=True):
                        received.setdefault(name, []).append(descriptor)
                elif message.data == GO:
                    self._check()
                    self._send(TAKEN)
                    return received
                else:  # the keeper has ended, or this process has no room for what it sends
                    sys.exit(0)

    def _check(self) -> None:
        if self._code.changed():
            sys.exit(OUTDATED)

    def _send(self, message: bytes) -> None:
        try:
            self._channel.send(message)
        except ConnectionError:
            sys.exit(0)


class _Code:
    """The files of the code that this process and its child have imported, and their state at that time."""

    def __init__(self) -> None:
        self._began = _start_of_this_process()
        self._files: dict[str, object] = {}

    def note(self, also: Iterable[str]) -> None:
        """Note the files of all modules that were imported, and ``also`` these."""
        found = {path: state for path in (*_files(), *also) if (state := _state(path))}
        # A file that was written since this process began may be newer than the imported code: it counts as changed.
        self._files = {path: None if state[-1] > self._began else state for path, state in found.items()}

    def changed(self) -> bool:
        """Whether the size or a time of any noted file has changed, or the file is gone."""
        return any(state is None or _state(path) != state for path, state in self._files.items())


def _files() -> Iterable[str]:
    """Return the paths of the interpreter, of the command and of everything that is imported."""
    modules = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    command = str(Path(sys.argv[0]).absolute())
    return {path for path in (str(EXECUTABLE.readlink()), command, *modules) if path and path.startswith("/")}


def _state(path: str) -> tuple[int, ...] | None:
    try:
        found = Path(path).stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _start_of_this_process() -> int:
    """Return when this process began, in nanoseconds since 1970, as the times of files are."""
    ticks = int(Path("/proc/self/stat").read_text(errors="replace").rpartition(")")[2].split()[19])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time_ns() - int(age * 1e9)
