"""``cubroker keep``; a module of its own, since a keeper loads no code of the broker, no driver and no asyncio."""

from __future__ import annotations

import click

from cubroker.cli import options, signals
from cubroker.server.keeper.child import LONGEST_PAUSE, TimeLimits
from cubroker.server.keeper.keeper import StderrLog, Terms
from cubroker.server.keeper.keeper import keep as run_keeper


@click.command("keep", context_settings={"allow_interspersed_args": False})
@options.seconds(
    "--watchdog", "Abort the command and start it again after this long without a sign of life; 0: never.", default=20.0
)
@options.seconds(
    "--start-timeout", "Abort and start it again if it is not ready after this long; 0: never.", default=300.0
)
@options.seconds(
    "--stop-timeout", "Kill it if it has neither ended nor asked for more time after this long; 0: never.", default=30.0
)
@click.option(
    "--descriptors",
    type=options.Integer(min=1),
    metavar="N",
    help="How many descriptors it may store.  [default: 4096, or what the limit of open files allows]",
)
@options.seconds("--pause", "The longest time between two starts.", default=LONGEST_PAUSE)
@click.argument("arguments", metavar="COMMAND...", nargs=-1, required=True, type=click.UNPROCESSED)
def keep(
    watchdog: float,
    start_timeout: float,
    stop_timeout: float,
    descriptors: int | None,
    pause: float,
    arguments: tuple[str, ...],
) -> int:
    """Run a command, start it again when it ends or hangs, and keep for it what it stores, as systemd does.

    `cubroker keep -- cubroker serve` is a broker that outlives its own crash: pools, sessions and leases are there
    again as soon as it is. SIGTERM or Ctrl-C ends both. It may be the first process of a container.
    """
    limits = TimeLimits(start_timeout or None, watchdog or None, stop_timeout or None)
    with options.reported(StderrLog(2).say):
        return run_keeper(Terms(arguments, descriptors, limits, pause), signals.inherited_mask())
