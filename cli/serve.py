"""``cubroker serve``."""

from __future__ import annotations

from pathlib import Path

import click

from cubroker.cli import options, text
from cubroker.driver import DriverError, load
from cubroker.protocol.errors import DeviceFailure
from cubroker.server import logs
from cubroker.server.run import DEFAULT_BUDGET, serve


@click.command("serve")
@options.directory
@click.option(
    "--devices",
    default="cuda",
    show_default=True,
    metavar="SPEC",
    help="cuda for all GPUs, cuda:0,1 for some, host:N for N emulated devices in host memory.",
)
@click.option(
    "--budget",
    default=DEFAULT_BUDGET,
    show_default=True,
    metavar="SIZE",
    help="What pools may take of each device: 40GiB, or 90%.",
)
def command(directory: Path, devices: str, budget: str) -> int:
    """Own the memory of this host's devices and lend it, until SIGTERM or Ctrl-C.

    The broker runs without a store today: when it ends, its pools go with it.
    """
    _probe(devices)
    with logs.to_standard_error(), options.own_broker():
        return serve(directory, devices, budget, lambda: text.say(f"cubroker: serving {devices} in {directory}"))


def _probe(devices: str) -> None:
    """Tell wrong usage, and a machine without a GPU, from what else may keep a broker from starting."""
    try:
        load(devices).close()
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--devices") from None
    except DriverError as error:
        advice = "--devices host:2 serves two devices in host memory instead"
        raise DeviceFailure(f"no GPU to serve as {devices} ({error.name}); {advice}") from None
