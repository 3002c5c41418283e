"""The options of a command that a broker's settings are given by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import update_wrapper
from pathlib import Path
from typing import Any

import click

from cubroker.cli import options
from cubroker.server.config import DEFAULT_BUDGET, SETTINGS
from cubroker.server.config.settings import find, get, nearest

FILE_VARIABLE = "CUBROKER_CONFIG"
"""The environment variable that names the file."""


def _check(key: str, text: str, context: click.Context, parameter: click.Parameter) -> None:
    """Fail as wrong usage unless ``text`` is a value of a setting, as far as that can be told without the devices."""
    kind = get(key).kind
    try:
        kind.read(kind.parse(text))
    except ValueError as error:
        reason = f"{key} is {kind.show(kind.parse(text))}; {str(error) or kind.allowed}"
        raise click.BadParameter(reason, context, parameter) from None


def value(context: click.Context, parameter: click.Parameter, text: str | None) -> str | None:
    """Return the text of the setting that an option is named after, or fail as wrong usage; a callback."""
    if text is not None and parameter.name is not None:
        _check(parameter.name, text, context, parameter)
    return text


def _split(context: click.Context, parameter: click.Parameter, assignments: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for assignment in assignments:
        key, _, text = (part.strip() for part in assignment.partition("="))
        if not find(key):
            raise click.BadParameter(f"there is no setting {key}; {nearest(key)}", context, parameter)
        if not text:
            raise click.BadParameter(f"{key} has no value; write --set {key}=VALUE", context, parameter)
        _check(key, text, context, parameter)
        found[key] = text
    return found


OPTIONS = (
    click.option(
        "--set",
        "assigned",
        multiple=True,
        callback=_split,
        metavar="KEY=VALUE",
        help="Any setting, as in --set quota.memory=40GiB; may be given several times.",
    ),
    click.option(
        "--budget",
        metavar="SIZE",
        callback=value,
        help=f"What pools may take of each device: 40GiB, or 90%.  [default: {DEFAULT_BUDGET}]",
    ),
    click.option(
        "--devices",
        metavar="SPEC",
        callback=value,
        help="cuda for all GPUs, cuda:0,1 for some, host:N for N emulated devices in host memory."
        f"  [default: {SETTINGS['devices'].default}]",
    ),
    options.any_directory,
)


def given(command: Callable[..., int]) -> Callable[..., int]:
    """Add ``--directory``, ``--devices``, ``--budget`` and ``--set``; ``given`` is what they set, as text by key."""

    def collect(
        before: Path | None,
        /,
        directory: Path | None,
        devices: str | None,
        budget: str | None,
        assigned: dict[str, str],
        **others: Any,
    ) -> int:
        place = directory or before
        named = {"directory": None if place is None else str(place), "devices": devices, "budget": budget}
        return command(given=assigned | {key: text for key, text in named.items() if text is not None}, **others)

    update_wrapper(collect, command)  # for its help
    collected = click.pass_obj(collect)
    for option in OPTIONS:
        collected = option(collected)
    return collected
