"""Exit statuses and messages that need no broker: wrong usage, no broker there, files that cannot be used."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from cubroker.cli import __main__, main
from tests import forkserver
from tests.forkserver import CLI
from tests.unit.cli.processes import COMMAND, DEADLINE, environment, run

SECONDS = ("nan", "-1", "inf", "soon", "")
WRONG = {
    "--budget": ("200%", "0", "0%", "-1", "much", "nan%", ""),
    "--config": ("",),
    "--descriptors": ("0", "many", ""),
    "--device": ("0,0", "0,,1", ""),
    "--devices": ("tpu:1", "host:0", "cuda:x", ""),
    "--authority": ("",),
    "--certificates": ("",),
    "--days": ("0", "-1", "some", ""),
    "--directory": ("",),
    "--every": (*SECONDS, "0"),
    "--from": ("", ",", "a b", "gpu-1:99999", "[::1"),
    "--host": (),  # what is none is refused when the certificate is made
    "--listen": ("", "a b", "gpu-1:x"),
    "--metrics": ("", "127.0.0.1", "a b:1"),
    "--mode": ("rw-", "1777", "-1", ""),
    "--owner": ("",),
    "--patience": (*SECONDS, "0"),
    "--pause": SECONDS,
    "--plan": ("", os.devnull),
    "--readers": ("0", "-1", "1000", "some", ""),
    "--seed": ("", "some", "0.5", "-1"),
    "--set": ("kep=1", "keep", "keep=", "keep=some", "keep=-1", "budget=200%", "quota.memory=-1", "log.level=loud", ""),
    "--filter": (),  # any text is one
    "--share": ("magic", ""),
    "--sort": ("magic", ""),
    "--slab": ("much", "0", "-1", "nan", ""),
    "--start-timeout": SECONDS,
    "--stop-timeout": SECONDS,
    "--timeout": (*SECONDS, "0"),
    "--user": (),  # the same
    "--wait": SECONDS,
    "--watchdog": SECONDS,
    "--weights": ("",),
    "--width": ("0", "-1", "33", "some", ""),
}
"""Values that an option cannot have."""

ARGUMENTS = {
    "authority": ["ca"],
    "fetch": ["llama"],
    "issue": ["host"],
    "keep": ["true"],
    "revoke": ["cert.pem"],
    "load": ["llama", "x.safetensors"],
    "show": ["llama"],
    "story": ["llama"],
    "verify": ["llama", "x.safetensors"],
    "retire": ["llama"],
}


def options(command: click.Command, *path: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield every option with a value that there is, and the command that has it."""
    context = click.Context(command)
    for parameter in command.params:
        if isinstance(parameter, click.Option) and not parameter.is_flag:
            yield from ((path, name) for name in parameter.opts)
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from options(found, *path, name)


