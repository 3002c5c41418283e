"""Keeps a gateway running: starts one, and another as soon as it dies; one that hangs is killed.

The listening socket of ``broker.zmq`` belongs to the broker, and every gateway gets a duplicate of
it: a client that connects while there is no gateway waits in the socket's backlog for the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from cubroker.protocol.errors import Unavailable
from cubroker.protocol.system_errors import explain
from cubroker.server import python, sandbox
from cubroker.server.batches import Part
from cubroker.server.gateway_probe import silence
from cubroker.server.transport import Link

log = logging.getLogger(__name__)

STEADY = 10.0
"""Seconds that a gateway must have lived for its death to be followed by a start at once."""

GRACE = 1.0
"""Seconds that a gateway may take to end once the pipe to it has closed: it may have to say why."""

ENVIRONMENT = ("PATH", "LANG", "LC_", "LD_", "PYTHON", "VIRTUAL_ENV", "GLIBC_TUNABLES", "MALLOC_")
"""How the names of variables begin that a gateway is given: what an interpreter and its libraries need to start.

The rest is not for a process that peers reach, and may hold secrets. What a variable starts in an interpreter besides,
such as a measurement that is written to a file at its end, would fail in a process that can open no file.
"""

FIRST_DELAY = 0.05
LONGEST_DELAY = 2.0

LAST_WORDS = 4000
"""Bytes of what a gateway wrote that are kept for the log."""


class Supervisor:
    """The broker's gateway, whichever process it is at the time.

    Args:
        listener: the listening socket of ``path``.
        path: the request socket.
    """

    def __init__(self, listener: socket.socket, path: Path) -> None:
        self._listener = listener
        self._path = path
        self._receive: Callable[[Iterator[bytes]], None] = _drop
        self._changed: Callable[[], None] = lambda: None
        self._link: Link | None = None
        self._stopping = asyncio.Event()
        self._first: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the first gateway; :meth:`connect` waits for it."""
        for obstacle in sandbox.obstacles():
            log.warning("the gateway is confined less than it could be: %s", obstacle)
        self._task = asyncio.create_task(self._keep())

    async def connect(self, receive: Callable[[Iterator[bytes]], None], changed: Callable[[], None]) -> None:
        """Return when the first gateway listens.

        Args:
            receive: called with each batch of requests; those that came before are not for this broker.
            changed: called when a gateway listens that is not the first.

        Raises:
            Unavailable: the first one could not be started, or ended before it listened.
        """
        self._receive, self._changed = receive, changed
        if failure := await self._first:
            raise Unavailable(f"the gateway does not come up on {self._path}: {failure}")

    def send(self, frames: Sequence[Part]) -> bool:
        """Send a batch of answers, and return whether the gateway is behind with them.

        Without a gateway it is dropped: clients ask again, and are answered again.
        """
        return self._link is not None and self._link.send(frames)

    def obstacle(self) -> str:
        """Return why no request comes through at the moment, or an empty text."""
        listens = self._link is not None and self._link.listening.done()
        return "" if listens else "its gateway is being started again"

    async def stop(self) -> None:
        """End the gateway, and start no other."""
        self._stopping.set()
        if self._link:
            self._link.close()
        if self._task:
            await self._task

    async def _keep(self) -> None:
        loop = asyncio.get_running_loop()
        quick = 0
        while not self._stopping.is_set():
            started = loop.time()
            ending = await self._run()
            if self._stopping.is_set():
                break
            if not self._first.done():
                return self._first.set_result(ending)
            quick = quick + 1 if loop.time() - started < STEADY else 0
            delay = min(FIRST_DELAY * 2 ** min(quick - 2, 10), LONGEST_DELAY) if quick > 1 else 0.0
            log.warning("the gateway went: %s; the next one starts in %.2f s", ending, delay)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), delay)
        return None

    async def _run(self) -> str:
        """Start a gateway, stay until it has ended, and return how."""
        try:
            process, link = await self._spawn()
        except (OSError, RuntimeError) as error:  # asyncio wants a thread to wait for the process, and may get none
            return f"it cannot be started: {explain(error)}"
        said = asyncio.create_task(_hear(process))
        self._link = link
        if self._stopping.is_set():
            link.close()
        if undone := await silence(link, self._path):
            _kill(process)
            link.close()
            undone += ", so it was killed, and "
        await link.ended
        self._link = None
        return f"process {process.pid} {undone}{_ended(await _end(process))}{_last_words(await said)}"

    async def _spawn(self) -> tuple[Process, Link]:
        ours, theirs = socket.socketpair()
        with theirs:
            link = await Link.over(ours, lambda batch: self._receive(batch))
            link.listening.add_done_callback(self._announce)
            arguments = (theirs.fileno(), self._listener.fileno(), self._path)
            try:
                process = await asyncio.create_subprocess_exec(
                    *python.command("cubroker.server.gateway", *map(str, arguments)),
                    env={name: text for name, text in os.environ.items() if name.startswith(ENVIRONMENT)},
                    stdin=DEVNULL,
                    stderr=PIPE,  # where ours leads may block, and a gateway that cannot say why it aborts does not end
                    pass_fds=(theirs.fileno(), self._listener.fileno()),
                )
            except BaseException:
                link.close()
                raise
        return process, link

    def _announce(self, listening: asyncio.Future[None]) -> None:
        if listening.cancelled():
            return
        if self._first.done():
            self._changed()
        else:
            self._first.set_result("")


async def _end(process: Process) -> int:
    """Return the status of a gateway whose pipe has closed, which ends it, or else is killed."""
    try:
        return await asyncio.wait_for(process.wait(), GRACE)
    except TimeoutError:
        _kill(process)
        return await process.wait()


def _kill(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has just ended
        process.kill()


def _ended(status: int) -> str:
    """Say how a gateway ended. libzmq aborts where it cannot go on, and says in its own words which call failed."""
    if status != -signal.SIGABRT:
        return f"ended with status {status}"
    return (
        "was aborted by libzmq, as a rule for want of threads, descriptors or memory; look at LimitNPROC=, TasksMax=,"
        " LimitNOFILE= and LimitAS= of the broker's unit, or at ulimit -a"
    )


async def _hear(process: Process) -> bytes:
    """Return the last that a gateway writes to its standard error, all of which is read, or it might wait for that."""
    assert process.stderr
    said = b""
    while more := await process.stderr.read(LAST_WORDS):
        said = (said + more)[-LAST_WORDS:]
    return said


def _last_words(said: bytes) -> str:
    """Log what an ended gateway wrote to its standard error, and return the end of it, which says most."""
    text = said.decode(errors="replace").strip()
    if not text:
        return ""
    log.error("the gateway said: %s", text)
    return f" ({text.splitlines()[-1][:200]})"


def _drop(frames: Iterator[bytes]) -> None:
    """Before there is a broker there is no session, so nobody whose requests could be answered."""
    for _ in frames:
        pass
