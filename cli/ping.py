"""``cubroker ping``."""

from __future__ import annotations

import time
from pathlib import Path

import click

from cubroker.cli import options, text
from cubroker.client import hello

REFUSED = 1


@click.command("ping")
@click.option("--live", is_flag=True, help="Succeed also while it serves nobody new, or is being started again.")
@options.seconds("--timeout", "How long it may take to answer.", default=5.0, least=0.001)
@options.as_json
@options.directory
def command(directory: Path, live: bool, timeout: float, as_json: bool) -> int:
    """Ask the broker whether it serves, without a session; status 3 if there is none, 1 if it serves nobody new.

    For probes: without --live that of readiness. With it that of liveness, which fails only where nobody holds the
    broker's socket any more, so that nobody ends a broker which somebody keeps while it is started again.
    """
    began = time.perf_counter()
    try:
        obstacle, silence = hello.ping(directory, timeout), None
    except hello.Silent as error:
        if not live:
            raise
        obstacle, silence = error.message, error
    seconds = time.perf_counter() - began
    _report(directory, obstacle, None if silence else seconds, as_json=as_json)
    return REFUSED if obstacle and not live else 0


def _report(directory: Path, obstacle: str, seconds: float | None, *, as_json: bool) -> None:
    if as_json:
        text.document({"ready": not obstacle, "seconds": seconds, "obstacle": obstacle or None})
    elif seconds is None:
        text.say(f"{directory} is held for the broker: {obstacle}")
    elif obstacle:
        text.say(f"The broker on {directory} answers in {text.duration(seconds)}, and serves nobody new: {obstacle}")
    else:
        text.say(f"The broker on {directory} answers in {text.duration(seconds)}.")
