from __future__ import annotations

import os
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cubroker.protocol.messages import Attach, Farewell
from tests.brokers import PATIENCE, BrokerProcess, eventually, serving
from tests.forkserver import heeded
from tests.unit.server.clients import RawClient, session
from tests.unit.server.processes import alive, gateway_of, maps, resident


def start(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a broker that is expected to end by itself."""
    command = [sys.executable, "-m", "cubroker.server", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_broker_without_a_file_serves_until_it_is_told_to_stop(number: signal.Signals) -> None:
    with heeded(number), serving() as broker:
        gateway = gateway_of(broker.pid)
        assert {entry.name for entry in broker.directory.iterdir()} == {"lock", "session.sock", "broker.zmq"}
        broker.process.send_signal(number)
        assert broker.process.wait(PATIENCE) == 0
        assert {entry.name for entry in broker.directory.iterdir()} == {"lock"}
        assert not alive(gateway)


def test_a_stopping_broker_says_farewell_and_hangs_up(broker: BrokerProcess, client: RawClient) -> None:
    client.publish("kept")
    client.send(Attach("never", 0, None, 60.0))
    client.devices()
    broker.stop()
    assert isinstance(client.notice(), Farewell)
    assert client.connection.recv(1) == b""


def test_it_says_what_it_lends_and_that_nothing_survives_it(broker: BrokerProcess) -> None:
    assert "device 1: " in broker.log()
    assert "budget 57 MiB of 64 MiB" in broker.log()
    assert "no store" in broker.log()


@pytest.mark.slow
def test_a_second_broker_is_refused_and_the_first_goes_on(broker: BrokerProcess, client: RawClient) -> None:
    second = start(broker.directory, "--devices", "host:1")
    assert second.returncode == 1
    assert f"another broker (process {broker.pid}) serves in {broker.directory}" in second.stderr
    assert "Traceback" not in second.stderr
    assert client.devices()
    with session(broker.directory) as late:
        assert late.devices()


def test_a_broker_starts_where_another_was_killed(broker: BrokerProcess) -> None:
    gateway = gateway_of(broker.pid)
    broker.kill()
    assert (broker.directory / "session.sock").exists()
    broker.start()
    with session(broker.directory) as client:
        assert client.devices()
    eventually(lambda: not alive(gateway), "the killed broker's gateway to end")
    with session(broker.directory) as client:
        assert client.devices()


def test_a_broker_at_rest_is_small_and_keeps_libraries_apart(broker: BrokerProcess, client: RawClient) -> None:
    client.publish("pool")
    gateway = gateway_of(broker.pid)
    if "COVERAGE_PROCESS_CONFIG" not in os.environ:  # measuring takes memory of its own
        assert resident(broker.pid) < 80 << 20
        assert resident(gateway) < 40 << 20
    assert "zmq" not in maps(broker.pid)
    assert "zmq" in maps(gateway)
    assert "cuda" not in maps(gateway)
    assert "_asyncio" not in maps(gateway)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--devices", "abacus:3"], "no driver 'abacus:3'"),
        (["--devices", "host:1@64MiB", "--budget", "lots"], '--budget: budget is "lots"; write a share or a size'),
        (["--devices", "host:1@64MiB", "--budget", "65MiB"], "device 0 (cubroker host device 0) has 67108864"),
    ],
)
def test_a_broker_that_cannot_start_says_why(tmp_path: Path, arguments: list[str], reason: str) -> None:
    ended = start(tmp_path, *arguments)
    assert ended.returncode == 1
    assert reason in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.slow
def test_a_broker_without_a_driver_says_so(tmp_path: Path) -> None:
    ended = start(tmp_path, "--devices", "cuda:999")
    assert ended.returncode == 1
    assert "cannot use devices 'cuda:999'" in ended.stderr


@contextmanager
def serving_after(program: str, directory: Path) -> Iterator[subprocess.Popen[str]]:
    """A broker that another program has become; it serves."""
    command = [sys.executable, "-c", program, sys.executable, "-m", "cubroker.server", str(directory)]
    with subprocess.Popen([*command, "--devices", "host:1@64MiB"], stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            while "serving on" not in process.stderr.readline():
                assert process.poll() is None
            yield process
        finally:
            process.kill()


@pytest.mark.slow
def test_signals_that_are_ignored_at_the_start_stay_so(tmp_path: Path) -> None:
    ignore = (
        "import os, signal, sys; signal.signal(signal.SIGHUP, signal.SIG_IGN); os.execv(sys.executable, sys.argv[1:])"
    )
    with serving_after(ignore, tmp_path) as process:
        process.send_signal(signal.SIGHUP)
        with session(tmp_path) as client:
            assert client.devices()
        process.terminate()
        assert process.wait(PATIENCE) == 0


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_that_are_blocked_at_the_start_are_heard(tmp_path: Path, number: signal.Signals) -> None:
    block = (
        "import os, signal, sys; signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals());"
        " os.execv(sys.executable, sys.argv[1:])"
    )
    with heeded(number), serving_after(block, tmp_path) as process:
        process.send_signal(number)
        assert process.wait(PATIENCE) == 0


@pytest.mark.slow
def test_a_broker_serves_from_a_home_that_the_user_database_does_not_know(tmp_path: Path) -> None:
    packages = Path(sysconfig.get_path("purelib", "posix_user", {"userbase": str(tmp_path / ".local")}))
    packages.mkdir(parents=True)
    (packages / "installed.pth").write_text(sysconfig.get_path("purelib"))  # as `pip install --user` would, with $HOME
    interpreter = sys._base_executable  # none of a virtual environment, which looks into no home
    command = [interpreter, "-m", "cubroker.server", str(tmp_path / "run"), "--devices", "host:1@64MiB"]
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        said = [process.stderr.readline()]
        while said[-1] and "serving on" not in said[-1]:
            said.append(process.stderr.readline())
        process.terminate()
    assert process.returncode == 0, said


def handles(pid: int, number: signal.Signals) -> bool:
    caught = Path(f"/proc/{pid}/status").read_text().partition("SigCgt:")[2].split()[0]
    return bool(int(caught, 16) >> (number - 1) & 1)


@pytest.mark.parametrize("moment", ["it runs", "it imports"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_broker_that_does_not_come_up_is_stopped_quietly_with_its_group(
    tmp_path: Path, number: signal.Signals, moment: str
) -> None:
    """As a terminal does it: its gateway gets the signal, too."""
    imports = tmp_path / "imports"
    (tmp_path / "zmq.py").write_text(f"import signal\nopen({str(imports)!r}, 'w').close()\nsignal.pause()\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))}
    command = [sys.executable, "-m", "cubroker.server", str(tmp_path / "run"), "--devices", "host:1@64MiB"]
    with (
        heeded(number),
        subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
        ) as process,
    ):
        gateway = gateway_of(process.pid)
        if moment == "it imports":
            eventually(imports.exists, "its imports")
        eventually(lambda: handles(process.pid, signal.SIGHUP), "the broker's handlers, of which this is the last")
        os.killpg(process.pid, number)
        assert process.stderr is not None
        said = process.stderr.read()
    assert process.returncode == 0
    assert "gateway" not in said
    assert not alive(gateway)


@pytest.mark.slow
def test_a_broker_whose_gateway_cannot_run_says_so(tmp_path: Path) -> None:
    (tmp_path / "zmq.py").write_text("raise ImportError('no such library')\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))}
    command = [sys.executable, "-m", "cubroker.server", str(tmp_path / "run"), "--devices", "host:1@64MiB"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False, env=environment)
    assert ended.returncode == 1
    assert "the gateway does not come up" in ended.stderr
    assert "no such library" in ended.stderr
