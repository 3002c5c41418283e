"""``cubroker serve``."""

from __future__ import annotations

from pathlib import Path

import click

from cubroker.cli import options, text
from cubroker.driver import DriverError, load
from cubroker.protocol.errors import DeviceFailure
from cubroker.server.run import serve


@click.command("serve")
@options.directory
@click.option(
    "--devices",
    metavar="SPEC",
    help="cuda, cuda:0,1, or host:N for N emulated devices in host memory.  [default: cuda]",
)
@click.option("--budget", default="90%", show_default=True, help="What pools may take of each device: 40GiB, or 90%.")
def command(directory: Path, devices: str | None, budget: str) -> int:
    """Own the memory of this host's devices and lend it, until SIGTERM or Ctrl-C.

    The broker runs without a store today: when it ends, its pools go with it.
    """
    spec = devices or _every_gpu()
    return serve(directory, spec, budget, lambda: text.say(f"cubroker: serving {spec} in {directory}"))


def _every_gpu() -> str:
    try:
        load("cuda").close()
    except DriverError as error:
        raise DeviceFailure(f"no GPU to serve ({error}); --devices host:2 serves two devices in host memory") from None
    return "cuda"
