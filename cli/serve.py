"""``cubroker serve``."""

from __future__ import annotations

import os
from pathlib import Path

import click

from cubroker.cli import options, text
from cubroker.driver import DriverError, load
from cubroker.protocol.directory import default_directory
from cubroker.protocol.errors import DeviceFailure, Invalid
from cubroker.server import logs
from cubroker.server.config import DEFAULT_BUDGET, DEFAULT_DEVICES
from cubroker.server.run import configure, serve


@click.command("serve")
@click.option("--config", "file", type=options.PATH, metavar="FILE", help="Settings in TOML; options come first.")
@options.any_directory
@click.option(
    "--devices",
    metavar="SPEC",
    help="cuda for all GPUs, cuda:0,1 for some, host:N for N emulated devices in host memory."
    f"  [default: {DEFAULT_DEVICES}]",
)
@click.option(
    "--budget",
    metavar="SIZE",
    help=f"What pools may take of each device: 40GiB, or 90%.  [default: {DEFAULT_BUDGET}]",
)
@click.pass_obj
def command(
    before: Path | None, file: Path | None, directory: Path | None, devices: str | None, budget: str | None
) -> int:
    """Own the memory of this host's devices and lend it, until SIGTERM or Ctrl-C.

    The broker runs without a store today: when it ends, its pools go with it.
    """
    config = configure(file, devices=devices, budget=budget)
    place = directory or before or _named() or config.directory or default_directory()
    _probe(config.devices, file if devices is None else None)
    with logs.to_standard_error(), options.own_broker():
        ready = f"cubroker: serving {config.devices} in {place}"
        return serve(place, config.devices, None, lambda: text.say(ready), config)


def _named() -> Path | None:
    """Return the directory that the environment names."""
    named = os.environ.get("CUBROKER_DIR")
    return Path(named) if named else None


def _probe(devices: str, file: Path | None) -> None:
    """Tell wrong usage, and a machine without a GPU, from what else may keep a broker from starting."""
    try:
        load(devices).close()
    except ValueError as error:
        if file is not None:
            raise Invalid(f"{file}: devices is {devices!r}; {error}") from None
        raise click.BadParameter(str(error), param_hint="--devices") from None
    except DriverError as error:
        advice = "--devices host:2 serves two devices in host memory instead"
        raise DeviceFailure(f"no GPU to serve as {devices} ({error.name}); {advice}") from None
