"""``cubroker serve``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import click

from cubroker.cli import options, settings
from cubroker.driver import DriverError, load
from cubroker.protocol.errors import DeviceFailure
from cubroker.server import logs
from cubroker.server.run import configure, serve


@click.command("serve")
@click.option(
    "--config",
    "file",
    type=options.PATH,
    envvar=settings.FILE_VARIABLE,
    metavar="FILE",
    help="Settings in TOML; the environment comes before it, and options before that.",
)
@settings.given
def command(file: Path | None, given: Mapping[str, str]) -> int:
    """Own the memory of this host's devices and lend it, until SIGTERM or Ctrl-C; SIGHUP has FILE read again.

    Its pools end with it, so first it waits for what it lent, for as long as shutdown.drain_seconds says; a second
    signal ends the waiting. Under systemd or `cubroker keep`, which store its descriptors while there is no broker,
    durable pools, sessions and leases stay: the next one goes on with them. SIGUSR1 makes way for that one, and waits
    for nothing that stays.
    """
    with logs.to_standard_error() as complain, options.reported(lambda why: complain(f"cubroker: {why}")):
        current = configure(file, given)
        config = current.config
        _probe(config.devices)
        with logs.to_standard_output() as say:
            return serve(current, lambda: say(f"cubroker: serving {config.devices} in {config.directory}"))


def _probe(devices: str) -> None:
    """Tell a machine without a GPU from what else may keep a broker from starting."""
    try:
        load(devices).close()
    except DriverError as error:
        advice = "--devices host:2 serves two devices in host memory instead"
        raise DeviceFailure(f"no GPU to serve as {devices} ({error.name}); {advice}") from None
