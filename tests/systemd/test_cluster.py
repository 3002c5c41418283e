"""docs/cluster.md as an operator would follow it: every command, in order, on hosts that a switch joins."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests import sampling
from tests.cluster import need_engine
from tests.systemd.documented_session import Step, Terminal, difference, steps
from tests.systemd.installing import install
from tests.systemd.lab import ROOT, Lab, booted, obstacle
from tests.wheels import source, wheel

need_engine()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sampling.WHOLE, reason="takes four systemds and over a minute; `make cluster` runs it"),
]

PAGE = (ROOT / "docs" / "cluster.md").read_text()
HOSTS = ("admin", "gpu-1", "gpu-2", "gpu-3")
"""As the prompts name them; the administrator's has no broker."""

SETTINGS = 'devices = "host:1@256MiB"\nmode = 0o600\n'
ENVIRONMENT = (
    "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME=/run/root",
    "LANG=C.UTF-8",
    "TERM=dumb",
    "PIP_NO_INDEX=1",  # what cubroker needs is there
    "PIP_NO_BUILD_ISOLATION=0",  # which means none
    "PIP_DISABLE_PIP_VERSION_CHECK=1",
)
LOOKS = re.compile(r"cubroker (ls|peers)|curl|journalctl|ss ")
"""What a command begins with that may be given again until it shows what is on its way."""


class Cluster:
    """The hosts of the page, each a systemd of its own, and a terminal on each."""

    def __init__(self, labs: dict[str, Lab], undo: ExitStack) -> None:
        self.labs = labs
        self._terminals = {name: undo.enter_context(Terminal(lab, ENVIRONMENT)) for name, lab in labs.items()}
        for name, terminal in self._terminals.items():
            terminal.run("mkdir -p ~ && cd")
            labs[name].run("hostname", name)

    def run(self, step: Step) -> list[str]:
        """Give a command of the page, and return what it prints."""
        name = step.prompt.rstrip("#$")
        if step.command.startswith("scp "):
            return self._copied(name, step.command)
        if step.command.startswith("cubroker export"):
            return self._shown_at_first(name, step)
        printed = self._terminals[name].run(step.command)
        if LOOKS.match(step.command):
            for _ in range(100):
                if not difference(step.printed, printed):
                    break
                self._terminals[name].run("sleep 0.2")
                printed = self._terminals[name].run(step.command)
        return printed

    def _copied(self, name: str, command: str) -> list[str]:
        """Do as ``scp`` does, which has no server here."""
        _, *files, target = command.split()
        host, _, folder = target.partition(":")
        pack = self._terminals[name].run(f"tar --transform 's|.*/||' -cf - {' '.join(files)} | base64 -w 0")
        unpack = self.labs[host].command("sh", "-c", f"base64 -d | tar --no-same-owner -xf - -C {folder}")
        subprocess.run(unpack, input=pack[-1], text=True, check=True)
        return []

    def _shown_at_first(self, name: str, step: Step) -> list[str]:
        """Return what a command that stays says at first, and have it end as Ctrl-C does."""
        command = self.labs[name].command("env", "PATH=/usr/local/bin:/usr/bin:/bin", *step.command.split())
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            assert process.stdout is not None
            printed = [process.stdout.readline().rstrip("\n") for _ in step.printed]
            self._terminals[name].run("pkill -INT -f 'cubroker [e]xport'")
            return printed


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Hosts on which cubroker is installed, and whose brokers serve."""
    if reason := obstacle():
        pytest.skip(reason)
    version = re.findall(r"cubroker-(\d+\.\d+\.\d+)", PAGE)[0]
    folder = tmp_path_factory.mktemp("cluster")
    built = wheel(folder, version)
    source(version, folder)
    with ExitStack() as undo:
        labs = {name: undo.enter_context(booted()) for name in HOSTS}
        _join(labs)
        for lab in labs.values():
            install(lab, {version: built}, SETTINGS)
            _add_pip(lab, folder, version)
        for name in HOSTS[1:]:
            labs[name].systemctl("start", "cubroker")
        yield Cluster(labs, undo)


def _add_pip(lab: Lab, tree: Path, version: str) -> None:
    """Have the tree and pip where docs/operating.md has them."""
    lab.run("mkdir", "-p", "/usr/local/src")
    lab.run("cp", "-r", tree, f"/usr/local/src/cubroker-{version}")
    lab.write(f"/opt/cubroker/{version}/bin/pip", f'#!/bin/sh\nexec /opt/cubroker/{version}/bin/python -m pip "$@"\n')
    lab.run("chmod", "755", f"/opt/cubroker/{version}/bin/pip")


def _join(labs: dict[str, Lab]) -> None:
    """Join the hosts by a switch, which the first one has, and tell each the others' names."""
    (first, switch), *others = labs.items()
    switch.run("ip", "link", "add", "switch", "type", "bridge")
    switch.run("ip", "addr", "add", "10.79.0.1/24", "dev", "switch")
    switch.run("ip", "link", "set", "switch", "up")
    names = f"127.0.0.1 localhost\n10.79.0.1 {first}\n"
    for number, (name, lab) in enumerate(others, 2):
        make = f"ip link add {name} type veth peer name eth0 netns {lab.pid}".split()
        subprocess.run(["nsenter", f"--net=/proc/{switch.pid}/ns/net", *make], check=True)
        switch.run("ip", "link", "set", name, "master", "switch", "up")
        lab.run("ip", "addr", "add", f"10.79.0.{number}/24", "dev", "eth0")
        lab.run("ip", "link", "set", "eth0", "up")
        names += f"10.79.0.{number} {name}\n"
    for lab in labs.values():
        lab.write("/etc/hosts", names)


@pytest.mark.timeout(600)
def test_every_command_of_the_page_prints_what_stands_there(cluster: Cluster) -> None:
    for step in steps(PAGE):
        printed = cluster.run(step)
        wrong = difference(step.printed, printed)
        assert not wrong, f"{step.heading}: {step.command}\n{wrong}"
    lab = cluster.labs["gpu-3"]
    lab.systemctl("stop", "cubroker-fetch@minilm")
    for sample in re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL):
        lab.run("cubroker", "retire", "minilm")
        command = lab.command("/opt/cubroker/current/bin/python", "-u", "-c", sample)
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            said = process.stdout.readline()
            lab.run("pkill", "-KILL", "-f", "cubroker.integrations.[c]luster.fetch import", check=False)
        assert re.match(r"minilm@\d+(, fetched: True|: 90856960 bytes in .* from gpu-1:7411)$", said), said
