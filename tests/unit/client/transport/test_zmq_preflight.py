"""Headroom: what libzmq takes is tried before, and nothing of the trial is left."""

from __future__ import annotations

import os
import resource
import threading
from pathlib import Path

import pytest

from cubroker.client.transport import zmq_preflight
from cubroker.client.transport.zmq_preflight import Shortage
from tests.unit.server.processes import files


def tasks() -> set[str]:
    """The threads of this process, those included that the kernel has not released yet."""
    return {entry.name for entry in Path("/proc/self/task").iterdir()}


def test_threads_of_a_trial_count_no_more_when_it_is_over() -> None:
    before, opened = tasks(), files(os.getpid())
    for _ in range(50):
        zmq_preflight.check()
        assert tasks() <= before
    assert files(os.getpid()) <= opened


def test_a_thread_that_never_runs_has_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq_preflight, "PATIENCE", 0.01)
    monkeypatch.setattr(threading.Thread, "run", lambda self: None)
    with pytest.raises(Shortage, match="2 more threads have no memory to run in"):
        zmq_preflight.try_threads()


def test_the_limits_that_are_set_are_named_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    set_ones = {resource.RLIMIT_AS: 200 << 20, resource.RLIMIT_STACK: resource.RLIM_INFINITY}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (set_ones.get(kind, resource.RLIM_INFINITY),) * 2)
    assert zmq_preflight.memory_limits() == "RLIMIT_AS (ulimit -v) is 200 MiB: raise that"
    assert "RLIMIT_NPROC (ulimit -u) sets no limit; pids.max" in zmq_preflight.thread_limits()
    set_ones.clear()
    assert zmq_preflight.memory_limits() == "the system has no more"
    zmq_preflight.check()
