"""``cubroker retire``."""

from __future__ import annotations

from pathlib import Path

import click

from cubroker.cli import options, text
from cubroker.cli.connect import connect


@click.command("retire")
@click.argument("reference", metavar="NAME[@VERSION]", callback=options.reference)
@options.directory
def command(reference: options.Reference, directory: Path) -> None:
    """Take a version, by default the current one, out of service.

    Nobody gets it any more; whoever holds it keeps it, and its memory is freed with the last lease.
    """
    with connect(directory) as broker:
        retirement = broker.retire(reference.name, reference.version)
    fate = f"with the last of {text.count(retirement.leases, 'lease')}" if retirement.leases else "now"
    text.say(f"{reference.name}@{retirement.version} is retired; its memory is freed {fate}.")
