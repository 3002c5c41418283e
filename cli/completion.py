"""What shells complete besides options: names of pools and versions, devices, settings.

A completion that fails completes nothing: no broker, a directory of another user, or one that does not answer at once
is no reason for lines on a terminal in the middle of a command.
"""

from __future__ import annotations

from collections.abc import Iterable

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from cubroker.protocol.errors import CubrokerError
from cubroker.protocol.paths import default_directory
from cubroker.protocol.status import PoolInfo

PATIENCE = 1.0
"""Seconds that a broker has to greet."""


def pools(context: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the names of pools that this user may see."""
    return _items({pool.name for pool in _listed(context)}, incomplete)


def versions(context: click.Context, _: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the names of pools, and after an ``@`` their versions."""
    names = (f"{pool.name}@{pool.version}" if "@" in incomplete else pool.name for pool in _listed(context))
    return _items(names, incomplete)


def _listed(context: click.Context) -> tuple[PoolInfo, ...]:
    from cubroker.client.broker import Broker

    given = [each.params["directory"] for each in (context, context.find_root()) if _is_given(each)]
    try:
        with Broker(given[0] if given else default_directory(), connect_timeout=PATIENCE) as broker:
            return broker.pools()
    except (CubrokerError, OSError):
        return ()


def _is_given(context: click.Context) -> bool:
    """Whether the command line says where the broker serves."""
    return context.get_parameter_source("directory") is ParameterSource.COMMANDLINE


def _items(names: Iterable[str], incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(name) for name in sorted({*names}) if name.startswith(incomplete)]
