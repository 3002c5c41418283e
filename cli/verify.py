"""``cubroker verify``."""

from __future__ import annotations

from pathlib import Path

import click

from cubroker.cli import options, text
from cubroker.cli.progress import progress
from cubroker.client import Broker
from cubroker.client.verify import verify
from cubroker.protocol.errors import CubrokerError

SHOWN = 10
"""Differences that are listed one by one."""


@click.command("verify")
@click.argument("reference", metavar="NAME[@VERSION]", callback=options.reference)
@click.argument("paths", metavar="PATH...", nargs=-1, required=True, type=click.Path(path_type=Path))
@options.directory
def command(reference: options.Reference, paths: tuple[Path, ...], directory: Path) -> None:
    """Compare a version, by default the current one, byte for byte with files; any difference is exit status 1."""
    name, version = reference
    with Broker(directory) as broker, progress(f"comparing {name}") as report:
        outcome = verify(broker, name, paths, version=version, progress=report)
    for difference in outcome.differences[:SHOWN]:
        text.say(text.printable(difference))
    if outcome.differences:
        raise CubrokerError(f"{name} is not what the files say: {text.count(len(outcome.differences), 'difference')}")
    text.say(f"{name}: {text.count(outcome.tensors, 'tensor')}, {text.size(outcome.nbytes)}, equal to the files")
