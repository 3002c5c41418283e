"""The command as a process: run to its end, or watched line by line; and what it may have left behind."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from cubroker.client.transport import handshake
from cubroker.protocol.errors import Unavailable
from tests import forkserver
from tests.brokers import PATIENCE, eventually
from tests.forkserver import CLI

DEADLINE = PATIENCE
"""Seconds after which a command that has not ended has failed."""

COMMAND = (sys.executable, "-m", "cubroker.cli")


def environment(**changes: str) -> dict[str, str]:
    """Return the environment without a directory of the user's, so that a test meets only its own broker."""
    kept = {key: value for key, value in os.environ.items() if key not in ("CUBROKER_DIR", "COLUMNS")}
    return kept | changes


def run(
    *arguments: str | Path, env: Mapping[str, str] | None = None, before: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Run ``cubroker`` to its end, by a command that starts others if there is one ``before``."""
    execute = subprocess.run if before else partial(forkserver.run, preload=CLI)
    command = [*before, *COMMAND, *map(str, arguments)]
    result: subprocess.CompletedProcess[str] = execute(
        command if before else command[1:],
        env=environment() if env is None else env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    return result


GUEST = """
import os, sys
from pathlib import Path
from cubroker.cli import main
from cubroker.protocol import paths

paths.SYSTEM = Path(sys.argv.pop(1))
os.getuid = lambda: int(os.environ["GUEST"])  # root's own broker is the host's
sys.exit(main.main())
"""


def run_as_guest(
    host: Path, *arguments: str | Path, folder: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run ``cubroker`` as a user without a broker, on a host whose broker has ``host`` in place of /run/cubroker."""
    uid = str(os.getuid() or 1234)
    env = environment(GUEST=uid, XDG_RUNTIME_DIR=str(host.with_name(f"{host.name}-guest")), **variables)
    result: subprocess.CompletedProcess[str] = forkserver.run(
        ["-c", GUEST, str(host), *map(str, arguments)],
        preload=CLI,
        cwd=folder,
        env=env,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    return result


@contextmanager
def started(*arguments: str | Path, env: Mapping[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
    """Start ``cubroker``, with signals as in a shell's foreground; what still runs at the end is killed.

    Its coverage is not measured: it may be interrupted, and an interrupt while coverage holds its lock blocks for ever.
    """
    process = forkserver.Forked(
        [*COMMAND[1:], *map(str, arguments)],
        preload=CLI,
        foreground=True,
        measured=False,
        env=environment() if env is None else env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


STREAMS = ("a full disk", "a pipe without a reader", "a full pipe", "closed")
"""Kinds of streams to which nothing can be written."""


@contextmanager
def stream(kind: str) -> Iterator[int | None]:
    """Yield the descriptor of such a stream; None: it is to be closed."""
    if kind == "closed":
        yield None
        return
    if kind == "a full disk":
        reading, writing = None, os.open("/dev/full", os.O_WRONLY)
    else:
        reading, writing = os.pipe()
        if kind == "a full pipe":
            os.write(writing, bytes(fcntl.fcntl(writing, fcntl.F_GETPIPE_SZ)))
        else:
            os.close(reading)
            reading = None
    try:
        yield writing
    finally:
        for descriptor in filter(None, (reading, writing)):
            os.close(descriptor)


@contextmanager
def mute(kind: str, *arguments: str | Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start ``cubroker`` with a standard output and a standard error to which nothing can be written."""
    closing = ["sh", "-c", 'exec "$@" 1>&- 2>&-', "sh"] if kind == "closed" else []
    command = [*closing, *COMMAND, *map(str, arguments)]
    with (
        stream(kind) as end,
        forkserver.start(
            command, preload=CLI, env=environment(), stdin=subprocess.DEVNULL, stdout=end, stderr=end
        ) as process,
    ):
        try:
            yield process
        finally:
            kill_with_children(process)


def kill_with_children(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and its children, if it still runs: a broker outlives its keeper."""
    if process.poll() is None:
        children: list[str] = []
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it may end now
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        for pid in (process.pid, *map(int, children)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def serves(directory: Path) -> None:
    """Wait until a broker answers."""

    def answers() -> bool:
        with contextlib.suppress(Unavailable):
            return not handshake.ping(directory, DEADLINE)
        return False

    eventually(answers, "the broker to serve")


def holding(marker: str) -> list[int]:
    """Return the processes that were executed with ``marker`` in their environment: those that a command started.

    A forked command is not among them: the environment that the kernel shows of it is that of the fork server.
    """
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                if marker.encode() in (entry / "environ").read_bytes():
                    found.append(int(entry.name))
            except OSError:  # it has just ended, or is another user's
                continue
    return found
