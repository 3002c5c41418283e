"""The report: for people, and as one JSON document."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import asdict

import click

from cubroker.cli import text
from cubroker.cli.doctor import devices, machine
from cubroker.cli.doctor.facts import DeviceFacts, Facts, Verdict

_WORDS = {True: "works", False: "does not", None: "unknown"}
_NOTES = {True: "good", False: "bad", None: "note"}
_COLOURS = {True: "green", False: "red", None: "yellow"}

NARROWEST = 60
"""Characters that a report is wide, however narrow the terminal."""


class Report:
    """What is made of facts.

    Attributes:
        devices: each device, and a verdict for each kind of sharing.
        host: a verdict on each thing that sharing needs.
    """

    def __init__(self, facts: Facts) -> None:
        self.devices = [(examined.device, devices.judge(examined, facts)) for examined in facts.devices]
        self.host = machine.judge(facts)

    @property
    def usable(self) -> bool:
        """Whether there is a device, and on each a kind of sharing that works."""
        return bool(self.devices) and all(devices.usable(verdicts) for _, verdicts in self.devices)

    def document(self) -> dict[str, object]:
        """Return it as JSON has it."""
        return {
            "devices": [
                {
                    "index": device.index,
                    "uuid": device.uuid,
                    "name": device.name,
                    "kinds": {kind: asdict(verdict) for kind, verdict in verdicts.items()},
                }
                for device, verdicts in self.devices
            ],
            "host": [{"name": name, **asdict(verdict)} for name, verdict in self.host.items()],
        }

    def show(self) -> None:
        """Print it for people, as wide as the terminal."""
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        for device, verdicts in self.devices:
            text.say(click.style(_title(device), bold=True))
            _section(verdicts, _WORDS, width)
        text.say(click.style("this machine", bold=True))
        _section(self.host, _NOTES, width)


def _title(device: DeviceFacts) -> str:
    return f"device {device.index}: {text.printable(device.name)}, {device.uuid}"


def _section(verdicts: Mapping[str, Verdict], words: Mapping[bool | None, str], width: int | None) -> None:
    names, longest = max(map(len, verdicts)), max(map(len, words.values()))
    indent = " " * (2 + names + 2 + longest + 2)
    for name, verdict in verdicts.items():
        word = click.style(words[verdict.works].ljust(longest), fg=_COLOURS[verdict.works])
        first, *more = _lines(verdict, len(indent), width)
        text.say(f"  {name.ljust(names)}  {word}  {first}")
        for line in more:
            text.say(indent + line)


def _lines(verdict: Verdict, indent: int, width: int | None) -> Iterator[str]:
    """Yield why, and below it what to do."""
    for paragraph in (verdict.why, f"-> {verdict.do}" if verdict.do else ""):
        line = text.printable(" ".join(paragraph.split()))
        if width is not None:  # what is to be copied, a path or a command's option, stays in one piece
            room = max(width, NARROWEST) - indent
            yield from textwrap.wrap(line, room, break_long_words=False, break_on_hyphens=False)
        elif line:
            yield line
