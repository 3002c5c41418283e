"""The start of a gateway's process, which takes as long as the imports of a broker, and so begins before them.

This module imports little. A gateway that was started in advance waits until the broker hands it the request socket
over the pipe between them. All other gateways inherit that socket: the kernel passes no descriptor while more are in
flight than this user may have open, and a broker without a gateway answers nothing.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from cubroker.server.hardening import blocked, python_command

GATEWAY = "cubroker.server.transport.gateway"  #: The module that a gateway runs.

LEFT_TO_US = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
"""Signals that a gateway has blocked from its first moment on. A terminal or a service manager sends them to all
processes of a group; the broker ends the gateway when it is done."""

ENVIRONMENT = ("PATH", "HOME", "LANG", "LC_", "LD_", "PYTHON", "VIRTUAL_ENV", "GLIBC_TUNABLES", "MALLOC_")
"""Prefixes of the environment variables that a gateway inherits: those that an interpreter and its libraries need to
start, such as the home directory, which may have the packages of one user.

A process that peers reach must not have the other variables, which may hold secrets. Some also make an interpreter do
more, such as write measurements to a file at its end, which would fail in a process that can open no file.
"""


class GatewayStart:
    """A process that runs a gateway, as it was started; :meth:`close` ends it.

    asyncio's own subprocesses are not used: on Python 3.11, and on any Python without ``pidfd_open``, asyncio has a
    thread wait for each process. If there is no memory for such a thread, it never reports that it has begun, and the
    event loop, which starts it, waits for that report without a limit.

    Args:
        listener: the request socket, which listens; None if :meth:`give` hands it over later.
        path: its path.

    Raises:
        OSError, MemoryError: the process could not be started.
    """

    def __init__(self, listener: socket.socket | None = None, path: Path | None = None) -> None:
        with ExitStack() as undo, ExitStack() as given:
            # All opened here: Popen leaks those that it has opened if it gets no descriptor for the next one (3.11).
            nothing = given.enter_context(open(os.devnull, "rb"))
            # Not the broker's own, which may block: a gateway that cannot write why it aborts does not end.
            #: The reading end of the pipe that is its standard error; reads do not wait.
            self.errors, errors = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            undo.callback(os.close, self.errors)
            given.callback(os.close, errors)
            os.set_blocking(errors, True)
            #: The broker's end of the pipe to it.
            self.pipe, theirs = socket.socketpair()
            undo.enter_context(self.pipe)
            given.enter_context(theirs)
            inherited, arguments = [theirs.fileno()], [str(theirs.fileno())]
            if listener:
                inherited.append(listener.fileno())
                arguments += str(listener.fileno()), str(path)
            with blocked(LEFT_TO_US):
                self.process = subprocess.Popen(  # noqa: S603
                    python_command(GATEWAY, *arguments),
                    env={name: text for name, text in os.environ.items() if name.startswith(ENVIRONMENT)},
                    stdin=nothing,
                    stderr=errors,
                    pass_fds=inherited,
                )
            undo.callback(self.process.wait)
            undo.callback(self.process.kill)  # does nothing once it has ended
            self._undo = undo.pop_all()

    def give(self, listener: socket.socket, path: Path) -> None:
        """Hand over the listening socket of ``path``, the request socket: the gateway can begin.

        Raises:
            OSError: the process has ended, or the kernel passes no descriptor, as when too many are in flight.
        """
        socket.send_fds(self.pipe, [os.fsencode(path)], [listener.fileno()])

    def close(self) -> None:
        """Kill the process unless it has ended, and close everything; may be called again."""
        self._undo.close()


@contextmanager
def in_advance() -> Iterator[GatewayStart | None]:
    """Start a gateway for a ``with`` block, which ends it; None if that fails: the broker starts one when it needs it.

    The block begins with the imports of a broker, and serves.
    """
    start = None
    with suppress(OSError, MemoryError):
        start = GatewayStart()
    try:
        yield start
    finally:
        if start:
            start.close()
