from __future__ import annotations

import functools
import gc
import itertools
import logging
import os
import signal
import tempfile
from collections.abc import Generator, Iterator
from contextlib import nullcontext
from pathlib import Path

import coverage
import pytest
from hypothesis import settings

from tests import forkserver, sampling
from tests.brokers import BrokerProcess, Patient, serving, started
from tests.measuring import campaigning, collecting, fork_without_its_lock

# A shell starts what it runs in the background with SIGINT ignored, and so do our children then: no test of an
# interrupt could pass. A handler, unlike SIG_IGN, does not outlive an exec.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("untimed", deadline=None)  # a busy machine stops any process for 0.2 s, the default
settings.load_profile("untimed")

ROOT = Path(__file__).parent
CAMPAIGNS = (
    *("crash", "fuzz", "integration", "systemd", "unit/benchmarks", "unit/deploy", "unit/examples"),
    *("test_docs.py", "test_imports.py", "test_package.py", "test_python.py"),
    *("unit/driver/test_ptx.py", "unit/server/ledger/test_effort.py", "unit/server/test_strangers.py"),
)
"""Tests that count for no coverage: it is the tests of units that have to come to every line.

Those of the last line repeat what others measure, many times over.
"""

EVERY_BRANCH = ("unit/protocol", "unit/server/ledger", "unit/server/transport/test_reply_cache.py")
"""Tests of what has to be covered by every branch. The slow ones count for none: it may not depend on the day."""

OWN_SAMPLE = ("integration/test_cluster.py",)
"""Tests that choose those of the day themselves."""

COLLECTED = pytest.StashKey[list[sampling.Collected]]()
"""What was collected, before any of it was left out."""

OFTEN = 200
"""Tests after which garbage is looked for in all that they left, and not again: a test that looks has its own alone."""

_ran = itertools.count(1)
_pools = itertools.count(1)

WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
"""The processes of pytest-xdist that run tests, and the number of this one."""


def pytest_configure(config: pytest.Config) -> None:
    """Measure no process that only hands tests out: tracing is half of what that computes."""
    measured = coverage.Coverage.current()
    if measured and "PYTEST_XDIST_WORKER" not in os.environ and getattr(config.option, "numprocesses", None):
        measured.stop()
    fork_without_its_lock()


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
    items.sort(key=lambda item: not _is_slow(item))
    collected = [
        sampling.Collected(item.nodeid, item.path, _is_slow(item) and not _among(item.path, OWN_SAMPLE))
        for item in items
    ]
    config.stash[COLLECTED] = collected
    left_out = sampling.left_out(collected)
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left_out])
    items[:] = [item for item in items if item.nodeid not in left_out]


@functools.cache
def _among(path: Path, places: tuple[str, ...]) -> bool:
    return any(path.is_relative_to(ROOT / each) for each in places)


def _is_slow(item: pytest.Item) -> bool:
    return item.get_closest_marker("slow") is not None


def _counts(item: pytest.Item) -> bool:
    """Whether coverage is measured in a test."""
    return not _among(item.path, CAMPAIGNS) and not (_is_slow(item) and _among(item.path, EVERY_BRANCH))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect without measuring, and without looking for garbage: later, neither, in what was imported."""
    gc.disable()
    try:
        with collecting():
            result = yield
        _have_all_propagate()
        return result
    finally:
        gc.freeze()
        gc.enable()


def _have_all_propagate() -> None:
    """Have other packages' loggers hand on what they log; torch has 44 that do not.

    pytest adds its handlers to each that does not, and takes them away again, six times a test.
    """
    for name, logger in logging.root.manager.loggerDict.items():
        if isinstance(logger, logging.Logger) and not name.startswith("cubroker"):
            logger.propagate = True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Measure no campaigns, which take half as long again if all that they start is measured."""
    with nullcontext() if _counts(item) else campaigning():
        result = yield
    if next(_ran) % OFTEN == 0:
        gc.collect()
        gc.freeze()
    return result


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish() -> None:
    """Do what takes time before pytest-xdist counts ten seconds and kills the worker, whose coverage would be lost."""
    forkserver.close()
    if measured := coverage.Coverage.current():
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
def shared() -> Iterator[BrokerProcess]:
    """A broker process for all tests of a module, with two host devices of 64 MiB."""
    with serving() as process:
        yield process


@pytest.fixture
def patient() -> Iterator[BrokerProcess]:
    """A broker process that waits for leases to end when it is stopped."""
    with started(Patient) as process:
        yield process
        process.kill()


@pytest.fixture
def name() -> str:
    """The name of a pool that there was not before, so that its first version is 1."""
    return f"pool-{next(_pools)}"


@pytest.fixture(scope="module")
def looking_at_nobody() -> Iterator[None]:
    """Brokers that are started in a module do not look at processes, which takes a descriptor or two now and then."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUBROKER_LIMITS_MAPPED_CHECK_SECONDS", "0")
        yield
