"""The protocol by which ``cubroker keep`` has the next broker ready in advance, and the waiting broker's side of it.

A process that *stands by* was started like any other run, has imported everything, and has touched neither devices nor
files of the broker's; so it may be killed at any time. It and the keeper share a socket, whose messages are::

    keeper                               the process that stands by
                              <- READY   it has imported everything, and waits
    NAMES, with descriptors ->           some of what is stored; as many of these as it takes
    GO ->                                that was all, and the process before has ended
                              <- TAKEN   it is the broker from here on

The end of the socket is the end of the other side. A process whose code is not what is installed any more gives no
answer to GO, and ends: the keeper starts another, as it would have without this. It also looks once in a while, so that
it makes room for a newer one.

Only a command that says :data:`SPEAKS` when it is ready is started in advance: any other would begin to work. One that
a script starts does not say it, since what the script does first would be done while the broker serves. The process has
to tell: the keeper may not read its command line, where ``/proc`` hides processes.
"""

from __future__ import annotations

import os
import re
import select
import socket
import sys
import time
import zlib
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from pathlib import Path

from cubroker.protocol.errors import Invalid
from cubroker.server.store.sd_notify import COMMAND, SCM_MAX_FD, STANDBY, receive

OFFER = "offer"
"""The value of the variable in a run that does not stand by: the keeper would have another process do so."""

SPEAKS = "X_STANDBY"
"""The field of a notify message of a command that knows this protocol, with the value 1."""

READY, GO, TAKEN = b"ready", b"go", b"taken"
NAMES = b"names "
"""How a message begins that brings descriptors. Their names follow, separated by colons."""

LONGEST = len(NAMES) + SCM_MAX_FD * 256
"""Bytes of a message: the names, of 255 characters at most, of as many descriptors as it can have."""

LOOKS = 30.0
"""Seconds after which a process that stands by looks whether its code is still what is installed."""

EXECUTABLE = Path("/proc/self/exe")

OUTDATED = 75
"""The exit status of a process that stood by with the code of before (EX_TEMPFAIL of sysexits.h)."""


# -- the keeper's side -----------------------------------------------------------------------------------


def hand_over(channel: socket.socket, stored: Mapping[int, str]) -> bool:
    """Send the stored descriptors, by number and name, and :data:`GO`; False if they cannot be sent at once."""
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


# -- the side of the process that stands by --------------------------------------------------------------


def checksum(command: Sequence[str]) -> str:
    """Return a short form of a command. The folder of its program does not count: it may be looked for in ``PATH``."""
    words = (Path(command[0]).name, *command[1:])
    return f"{zlib.crc32(os.fsencode(chr(0).join(words))):08x}"


def is_offered(environ: Mapping[str, str]) -> bool:
    """Whether the service manager would have a process stand by, and another one of its command would be as this one.

    This process is what the command names, or its interpreter: no script has started it in its own place.
    """
    line = sys.orig_argv
    return STANDBY in environ and environ.get(COMMAND) in {checksum(line[start:]) for start in range(len(line))}


class Standby:
    """A process that stands by, from its start to its turn.

    Args:
        number: of the socket to the keeper, which this object owns.

    Raises:
        OSError: it is no socket.
    """

    def __init__(self, number: int) -> None:
        self._channel = socket.socket(fileno=number)
        self._channel.setblocking(True)
        self._code = _Code()

    @classmethod
    def of(cls, environ: MutableMapping[str, str]) -> Standby | None:
        """Return it if this process is to stand by; raises ``Invalid`` if the environment breaks the protocol."""
        number = environ.get(STANDBY, OFFER)
        if number == OFFER:
            return None
        if not re.fullmatch("[0-9]{1,9}", number):
            raise Invalid(f"{STANDBY} is {number!r} in the environment, and no process but `cubroker keep` may set it")
        environ[STANDBY] = OFFER  # once this one serves, another may
        return cls(int(number))

    def wait(self) -> dict[str, list[int]]:
        """Return the stored descriptors by name when this process is to be the broker. Everything is imported by now.

        Raises:
            SystemExit: the keeper has ended; or the code that was imported is not what is installed any more.
        """
        self._code.note()
        received: dict[str, list[int]] = {}
        poll = select.poll()  # select() takes no number from 1024 on, and the keeper may have stored as many
        with self._channel as channel:
            poll.register(channel, select.POLLIN)
            self._send(READY)
            while True:
                while not poll.poll(None if received else LOOKS * 1000):
                    self._check()
                message = receive(channel, LONGEST)
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
    """The files that this process has imported, as they were."""

    def __init__(self) -> None:
        self._began = _start_of_this_process()
        self._files: dict[str, object] = {}

    def note(self) -> None:
        """Note the files of all modules that were imported."""
        found = {path: state for path in _files() if (state := _state(path))}
        # What was written since this process began may be newer than what it imported: as good as changed.
        self._files = {path: None if state[-1] > self._began else state for path, state in found.items()}

    def changed(self) -> bool:
        """Whether any of them is another file now, or has another content or time."""
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
