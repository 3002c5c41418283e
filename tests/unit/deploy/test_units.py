"""The systemd units, and what installs them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from configparser import ConfigParser
from dataclasses import dataclass
from pathlib import Path

import pytest

from cubroker.protocol.paths import REQUEST_SOCKET, SESSION_SOCKET
from cubroker.server.store.sd_notify import LONGEST_NAME
from cubroker.server.takeover import BACKLOG, DOOR, REQUESTS
from tests.unit.cli.processes import run

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
UNITS = DEPLOY / "systemd"
SYSTEM = (
    "cubroker.service",
    "cubroker.socket",
    "cubroker-requests.socket",
    "cubroker-load@llama.service",
    "cubroker-export.service",
    "cubroker-fetch@llama.service",
)
WITH_COMMANDS = (
    "cubroker.service",
    "user/cubroker.service",
    "cubroker-load@.service",
    "cubroker-export.service",
    "cubroker-fetch@.service",
)
PRESERVE = "Unknown key 'FileDescriptorStorePreserve' in section [Service], ignoring."
ANALYZE = shutil.which("systemd-analyze")
analyzed = pytest.mark.skipif(not ANALYZE, reason="systemd-analyze is not installed: apt-get install systemd")


class Unit(ConfigParser):
    """A unit file; of a key that stands there several times the last one counts, as for most of systemd's."""

    def __init__(self, path: Path) -> None:
        super().__init__(interpolation=None, strict=False)
        self.read_string(path.read_text())


@dataclass
class Installed:
    """What ``make install`` put under a folder."""

    folder: Path

    def make(self, target: str, *places: str) -> None:
        arguments = places or [f"PREFIX={self.folder}/usr", f"SYSCONFDIR={self.folder}/etc"]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
        subprocess.run(["make", "-C", ROOT, target, *arguments], check=True, capture_output=True, env=environment)

    def files(self) -> set[str]:
        return {str(path.relative_to(self.folder)) for path in self.folder.rglob("*") if not path.is_dir()}

    def verify(self, manager: str, *units: str) -> list[str]:
        """Return what systemd has to say about units, but for what only later versions know."""
        paths = [self.folder / "usr/lib/systemd" / manager / unit for unit in units]
        done = subprocess.run(
            ["systemd-analyze", f"--{manager}", "verify", *paths], capture_output=True, text=True, check=False
        )
        said = (done.stdout + done.stderr).splitlines()
        assert done.returncode == 0, said
        return [line for line in said if not (line.endswith(PRESERVE) and version() < 254)]


def install(folder: Path) -> Installed:
    """Install the units, and a program that they can start."""
    tree = Installed(folder)
    tree.make("install")
    program = tree.folder / "usr/bin/cubroker"
    program.parent.mkdir()
    program.symlink_to("/bin/true")
    return tree


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """An installation that no test changes."""
    return install(tmp_path_factory.mktemp("installed") / "host")


@pytest.fixture
def own(tmp_path: Path) -> Installed:
    """An installation of a test's own."""
    return install(tmp_path / "host")


def version() -> int:
    """The version of systemd."""
    found = re.match(r"systemd (\d+)", subprocess.check_output(["systemd-analyze", "--version"], text=True))
    assert found
    return int(found[1])


@analyzed
def test_systemd_finds_nothing_wrong_with_the_units_of_a_system(
    installed: Installed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("SYSTEMD_UNIT_PATH", f"{installed.folder}/usr/lib/systemd/system:")
    assert installed.verify("system", *SYSTEM) == []


@analyzed
def test_systemd_finds_nothing_wrong_with_the_unit_of_a_user(
    installed: Installed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))  # this user may have no account
    assert installed.verify("user", "cubroker.service") == []


@analyzed
@pytest.mark.parametrize(("file", "most"), [("cubroker.service", 0.8), ("cubroker-export.service", 1.6)])
def test_a_service_is_hardened_and_says_why_of_all_that_is_open(file: str, most: float) -> None:
    security = ["systemd-analyze", "security", "--offline=true", "--threshold=20", "--json=short"]
    report = subprocess.run([*security, UNITS / file], capture_output=True, text=True, check=True).stdout
    open_ones = [each["name"] for each in json.loads(report) if each["exposure"]]
    assert open_ones
    overall = subprocess.run([*security[:-1], UNITS / file], capture_output=True, text=True, check=True)
    assert float(re.findall(rf"level for {file}: ([\d.]+)", overall.stdout)[0]) <= most
    _, _, reasons = (UNITS / file).read_text().partition("# -- What has to stay open")
    unexplained = [name for name in open_ones if re.sub(r"^.*~|=.*$", "", name) not in reasons]
    assert unexplained == []


