"""Exit statuses and messages that need no broker: wrong usage, no broker there, what is not built yet."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cubroker.cli.main import COMMANDS
from tests.cli.processes import environment, run


@pytest.mark.parametrize(
    "arguments",
    [
        ["nothing"],
        ["load"],
        ["load", "llama"],
        ["load", "no name", "x.safetensors"],
        ["load", "llama", "x.safetensors", "--share", "magic"],
        ["load", "llama", "x.safetensors", "--slab", "much"],
        ["load", "llama", "x.safetensors", "--device", "0,0"],
        ["load", "llama", "x.safetensors", "--wait", "-1"],
        ["show"],
        ["show", "llama@0"],
        ["retire", "llama@latest"],
        ["verify", "llama"],
        ["ls", "--yaml"],
        ["serve", "--devices", "tpu:1"],
        ["demo", "one", "two"],
    ],
    ids=" ".join,
)
def test_wrong_usage_is_status_2_with_the_usage(arguments: list[str]) -> None:
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert "Usage: cubroker" in done.stderr
    assert "Error: " in done.stderr


@pytest.mark.parametrize(
    "arguments",
    ["ls", "show x", "clients", "devices --json", "retire x@1", "load x y", "verify x y"],
)
def test_no_broker_there_is_status_3(arguments: str, tmp_path: Path) -> None:
    done = run(*arguments.split(), "--directory", tmp_path / "nobody")
    assert (done.returncode, done.stdout) == (3, "")
    assert str(tmp_path / "nobody") in done.stderr
    reason = done.stderr.splitlines()[-1]
    assert reason.startswith("cubroker: ")


def test_the_directory_may_come_first_last_or_from_the_environment(tmp_path: Path) -> None:
    first = run("--directory", tmp_path / "first", "ls")
    last = run("--directory", tmp_path / "first", "ls", "--directory", tmp_path / "last")
    inherited = run("ls", env=environment(CUBROKER_DIR=str(tmp_path / "inherited")))
    assert str(tmp_path / "first") in first.stderr
    assert str(tmp_path / "last") in last.stderr
    assert str(tmp_path / "inherited") in inherited.stderr


@pytest.mark.parametrize("option", [["--durable"], ["--share", "vmm"], ["--share", "multicast"]], ids=" ".join)
def test_what_is_not_built_yet_is_refused_as_such(option: list[str], tmp_path: Path) -> None:
    done = run("load", "llama", tmp_path, *option, "--directory", tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"cubroker: {' '.join(option)}: ")
    assert "not built yet" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_help_names_every_command_and_every_command_has_help() -> None:
    overview = run("--help").stdout
    for command, (_, summary) in COMMANDS.items():
        assert f"  {command}" in overview
        assert summary in overview
        done = run(command, "-h")
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith(f"Usage: cubroker {command} ")


def test_help_imports_neither_cuda_nor_zeromq_nor_torch() -> None:
    program = (
        "import sys; from cubroker.cli.main import run; assert run(['--help']) == 0;"
        "print(sorted({'cuda', 'zmq', 'torch', 'numpy', 'asyncio', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("command", ["ls", "load", "serve", "demo"])
def test_no_command_imports_torch(command: str) -> None:
    program = (
        f"import sys; from cubroker.cli.main import run; assert run([{command!r}, '--help']) == 0;"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "False"
