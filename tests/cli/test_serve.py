"""serve: it says where, ends cleanly, and refuses what it cannot do in one line."""

from __future__ import annotations

import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.processes import DEADLINE, run, started


@pytest.fixture
def directory() -> Iterator[Path]:
    # Short, unlike pytest's own: the path of a Unix socket has 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="serve-"))
    yield folder / "run"
    shutil.rmtree(folder)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_broker_says_where_it_serves_and_ends_with_status_0(directory: Path, number: signal.Signals) -> None:
    with started("serve", "--devices", "host:1@64MiB", "--budget", "50%", "--directory", directory) as broker:
        assert broker.stdout is not None
        assert broker.stdout.readline() == f"cubroker: serving host:1@64MiB in {directory}\n"
        assert '"budget": 33554432' in run("devices", "--json", "--directory", directory).stdout
        broker.send_signal(number)
        broker.communicate(timeout=DEADLINE)
        assert broker.returncode == 0
    assert run("ls", "--directory", directory).returncode == 3


def test_a_second_broker_in_the_directory_is_refused_and_the_first_goes_on(directory: Path) -> None:
    with started("serve", "--devices", "host:1@64MiB", "--directory", directory) as first:
        assert first.stdout is not None
        first.stdout.readline()
        second = run("serve", "--devices", "host:1@64MiB", "--directory", directory)
        assert (second.returncode, second.stdout) == (1, "")
        assert second.stderr.splitlines()[-1].startswith("cubroker: ")
        assert str(directory) in second.stderr
        assert run("ls", "--directory", directory).returncode == 0
        first.terminate()
        first.communicate(timeout=DEADLINE)


def test_a_budget_beyond_the_device_is_refused(directory: Path) -> None:
    done = run("serve", "--devices", "host:1@64MiB", "--budget", "1GiB", "--directory", directory)
    assert done.returncode == 1
    assert "budget of 1GiB" in done.stderr


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="needs a machine without a GPU")
def test_without_a_gpu_the_default_suggests_devices_in_host_memory(directory: Path) -> None:
    done = run("serve", "--directory", directory)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("cubroker: no GPU to serve as cuda (CUDA_ERROR_NO_DEVICE)")
    assert "--devices host:2" in done.stderr
    assert len(done.stderr.splitlines()) == 1
