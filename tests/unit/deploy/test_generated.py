"""What is written from the command line: the page of the manual, and the completion of shells."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import pty
import re
import select
import shutil
import struct
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from cubroker.cli.main import COMMANDS
from cubroker.client import Broker
from cubroker.protocol import Layout
from tests.brokers import PATIENCE, BrokerProcess
from tests.unit.cli.processes import environment, run

DEPLOY = Path(__file__).parents[3] / "deploy"
MAN = DEPLOY / "man" / "cubroker.1"
BASH = DEPLOY / "completion" / "cubroker.bash"
ZSH = DEPLOY / "completion" / "_cubroker"
FISH = DEPLOY / "completion" / "cubroker.fish"


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
    for name in COMMANDS.keys() - {"certificates", "config", "vllm"}:
        assert f"\n   cubroker {name} [OPTIONS]" in done.stdout
    assert "\n   cubroker config show [OPTIONS] [FILE]" in done.stdout
    assert "--if-absent" in done.stdout


RC = r"""
PS1='ready> '
bind 'set bell-style none'
bind 'set enable-bracketed-paste off'
bind '"\C-x*": insert-completions'
bind -x '"\C-x\C-l": printf "\n<%s>\n" "$READLINE_LINE"; READLINE_LINE=; READLINE_POINT=0'
"""
TAB, ALL, LINE = "\t", "\x18*", "\x18\x0c"
"""Keys: complete; write every completion; print the line as it is, and empty it."""


ZSHRC = r"""
PS1='ready> '
unsetopt beep zle prompt_cr prompt_sp
setopt zle
unset zle_bracketed_paste
show-line() { zle -I; print -r -- "<$BUFFER>"; BUFFER= }
zle -N show-line
bindkey '^X^L' show-line
autoload -Uz compinit
"""


class Shell:
    """An interactive shell on a terminal, which completes what is typed there."""

    def __init__(self, command: list[str], directory: Path, **variables: str) -> None:
        path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
        env = environment(CUBROKER_DIR=str(directory), PATH=path, TERM="dumb", HISTFILE="", **variables)
        self._terminal, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 1000, 0, 0))  # so that no line is broken
        self._process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env)
        os.close(theirs)
        self._written = ""
        self._read("ready> ")

    def press(self, keys: str, key: str = TAB) -> str:
        """Return the line after keys were pressed."""
        os.write(self._terminal, f"{keys}{key}{LINE}".encode())
        return self._read("<(.*)>\r?\nready> ")[1]

    def execute(self, command: str) -> None:
        os.write(self._terminal, f"{command}\n".encode())
        self._read("\nready> ")

    def _read(self, pattern: str) -> re.Match[str]:
        """Return what the terminal shows next that matches; a shell that has ended is an OSError."""
        while not (found := re.search(pattern, self._written)):
            ready, _, _ = select.select([self._terminal], [], [], PATIENCE)
            assert ready, self._written
            self._written += os.read(self._terminal, 1 << 16).decode()
        self._written = self._written[found.end() :]
        return found

    def close(self) -> None:
        self._process.kill()
        self._process.wait(PATIENCE)
        os.close(self._terminal)


@pytest.fixture
def bash(tmp_path: Path) -> Iterator[Callable[[Path], Shell]]:
    """Starts an interactive bash that has read the completion, for users of the broker in a directory."""
    with ExitStack() as undo:

        def start(directory: Path) -> Shell:
            rc = tmp_path / "rc"
            rc.write_text(f"{RC}source {BASH}\n")
            shell = Shell(["bash", "--noprofile", "--rcfile", str(rc), "-i"], directory)
            undo.callback(shell.close)
            return shell

        yield start


LAYOUT = Layout.pack([("x", "U8", (5,))])

needs_bash = pytest.mark.skipif(not shutil.which("bash"), reason="bash is not installed")


@pytest.mark.slow
@needs_bash
def test_bash_completes_commands_options_and_pools(
    broker: BrokerProcess, tmp_path: Path, bash: Callable[[Path], Shell]
) -> None:
    here = broker.directory
    with Broker(here) as client:
        for name in ("qwen-large", "qwen-small", "llama"):
            client.create(name, LAYOUT).seal()
        shell = bash(here)
        assert shell.press("cubroker sh") == "cubroker show "
        assert shell.press("cubroker ls --so") == "cubroker ls --sort "
        assert shell.press("cubroker ls --sort si") == "cubroker ls --sort size "
        assert shell.press("cubroker show q") == "cubroker show qwen-"
        assert shell.press("cubroker show ", ALL) == "cubroker show llama qwen-large qwen-small "
        assert shell.press('cubroker show "ll') == 'cubroker show "llama" '
        assert shell.press("cubroker load ll") == "cubroker load llama "
        shell = bash(tmp_path)
        assert shell.press("cubroker show q") == "cubroker show q"
        assert shell.press(f"cubroker --directory {here} show ll") == f"cubroker --directory {here} show llama "
        assert shell.press(f"cubroker show --directory {here} ll") == f"cubroker show --directory {here} llama "
        assert shell.press(f"cubroker show --directory={here} ll") == f"cubroker show --directory={here} llama "


@pytest.mark.slow
@needs_bash
@pytest.mark.parametrize("breaks", ["@=:", "=:", ""])
def test_bash_completes_versions_devices_and_settings_wherever_it_breaks_words(
    broker: BrokerProcess, bash: Callable[[Path], Shell], breaks: str
) -> None:
    with Broker(broker.directory) as client:
        for _ in range(2):
            client.create("llama", LAYOUT).seal()
        (first, second) = client.devices()
        shell = bash(broker.directory)
        shell.execute(f"COMP_WORDBREAKS=$' \\t\\n\"\\'><;|&({breaks}'")
        assert shell.press("cubroker retire llama@") == "cubroker retire llama@2 "
        assert shell.press("cubroker show llama@2") == "cubroker show llama@2 "
        assert shell.press("cubroker load x --device ", ALL) == "cubroker load x --device 0 1 "
        assert shell.press("cubroker load x --device 1,") == "cubroker load x --device 1,0 "
        assert shell.press(f"cubroker load x --device 0,{second.uuid[:13]}").endswith(f" 0,{second.uuid} ")
        assert shell.press(f"cubroker top --device {first.uuid[:13]}").endswith(f" --device {first.uuid} ")
        assert shell.press("cubroker serve --set quota.mem") == "cubroker serve --set quota.memory="
        assert shell.press("cubroker serve --set share=v") == "cubroker serve --set share=vmm "
        assert shell.press("cubroker serve --set metrics.public=", ALL).split()[3:] in (
            ["metrics.public=false", "true"],
            ["metrics.public=false", "metrics.public=true"],
        )
        assert shell.press("cubroker load x --device=1,") == "cubroker load x --device=1,0 "


def test_what_is_evaluated_without_an_installation_is_what_is_installed() -> None:
    done = run(env=environment(_CUBROKER_COMPLETE="bash_source"))
    assert (done.returncode, done.stdout.strip()) == (0, BASH.read_text().strip())


@pytest.mark.skipif(not shutil.which("zsh"), reason="zsh is not installed: apt-get install zsh")
def test_zsh_completes_each_time_where_it_finds_the_function_itself(broker: BrokerProcess, tmp_path: Path) -> None:
    (tmp_path / ".zshrc").write_text(f"{ZSHRC}fpath=({ZSH.parent} $fpath)\ncompinit -u -D\n")
    with Broker(broker.directory) as client, ExitStack() as undo:
        client.create("llama", LAYOUT).seal()
        shell = Shell(["zsh", "-d", "-i"], broker.directory, ZDOTDIR=str(tmp_path))
        undo.callback(shell.close)
        for typed, line in (("sho", "show"), ("show ll", "show llama"), ("verify llama@", "verify llama@1")):
            for _ in range(2):
                assert shell.press(f"cubroker {typed}").rstrip() == f"cubroker {line}"


@pytest.mark.skipif(not shutil.which("fish"), reason="fish is not installed: apt-get install fish")
def test_fish_completes_commands_pools_and_devices(broker: BrokerProcess, tmp_path: Path) -> None:
    def offered(line: str) -> list[str]:
        path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
        env = environment(CUBROKER_DIR=str(broker.directory), PATH=path, HOME=str(tmp_path))
        command = ["fish", "--no-config", "--command", f"source {FISH}; complete --do-complete '{line}'"]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=PATIENCE)
        return [each.partition("\t")[0] for each in done.stdout.splitlines()]

    with Broker(broker.directory) as client:
        client.create("llama", LAYOUT).seal()
        assert offered("cubroker sho") == ["show"]
        assert offered("cubroker show ll") == ["llama"]
        assert offered("cubroker load x --device ") == ["0", "1"]
