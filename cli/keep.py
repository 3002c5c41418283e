"""``cubroker keep``."""

from __future__ import annotations

import click

from cubroker.cli import options
from cubroker.server.store.keeper import keep
from cubroker.server.store.pace import LONGEST_PAUSE


@click.command("keep", context_settings={"allow_interspersed_args": False})
@click.option(
    "--watchdog",
    type=options.Seconds(min=0.001, max=86400),
    metavar="SECONDS",
    help="Start it anew when it gives no sign of life for so long.  [default: never]",
)
@click.option(
    "--descriptors",
    type=click.IntRange(min=1),
    metavar="N",
    help="How many descriptors it may store.  [default: 4096, or what the limit of open files allows]",
)
@click.option(
    "--pause",
    type=options.Seconds(min=0, max=86400),
    default=LONGEST_PAUSE,
    metavar="SECONDS",
    help=f"The longest time between two starts.  [default: {LONGEST_PAUSE:g}]",
)
@click.argument("arguments", metavar="COMMAND...", nargs=-1, required=True, type=click.UNPROCESSED)
def command(watchdog: float | None, descriptors: int | None, pause: float, arguments: tuple[str, ...]) -> int:
    """Run a command, start it again when it ends, and keep for it what it stores, as systemd does.

    `cubroker keep -- cubroker serve` is a broker that outlives its own crash: pools, sessions and leases are there
    again as soon as it is. SIGTERM or Ctrl-C ends both. It may be the first process of a container.
    """
    with options.own_broker():
        return keep(arguments, descriptors=descriptors, watchdog=watchdog, pause=pause)
