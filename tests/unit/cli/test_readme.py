"""What the README shows can be done as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import checkpoints, forkserver
from tests.brokers import BrokerProcess
from tests.forkserver import CLI
from tests.unit.cli.processes import COMMAND, DEADLINE, environment

README = (Path(__file__).parents[3] / "README.md").read_text()


def test_the_commands_and_the_worker_of_the_readme_work(
    broker: BrokerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = ("embeddings.word_embeddings.weight", "F32", (30, 8))
    folder = tmp_path / "all-MiniLM-L6-v2"
    folder.mkdir()
    checkpoints.write(folder / "model.safetensors", checkpoints.filled([weight]))
    commands = [line.split() for line in re.findall(r"^\$ cubroker (.*)$", README, re.MULTILINE)]
    assert [command[0] for command in commands] == ["serve", "load", "ls", "devices", "clients", "verify", "retire"]
    *before, retire = commands[1:]
    worker = re.findall(r"^```python\n(.*?)```", README, re.MULTILINE | re.DOTALL)[0]
    env = environment(CUBROKER_DIR=str(broker.directory))
    for command in (*before, None, retire):
        if command is None:
            monkeypatch.setenv("CUBROKER_DIR", str(broker.directory))
            exec(compile(worker, "README.md", "exec"), {"__name__": "__main__"})  # here torch is imported already
            continue
        done = forkserver.run(
            [*COMMAND[1:], *command],
            preload=CLI,
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
            timeout=DEADLINE,
        )
        assert done.returncode == 0, done.stderr


def test_the_links_of_the_readme_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (Path(__file__).parents[3] / target).exists(), target
