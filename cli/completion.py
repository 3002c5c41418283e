"""Shell completion of the names of pools and versions, devices and settings, with the functions for bash and zsh.

A completion that fails completes nothing. If there is no broker, if the directory is another user's, or if the broker
does not answer in time, no lines appear on a terminal in the middle of a command.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeVar, get_args, get_origin

import click
from click.core import ParameterSource
from click.shell_completion import BashComplete, CompletionItem, ZshComplete, add_completion_class, split_arg_string

from cubroker.protocol.errors import CubrokerError
from cubroker.protocol.status import PoolInfo

if TYPE_CHECKING:
    from cubroker.client import Broker
    from cubroker.server.config.schema import Setting

T = TypeVar("T")

PATIENCE = 1.0
"""Seconds that a broker has to greet."""


def pools(context: click.Context, _: click.Parameter | None, incomplete: str) -> list[CompletionItem]:
    """Return the names of pools that this user may see."""
    return _items(sorted({pool.name for pool in _pools(context)}), incomplete)


def versions(context: click.Context, _: click.Parameter | None, incomplete: str) -> list[CompletionItem]:
    """Return the names of pools, and after an ``@`` their versions."""
    names = {f"{pool.name}@{pool.version}" if "@" in incomplete else pool.name for pool in _pools(context)}
    return _items(sorted(names), incomplete)


def devices(context: click.Context, _: click.Parameter | None, incomplete: str) -> list[CompletionItem]:
    """Return the indexes of the broker's devices, and their UUIDs if something has been typed already."""
    return [
        CompletionItem(name, help=f"{device.name}, {device.uuid}")
        for device in _ask(context, lambda broker: broker.devices())
        for name in (str(device.index), *[device.uuid] * bool(incomplete))
        if name.startswith(incomplete)
    ]


def device_list(context: click.Context, parameter: click.Parameter | None, incomplete: str) -> list[CompletionItem]:
    """Return lists of devices: those before the last comma, and one more."""
    before, comma, last = incomplete.rpartition(",")
    found = devices(context, parameter, last)
    return [
        CompletionItem(f"{before}{comma}{item.value}", help=item.help)
        for item in found
        if item.value not in before.split(",")
    ]


def settings(_: click.Context, __: click.Parameter | None, incomplete: str) -> list[CompletionItem]:
    """Return the keys of settings, each with ``=``, and after that the values if they are words."""
    from cubroker.server.config.schema import SETTINGS

    key, equals, _value = incomplete.partition("=")
    if not equals:
        return _items((f"{key}=" for key in SETTINGS), incomplete)
    return _items((f"{key}={value}" for value in _values(SETTINGS.get(key))), incomplete)


def _values(setting: Setting | None) -> tuple[str, ...]:
    kind = setting.kind.type if setting else None
    if kind is bool:
        return "false", "true"
    return get_args(kind) if get_origin(kind) is Literal else ()


def _pools(context: click.Context) -> Sequence[PoolInfo]:
    return _ask(context, lambda broker: broker.pools())


def _ask(context: click.Context, question: Callable[[Broker], Sequence[T]]) -> Sequence[T]:
    """Return the answer of the broker that the command would use; nothing if it does not answer."""
    from cubroker.client.broker import Broker

    given = [each.params["directory"] for each in (context, context.find_root()) if _is_given(each)]
    directory: Path | None = given[0] if given else None
    try:
        with Broker(directory, connect_timeout=PATIENCE) as broker:
            return question(broker)
    except (CubrokerError, OSError):
        return ()


def _is_given(context: click.Context) -> bool:
    """Whether the command line says where the broker serves."""
    return context.get_parameter_source("directory") is ParameterSource.COMMANDLINE


def _items(names: Iterable[str], incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]


# -- bash ----------------------------------------------------------------------------------------------

# Readline breaks words at @, = and : too. cubroker completes the whole word, and readline gets the part of each
# completion that replaces readline's own word, $2. If $2 is a lone = or :, the completion follows it instead; a lone @
# is replaced. For --OPTION=VALUE cubroker returns the value.
_BASH = """\
%(complete_func)s() {
    local line=${COMP_LINE:0:COMP_POINT}
    local word=${line##*[[:space:]]}
    local head=$word option='' type value

    [[ $2 == [=:] ]] || head=${word%%"$2"}
    [[ $word == -*=* ]] && option=${word%%%%=*}=
    COMPREPLY=()
    while IFS=',' read -r type value; do
        case $type in
            dir) compopt -o dirnames ;;
            file) compopt -o default ;;
            plain)
                value=$option$value
                COMPREPLY+=("${value#"$head"}")
                [[ $value == *= ]] && compopt -o nospace
                ;;
        esac
    done <<< "$(env COMP_LINE="$line" %(complete_var)s=bash_complete "$1")"

    return 0
}

%(complete_func)s_setup() {
    complete -o nosort -F %(complete_func)s %(prog_name)s
}

%(complete_func)s_setup;
"""


@add_completion_class
class Zsh(ZshComplete):
    """Completion for zsh, from a file on ``$fpath``, which zsh runs each time; click's works only the first time."""

    source_template = ZshComplete.source_template.replace(
        "$zsh_eval_context[-1] == loadautofunc", '"$funcstack[1]" == _%(prog_name)s'
    )


@add_completion_class
class Bash(BashComplete):
    """Completion for bash, of a line whose words the shell does not break at ``@`` and ``=``."""

    source_template = _BASH

    def get_completion_args(self) -> tuple[list[str], str]:
        """Return the words between the command's name and the word at the cursor, and that word, which may be empty."""
        if (line := os.environ.get("COMP_LINE")) is None:  # an earlier release's function called, which breaks words
            return super().get_completion_args()
        words = split_arg_string(f"{line}.")  # so that there is a word after a blank
        return words[1:-1], words[-1][:-1]
