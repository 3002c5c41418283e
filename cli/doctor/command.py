"""``cubroker doctor``: the report on a machine, for people and as one JSON document."""

from __future__ import annotations

import asyncio
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

import click

from cubroker.cli import format, options, serve
from cubroker.cli.doctor import verdicts
from cubroker.cli.doctor.facts import Facts, Finding
from cubroker.cli.doctor.probe import gather
from cubroker.protocol.errors import Denied
from cubroker.protocol.paths import default_directory, find_directory

_WORDS = {True: "works", False: "does not", None: "unknown"}
_NOTES = {True: "good", False: "bad", None: "note"}
_COLOURS = {True: "green", False: "red", None: "yellow"}

NARROWEST = 60
"""Characters that a report is wide, however narrow the terminal."""


@click.command("doctor")
@click.option(
    "--devices",
    metavar="SPEC",
    type=serve.value("devices"),
    help="cuda for all GPUs, cuda:0,1 for some, host:N for N emulated devices in host memory."
    "  [default: cuda, and host:2 where there is no GPU]",
)
@options.as_json
@options.given_directory
@click.pass_obj
def doctor(before: Path | None, devices: str | None, directory: Path | None, as_json: bool) -> int:
    """Find out what works here, and if something does not, why and what to do.

    For each device and kind of sharing a small trial is made, by processes that share 2 MiB, or an event; multicast is
    never tried.
    The machine, its limits and the broker's directory are looked at too. The exit status is 0 if memory can be shared
    in one way at least on every device, else 1.
    """
    place, doubt = _find(directory or before)
    facts = asyncio.run(gather(devices, place, doubt=doubt))
    report = DoctorReport(facts)
    if as_json:
        format.document(report.document())
    else:
        report.show()
    return 0 if report.usable else 1


def _find(named: Path | None) -> tuple[Path, str]:
    """Return where a client connects that was told ``named``, and why not to the host's broker if that is in doubt."""
    try:
        return named or find_directory(), ""
    except Denied as error:
        return default_directory(), error.message


class DoctorReport:
    """What is made of facts.

    Attributes:
        devices: each device, and a verdict for each kind of sharing.
        host: a verdict on each thing that sharing needs.
    """

    def __init__(self, facts: Facts) -> None:
        self.devices = [(each.device, verdicts.judge_device(each, facts)) for each in facts.devices]
        self.host = verdicts.judge_machine(facts)

    @property
    def usable(self) -> bool:
        """Whether there is a device, and on each a kind of sharing that works."""
        return bool(self.devices) and all(verdicts.usable(found) for _, found in self.devices)

    def document(self) -> dict[str, object]:
        """Return it as JSON has it."""
        return {
            "devices": [
                {
                    "index": device.index,
                    "uuid": device.uuid,
                    "name": device.name,
                    "kinds": {kind: asdict(verdict) for kind, verdict in found.items()},
                }
                for device, found in self.devices
            ],
            "host": [{"name": name, **asdict(verdict)} for name, verdict in self.host.items()],
        }

    def show(self) -> None:
        """Print it for people, as wide as the terminal."""
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        for device, found in self.devices:
            title = f"device {device.index}: {format.printable(device.name)}, {device.uuid}"
            format.say(click.style(title, bold=True))
            _section(found, _WORDS, width)
        format.say(click.style("this machine", bold=True))
        _section(self.host, _NOTES, width)


def _section(findings: Mapping[str, Finding], words: Mapping[bool | None, str], width: int | None) -> None:
    names, longest = max(map(len, findings)), max(map(len, words.values()))
    indent = " " * (2 + names + 2 + longest + 2)
    for name, verdict in findings.items():
        word = click.style(words[verdict.works].ljust(longest), fg=_COLOURS[verdict.works])
        first, *more = _lines(verdict, len(indent), width)
        format.say(f"  {name.ljust(names)}  {word}  {first}")
        for line in more:
            format.say(indent + line)


def _lines(verdict: Finding, indent: int, width: int | None) -> Iterator[str]:
    """Yield why, and below it what to do."""
    for paragraph in (verdict.why, f"-> {verdict.do}" if verdict.do else ""):
        line = format.printable(" ".join(paragraph.split()))
        if width is not None:  # what is to be copied, a path or a command's option, stays in one piece
            room = max(width, NARROWEST) - indent
            yield from textwrap.wrap(line, room, break_long_words=False, break_on_hyphens=False)
        elif line:
            yield line
