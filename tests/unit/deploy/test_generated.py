"""What is written from the command line: the page of the manual, and the completion of shells."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cubroker.cli.main import COMMANDS
from cubroker.client import Broker
from cubroker.protocol import Layout
from tests.brokers import BrokerProcess
from tests.unit.cli.processes import environment

DEPLOY = Path(__file__).parents[3] / "deploy"
MAN = DEPLOY / "man" / "cubroker.1"
BASH = DEPLOY / "completion" / "cubroker.bash"

COMPLETE = """
source "$1"; shift
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1))
_cubroker_completion cubroker
printf '%s\\n' "${COMPREPLY[@]}"
"""


def test_they_are_as_the_command_line_has_it() -> None:
    spec = importlib.util.spec_from_file_location("generate", DEPLOY / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for path, text in module.generated().items():
        assert path.read_text() == text, f"{path} is older than the commands: run deploy/generate.py"


@pytest.mark.skipif(not shutil.which("groff"), reason="groff is not installed: apt-get install groff")
def test_the_page_has_every_command_and_no_mistake() -> None:
    done = subprocess.run(
        ["groff", "-man", "-Tutf8", "-ww", "-P-cbou", MAN], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stderr == ""
    for name in COMMANDS.keys() - {"config", "vllm"}:
        assert f"\n   cubroker {name} [OPTIONS]" in done.stdout
    assert "\n   cubroker config show [OPTIONS] [FILE]" in done.stdout
    assert "--if-absent" in done.stdout


def completed(directory: Path, *words: str) -> list[str]:
    """Return what bash offers for the last of these words."""
    folder = Path(sys.executable).parent
    env = environment(CUBROKER_DIR=str(directory), PATH=f"{folder}:/usr/bin:/bin")
    command = ["bash", "-c", COMPLETE, "bash", BASH, "cubroker", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, env=env)
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.skipif(not shutil.which("bash"), reason="bash is not installed")
def test_bash_completes_commands_options_and_pools(broker: BrokerProcess, tmp_path: Path) -> None:
    here = broker.directory
    with Broker(here) as client:
        for name in ("qwen-large", "qwen-small", "llama"):
            client.create(name, Layout.pack([("x", "U8", (5,))])).seal()
        client.create("llama", Layout.pack([("x", "U8", (5,))])).seal()
        assert completed(here, "sh") == ["show"]
        assert completed(here, "ls", "--so") == ["--sort"]
        assert completed(here, "ls", "--sort", "si") == ["size"]
        assert completed(here, "show", "q") == ["qwen-large", "qwen-small"]
        assert completed(here, "retire", "llama@") == ["llama@2"]
        assert completed(here, "load", "ll") == ["llama"]
        assert completed(tmp_path, "show", "q") == []
        assert completed(tmp_path, "--directory", str(here), "show", "ll") == ["llama"]
        assert completed(tmp_path, "show", "--directory", str(here), "ll") == ["llama"]
