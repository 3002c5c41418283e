"""A page of documentation as a session at a terminal: its commands, and what it says that they print."""

from __future__ import annotations

import difflib
import os
import re
import select
import subprocess
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Self

from tests.brokers import PATIENCE
from tests.systemd.lab import Lab

OMITTED = "…"
END = "the-end-of-this-command"
PROMPT = re.compile(r"((?:[a-z]+-?\d*)?[#$]) ")

VARYING = (
    (r"\b(Mon|Tue|Wed|Thu|Fri|Sat|Sun) \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC", "DATE"),
    (r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d(:\d\d(\.\d+)?)?", "DATE"),
    (r"\b(Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec) [ \d]\d \d\d:\d\d:\d\d", "DATE"),
    (r"\bHOST-[0-9a-f-]+", "HOST"),
    (r"\b\d+(\.\d+)? ?(µs|ms|s|min)\b", "TIME"),
    (r"\b\d+(\.\d+)? [KMG]iB/s", "SPEED"),
    (r"(session|request|lease|memory|process|pid|uid|user|GID|UID) \d+", r"\1 N"),
    (r"(\[|─)\d+", r"\1N"),
    (r"^ *\d+ +\d+ +(\S+ +\w+ +\S+ +TIME +(connected|detached))", r"N N \1"),
    (r"\d+(\.\d+)?e[+-]\d+", "N"),
    (r"\b\d{3,}(\.\d+)?\b", "N"),
    (r" +", " "),
)
"""What is different in every run, and what stands for it."""


class Step(NamedTuple):
    """A command of the page.

    Attributes:
        heading: the heading under which it stands.
        prompt: ``#`` if root gives it, ``$`` if somebody else does; after the host's name, if there are several.
        command: one line or several.
        printed: the lines that the page says it prints.
    """

    heading: str
    prompt: str
    command: str
    printed: list[str]


def steps(text: str) -> Iterator[Step]:
    """Return the commands in the blocks of a page: lines after a prompt, and those after ``> `` that continue them."""
    for heading, block in _blocks(text):
        begun: list[Step] = []
        for line in block:
            if found := PROMPT.match(line):
                begun.append(Step(heading, found[1], line[found.end() :], []))
            elif line.startswith("> ") and not begun[-1].printed:
                begun[-1] = begun[-1]._replace(command=f"{begun[-1].command}\n{line[2:]}")
            else:
                begun[-1].printed.append(line)
        yield from begun


def _blocks(text: str) -> Iterator[tuple[str, list[str]]]:
    """Return the blocks that begin with a command, each with the heading above it."""
    heading = ""
    for title, block in re.findall(r"^#+ ([^\n]*)$|^```\w*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        if title:
            heading = title
        elif PROMPT.match(block):
            yield heading, block.splitlines()


def difference(expected: Sequence[str], printed: Sequence[str]) -> str:
    """Return how what was printed is not what was expected, or nothing."""
    wanted, got = [_plain(line) for line in expected], [_plain(line) for line in printed]
    pattern = "".join(r"(.*\n)*?" if line == OMITTED else _pattern(line) for line in wanted)
    if re.fullmatch(pattern, "".join(f"{line}\n" for line in got)):
        return ""
    return "\n".join(difflib.unified_diff(wanted, got, "the page", "what was printed", lineterm=""))


def _plain(line: str) -> str:
    for varying, word in VARYING:
        line = re.sub(varying, word, line)
    return line.strip()


def _pattern(line: str) -> str:
    return ".*".join(re.escape(part) for part in line.split(OMITTED)) + r"\n"


class Terminal:
    """A shell of root inside a lab, for commands one after the other."""

    def __init__(self, lab: Lab, environment: Sequence[str]) -> None:
        shell = lab.command("env", "--ignore-environment", *environment, "bash", "--noprofile", "--norc")
        self._process = subprocess.Popen(
            shell, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, bufsize=0
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        with self._process as process:
            process.wait(PATIENCE)

    def run(self, command: str) -> list[str]:
        """Run a command, and return the lines that it prints."""
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(f"{{ {command}\n}} < /dev/null\nprintf '{END}'\n".encode())
        printed = b""
        while not printed.endswith(END.encode()):
            assert select.select([self._process.stdout], [], [], PATIENCE)[0], f"{command} has not ended: {printed!r}"
            piece = os.read(self._process.stdout.fileno(), 1 << 16)
            assert piece, f"the shell ended with {command}: {printed!r}"
            printed += piece
        return printed.decode().removesuffix(END).rstrip("\n").splitlines()
