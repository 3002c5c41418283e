from __future__ import annotations

import gc
import itertools
import os
import signal
import sys
import tempfile
from collections.abc import Generator, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests import forkserver, sampling
from tests.brokers import BrokerProcess, serving
from tests.measuring import campaigning, collecting

# A shell starts what it runs in the background with SIGINT ignored, and so do our children then: no test of an
# interrupt could pass. A handler, unlike SIG_IGN, does not outlive an exec.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).parent
CAMPAIGNS = (
    *("crash", "fuzz", "integration", "systemd", "unit/benchmarks", "unit/deploy", "unit/examples"),
    *("test_docs.py", "test_imports.py", "test_package.py", "test_python.py"),
    *("unit/driver/test_ptx.py", "unit/server/ledger/test_effort.py", "unit/server/test_strangers.py"),
)
"""Tests that count for no coverage: it is the tests of units that have to come to every line.

Those of the last line repeat what others measure, many times over.
"""

EVERY_DAY = ("unit/protocol", "unit/server/ledger", "unit/server/transport", "integration/test_cluster.py")
"""Tests of which none is left out: every branch of what they test has to be covered. The last has its own samples."""

OFTEN = 200
"""Tests after which garbage is looked for in all that they left, and not again: a test that looks has its own alone."""

_ran = itertools.count(1)

WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
"""The processes of pytest-xdist that run tests, and the number of this one."""


def pytest_report_header() -> str:
    """Say what repeats today's samples."""
    if sampling.WHOLE:
        return "every sweep whole"
    slow = f" CUBROKER_TEST_SLOW_PART={sampling.SLOW_PART}" if sampling.SLOW_PART > 1 else ""
    return f"samples of sweeps and slow tests: CUBROKER_TEST_SEED={sampling.SEED}{slow}"


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Have each worker begin at another place: what one has compiled, the others read."""
    report = yield
    if isinstance(collector, pytest.Directory):
        entries = report.result
        first = len(entries) * WORKER // WORKERS
        report.result = [*entries[first:], *entries[:first]]
    return report


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the slow ones that are not today's, and have the others run first: none is left alone at the end."""
    if WORKERS > 1:
        items.sort(key=lambda item: item.path)  # in the same order for all of them
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    folders: dict[Path, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("slow") and not any(item.path.is_relative_to(ROOT / each) for each in EVERY_DAY):
            folders.setdefault(item.path.parent, []).append(item)
    left_out: set[pytest.Item] = set()
    for slow in folders.values():
        left_out |= set(slow) - set(sampling.daily(slow, -(-len(slow) // sampling.SLOW_PART)))
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=list(left_out))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without measuring, and without looking for garbage: later, neither, in what was imported."""
    gc.disable()
    try:
        with collecting():
            return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Leave out campaigns, which take half as long again if all that they start is measured."""
    path = item.path.relative_to(ROOT)
    with campaigning() if any(map(path.is_relative_to, CAMPAIGNS)) else nullcontext():
        result = yield
    if next(_ran) % OFTEN == 0:
        gc.collect()
        gc.freeze()
    return result


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    """Do what takes time before pytest-xdist counts ten seconds and kills the worker, whose coverage would be lost."""
    forkserver.close()
    coverage = sys.modules.get("coverage")
    if coverage and (measured := coverage.Coverage.current()):
        measured.save()


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """An empty directory on a short path: pytest's own has a user's and a test's name, and no room for a socket's."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        yield Path(directory).resolve()


@pytest.fixture
def broker() -> Iterator[BrokerProcess]:
    """A broker process with two host devices of 64 MiB."""
    with serving() as process:
        yield process


@pytest.fixture(scope="module")
def looking_at_nobody() -> Iterator[None]:
    """Brokers that are started in a module do not look at processes, which takes a descriptor or two now and then."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUBROKER_LIMITS_MAPPED_CHECK_SECONDS", "0")
        yield
