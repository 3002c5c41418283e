"""What the README shows can be done as it stands there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests import checkpoints
from tests.brokers import BrokerProcess
from tests.cli.processes import COMMAND, DEADLINE, environment

README = (Path(__file__).parents[2] / "README.md").read_text()


def test_the_commands_and_the_worker_of_the_readme_work(broker: BrokerProcess, tmp_path: Path) -> None:
    weight = ("embeddings.word_embeddings.weight", "F32", (30, 8))
    folder = tmp_path / "all-MiniLM-L6-v2"
    folder.mkdir()
    checkpoints.write(folder / "model.safetensors", checkpoints.filled([weight]))
    commands = [line.split() for line in re.findall(r"^\$ cubroker (.*)$", README, re.MULTILINE)]
    assert [command[0] for command in commands] == ["serve", "load", "ls", "devices", "clients", "verify", "retire"]
    *before, retire = commands[1:]
    worker = re.findall(r"^```python\n(.*?)```", README, re.MULTILINE | re.DOTALL)[0]
    programs = [*([*COMMAND, *command] for command in before), [sys.executable, "-c", worker], [*COMMAND, *retire]]
    for program in programs:
        env = environment(CUBROKER_DIR=str(broker.directory))
        done = subprocess.run(
            program, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=DEADLINE, check=False
        )
        assert done.returncode == 0, done.stderr


def test_the_links_of_the_readme_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (Path(__file__).parents[2] / target).exists(), target
