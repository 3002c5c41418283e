"""``cubroker config``: what is set, where, and whether it makes sense."""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping
from pathlib import Path

import click

from cubroker.cli import options, settings, table, text
from cubroker.cli.options import Decorated
from cubroker.server.config import DEFAULT, Sources, Value, Wrong
from cubroker.server.config.settings import Setting, get

COLUMNS = (table.Column("KEY"), table.Column("VALUE", fold=True), table.Column("FROM"))
REFUSED = 1


@click.group("config")
def command() -> None:
    """Look at the settings that a broker would have: options, then the environment, then the file, then defaults."""


def _file(command: Decorated) -> Decorated:
    return click.argument("file", type=options.PATH, required=False, envvar=settings.FILE_VARIABLE)(command)


@command.command("check")
@_file
@settings.given
def check(file: Path | None, given: Mapping[str, str]) -> int:
    """Say everything that makes no sense, a line each.

    The status is 1 if anything does not. FILE is what serve --config reads. Devices and budgets are checked as far as
    that can be done without the devices.
    """
    try:
        effective = _sources(file, given).read()
    except Wrong as error:
        for complaint in error.complaints:
            text.complain(complaint)
        return REFUSED
    count = sum(value.origin != DEFAULT for value in effective.values.values())
    text.say(f"{file or 'no file'}: {text.count(count, 'setting')}, nothing wrong")
    return 0


@command.command("show")
@_file
@options.as_json
@settings.given
def show(file: Path | None, as_json: bool, given: Mapping[str, str]) -> int:
    """Show the value of every setting, and where it comes from.

    FILE is what serve --config reads.
    """
    effective = _sources(file, given).read()
    rows = [(get(key), value) for key, value in effective.values.items()]
    if as_json:
        text.document([_record(setting, value) for setting, value in rows])
    else:
        table.show(COLUMNS, [(s.key, s.kind.show(value.written), value.origin) for s, value in rows])
    return 0


def _record(setting: Setting, value: Value) -> dict[str, object]:
    written = setting.plain(value.written)
    return {"key": setting.key, "value": written, "from": value.origin, "live": setting.live}


def _sources(file: Path | None, given: Mapping[str, str]) -> Sources:
    _, descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)  # as many as serve raises the limit to
    return Sources(file, given, os.environ, descriptors)
