"""Spans of functions in a process that runs a module, taken by wrapping the functions: ``python -m benchmarks.spans``.

::

    python -m benchmarks.spans FILE MODULE ARGUMENT...

runs a module as ``python -m MODULE ARGUMENT...`` does. Each function of :data:`WRAPPED` is replaced when its module has
been imported. At the end of the process, each call of such a function is written as a line of JSON to FILE. Times are
seconds of the monotonic clock, which all processes of a machine share.

This module imports nothing else, since imports are measured, too.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import runpy
import sys
import threading
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from time import perf_counter
from typing import Any, NoReturn

STARTED = perf_counter()

WRAPPED = {
    "cubroker.cli.main": {"main": "command"},
    "cubroker.client.session": {"Reconnecting.__init__": "connect"},
    "cubroker.driver.driver": {"Driver.__init__": "driver"},
    "cubroker.client.loading.checkpoint": {"Checkpoint.open": "open files", "CheckpointFile.read_into": "read"},
    "cubroker.protocol.layout": {"Layout.pack": "lay out", "Layout.encode": "encode"},
    "cubroker.client.broker": {"Broker.create": "create", "Broker.close": "close"},
    "cubroker.client.memory.lease": {"LeaseHandle.map": "map", "LeaseHandle._unmap": "unmap"},
    "cubroker.client.loading.copy": {
        "PinnedStaging.__init__": "pin",
        "PinnedStaging.close": "unpin",
        "read_plan": "plan",
        "FileCopy.into": "copy",
        "FileCopy._await": "await memory",
        "PinnedRing.send": "send",
        "_Slot.wait": "await copy",
    },
    "cubroker.client.loading.threads": {"AioReads.start": "begin read", "AioRead.wait": "read"},
    "cubroker.driver.context": {"PrimaryContext.__init__": "context", "Stream.close": "finish"},
    "cubroker.client.draft": {"Draft.seal": "seal"},
    "cubroker.client.digests": {"sealing": "digest"},
    "cubroker.server.devices.allocator": {
        "IpcAllocation.__init__": "allocate",
        "IpcAllocation.share": "clear",
        "IpcAllocation.release": "free",
        "VmmAllocation.__init__": "allocate",
        "VmmAllocation.share": "export",
        "VmmAllocation.release": "free",
    },
}
"""The name of each function in the drawing, by module and by name in the module."""

IMPORTS = ("cubroker.cli.load", "cuda.bindings.driver")
"""Modules whose import is a span."""

Span = tuple[str, str, float, float]
"""The thread, what it did, when that began and when it ended."""

spans: list[Span] = []


def note(what: str, began: float) -> None:
    """Record a span that ends now."""
    spans.append((threading.current_thread().name, what, began, perf_counter()))


def wrap(module: Any) -> None:
    """Replace the functions of a module that was just imported."""
    for name, what in WRAPPED.get(module.__name__, {}).items():
        *path, last = name.split(".")
        holder = functools.reduce(getattr, path, module)
        kept = vars(holder)[last]
        bare = kept.__func__ if isinstance(kept, classmethod | staticmethod) else kept
        replaced = _timed(bare, what)
        setattr(holder, last, type(kept)(replaced) if bare is not kept else replaced)


def _timed(function: Any, what: str) -> Any:
    @functools.wraps(function)
    def timed(*arguments: Any, **options: Any) -> Any:
        began = perf_counter()
        try:
            return function(*arguments, **options)
        finally:
            note(what, began)

    return timed


class Finder(MetaPathFinder):
    """A finder that finds modules as usual, and has them wrapped when they have been executed."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """Find a module that is to be wrapped, or measured."""
        if fullname not in WRAPPED and fullname not in IMPORTS:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_wrap(module: Any) -> None:
            began = perf_counter()
            execute(module)
            if fullname in IMPORTS:
                note(f"import {fullname.partition('.')[0]}", began)
            wrap(module)

        spec.loader.exec_module = execute_and_wrap  # type: ignore[method-assign]
        return spec


def main() -> None:
    file, module, *arguments = sys.argv[1:]
    sys.meta_path.insert(0, Finder())
    threading.current_thread().name = "main"

    def write() -> None:
        with open(file, "a") as output:
            output.writelines(json.dumps(span) + "\n" for span in [("main", "start", STARTED, STARTED), *spans])

    def leave(status: int, process: int = os.getpid(), leave: Callable[[int], NoReturn] = os._exit) -> NoReturn:
        if os.getpid() == process:
            write()
        leave(status)

    atexit.register(write)
    os._exit = leave  # which runs nothing that is registered
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    from benchmarks.spans import main as run  # not this `__main__`: other modules import `benchmarks.spans`

    run()
