"""The demo's children: whatever becomes of them, the demo says so and goes on to clean up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cubroker.cli import demo_story
from cubroker.cli.demo_stage import Child
from cubroker.protocol.errors import CubrokerError, TimedOut, Unavailable
from tests import checkpoints
from tests.brokers import BrokerProcess
from tests.cli.processes import run


@contextmanager
def child(folder: Path, module: str, *arguments: str) -> Iterator[Child]:
    started = Child(module, arguments, folder / "worker 1.log")
    try:
        yield started
    finally:
        started.close()


def test_a_child_that_ends_is_reported_with_its_last_words(tmp_path: Path) -> None:
    with child(tmp_path, "no_such_module") as worker:
        with pytest.raises(Unavailable, match=r"^worker 1 has ended with status 1: .*No module named no_such_module$"):
            worker.line()
        with pytest.raises(Unavailable, match="status 1"):
            worker.ask("ready")


def test_a_child_that_says_nothing_is_not_waited_for_for_ever(tmp_path: Path) -> None:
    # json.tool waits for the end of its input.
    with child(tmp_path, "json.tool") as worker, pytest.raises(TimedOut, match=rf"worker 1 \(pid {worker.pid}\)"):
        worker.line(0.01)


def test_a_worker_that_cannot_says_why(tmp_path: Path) -> None:
    directory = tmp_path / "nobody"
    with child(tmp_path, "cubroker.cli.demo_worker", str(directory), "demo", "GPU-0") as worker:
        with pytest.raises(CubrokerError, match=f"^worker 1: .*{directory}"):
            worker.ask("ready")
        worker.leave()


def test_a_worker_finds_bytes_that_are_not_the_files(broker: BrokerProcess, tmp_path: Path) -> None:
    ours, theirs = (
        checkpoints.write(tmp_path / f"{seed}.safetensors", checkpoints.filled(checkpoints.ODD_SHAPES, seed))
        for seed in (0, 1)
    )
    assert run("load", "demo", ours, "--directory", broker.directory).returncode == 0
    uuid = run("devices", "--json", "--directory", broker.directory).stdout.split('"uuid": "')[1].partition('"')[0]
    with child(tmp_path, "cubroker.cli.demo_worker", str(broker.directory), "demo", uuid, str(theirs)) as worker:
        worker.ask("attach", 0.0)
        with pytest.raises(CubrokerError, match=f"pid {worker.pid} read other bytes than the file's in scalar, "):
            demo_story._compare(worker)
        worker.ask("detach")
        worker.leave()
