"""``cubroker story``."""

from __future__ import annotations

import re
from datetime import datetime
from pathlib import Path

import click
import msgspec

from cubroker.cli import options, text
from cubroker.cli.connect import connect
from cubroker.protocol.infos import Line


def _subject(context: click.Context, parameter: click.Parameter, value: str) -> str | int:
    """Return the number of a session, or the name of a pool, or fail as wrong usage."""
    if re.fullmatch(r"[0-9]{1,15}", value, re.ASCII):
        return int(value)
    return options.pool_name(context, parameter, value)


@click.command("story")
@click.argument("subject", metavar="NAME|SESSION", callback=_subject)
@options.as_json
@options.directory
def command(subject: str | int, directory: Path, as_json: bool) -> None:
    """Tell the last events of a pool, or of the session that a number names, in the order in which they happened.

    What has ended is told of for a while. A number is that of a session, although a pool could be named by one.
    """
    with connect(directory) as broker:
        lines = broker.story(subject)
    if as_json:
        text.document(msgspec.to_builtins(lines))
        return
    for line in lines:
        text.say(f"{_when(line)}  {text.printable(line.text)}")


def _when(line: Line) -> str:
    """Return a time as clocks here show it."""
    return datetime.fromtimestamp(line.time).astimezone().strftime("%Y-%m-%d %H:%M:%S")