@pytest.mark.parametrize("file", WITH_COMMANDS)
def test_every_command_in_a_unit_is_one_that_cubroker_knows(file: str) -> None:
    commands = re.findall(r"^Exec\w+=/usr/local/bin/cubroker (.*)$", (UNITS / file).read_text(), re.MULTILINE)
    assert commands
    for command in commands:
        words = re.match(r"[a-z ]+(?= )", command)
        assert words, command
        known = run(*words[0].split(), "--help").stdout
        assert [word for word in command.split() if word.startswith("--") and word not in known] == []


@pytest.mark.parametrize("file", ["cubroker.service", "user/cubroker.service"])
def test_the_broker_is_told_how_much_systemd_stores_and_names_of_so_many_fit(file: str) -> None:
    service = Unit(UNITS / file)["Service"]
    stored = int(service["FileDescriptorStoreMax"])
    assert f"Environment=CUBROKER_STORE={stored}" in (UNITS / file).read_text()
    assert stored * (LONGEST_NAME + 1) < 128 << 10
    assert int(service.get("LimitNOFILE", "0")) >= 2 * stored + 1024 or file.startswith("user/")


def test_with_the_next_one_standing_by_the_same_broker_runs_and_has_as_long_to_end() -> None:
    service, drop_in = (Unit(UNITS / file)["Service"] for file in ("cubroker.service", "standby.conf"))
    keep, serve = drop_in["ExecStart"].split(" -- ")
    assert serve == service["ExecStart"]
    assert keep == "/usr/local/bin/cubroker keep --stop-timeout 300"
    assert service["TimeoutStopSec"] == "5min"
    assert "ExecStart=\n" in (UNITS / "standby.conf").read_text(), "systemd adds a command to those before"
    assert drop_in["NotifyAccess"] == "all"


@pytest.mark.parametrize(
    ("file", "kind", "socket", "name"),
    [
        ("cubroker.socket", "ListenSequentialPacket", SESSION_SOCKET, DOOR),
        ("cubroker-requests.socket", "ListenStream", REQUEST_SOCKET, REQUESTS),
    ],
)
def test_socket_units_make_what_the_broker_looks_for(file: str, kind: str, socket: str, name: str) -> None:
    unit = Unit(UNITS / file)["Socket"]
    service = Unit(UNITS / "cubroker.service")["Service"]
    assert (unit[kind], unit["FileDescriptorName"]) == (f"%t/cubroker/{socket}", name)
    assert unit["Backlog"] == str(BACKLOG)
    assert service["ExecStart"].endswith("--directory %t/cubroker")
    assert file in Unit(UNITS / "cubroker.service")["Unit"]["Requires"].split()


def test_an_installed_unit_has_the_paths_that_were_chosen(installed: Installed) -> None:
    for unit in (installed.folder / "usr/lib").rglob("*.service"):
        assert "/usr/local" not in unit.read_text()
        assert f"{installed.folder}/usr/bin/cubroker" in unit.read_text()
    service = (installed.folder / "usr/lib/systemd/system/cubroker.service").read_text()
    assert f"--config {installed.folder}/etc/cubroker/cubroker.toml" in service


def test_a_package_is_staged_below_another_root_with_the_paths_of_the_host(tmp_path: Path) -> None:
    stage = Installed(tmp_path)
    places = (f"DESTDIR={tmp_path}", "PREFIX=/usr", "SYSCONFDIR=/etc")
    stage.make("install", *places)
    assert {"usr/lib/systemd/system/cubroker.service", "etc/cubroker/cubroker.toml"} < stage.files()
    texts = [(tmp_path / file).read_text() for file in stage.files() if file.startswith("usr/lib")]
    assert not any(str(tmp_path) in text or "/usr/local" in text for text in texts)
    stage.make("uninstall", *places)
    assert stage.files() == set()


def test_what_is_installed_is_removed_again(own: Installed) -> None:
    assert "etc/cubroker/cubroker.toml" in own.files()
    own.make("uninstall")
    assert own.files() == {"usr/bin/cubroker"}


def test_settings_outlive_another_install_and_an_uninstall(own: Installed) -> None:
    settings = own.folder / "etc/cubroker/cubroker.toml"
    assert settings.read_bytes() == (DEPLOY / "cubroker.toml").read_bytes()
    settings.write_text("keep = 1\n")
    own.make("install")
    own.make("uninstall")
    assert settings.read_text() == "keep = 1\n"
    assert own.files() == {"etc/cubroker/cubroker.toml", "usr/bin/cubroker"}


def test_everything_in_the_folder_is_installed(installed: Installed) -> None:
    rules = (DEPLOY / "install.mk").read_text()
    named = {file.removeprefix("./") for file in re.findall(r"^\t([\w./@-]+):\w", rules, re.MULTILINE)}
    folders = (UNITS, DEPLOY / "man", DEPLOY / "completion")
    assert named == {str(path.relative_to(DEPLOY)) for each in folders for path in each.rglob("*") if path.is_file()}
    assert len(installed.files()) == len(named) + len({"etc/cubroker/cubroker.toml", "usr/bin/cubroker"})
