"""The broker's service as ``cubroker doctor`` finds it: commands of systemd stand in for it, sockets are real."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cubroker.cli.doctor import command, verdicts
from cubroker.cli.doctor.facts import (
    BrokerFacts,
    DirectoryFacts,
    DriverFacts,
    Facts,
    Finding,
    HostFacts,
    ListenerFacts,
    Trial,
    UnitFacts,
)
from cubroker.client import Broker
from cubroker.protocol.paths import SESSION_SOCKET
from cubroker.server.transport.unix_sockets import read_process
from tests.brokers import BrokerProcess
from tests.unit.cli.processes import environment, run
from tests.unit.server.configured import configured

SOMEBODY = 1234

FAILED = """LoadState=loaded
ActiveState=failed
SubState=failed
Result=exit-code
ExecMainStatus=1
NRestarts=5
StatusText=
UnitFileState=enabled
NeedDaemonReload=no
ExecStart={{ path=/usr/local/bin/cubroker ; argv[]=/usr/local/bin/cubroker serve --config {file} ; status=1 }}
Environment=PYTHONFAULTHANDLER=1
FragmentPath=/usr/local/lib/systemd/system/cubroker.service
"""
WHY = "cubroker: cubroker.toml:1: there is no setting devicez; did you mean devices?"
LOG = [
    {"MESSAGE": "Started cubroker.service - GPU memory broker.", "PRIORITY": "6"},
    {"MESSAGE": WHY, "PRIORITY": "6"},
    {"MESSAGE": "cubroker: serving cuda in /run/cubroker", "PRIORITY": "6"},
    {"MESSAGE": [1, 2], "PRIORITY": "6"},
]


@pytest.fixture
def systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder at the head of PATH with a ``systemctl`` and a ``journalctl`` that print the files beside them."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("systemctl", "journalctl"):
        script = folder / name
        script.write_text(f'#!/bin/sh\\n[ "$1" = --user ] && exit 1\\ncat {folder}/{name}.out\\n'.replace("\\n", "\n"))
        script.chmod(0o755)
    (folder / "journalctl.out").write_text("".join(f"{json.dumps(line)}\n" for line in LOG) + "no json\n[]\n")
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


def report(directory: Path, **variables: str) -> dict[str, Any]:
    env = environment(**variables)
    done = run("doctor", "--devices", "host:1@64MiB", "--json", "--directory", directory, env=env)
    assert done.stderr == ""
    return {finding["name"]: finding for finding in json.loads(done.stdout)["host"]}


@pytest.mark.slow
def test_a_broken_unit_is_told_with_its_log_and_its_settings(systemd: Path, tmp_path: Path) -> None:
    file = tmp_path / "cubroker.toml"
    file.write_text("devicez = 'cuda'\nkeep = -1\n")
    (systemd / "systemctl.out").write_text(FAILED.format(file=file))
    found = report(tmp_path / "run")
    assert found["service"]["works"] is False
    assert found["service"]["why"] == "cubroker.service has failed: exit-code, status 1, after 5 restarts"
    assert (found["last error"]["works"], found["last error"]["why"]) == (False, f"the service's log says: {WHY}")
    assert found["settings"]["works"] is False
    assert "there is no setting devicez; did you mean devices?" in found["settings"]["why"]
    assert "keep" in found["settings"]["why"]
    assert found["settings"]["do"] == f"`cubroker config check {file}`"


def test_a_unit_that_serves_is_good(systemd: Path, tmp_path: Path) -> None:
    file = tmp_path / "cubroker.toml"
    file.write_text("keep = 1\n")
    text = FAILED.format(file=file).replace("=failed", "=active").replace("StatusText=", "StatusText=2 versions")
    (systemd / "systemctl.out").write_text(text)
    (systemd / "journalctl.out").write_text("")
    unit = command.examine_unit("system")
    assert unit is not None
    assert (unit.state, unit.said, unit.file, unit.error, unit.restarts) == ("active", "2 versions", str(file), "", 5)
    settings = command.examine_settings(unit, {"CUBROKER_KEEP": "nonsense"})
    assert settings is not None
    assert (settings.complaints, settings.count) == ((), 1), "the unit has an environment of its own"


def test_a_unit_that_is_not_there_is_none(systemd: Path) -> None:
    (systemd / "systemctl.out").write_text("LoadState=not-found\nActiveState=inactive\n")
    assert command.examine_unit("system") is None
    assert command.examine_unit("user") is None
    (systemd / "systemctl").unlink()
    os.environ["PATH"] = str(systemd)
    assert command.examine_unit("system") is None


def test_a_variable_names_the_file_of_a_unit_too(systemd: Path) -> None:
    text = FAILED.format(file="x").replace("--config x ", "").replace("HANDLER=1", "HANDLER=1 CUBROKER_CONFIG=/y.toml")
    (systemd / "systemctl.out").write_text(text)
    unit = command.examine_unit("system")
    assert unit is not None
    assert unit.file == "/y.toml"


def test_settings_of_the_environment_are_looked_at_where_there_is_no_unit(tmp_path: Path) -> None:
    file = tmp_path / "cubroker.toml"
    file.write_text("keep = 1")
    found = command.examine_settings(None, {"CUBROKER_CONFIG": str(file), "CUBROKER_KEEP": "much"})
    assert found is not None
    assert [line.partition(":")[0] for line in found.complaints] == ["$CUBROKER_KEEP"]
    missing = command.examine_settings(UnitFacts("system", file=str(tmp_path / "none.toml")), {})
    assert missing is not None
    assert missing.readable
    assert "none.toml" in missing.complaints[0]


def test_settings_in_a_folder_that_this_user_may_not_search_are_told_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "roots"
    folder.mkdir()
    file = folder / "cubroker.toml"
    file.write_text("keep = 1\n")
    monkeypatch.setattr(command, "SETTINGS_FILE", str(file))
    with shut(folder):  # the file is named, and the usual one
        found = [command.examine_settings(None, environ) for environ in ({"CUBROKER_CONFIG": str(file)}, {})]
    for settings in found:
        assert settings is not None
        host = HostFacts(DirectoryFacts(tmp_path), BrokerFacts("", ""), settings=settings)
        found_out = verdicts.judge_machine(Facts(DriverFacts("cuda", Trial("works")), (), host))
        assert found_out["settings"] == Finding(None, f"this user may not read {file}", "ask as root")


@contextmanager
def shut(folder: Path) -> Iterator[None]:
    """Have this process be a user who may not search a folder."""
    folder.chmod(0)
    root = os.geteuid() == 0
    if root:
        folder.parent.chmod(0o755)
        os.seteuid(SOMEBODY)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)
        folder.chmod(0o700)


@pytest.mark.slow
def test_a_socket_that_listens_without_a_broker_is_told(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    directory.mkdir()
    assert command.examine_listener(directory) == ListenerFacts("absent")
    process = read_process(os.getpid())
    assert process is not None
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(directory / SESSION_SOCKET))
        listener.listen(2)
        assert command.examine_listener(directory) == ListenerFacts("listening", os.getpid(), process.name)
        found = report(directory)["socket"]
    assert found["works"] is False
    assert found["why"].startswith(f"process {os.getpid()} ({process.name}) listens for clients, and no broker answers")
    assert command.examine_listener(directory) == ListenerFacts("deserted")


@pytest.mark.slow
def test_of_a_broker_that_answers_no_socket_is_told(broker: BrokerProcess) -> None:
    assert command.examine_listener(broker.directory).pid == broker.pid
    assert "socket" not in report(broker.directory)


@pytest.mark.slow
def test_a_broker_that_refuses_a_session_is_no_socket_without_a_broker() -> None:
    with configured("[quota]\nsessions = 1") as broker, Broker(broker.directory):
        found = report(broker.directory)
    assert found["broker"]["works"] is False
    assert "has 1 session of a quota of 1" in found["broker"]["why"]
    assert "socket" not in found


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ({"MESSAGE": "2026-11-24 00:15:45,415 ERROR pool a is lost", "PRIORITY": "6"}, True),
        ({"MESSAGE": "Failed with result 'exit-code'.", "PRIORITY": "3"}, True),
        ({"MESSAGE": "2026-11-24 00:15:45,415 WARNING there is no store", "PRIORITY": "4"}, False),
        ({"MESSAGE": "no priority"}, False),
    ],
)
def test_errors_are_told_from_other_lines(line: dict[str, str], error: bool) -> None:
    assert command.last_error(json.dumps(line)) == (line["MESSAGE"] if error else "")


def test_a_reason_is_told_rather_than_that_a_job_failed() -> None:
    why = {"MESSAGE": WHY, "PRIORITY": "6"}
    job = {"MESSAGE": "Failed to start cubroker.service - GPU memory broker.", "PRIORITY": "3", "JOB_RESULT": "failed"}
    assert command.last_error(f"{json.dumps(why)}\n{json.dumps(job)}") == WHY
    assert command.last_error(json.dumps(job)) == job["MESSAGE"]