@pytest.mark.parametrize(
    ("path", "option"), [*options(main.commands)], ids=lambda each: " ".join(each) if isinstance(each, tuple) else each
)
def test_a_value_that_an_option_cannot_have_is_wrong_usage(
    path: tuple[str, ...], option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rest = ARGUMENTS.get(path[-1], []) if path else ["ls"]
    for value in WRONG[option]:
        assert main.run([*path, option, value, *rest]) == 2, value
        out, errors = capsys.readouterr()
        assert out == ""
        assert option in errors.splitlines()[-1], errors
        assert " range." not in errors  # the class of a number is no form in which to write one


@pytest.mark.parametrize(
    "arguments",
    [
        ["nothing"],
        ["load"],
        ["load", "llama"],
        ["load", "no name", "x.safetensors"],
        ["load", "llama", ""],
        ["verify", "llama", ""],
        ["config", "check", ""],
        ["demo", ""],
        ["show"],
        ["show", "llama@0"],
        ["retire", "llama@latest"],
        ["verify", "llama"],
        ["drain", "--off", "--wait", "1"],
        ["ls", "--yaml"],
        ["demo", "one", "two"],
        ["demo", "one", "--seed", "1"],
    ],
    ids=" ".join,
)
def test_wrong_usage_is_status_2_with_the_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(arguments) == 2
    out, errors = capsys.readouterr()
    assert out == ""
    assert "Usage: cubroker" in errors
    assert "Error: " in errors


@pytest.mark.parametrize(
    "arguments",
    ["ls", "show x", "clients", "devices --json", "retire x@1", "load x y", "verify x y"],
)
def test_no_broker_there_is_status_3(arguments: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run([*arguments.split(), "--directory", str(tmp_path / "nobody")]) == 3
    out, errors = capsys.readouterr()
    assert out == ""
    assert errors.startswith("cubroker: ")
    assert str(tmp_path / "nobody") in errors
    assert len(errors.splitlines()) == 1


def test_a_path_that_this_user_may_not_read_is_no_wrong_usage() -> None:
    program = (
        "import os, sys; from cubroker.cli import broker, load, main\n"
        "if not os.getuid(): os.setuid(65534)\n"
        "sys.exit(main.run(sys.argv[1:]))"
    )
    with tempfile.TemporaryDirectory() as folder:  # in pytest's own, other users could not look
        Path(folder).chmod(0o711)
        secret = Path(folder) / "run"
        secret.mkdir(mode=0o311)
        for command in (["ls"], ["load", "x", str(secret)]):
            command = ["-c", program, *command, "--directory", str(secret)]
            done = forkserver.run(command, preload=CLI, capture_output=True, text=True, timeout=DEADLINE)
            assert (done.returncode, done.stdout) == (3, ""), done.stderr


def test_statuses_are_those_of_the_process(tmp_path: Path) -> None:
    assert run("nothing").returncode == 2
    assert run("ls", "--directory", tmp_path / "nobody").returncode == 3


def test_the_directory_may_come_first_last_or_from_the_environment(tmp_path: Path) -> None:
    first = run("--directory", tmp_path / "first", "ls")
    last = run("--directory", tmp_path / "first", "ls", "--directory", tmp_path / "last")
    inherited = run("ls", env=environment(CUBROKER_DIR=str(tmp_path / "inherited")))
    assert str(tmp_path / "first") in first.stderr
    assert str(tmp_path / "last") in last.stderr
    assert str(tmp_path / "inherited") in inherited.stderr


def test_help_names_every_command_and_every_command_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["--help"]) == 0
    overview = capsys.readouterr().out
    for command, (_, summary) in main.COMMANDS.items():
        assert f"  {command}" in overview
        assert summary in overview
        assert main.run([command, "-h"]) == 0
        assert capsys.readouterr().out.startswith(f"Usage: cubroker {command} ")


def test_options_before_the_command_that_have_values_are_known_where_click_is_not_installed() -> None:
    valued = [each for each in main.commands.params if isinstance(each, click.Option) and not each.is_flag]
    assert {name for each in valued for name in each.opts} == __main__.VALUED


BINDINGS = """
import sys

seen = [f"imported before click: {'click' not in sys.modules}"]
def note(name, result):
    seen.append(name)
    sys.stderr.write(f"{seen}\\n") if name == "retained" or (name, GPUS) == ("counted", 2) else None
    return result
cuInit = lambda flags: note("initialized", (0,))
cuDeviceGetCount = lambda: note("counted", (0, GPUS))
cuDeviceGet = lambda ordinal: (0, ordinal)
cuDevicePrimaryCtxRetain = lambda device: note("retained", (0, device))
"""
"""A stand-in for the module of CUDA's bindings, which tells what was called."""


def bindings(directory: Path, text: str) -> dict[str, str]:
    """Return the environment of a process that takes ``text`` for the module of CUDA's bindings."""
    package = directory / "cuda" / "bindings"
    package.mkdir(parents=True)
    for folder in (package, package.parent):
        (folder / "__init__.py").touch()
    (package / "driver.py").write_text(text)
    return environment(PYTHONPATH=str(directory))


@pytest.mark.parametrize("gpus", [1, 2])
def test_a_load_starts_cuda_before_it_imports_the_rest_and_makes_the_context_of_a_gpu_that_is_alone(
    tmp_path: Path, gpus: int
) -> None:
    env = bindings(tmp_path, BINDINGS.replace("GPUS", str(gpus)))
    told = f"{['imported before click: True', 'initialized', 'counted', 'retained'][: 4 if gpus == 1 else 3]}\n"
    for given, expected in ((["x"], told), (["x", "--help"], ""), ([], told)):
        command = [*COMMAND, "--directory", str(tmp_path / "nobody"), "load", "model", *given]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=DEADLINE, check=False)
        assert done.stderr.startswith(expected), done.stderr
        assert done.stderr.count("initialized") == bool(expected)
        assert done.returncode == (0 if "--help" in given else 3 if given else 2), done.stderr


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-"])
def test_no_file_of_cudas_becomes_a_standard_stream_of_a_load_that_was_started_with_one_closed(
    tmp_path: Path, closed: str
) -> None:
    number = tmp_path / "number"
    text = f"import os\nfile = os.open(os.devnull, os.O_RDWR)\nopen({str(number)!r}, 'w').write(str(file))\n{BINDINGS}"
    shell = ["sh", "-c", f'exec "$@" {closed}; exit 1', "sh", *COMMAND, "load"]
    done = subprocess.run(shell, env=bindings(tmp_path, text), capture_output=True, timeout=DEADLINE, check=False)
    assert done.returncode == 2
    assert not number.exists() or int(number.read_text()) > 2


