"""``cubroker serve`` and ``cubroker config``: a broker's settings as options, served, checked and shown.

This module imports no settings: ``serve`` starts a gateway first, beside its other imports.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Mapping, Sequence
from functools import update_wrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cubroker.cli import format, options
from cubroker.protocol.errors import DeviceFailure, Invalid
from cubroker.server.config import DEFAULT_BUDGET, DEFAULT_DEVICES

if TYPE_CHECKING:
    from cubroker.server.config.load import ConfigSources

FILE_VARIABLE = "CUBROKER_CONFIG"
"""The environment variable that names the file."""


def value(key: str) -> Callable[[str], str]:
    """Return the type of an option for the setting ``key``: it returns the text, or fails as wrong usage.

    The devices are not asked; the text is checked as far as that can be done without them.
    """

    def checked(text: str) -> str:
        from cubroker.server.config.schema import get

        setting = get(key)
        try:
            setting.read(setting.kind.parse(text))
        except ValueError as error:
            raise click.BadParameter(str(error)) from None
        return text

    return checked


def _assignment(assignment: str) -> tuple[str, str]:
    from cubroker.server.config.schema import find, nearest

    key, _, text = (part.strip() for part in assignment.partition("="))
    if not find(key):
        raise click.BadParameter(f"there is no setting {key}; {nearest(key)}")
    if not text:
        raise click.BadParameter(f"{key} has no value; write --set {key}=VALUE")
    return key, value(key)(text)


OPTIONS = (
    click.option(
        "--set",
        "assigned",
        multiple=True,
        type=_assignment,
        shell_complete=options.complete_settings,
        metavar="KEY=VALUE",
        help="Any setting, as in --set quota.memory=40GiB; may be given several times.",
    ),
    click.option(
        "--budget",
        metavar="SIZE",
        type=value("budget"),
        help=f"What pools may take of each device: 40GiB, or 90%.  [default: {DEFAULT_BUDGET}]",
    ),
    click.option(
        "--devices",
        metavar="SPEC",
        type=value("devices"),
        help="cuda for all GPUs, cuda:0,1 for some, host:N for N emulated devices in host memory."
        f"  [default: {DEFAULT_DEVICES}]",
    ),
    options.serving_directory,
)


def given(command: Callable[..., int]) -> Callable[..., int]:
    """Add ``--directory``, ``--devices``, ``--budget`` and ``--set``; the command gets their values in ``given``."""

    def collect(
        before: Path | None,
        /,
        directory: Path | None,
        devices: str | None,
        budget: str | None,
        assigned: Sequence[tuple[str, str]],
        **others: Any,
    ) -> int:
        place = directory or before
        named = {"directory": None if place is None else str(place), "devices": devices, "budget": budget}
        return command(given=dict(assigned) | {key: text for key, text in named.items() if text is not None}, **others)

    update_wrapper(collect, command)  # for its help
    collected = click.pass_obj(collect)
    for option in OPTIONS:
        collected = option(collected)
    return collected


@click.command("serve")
@click.option(
    "--config",
    "file",
    type=options.PATH,
    envvar=FILE_VARIABLE,
    metavar="FILE",
    help="Settings in TOML; the environment overrides them, and options override both.",
)
@given
def serve(file: Path | None, given: Mapping[str, str]) -> int:
    """Own the memory of this host's devices and lend it, until SIGTERM or Ctrl-C; SIGHUP has FILE read again.

    Its pools end with it, so first it waits for what it lent, for as long as shutdown.drain_seconds says; a second
    signal ends the waiting. Under systemd or `cubroker keep`, which store its descriptors while there is no broker,
    durable pools, sessions and leases stay: the next one goes on with them. SIGUSR1 makes way for that one, and waits
    for nothing that stays.
    """
    from cubroker.server import logs
    from cubroker.server.transport import gateway_start

    with (
        logs.to_standard_error() as complain,
        options.reported(lambda why: complain(f"cubroker: {why}")),
        gateway_start.in_advance() as gateway,
    ):
        from cubroker.driver import DriverError, load
        from cubroker.server import main as broker

        handed = broker.stand_by(file, given)
        current = broker.configure(file, given)
        config = current.config
        try:  # give advice before the broker starts; a broker that continues with what is stored needs none
            if handed is None:
                load(config.devices).close()
        except ValueError as error:
            raise Invalid(f"cannot use devices {config.devices!r}: {error}") from None
        except DriverError as error:
            if error.name == "CUDA_ERROR_INVALID_DEVICE":
                raise DeviceFailure(f"cannot serve {config.devices}: {error.detail}") from None
            advice = "--devices host:2 serves two devices in host memory instead"
            raise DeviceFailure(f"no GPU to serve as {config.devices} ({error.name}); {advice}") from None
        with logs.to_standard_output() as say:
            ready = f"cubroker: serving {config.devices} in {config.directory}"
            return broker.serve(current, lambda: say(ready), handed, gateway)


@click.group("config")
def config() -> None:
    """Look at the settings that a broker would have: options, then the environment, then the file, then defaults."""


@config.command("check")
@click.argument("file", type=options.PATH, required=False, envvar=FILE_VARIABLE)
@given
def check(file: Path | None, given: Mapping[str, str]) -> int:
    """Say everything that makes no sense, a line each.

    The status is 1 if anything does not. FILE is what serve --config reads. Devices and budgets are checked as far as
    that can be done without the devices. Metrics that this installation cannot serve are said too; a broker serves
    without them.
    """
    from cubroker.server import monitoring
    from cubroker.server.config.load import DEFAULT, InvalidConfig

    try:
        effective = _sources(file, given).read()
    except InvalidConfig as error:
        for complaint in error.complaints:
            format.complain(complaint)
        return options.REFUSED
    count = sum(value.origin != DEFAULT for value in effective.values.values())
    why = "" if effective.config.metrics.listen is None else monitoring.obstacle()
    if why:
        format.complain(f"there will be no metrics: {why}")
    outcome = "a broker serves, without metrics" if why else "nothing wrong"
    format.say(f"{file or 'no file'}: {format.count(count, 'setting')}, {outcome}")
    return 0


@config.command("show")
@click.argument("file", type=options.PATH, required=False, envvar=FILE_VARIABLE)
@options.as_json
@given
def show(file: Path | None, as_json: bool, given: Mapping[str, str]) -> int:
    """Show the value of every setting, and where it comes from.

    FILE is what serve --config reads.
    """
    from cubroker.server.config.schema import get

    effective = _sources(file, given).read()
    rows = [(get(key), value) for key, value in effective.values.items()]
    if as_json:
        format.document(
            [
                {"key": s.key, "value": s.kind.plain(value.written), "from": value.origin, "live": s.live}
                for s, value in rows
            ]
        )
    else:
        format.print_table(
            rows,
            {
                "KEY": lambda row: row[0].key,
                "~VALUE": lambda row: row[0].kind.show(row[1].written),
                "FROM": lambda row: row[1].origin,
            },
        )
    return 0


def _sources(file: Path | None, given: Mapping[str, str]) -> ConfigSources:
    from cubroker.server.config.load import ConfigSources

    _, descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)  # as many as serve raises the limit to
    return ConfigSources(file, given, os.environ, descriptors)
