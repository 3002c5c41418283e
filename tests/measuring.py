"""When the coverage of a test process is measured, and when it need not be."""

from __future__ import annotations

import os
import pkgutil
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from threading import RLock

import coverage
import pytest

import cubroker

MEASURED = "PYTEST_XDIST_WORKER" in os.environ and coverage.Coverage.current() is not None
"""Whether this is a process that runs tests, and measures them. Where pytest runs by itself, nothing is put off."""


VARIABLES = "COVERAGE_"
"""What the variables begin with that have children measured."""


def fork_without_its_lock() -> None:
    """Have no thread hold coverage's lock where this process forks: no child could take it, and all take it to end.

    Coverage 7.17 does not see to that. A thread holds it where it first comes to a file. This thread may take it again:
    in a child the handlers of other modules may run, and be measured, before the one that releases it.
    """
    if measured := coverage.Coverage.current():
        collector = measured._collector
        assert collector
        collector.data_lock = RLock()  # type: ignore[assignment]
        os.register_at_fork(
            before=collector.lock_data, after_in_parent=collector.unlock_data, after_in_child=collector.unlock_data
        )


@contextmanager
def unmeasured() -> Iterator[None]:
    """Within a ``with`` block the coverage of a process of pytest-xdist is not measured, which takes time."""
    measured = coverage.Coverage.current() if MEASURED else None
    if measured:
        measured.stop()
    try:
        yield
    finally:
        if measured:
            end = os._exit
            measured.start()
            os._exit = end  # coverage has wrapped it once more; after hundreds of times no forked child could end by it


@contextmanager
def traced() -> Iterator[Callable[[], tuple[int, int]]]:
    """Trace allocations within a ``with`` block; yields what tells the bytes that it has, and their peak.

    Bytes from before do not count, nor does it end a trace that is there already, as under ``-X tracemalloc``.
    """
    earlier = tracemalloc.is_tracing()
    tracemalloc.start()
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]

    def taken() -> tuple[int, int]:
        now, peak = tracemalloc.get_traced_memory()
        return now - before, peak - before

    try:
        yield taken
    finally:
        if not earlier:
            tracemalloc.stop()


@contextmanager
def campaigning() -> Iterator[None]:
    """Within a ``with`` block neither a process of pytest-xdist nor its children are measured."""
    with unmeasured(), pytest.MonkeyPatch.context() as patch:
        for name in [*os.environ] if MEASURED else []:
            if name.startswith(VARIABLES):
                patch.delenv(name)
        yield


@contextmanager
def collecting() -> Iterator[None]:
    """Within a ``with`` block tests are collected: modules of ours are imported before, and only that is measured.

    Assertions that pytest rewrites are kept in ``__pycache__``, whatever the environment says of bytecode.
    """
    written, sys.dont_write_bytecode = sys.dont_write_bytecode, False
    if MEASURED:
        with unmeasured(), suppress(ImportError):
            import_module("torch")
        for module in pkgutil.walk_packages(cubroker.__path__, "cubroker."):
            if not module.name.endswith(".__main__"):
                with suppress(ImportError):
                    import_module(module.name)
    with unmeasured():
        yield
    sys.dont_write_bytecode = written
