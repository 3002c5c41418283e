"""A client process of any user: ``python -m tests.unit.server.visitor DIRECTORY UID GID [GROUP …]``, started by root.

It takes one JSON list per line, a command and its arguments, and answers each with one line: what came of
it, or ``{"code", "message"}`` of a refusal. It opens its session with the first command.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np  # noqa: F401  # before the user changes, who may not read where Python lies

import cubroker.driver.host.bindings  # noqa: F401  # likewise
from cubroker.client import Broker
from cubroker.client.transport.requests import VARIABLE
from cubroker.protocol import CubrokerError, Layout
from cubroker.server.hardening import hide
from tests import forkserver

libc = ctypes.CDLL(None, use_errno=True)
libc.mremap.restype = ctypes.c_void_p
NBYTES = ctypes.c_size_t(1 << 20)
MREMAP_MAYMOVE = 1

ROOT = Path(__file__).parents[3]
LAYOUT = Layout.pack([("x", "U8", (1 << 20,))])


class Visitor:
    """Such a process, seen from the test that started it."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def __call__(self, command: str, *arguments: object) -> Any:
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps([command, *arguments]) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    @property
    def pid(self) -> int:
        return self._process.pid

    def refused(self, command: str, *arguments: object) -> tuple[str, str]:
        """Return the code and the message of a refusal."""
        answer = self(command, *arguments)
        return answer["code"], answer["message"]


@contextmanager
def visiting(
    directory: Path,
    uid: int,
    gid: int,
    *groups: int,
    before: Sequence[str] = (),
    module: str = "tests.unit.server.visitor",
) -> Iterator[Visitor]:
    """A client of user ``uid`` for the length of a block; ``before`` is a command that runs it, as in a container."""
    command = [*before, sys.executable, "-m", module, str(directory), *map(str, (uid, gid, *groups))]
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    # Another user can write no file of what is measured.
    with forkserver.start(command, measured=False, cwd=ROOT, text=True, **streams) as process:
        try:
            yield Visitor(process)
        finally:
            process.kill()


def _publish(broker: Broker, name: str, mode: int | None = None) -> int:
    with broker.create(name, LAYOUT, mode=mode) as draft:
        draft["x"].copy_from(bytes([os.getuid() % 251]) * (1 << 20))
        return draft.seal()


def _attach(
    broker: Broker, name: str, version: int | None = None, wait: float = 0.0, owner: int | None = None
) -> list[int]:
    with broker.attach(name, version=version, wait=wait, owner=owner) as pool:
        return [pool.version, pool["x"].tobytes()[-1]]


def _watch(broker: Broker, name: str) -> int | None:
    with broker.watch(name) as watch:
        return next(watch)


def _keep(broker: Broker, name: str) -> int:
    """Map the memory of a pool a second time, and give the lease back."""
    with broker.attach(name) as pool:
        return _mapped_twice(pool["x"].pointer)


def _fork(broker: Broker, name: str) -> int:
    """Leave a child that has the memory of a pool mapped, and give the lease back; return its number."""
    with broker.attach(name):
        if not (child := os.fork()):
            signal.pause()
    return child


def _end(_: Broker, child: int) -> None:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def _mapped_twice(pointer: int) -> int:
    """Map shared memory at another address as well, as mremap(2) does from nothing."""
    found: int = libc.mremap(ctypes.c_void_p(pointer & -mmap.PAGESIZE), ctypes.c_size_t(0), NBYTES, MREMAP_MAYMOVE)
    assert found % mmap.PAGESIZE == 0
    return found


def _let_go(_: Broker, pointer: int) -> None:
    assert libc.munmap(ctypes.c_void_p(pointer), NBYTES) == 0


COMMANDS: dict[str, Callable[..., Any]] = {
    "hello": lambda broker: broker.session,
    "publish": _publish,
    "attach": _attach,
    "describe": lambda broker, name: [tensor.name for tensor in broker.describe(name)[1].tensors],
    "watch": _watch,
    "story": lambda broker, name: len(broker.story(name)),
    "retire": lambda broker, name: msgspec.to_builtins(broker.retire(name)),
    "drain": lambda broker, on: broker.drain(on=on),
    "keep": _keep,
    "let go": _let_go,
    "fork": _fork,
    "end": _end,
    "hide": lambda _: hide(),
    "pools": lambda broker: msgspec.to_builtins(broker.pools()),
    "everything": lambda broker: msgspec.to_builtins((broker.look(), broker.pools(), broker.clients())),
    "trust": lambda broker, owner: os.environ.update({VARIABLE: owner}),
}
"""What a client can be told to do."""


def become(uid: str, gid: str, *groups: str) -> None:
    """Be a user from now on, unless this process is that already."""
    if os.getuid() != int(uid):
        os.setgroups([int(group) for group in groups])
        os.setgid(int(gid))
        os.setuid(int(uid))


def serve(directory: str) -> None:
    """Do what is asked on standard input."""
    broker: Broker | None = None
    for line in sys.stdin:
        command, *arguments = json.loads(line)
        try:
            broker = broker or Broker(directory)
            answer = COMMANDS[command](broker, *arguments)
        except CubrokerError as error:
            answer = {"code": error.code, "message": error.message}
        print(json.dumps(answer), flush=True)


def main() -> None:
    directory, *who = sys.argv[1:]
    become(*who)
    serve(directory)


if __name__ == "__main__":
    main()
