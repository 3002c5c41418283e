"""serve: it says where, ends cleanly, and refuses what it cannot do in one line."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.forkserver import unmeasured
from tests.namespaces import unshare
from tests.unit.cli.processes import COMMAND, DEADLINE, STREAMS, environment, mute, run, serves, started
from tests.unit.server.processes import gateways

STRANGER = 4001


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
        assert len(gateways(broker.pid)) == 1
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


@pytest.mark.slow
@pytest.mark.parametrize("kind", STREAMS)
def test_a_broker_that_cannot_start_ends_wherever_its_words_go(directory: Path, kind: str) -> None:
    directory.write_text("no directory")
    with mute(kind, "serve", "--devices", "host:1@64MiB", "--directory", directory) as broker:
        assert broker.wait(DEADLINE) == 1


@pytest.mark.parametrize(("budget", "nbytes"), [("1GiB", 1 << 30), ("0.00001%", 6)])
def test_a_budget_beyond_the_device_or_too_small_to_lend_anything_is_refused(
    directory: Path, budget: str, nbytes: int
) -> None:
    done = run("serve", "--devices", "host:1@64MiB", "--budget", budget, "--directory", directory)
    assert done.returncode == 1
    assert done.stderr.endswith(
        f"a budget of {budget} is {nbytes} bytes, and device 0 (cubroker host device 0) has 67108864; "
        "write 2097152 to 67108864 bytes\n"
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can run processes as other users")
@pytest.mark.parametrize(("mode", "named"), [(0o755, "session.sock: "), (0o700, "")])
def test_a_group_that_the_broker_is_not_in_is_named_in_the_refusal(directory: Path, mode: int, named: str) -> None:
    directory.mkdir()
    directory.chmod(mode)
    directory.parent.chmod(0o755)
    os.chown(directory, STRANGER, STRANGER)
    options = ("--devices", "host:1@64MiB", "--set", "sockets.group=4321", "--directory", directory)
    as_stranger = ("setpriv", f"--reuid={STRANGER}", f"--regid={STRANGER}", "--clear-groups")
    env = unmeasured(environment())  # the stranger cannot write a file of figures here
    done = run("serve", *options, env=env, before=as_stranger)
    who = "only root, and its owner as a member of group 4321, may give it to that group"
    what = f"{directory / named}" if named else ""
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.endswith(f"cannot serve in {directory}: {what}{who}; choose another directory or user\n")


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_limit_on_open_files_that_is_too_low_is_refused_with_what_to_raise(directory: Path) -> None:
    script = 'ulimit -n 7 && exec "$@"'
    command = ["sh", "-c", script, "sh", *COMMAND, "serve", "--devices", "host:1@64MiB", "--directory", str(directory)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=DEADLINE, check=False)
    assert f"cannot serve in {directory}: {directory}/" in done.stderr
    assert "Too many open files; raise the limit on open files (`ulimit -n`, LimitNOFILE=), or choose" in done.stderr


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "cubroker.toml"


def test_a_file_that_makes_sense_is_status_0(file: Path) -> None:
    file.write_text("keep = 2\n[quota]\nleases = 5\n")
    done = run("config", "check", file)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{file}: 2 settings, nothing wrong\n", "")
    assert run("config", "check").stdout == "no file: 0 settings, nothing wrong\n"


def test_everything_that_is_wrong_is_a_line_and_status_1(file: Path) -> None:
    file.write_text("keep = 2000\nbugdet = 1\n")
    done = run("config", "check", file, env=environment(CUBROKER_MODE="x", CUBROKER_LOG_LEVEL="loud"))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines() == [
        f"cubroker: {file}:1: keep is 2000; write a whole number from 0 to 1000",
        f"cubroker: {file}:2: there is no setting bugdet; did you mean budget?",
        'cubroker: $CUBROKER_MODE: mode is "x"; write it in octal, as in 0o640 or "640", up to 0o777',
        'cubroker: $CUBROKER_LOG_LEVEL: log.level is "loud"; write "debug", "info", "warning" or "error"',
    ]
    shown = run("config", "show", file, env=environment(CUBROKER_LOG_LEVEL="loud"))
    assert (shown.returncode, shown.stdout) == (1, "")
    assert len(shown.stderr.splitlines()) == 1
    assert "(and 2 more, which cubroker config check shows)" in shown.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--set", "kep=1"], "there is no setting kep; did you mean keep?"),
        (["--set", "keep"], "keep has no value; write --set keep=VALUE"),
        (["--devices", "tpu:1"], "no driver 'tpu:1'"),
    ],
)
def test_an_option_that_there_is_not_is_wrong_usage(arguments: list[str], said: str) -> None:
    for command in (["config", "check"], ["config", "show"], ["serve"]):
        done = run(*command, *arguments)
        assert (done.returncode, done.stdout) == (2, "")
        assert said in done.stderr


def test_the_value_of_every_setting_is_shown_with_where_it_comes_from(file: Path) -> None:
    file.write_text('mode = 0o640\nadmins = ["root"]\nkeep = 1\n[quotas.root]\nmemory = "1GiB"\n')
    names = environment(CUBROKER_CONFIG=str(file), CUBROKER_KEEP="2", CUBROKER_DIR="/srv/a", CUBROKER_LOG_LEVEL="debug")
    options = ("--directory", "/srv/b", "--budget", "50%", "--set", "log.level=error")
    header, *lines = run("config", "show", *options, env=names).stdout.splitlines()
    assert header.split() == ["KEY", "VALUE", "FROM"]
    rows = {line.split()[0]: line.split(maxsplit=1)[1] for line in lines}
    assert rows["directory"].split() == ['"/srv/b"', "--directory"]
    assert rows["devices"].split() == ['"cuda"', "default"]
    assert rows["budget"].split() == ['"50%"', "--budget"]
    assert rows["keep"].split() == ["2", "$CUBROKER_KEEP"]
    assert rows["mode"].split() == ["0o640", f"{file}:1"]
    assert rows["admins"].split() == ['["root"]', f"{file}:2"]
    assert rows["log.level"].split() == ['"error"', "--set", "log.level"]
    assert rows["quotas.root.memory"].split() == ['"1GiB"', f"{file}:5"]
    found = json.loads(run("config", "show", "--json", *options, env=names).stdout)
    assert [record["key"] for record in found] == list(rows)
    assert found[1] == {"schema": 1, "key": "devices", "value": "cuda", "from": "default", "live": False}
    assert found[4] == {"schema": 1, "key": "mode", "value": "0o640", "from": f"{file}:1", "live": True}


def test_a_broker_has_the_settings_that_are_shown(file: Path) -> None:
    done = run("serve", env=environment(CUBROKER_CONFIG=str(file)))
    assert done.returncode == 1
    assert f"cannot read the configuration {file}" in done.stderr
