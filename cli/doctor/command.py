"""``cubroker doctor``."""

from __future__ import annotations

import asyncio
from pathlib import Path

import click

from cubroker.cli import options, settings, text
from cubroker.cli.doctor.probe import gather
from cubroker.cli.doctor.report import Report


@click.command("doctor")
@click.option(
    "--devices",
    metavar="SPEC",
    callback=settings.value,
    help="cuda for all GPUs, cuda:0,1 for some, host:N for N emulated devices in host memory."
    "  [default: cuda, and host:2 where there is no GPU]",
)
@options.as_json
@options.directory
def command(devices: str | None, directory: Path, as_json: bool) -> int:
    """Find out what works here, and if something does not, why and what to do.

    For each device and kind of sharing a small trial is made, by processes that share 2 MiB, or an event; multicast is
    never tried.
    The machine, its limits and the broker's directory are looked at too. The exit status is 0 if memory can be shared
    in one way at least on every device, else 1.
    """
    facts = asyncio.run(gather(devices, directory))
    report = Report(facts)
    if as_json:
        text.document(report.document())
    else:
        report.show()
    return 0 if report.usable else 1
