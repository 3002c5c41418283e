"""``cubroker keep``."""

from __future__ import annotations

import click

from cubroker.cli import options, signals
from cubroker.server.store.keeper import keep
from cubroker.server.store.pace import LONGEST_PAUSE
from cubroker.server.store.remarks import Remarks
from cubroker.server.store.runs import Limits


@click.command("keep", context_settings={"allow_interspersed_args": False})
@options.seconds(
    "--watchdog", "Abort it, and start it anew, when it gives no sign of life for so long; 0: never.", default=20.0
)
@options.seconds("--start-timeout", "The same when it is not ready after so long; 0: never.", default=300.0)
@options.seconds(
    "--stop-timeout", "Kill it when it does not end in so long, nor asks for more time; 0: never.", default=30.0
)
@click.option(
    "--descriptors",
    type=click.IntRange(min=1),
    metavar="N",
    help="How many descriptors it may store.  [default: 4096, or what the limit of open files allows]",
)
@options.seconds("--pause", "The longest time between two starts.", default=LONGEST_PAUSE)
@click.argument("arguments", metavar="COMMAND...", nargs=-1, required=True, type=click.UNPROCESSED)
def command(
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
    limits = Limits(start_timeout or None, watchdog or None, stop_timeout or None)
    with options.reported(Remarks(2).say):
        return keep(arguments, descriptors=descriptors, limits=limits, pause=pause, mask=signals.inherited_mask())
