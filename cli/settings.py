"""The options of a command that a broker's settings are given by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import update_wrapper
from pathlib import Path
from typing import Any

import click

from cubroker.cli import options
from cubroker.driver.load import check
from cubroker.server.config import DEFAULT_BUDGET, SETTINGS
from cubroker.server.config.settings import find, nearest

FILE_VARIABLE = "CUBROKER_CONFIG"
"""The environment variable that names the file."""


def _check_devices(context: click.Context, parameter: click.Parameter, spec: str | None) -> str | None:
    if spec is not None:
        try:
            check(spec)
        except ValueError as error:
            raise click.BadParameter(str(error), context, parameter) from None
    return spec


def _split(context: click.Context, parameter: click.Parameter, assignments: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for assignment in assignments:
        key, _, text = (part.strip() for part in assignment.partition("="))
        if not find(key):
            raise click.BadParameter(f"there is no setting {key}; {nearest(key)}", context, parameter)
        if not text:
            raise click.BadParameter(f"{key} has no value; write --set {key}=VALUE", context, parameter)
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
        help=f"What pools may take of each device: 40GiB, or 90%.  [default: {DEFAULT_BUDGET}]",
    ),
    click.option(
        "--devices",
        metavar="SPEC",
        callback=_check_devices,
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
        named = {"directory": place and str(place), "devices": devices, "budget": budget}
        return command(given=assigned | {key: text for key, text in named.items() if text}, **others)

    update_wrapper(collect, command)  # for its help
    collected = click.pass_obj(collect)
    for option in OPTIONS:
        collected = option(collected)
    return collected