@pytest.mark.parametrize(
    "text",
    [
        "import no_such_module",
        "raise RuntimeError('no libcuda')",
        "def cuInit(_): raise RuntimeError('no libcuda')",
        "cuInit = lambda _: (100,)",
        "import threading\ndef start(_): raise RuntimeError('no thread')\nthreading.Thread.start = start",
        "import threading\ncuInit = lambda _: threading.Event().wait()",
    ],
    ids=["missing", "broken", "without a driver", "without a device", "without room for a thread", "hanging"],
)
def test_a_load_that_needs_no_cuda_ends_the_same_where_cuda_does_not_start(tmp_path: Path, text: str) -> None:
    env = bindings(tmp_path, text)
    done = subprocess.run([*COMMAND, "load"], env=env, capture_output=True, text=True, timeout=DEADLINE, check=False)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_help_says_which_commands_go_on_to_the_hosts_broker(capsys: pytest.CaptureFixture[str]) -> None:
    goes_on = {}
    for command in ([], ["ls"], ["doctor"], ["serve"], ["config", "check"]):
        assert main.run([*command, "--help"]) == 0
        help_text = " ".join(capsys.readouterr().out.partition("--directory DIR")[2].split()).partition("]")[0]
        goes_on[" ".join(command)] = "/run/cubroker" in help_text
    assert goes_on == {"": True, "ls": True, "doctor": True, "serve": False, "config check": False}


def test_a_shell_completes_commands() -> None:
    env = environment(_CUBROKER_COMPLETE="bash_complete", COMP_WORDS="cubroker de", COMP_CWORD="1")
    assert run(env=env).stdout.split() == ["plain,devices", "plain,demo"]


def test_a_file_that_cannot_be_used_is_a_refusal() -> None:
    done = run("serve", "--devices", "host:1@64MiB", "--directory", "/proc/nowhere")
    reason = "cannot serve in /proc/nowhere: No such file or directory; check the path, or choose another directory"
    assert (done.returncode, done.stderr.splitlines()[-1]) == (1, f"cubroker: {reason}")


@pytest.mark.parametrize("command", ["ls", "serve --devices host:1@64MiB"])
def test_a_directory_that_is_not_utf8_is_refused_in_one_line(tmp_path: Path, command: str) -> None:
    done = run(*command.split(), "--directory", os.fsdecode(bytes(tmp_path) + b"/\xff"))
    assert (done.returncode, done.stdout) == (1, "")
    assert "is not UTF-8" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_help_imports_neither_cuda_nor_zeromq_and_no_command_imports_torch() -> None:
    program = (
        "import sys; from cubroker.cli import main; assert main.run(['--help']) == 0;"
        "early = {'cuda', 'zmq', 'torch', 'numpy', 'asyncio', 'rich'} & set(sys.modules);"
        "assert all(main.run([command, '--help']) == 0 for command in main.COMMANDS);"
        "print(sorted(early), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=DEADLINE, check=True)
    assert done.stdout.splitlines()[-1] == "[] False"


@pytest.mark.parametrize(
    ("typed", "hint"),
    [
        ("lst", "did you mean ls or "),
        ("verfy", "did you mean verify?"),
        ("device", "did you mean devices"),
        ("unload", "did you mean retire?"),
        ("stop", "a broker ends with Ctrl-C or SIGTERM"),
        ("help", "cubroker --help lists"),
        ("zzz", "cubroker --help lists"),
    ],
)
def test_an_unknown_command_is_answered_with_the_nearest(
    typed: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run([typed]) == 2
    out, errors = capsys.readouterr()
    assert out == ""
    assert f"No such command {typed!r}; {hint}" in errors


def test_an_option_of_a_command_before_its_name_is_told_where_it_goes() -> None:
    done = run("--json", "ls")
    assert (done.returncode, done.stdout) == (2, "")
    assert "No such option '--json'; options of a command follow its name, as in `cubroker ls --json`\n" in done.stderr
    assert "follow its name" not in run("ls", "--jsno").stderr
