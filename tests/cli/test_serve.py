"""serve: it says where, ends cleanly, and refuses what it cannot do in one line."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.processes import COMMAND, DEADLINE, STREAMS, environment, mute, run, serves, started
from tests.namespaces import unshare


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


@pytest.mark.slow
@pytest.mark.parametrize("kind", STREAMS)
def test_a_broker_serves_and_ends_well_wherever_its_words_go(directory: Path, kind: str) -> None:
    with mute(kind, "serve", "--devices", "host:1@64MiB", "--directory", directory) as broker:
        serves(directory)
        broker.terminate()
        assert broker.wait(DEADLINE) == 0


@pytest.mark.parametrize("kind", STREAMS)
def test_a_broker_that_cannot_start_ends_wherever_its_words_go(directory: Path, kind: str) -> None:
    directory.write_text("no directory")
    with mute(kind, "serve", "--devices", "host:1@64MiB", "--directory", directory) as broker:
        assert broker.wait(DEADLINE) == 1


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
    assert done.stderr.endswith(
        "a budget of 1GiB is 1073741824 bytes, and the device has 67108864; it can be 1 byte to all of them\n"
    )


def test_options_come_before_the_environment_and_that_before_the_file(directory: Path) -> None:
    file, named = directory.with_name("cubroker.toml"), directory.with_name("named")
    file.write_text(f'directory = "{directory}"\ndevices = "host:1@64MiB"\nbudget = "50%"\n')
    cases = (
        ((), {}, directory, "host:1@64MiB", 32 << 20),
        ((), {"CUBROKER_DIR": str(named)}, named, "host:1@64MiB", 32 << 20),
        (
            ("--directory", directory, "--budget", "25%"),
            {"CUBROKER_DIR": str(named)},
            directory,
            "host:1@64MiB",
            16 << 20,
        ),
        (("--devices", "host:1@32MiB"), {}, directory, "host:1@32MiB", 16 << 20),
    )
    for options, names, place, devices, budget in cases:
        with started("serve", "--config", file, *options, env=environment(**names)) as broker:
            assert broker.stdout is not None
            assert broker.stdout.readline() == f"cubroker: serving {devices} in {place}\n"
            assert f'"budget": {budget}' in run("devices", "--json", "--directory", place).stdout
            broker.terminate()
            broker.communicate(timeout=DEADLINE)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("kep = 1", "there is no setting kep; did you mean keep?"),
        ('devices = "tpu:1"', 'devices is "tpu:1"; '),
    ],
)
def test_a_configuration_that_makes_no_sense_is_one_line_and_status_1(directory: Path, text: str, said: str) -> None:
    file = directory.with_name("cubroker.toml")
    file.write_text(text)
    done = run("serve", "--config", file, "--directory", directory)
    assert (done.returncode, done.stdout) == (1, "")
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith(f"cubroker: {file}:1: {said}")


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="needs a machine without a GPU")
def test_without_a_gpu_the_default_suggests_devices_in_host_memory(directory: Path) -> None:
    done = run("serve", "--directory", directory)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("cubroker: no GPU to serve as cuda (CUDA_ERROR_NO_DEVICE)")
    assert "--devices host:2" in done.stderr
    assert len(done.stderr.splitlines()) == 1


NO_SPACE = "No space left on device; free space on its file system"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount")
@pytest.mark.parametrize(
    ("options", "then", "name", "why"),
    [
        ("size=8k", "head -c 8k /dev/zero >full", "lock", NO_SPACE),
        ("nr_inodes=4", "true", "broker.zmq", NO_SPACE),
        ("size=8k", "mount -o remount,ro .", "lock", "Read-only file system; mount its file system for writing"),
    ],
)
def test_a_file_system_that_takes_nothing_is_refused_with_the_path_and_what_to_do(
    directory: Path, options: str, then: str, name: str, why: str
) -> None:
    mount = f"mount -t tmpfs -o mode=755,{options} none {directory.parent} && cd {directory.parent} && mkdir -m 755 run"
    before = [*unshare("--mount"), "sh", "-c", f'{mount} && {then} && cd / && exec "$@"', "sh"]
    command = [*before, *COMMAND, "serve", "--devices", "host:1@64MiB", "--directory", str(directory)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=DEADLINE, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert done.stderr.startswith(f"cubroker: cannot serve in {directory}: {directory / name}: {why}")
    assert done.stderr.endswith(", or choose another directory\n")


def test_a_limit_on_open_files_that_is_too_low_is_refused_with_what_to_raise(directory: Path) -> None:
    script = 'ulimit -n 7 && exec "$@"'
    command = ["sh", "-c", script, "sh", *COMMAND, "serve", "--devices", "host:1@64MiB", "--directory", str(directory)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=DEADLINE, check=False)
    assert f"cannot serve in {directory}: {directory}/" in done.stderr
    assert "Too many open files; raise the limit on open files (`ulimit -n`, LimitNOFILE=), or choose" in done.stderr
