"""The instructions of a Containerfile: as much of its grammar as ours uses, and no more."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from string import Template

COMMENT = re.compile(r"^\s*#.*\n?", re.MULTILINE)
CONTINUED = re.compile(r"\\\n\s*")
KNOWN = {"ARG", "FROM", "WORKDIR", "COPY", "RUN", "ENV", "USER", "ENTRYPOINT", "CMD", "HEALTHCHECK"}


@dataclass(frozen=True)
class Instruction:
    """One instruction, and what follows its name."""

    name: str
    value: str

    def words(self) -> list[str]:
        """Return the value of an instruction that is in exec form, or of plain words, without options."""
        text = re.sub(r"^(--\S+\s+)*", "", self.value)
        return list(json.loads(text)) if text.startswith("[") else text.split()

    def option(self, name: str) -> str | None:
        """Return the value of ``--name=``."""
        found = re.search(rf"(?:^|\s)--{name}=(\S+)", self.value)
        return found and found[1]


@dataclass
class Stage:
    """What follows one FROM."""

    base: str
    name: str
    instructions: list[Instruction] = field(default_factory=list)

    def all(self, name: str) -> list[Instruction]:
        """Return the instructions of a name."""
        return [each for each in self.instructions if each.name == name]

    def one(self, name: str) -> Instruction:
        """Return the only instruction of a name."""
        (found,) = self.all(name)
        return found


def read(path: Path) -> list[Stage]:
    """Return the stages of a file, with its arguments, which come before the first, at their defaults."""
    text = CONTINUED.sub(" ", COMMENT.sub("", path.read_text()))
    arguments: dict[str, str] = {}
    stages: list[Stage] = []
    for line in filter(None, map(str.strip, text.splitlines())):
        name, value = line.split(maxsplit=1)
        assert name in KNOWN, f"{name} is not known here: {line}"
        if name == "ARG":
            key, _, default = value.partition("=")
            arguments[key] = default
        elif name == "FROM":
            base, *alias = Template(value).substitute(arguments).split()
            stages.append(Stage(base, alias[1] if alias else ""))
        else:
            stages[-1].instructions.append(Instruction(name, value))
    return stages


def environment(stage: Stage, base: dict[str, str]) -> dict[str, str]:
    """Return the variables of a stage's image, over those of its base image."""
    known = dict(base)
    for instruction in stage.all("ENV"):
        for pair in instruction.value.split():
            key, _, value = pair.partition("=")
            known[key] = Template(value).substitute(known)
    return known
