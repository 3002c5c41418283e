"""Faults on demand: driver calls and system calls that fail at the nth call.

``python -m tests.faults DIRECTORY --devices host:2`` is a broker whose calls fail when a test says so;
:class:`FaultyBroker` starts one and says so, over its standard input.
"""

from __future__ import annotations

import ctypes
import fcntl
import importlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from threading import Lock, Thread
from typing import Any

import pytest

from cubroker.driver.host import shared_memory
from cubroker.server.__main__ import main as serve
from tests import forkserver
from tests.brokers import BrokerProcess, measured, started
from tests.forkserver import SERVER

SYSTEM_CALLS = ("memfd_create", "ftruncate", "fcntl", "mmap", "mprotect", "madvise")
"""Those that host memory is made with."""


class Plan:
    """Which call is to fail, and how many of those that may fail were made."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._names: frozenset[str] = frozenset()
        self._at = self._error = self._seen = 0

    def arm(self, names: Sequence[str], at: int, error: int) -> int:
        """Have the ``at``-th call of any of ``names`` fail with ``error``, if there is one.

        Returns how many there were since the last time.
        """
        with self._lock:
            seen = self._seen
            self._names, self._at, self._error, self._seen = frozenset(names), at, error, 0
        return seen

    def due(self, name: str) -> int:
        """Count a call, and return the error that it is to fail with, or 0."""
        with self._lock:
            if name not in self._names:
                return 0
            self._seen += 1
            return self._error if self._seen == self._at else 0


def fail_nth(patch: pytest.MonkeyPatch, thing: object, name: str, at: int, error: Exception) -> Callable[[], int]:
    """Have the ``at``-th call of a function of ``thing`` fail, in this process; returns what counts the calls."""
    calls = 0
    real = getattr(thing, name)

    def call(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at:
            raise error
        return real(*args, **options)

    patch.setattr(thing, name, call)
    return lambda: calls


class FaultyModule:
    """A driver-shaped module whose functions fail, without being called, as ``plan`` says."""

    def __init__(self, module: Any, plan: Plan) -> None:
        self._module = module
        self._plan = plan

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        if not name.startswith("cu"):
            return found

        def call(*args: Any) -> tuple[Any, ...]:
            if error := self._plan.due(name):
                return (self._module.CUresult(error),)
            result: tuple[Any, ...] = found(*args)
            return result

        return call


class _FaultyLibc:
    """The C library's functions that host memory is mapped with."""

    def __init__(self, libc: Any, plan: Plan) -> None:
        self._libc = libc
        self._plan = plan

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._libc, name)

        def call(*args: Any) -> Any:
            if error := self._plan.due(name):
                ctypes.set_errno(error)
                return ctypes.c_void_p(-1).value if name in ("mmap", "mremap") else -1
            return function(*args)

        return call


def install(plan: Plan) -> None:
    """Have the host driver, the system calls beneath it and the sending of descriptors fail as ``plan`` says, here."""
    host: Any = importlib.import_module("cubroker.driver.host.bindings")  # cubroker.driver.driver asks it at each load
    host_module = host.host_module
    host.host_module = lambda *args: FaultyModule(host_module(*args), plan)
    fail_system_calls(pytest.MonkeyPatch(), plan)
    socket.send_fds = _failing(socket.send_fds, "send_fds", plan)


def fail_system_calls(patch: pytest.MonkeyPatch, plan: Plan) -> None:
    """Have the system calls beneath host memory fail as ``plan`` says, in this process."""
    patch.setattr(shared_memory, "_libc", _FaultyLibc(vars(shared_memory)["_libc"], plan))
    for module, name in ((os, "memfd_create"), (os, "ftruncate"), (os, "open"), (fcntl, "fcntl")):
        patch.setattr(module, name, _failing(getattr(module, name), name, plan))


def _failing(function: Callable[..., Any], name: str, plan: Plan) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        if error := plan.due(name):
            raise OSError(error, f"{name}: {os.strerror(error)}")
        return function(*args)

    return call


class FaultyBroker(BrokerProcess):
    """A broker process whose calls fail on demand; its standard input is a socket, over which it is told."""

    def spawn(self, log: int) -> subprocess.Popen[bytes]:
        """As any broker's."""
        self._control, theirs = socket.socketpair()
        with theirs:
            streams = {"stdin": theirs.fileno(), "stdout": log, "stderr": log}
            return forkserver.start(self.command(), preload=SERVER, measured=measured(), **streams)

    def command(self) -> list[str]:
        return [sys.executable, "-m", "tests.faults", *super().command()[3:]]

    def arm(self, names: Sequence[str], at: int, error: int) -> int:
        """As :meth:`Plan.arm`, in the broker's process."""
        self._control.sendall(json.dumps([names, at, error]).encode())
        return int(self._control.recv(100))

    def disarm(self) -> int:
        """Let every call succeed; return how many could have failed since the last time."""
        return self.arm((), 0, 0)

    def kill(self) -> None:
        super().kill()
        self._control.close()


def faulty(devices: str) -> AbstractContextManager[FaultyBroker]:
    """Start a broker that fails on demand, and stop it at the end whatever happens."""
    return started(lambda directory: FaultyBroker(directory, devices))


def _obey(plan: Plan) -> None:
    while order := os.read(0, 1000):
        os.write(0, b"%d" % plan.arm(*json.loads(order)))


def main() -> int:
    """Serve, and fail as standard input says."""
    plan = Plan()
    install(plan)
    Thread(target=_obey, args=(plan,), daemon=True).start()
    return serve()


if __name__ == "__main__":
    sys.exit(main())
