"""The Containerfile: checked by a linter, carried out step by step, and what it makes run as a container is."""

from __future__ import annotations

import os
import re
import signal
import stat
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from cubroker.client import Broker
from cubroker.protocol.layout import Layout
from cubroker.protocol.paths import REQUEST_SOCKET, SESSION_SOCKET
from tests.brokers import PATIENCE, eventually
from tests.namespaces import children
from tests.unit.deploy import containerfile, image
from tests.unit.deploy.image import ROOT, Image

FILE = ROOT / "deploy/container/Containerfile"
HADOLINT = Path(sysconfig.get_path("scripts"), "hadolint")
LAYOUT = Layout.pack([("x", "U8", (4096,))])

needs_image = pytest.mark.skipif(bool(image.obstacle()), reason=image.obstacle())


@pytest.mark.skipif(not HADOLINT.exists(), reason="there is no hadolint for this kind of machine")
def test_a_linter_finds_nothing_wrong() -> None:
    done = subprocess.run([HADOLINT, FILE], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_no_shell_stands_between_the_keeper_and_the_broker() -> None:
    final = containerfile.read(FILE)[-1]
    keep, serve = " ".join(final.one("ENTRYPOINT").words()).split(" -- ")
    assert final.one("ENTRYPOINT").value.startswith("[")
    assert keep == "cubroker keep"
    assert serve == "cubroker serve"


def test_what_the_wheel_is_made_from_is_all_copied() -> None:
    build = containerfile.read(FILE)[0]
    copied = {source for each in build.all("COPY") for source in each.words()[:-1]}
    named = re.findall(r'^"?cubroker(?:\.\w+"|) = "(\w+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert copied == {*named, "pyproject.toml", "README.md", "LICENSE", "requirements"}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Image]:
    with image.built(FILE, tmp_path_factory.mktemp("image")) as made:
        made.supply("/opt/cubroker/bin/python")
        yield made


class Container:
    """A running container, seen from this machine.

    Attributes:
        directory: its /run/cubroker.
        process: what started it, and ends as it does.
        first: its first process.
    """

    def __init__(self, directory: Path, process: subprocess.Popen[str]) -> None:
        self.directory = directory
        self.process = process
        self._said: list[str] = []
        self.hear("serving on /run/cubroker")
        (self.first,) = children(process.pid)

    def hear(self, words: str) -> None:
        """Return when its log has said so."""
        assert self.process.stderr
        for line in self.process.stderr:
            self._said.append(line)
            if words in line:
                return
        raise AssertionError("".join(self._said))

    @property
    def broker(self) -> int:
        (broker,) = children(self.first)
        return broker


@contextmanager
def running(built: Image, *arguments: str, group: str = "") -> Iterator[Container]:
    uid, gid = map(int, built.stage.one("USER").value.split(":"))
    with tempfile.TemporaryDirectory(prefix="cubroker-") as folder:
        directory = Path(folder, "run")
        directory.mkdir()
        os.chown(directory, uid, gid)
        with built.start(directory, "--devices", "host:2@64MiB", *arguments, group=group) as process:
            try:
                yield Container(directory, process)
            finally:
                # Changing its user made the first process forget that it is to end with the one that started it.
                first = children(process.pid) if process.poll() is None else []
                for pid in first:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                process.kill()
        eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in first), "the container to end")


@pytest.fixture(scope="module")
def container(built: Image) -> Iterator[Container]:
    """A container whose processes no test ends."""
    with running(built) as started:
        yield started


def status(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {key: value.strip() for key, value in (line.split(":", 1) for line in lines)}


@pytest.mark.slow
@needs_image
def test_the_keeper_is_the_first_process_and_the_broker_its_child_both_without_any_privilege(
    container: Container,
) -> None:
    commands = [Path(f"/proc/{pid}/cmdline").read_text().split("\0") for pid in (container.first, container.broker)]
    assert commands[0][1:3] == ["/opt/cubroker/bin/cubroker", "keep"]
    assert commands[1][1:3] == ["/opt/cubroker/bin/cubroker", "serve"]
    assert status(container.first)["NSpid"].split()[-1] == "1"
    for pid in (container.first, container.broker):
        facts = status(pid)
        assert set(facts["Uid"].split()) == {"10900"}
        assert set(facts["Gid"].split()) == {"10900"}
        assert facts["Groups"] == ""
        assert {int(facts[each], 16) for each in ("CapEff", "CapPrm", "CapBnd", "CapInh", "CapAmb")} == {0}
        assert facts["NoNewPrivs"] == "1"


@pytest.mark.slow
@needs_image
def test_it_is_cubroker_as_it_was_built_and_its_health_is_told_by_the_check_of_the_image(
    built: Image, container: Container
) -> None:
    where = built.run(container.first, "python", "-c", "import cubroker.cli.main as m; print(m.__file__)")
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    assert where.stdout == f"/opt/cubroker/lib/{version}/site-packages/cubroker/cli/main.py\n"
    check = built.stage.one("HEALTHCHECK").value.partition("CMD ")[2]
    (command,) = [containerfile.Instruction("CMD", check).words()]
    done = built.run(container.first, *command)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("The broker on /run/cubroker answers in ")
    assert built.run(container.first, "cubroker", "config", "check").returncode == 0


@pytest.mark.slow
@needs_image
def test_its_sockets_are_a_groups_that_it_is_in_and_a_broker_that_is_killed_is_there_again_with_its_pool(
    built: Image,
) -> None:
    with running(built, "--set", "sockets.group=10901", group="10901") as container:
        for name in (SESSION_SOCKET, REQUEST_SOCKET):
            there = (container.directory / name).stat()
            assert (there.st_uid, there.st_gid, stat.S_IMODE(there.st_mode)) == (10900, 10901, 0o660)
        with Broker(container.directory) as broker:
            with broker.create("llama", LAYOUT, share="vmm", durable=True) as draft:
                draft["x"].copy_from(bytes([7]) * 4096)
                draft.seal()
            killed = container.broker
            os.kill(killed, signal.SIGKILL)
            container.hear("serving on /run/cubroker")
            assert container.broker != killed
            with broker.attach("llama") as pool:
                assert pool["x"].tobytes() == bytes([7]) * 4096
        os.kill(container.first, signal.SIGTERM)
        container.process.communicate(timeout=PATIENCE)
        assert container.process.returncode == 0


@pytest.mark.slow
@needs_image
def test_what_is_carried_out_changes_nothing_on_this_machine(built: Image) -> None:
    passwd = subprocess.check_output(built.inside("cat", built.root(built.stage) / "etc/passwd"), text=True)
    assert "cubroker:x:10900:10900:" in passwd
    assert passwd != Path("/etc/passwd").read_text()
    assert built.root(built.stage).exists() is False
