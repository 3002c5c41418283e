"""A command that is run in somebody else's directory imports nothing from there, and neither does what it starts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from cubroker.cli.main import COMMANDS
from tests import sampling
from tests.brokers import PATIENCE
from tests.checkpoints import filled, write
from tests.unit.cli.processes import environment

COMMAND = Path(sysconfig.get_path("scripts"), "cubroker")
"""The console script, as users have it: ``python -m`` would have the directory on its path before cubroker runs."""

ELSEWHERE = ("click", "cubroker", "cuda", "h11", "msgpack", "msgspec", "numpy", "prometheus_client", "rich", "zmq")
PLANTED = sorted({*sys.stdlib_module_names, *ELSEWHERE, "sitecustomize", "usercustomize"})

TRAP = """
import os, sys
os.open(os.environ["TRAP"], os.O_CREAT | os.O_WRONLY)
sys.exit(f"{__file__} was imported by {sys.argv}")
"""

DEVICES = "host:1@64MiB"
QUICK = {
    "ping": ["ping"],
    "load": ["load", "tiny", "{model}", "--share", "vmm"],
    "ls": ["ls"],
    "show": ["show", "tiny"],
    "clients": ["clients"],
    "top": ["top", "--once"],
    "story": ["story", "tiny"],
    "devices": ["devices"],
    "topology": ["topology"],
    "verify": ["verify", "tiny", "{model}"],
    "retire": ["retire", "tiny"],
    "drain": ["drain", "--wait", "1"],
    "config": ["config", "check"],
    "vllm": ["vllm", "--help"],
    "certificates": ["certificates", "authority", "{place}/authority"],
    "export": ["export", "--help"],  # its processes start with -P as well
    "fetch": ["fetch", "--help"],
    "peers": ["peers", "--help"],
}
"""Commands to a broker of their own directory, in an order in which they succeed."""

SLOW = {
    "doctor": ["doctor", "--devices", DEVICES, "--directory", "{place}/nobody"],
    "demo": ["demo", "{model}"],
}
SERVING = {"keep", "serve"}


class Hostile:
    """A directory where every module is a trap, everybody may write there, and a model beside it.

    Attributes:
        place: a short path for all that a test makes.
        model: a checkpoint.
    """

    def __init__(self, place: Path) -> None:
        self.place = place
        self.model = write(place / "model.safetensors", filled([("weight", "F32", (16, 16))]))
        self.sprung = place / "sprung"
        self.directory = place / "hostile"
        self.directory.mkdir()
        self.directory.chmod(0o777)
        for name in PLANTED:
            (self.directory / f"{name}.py").write_text(TRAP)
        self._env = environment(TRAP=str(self.sprung), CUBROKER_DIR=str(place / "run"))

    def start(self, *arguments: str, command: Sequence[str | Path] = (COMMAND,), **env: str) -> subprocess.Popen[str]:
        """Start a command in the directory."""
        filled_in = [each.format(model=self.model, place=self.place) for each in arguments]
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        return subprocess.Popen([*command, *filled_in], cwd=self.directory, env=self._env | env, text=True, **pipes)

    def succeeds(self, arguments: Sequence[str]) -> None:
        """Run a command to its end: it does what it should, and springs no trap."""
        with self.start(*arguments) as process:
            said, _ = process.communicate(timeout=PATIENCE)
        assert not self.sprung.exists(), said
        assert process.returncode == 0, said


@pytest.fixture
def hostile() -> Iterator[Hostile]:
    with tempfile.TemporaryDirectory(prefix="cubroker-") as folder:  # the path of a socket has 107 bytes at most
        yield Hostile(Path(folder))


@contextmanager
def kept(hostile: Hostile, command: Sequence[str] = (str(COMMAND),), **env: str) -> Iterator[None]:
    """Run a broker under ``cubroker keep``, both started in the directory; it ends by SIGTERM."""
    with hostile.start("keep", "--", *command, "serve", "--devices", DEVICES, command=command, **env) as keeper:
        assert keeper.stdout
        said = ""
        while "serving on" not in said:
            line = keeper.stdout.readline()
            assert line, said
            said += line
        try:
            yield
        finally:
            keeper.send_signal(signal.SIGTERM)
            said += keeper.communicate(timeout=PATIENCE)[0]
    assert keeper.returncode == 0, said


def test_no_command_is_left_out_here() -> None:
    assert {*QUICK, *SLOW} | SERVING == set(COMMANDS)


def test_such_a_directory_is_a_trap_for_a_python_that_looks_for_modules_there(hostile: Hostile) -> None:
    command = [sys.executable, "-m", "cubroker.cli", "--version"]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    env["TRAP"] = str(hostile.sprung)
    done = subprocess.run(command, cwd=hostile.directory, env=env, capture_output=True, text=True, check=False)
    assert done.returncode
    assert hostile.sprung.exists(), done.stderr


@pytest.mark.slow
def test_no_command_to_a_broker_imports_from_the_directory_and_neither_do_keeper_broker_and_gateway(
    hostile: Hostile,
) -> None:
    with kept(hostile):
        for name in sampling.daily(QUICK, 3, always=["load"]):
            hostile.succeeds(QUICK[name])
    assert not hostile.sprung.exists()


@pytest.mark.slow
def test_what_an_isolated_python_starts_does_not_import_from_the_path_that_it_ignores(hostile: Hostile) -> None:
    with kept(hostile, (sys.executable, "-I", "-m", "cubroker"), PYTHONPATH=str(hostile.directory)):
        pass
    assert not hostile.sprung.exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_no_process_that_a_command_starts_imports_from_the_directory(hostile: Hostile, name: str) -> None:
    hostile.succeeds(SLOW[name])
