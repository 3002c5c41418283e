"""The protocol by which ``cubroker keep`` has the next broker ready in advance, and the waiting broker's side of it.

A process that *stands by* was started like any other run, has imported everything, and has touched neither devices nor
files of the broker; so it may be killed at any time. It and the keeper share a socket, whose messages are::

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
"""The value of the variable ``STANDBY`` in a run that does not stand by: the keeper can have another process do so."""

SPEAKS = "X_STANDS_BY"
"""The field of a notify message, with the value 1, by which a command says that it knows this protocol. Earlier builds,
which could not tell whether a script had started them, sent ``X_STANDBY``."""

READY, GO, TAKEN = b"ready", b"go", b"taken"
NAMES = b"names "
"""The beginning of a message with descriptors. Their names follow, separated by colons."""

LONGEST = len(NAMES) + SCM_MAX_FD * 256
"""Bytes of the longest message: one name, of 255 characters at most, for each descriptor that a message can have."""

LOOKS = 30.0  #: Seconds between two checks whether the code of a process that stands by is still the installed code.

EXECUTABLE = Path("/proc/self/exe")

OUTDATED = 75  #: The exit status of a process that stood by and whose code is outdated (EX_TEMPFAIL of sysexits.h).


# -- the keeper's side -----------------------------------------------------------------------------------


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


# -- the side of the process that stands by --------------------------------------------------------------


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

    def wait(self) -> dict[str, list[int]]:
        """Wait until this process is to be the broker; return the stored descriptors by name. Call after all imports.

        Raises:
            SystemExit: the keeper has ended, or the imported code is not the installed code any more.
        """
        self._code.note()
        received: dict[str, list[int]] = {}
        poll = select.poll()  # select() refuses numbers from 1024 on, and the keeper may have stored as many
        with self._channel as channel:
            poll.register(channel, select.POLLIN)
            self._send(READY)
            while True:
                while not poll.poll(None if received else LOOKS * 1000):
                    self._check()
                try:
                    message = receive(channel, LONGEST)
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
    """The files of the code that this process has imported, and their state at that time."""

    def __init__(self) -> None:
        self._began = _start_of_this_process()
        self._files: dict[str, object] = {}

    def note(self) -> None:
        """Note the files of all modules that were imported."""
        found = {path: state for path in _files() if (state := _state(path))}
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
