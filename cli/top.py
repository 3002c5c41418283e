"""``cubroker top``."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import click
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from cubroker.cli import options, text
from cubroker.cli.connect import connect
from cubroker.cli.frame import ASCII, PLAIN, Frame
from cubroker.client import Broker
from cubroker.protocol.errors import CubrokerError

NARROWEST = 60
"""Columns that a picture has at least, however narrow the terminal."""


@click.command("top")
@click.option("--once", is_flag=True, help="Show it once, all pools of it, and end; also where there is no terminal.")
@click.option(
    "--every",
    type=options.Seconds(0.2, 3600),
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="How often to look.",
)
@options.directory
def command(directory: Path, once: bool, every: float) -> None:
    """Show the devices as bars, who waits, and which processes hold which pools; live, until Ctrl-C.

    A bar stands for all memory of a device. ON are indexes of devices, HELD BY are processes; those that are detached
    have lost their connection and live. Of pools, those that take most come first.
    """
    console = Console(highlight=False, soft_wrap=True)
    if once or not console.is_terminal or console.is_dumb_terminal:
        with connect(directory) as broker:
            for line in _look(console, broker, None):
                text.say(_styled(console, line))
        return
    try:
        _follow(console, directory, every)
    except KeyboardInterrupt:  # the usual way to end it
        return


def _follow(console: Console, directory: Path, every: float) -> None:
    """Show what there is until interrupted; a broker that went away, hangs or refuses may serve again."""
    shown = [Text("looking for the broker")]
    with connect(directory):  # none at all is a mistake in the command
        pass
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            try:
                with connect(directory) as broker:
                    while True:
                        shown = _look(console, broker, console.height)
                        live.update(Group(*shown), refresh=True)
                        time.sleep(every)
            except CubrokerError as error:
                gone = Text(f"as of {time.strftime('%H:%M:%S')}: {text.printable(error.message)}", "bold red")
                live.update(Group(gone, *shown[1:]), refresh=True)
                time.sleep(every)


def _look(console: Console, broker: Broker, height: int | None) -> list[Text]:
    marks = PLAIN if console.encoding.lower().startswith("utf") else ASCII
    width = max(NARROWEST, shutil.get_terminal_size().columns)
    return Frame(width, height, marks, broker.session).lines(broker.look(), time.time())


def _styled(console: Console, line: Text) -> str:
    """Return a line with its colours, if standard output shows them."""
    with console.capture() as captured:
        console.print(line, end="")
    return captured.get()
