"""What several commands share: options and arguments, how shells complete these, the session, the choice of devices."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, TypeVar, get_args, get_origin

import click
import msgspec
from click.core import ParameterSource
from click.shell_completion import BashComplete, CompletionItem, ZshComplete, add_completion_class, split_arg_string

from cubroker.cli import format
from cubroker.protocol import fields
from cubroker.protocol.errors import CubrokerError, Invalid, NotFound, explain
from cubroker.protocol.fields import MAX_WAIT
from cubroker.protocol.messages import AUTO, IPC, MULTICAST, VMM
from cubroker.protocol.paths import find_directory
from cubroker.protocol.status import DeviceInfo, PoolInfo

if TYPE_CHECKING:
    from cubroker.client import Broker

T = TypeVar("T")
Decorated = TypeVar("Decorated", bound=Callable[..., Any])

FOUND = "found directory"
"""The key in a context's ``meta`` of a directory that was found, and not named."""

REFUSED = 1
"""Exit status of a command that was refused."""

NO_BROKER = 3
"""Exit status of a command that found no broker."""

LONGEST = 86400.0
"""The most seconds that an option of :func:`seconds` takes: a day."""

COMPLETION_SECONDS = 1.0
"""Seconds that a broker has to greet when a shell completes a word."""

Plan = Annotated[dict[str, int | str], msgspec.Meta(min_length=1)]
"""The content of a plan's file: the device, by index or UUID, for tensors by name or pattern."""


# -- values of options and arguments -------------------------------------------------------------------


class _Typed(click.Path):
    """A path that is not empty: an empty one comes from a variable without a value, and means the current folder."""

    def convert(
        self, value: str | os.PathLike[str], param: click.Parameter | None, ctx: click.Context | None
    ) -> str | bytes | os.PathLike[str]:
        if value == "":
            self.fail("a path cannot be empty; has the variable that it comes from a value?", param, ctx)
        return super().convert(value, param, ctx)


class Seconds(click.FloatRange):
    """A time within bounds; NaN, which passes every bound, is refused."""

    name = "number of seconds"  # in errors

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number of seconds, or fail as wrong usage."""
        seconds: float = super().convert(value, param, ctx)
        if isnan(seconds):
            self.fail(f"{value!r} is no number of seconds.", param, ctx)
        return seconds


class Integer(click.IntRange):
    """A whole number within bounds."""

    name = "integer"  # in errors and help


def seconds(name: str, what: str, *, default: float, least: float = 0.0) -> Callable[[Decorated], Decorated]:
    """Add an option for a time of at least ``least`` seconds; ``what`` is its help."""
    form = Seconds(min=least, max=LONGEST)
    return click.option(name, type=form, default=default, metavar="SECONDS", help=f"{what}  [default: {default:g}]")


PATH = _Typed(readable=False, path_type=Path)
"""A path as it was typed. A path that this user may not read is a refusal, not wrong usage."""


class Reference(NamedTuple):
    """``NAME`` or ``NAME@VERSION``; ``version`` is None for the current one."""

    name: str
    version: int | None


def typed(parse: Callable[[str], T]) -> Callable[[str], T]:
    """Return the type of an option or an argument that ``parse`` reads; what that refuses is wrong usage."""

    def convert(value: str) -> T:
        try:
            return parse(value)
        except Invalid as error:
            raise click.BadParameter(error.message) from None

    return convert


pool_name = typed(fields.check_pool_name)
mode = typed(fields.parse_mode)


@typed
def reference(value: str) -> Reference:
    """Split ``NAME[@VERSION]``."""
    name, at, version = value.partition("@")
    fields.check_pool_name(name)
    if at and not re.fullmatch(r"[1-9][0-9]{0,12}", version, re.ASCII):
        raise Invalid(f"{version!r} is no version: versions are 1, 2, 3 …, as in {name}@1")
    return Reference(name, int(version) if at else None)


@typed
def size(value: str) -> int:
    """Return bytes, 1 at least, written as ``4096``, ``512MiB`` or ``1.5GB``."""
    from cubroker.server.config.schema import parse_bytes

    if (nbytes := parse_bytes(value)) == 0:
        raise Invalid("0 bytes hold nothing: write 1 or more")
    return nbytes


def device_list(value: str) -> tuple[str, ...]:
    """Split names of devices at the commas, or fail as wrong usage."""
    chosen = tuple(part.strip() for part in value.split(","))
    if not all(chosen) or len(set(chosen)) < len(chosen):
        raise click.BadParameter(f"{value!r} is no list of different devices, as in 0,1 or cuda:0")
    return chosen


def device(value: str) -> str:
    """Return the name of one device, or fail as wrong usage."""
    name, *others = device_list(value)
    if others:
        raise click.BadParameter(f"{value!r} is no single device, as in 0 or cuda:0")
    return name


def plan(value: str) -> dict[str, str]:
    """Read a plan, the file that names a device for tensors by name or pattern, or fail as wrong usage.

    It is parsed as the header of a checkpoint is, which refuses a key that appears twice.
    """
    from cubroker.client.loading.safetensors import FormatError, parse_json

    path = Path(str(PATH.convert(value, None, None)))
    try:
        found = parse_json(path.read_bytes(), Plan)
    except OSError as error:
        raise CubrokerError(f"cannot read the plan {path}: {explain(error, path)}") from None
    except FormatError as error:
        reason = f'{path} is no plan: {error}; a plan is JSON such as {{"layers.1.*": 1, "*": 0}}'
        raise click.BadParameter(reason) from None
    return {tensor: str(device) for tensor, device in found.items()}


# -- how shells complete values ------------------------------------------------------------------------

# A completion that fails completes nothing. If there is no broker, if the directory is another user's, or if the broker
# does not answer in time, no lines appear on a terminal in the middle of a command.


def complete_pools(context: click.Context, _: click.Parameter | None, incomplete: str) -> list[CompletionItem]:
    """Return the names of pools that this user may see."""
    return _completions(sorted({pool.name for pool in _pools(context)}), incomplete)


def complete_versions(context: click.Context, _: click.Parameter | None, incomplete: str) -> list[CompletionItem]:
    """Return the names of pools, and after an ``@`` their versions."""
    names = {f"{pool.name}@{pool.version}" if "@" in incomplete else pool.name for pool in _pools(context)}
    return _completions(sorted(names), incomplete)


def complete_devices(context: click.Context, _: click.Parameter | None, incomplete: str) -> list[CompletionItem]:
    """Return the indexes of the broker's devices, and their UUIDs if something has been typed already."""
    return [
        CompletionItem(name, help=f"{device.name}, {device.uuid}")
        for device in _ask(context, lambda broker: broker.devices())
        for name in (str(device.index), *[device.uuid] * bool(incomplete))
        if name.startswith(incomplete)
    ]


def complete_device_list(
    context: click.Context, parameter: click.Parameter | None, incomplete: str
) -> list[CompletionItem]:
    """Return lists of devices: those before the last comma, and one more."""
    before, comma, last = incomplete.rpartition(",")
    found = complete_devices(context, parameter, last)
    return [
        CompletionItem(f"{before}{comma}{item.value}", help=item.help)
        for item in found
        if item.value not in before.split(",")
    ]


def complete_settings(_: click.Context, __: click.Parameter | None, incomplete: str) -> list[CompletionItem]:
    """Return the keys of settings, each with ``=``, and after that the values if they are words."""
    from cubroker.server.config.schema import SETTINGS

    key, equals, _value = incomplete.partition("=")
    if not equals:
        return _completions((f"{key}=" for key in SETTINGS), incomplete)
    kind = SETTINGS[key].kind.type if key in SETTINGS else None
    values = ("false", "true") if kind is bool else get_args(kind) if get_origin(kind) is Literal else ()
    return _completions((f"{key}={value}" for value in values), incomplete)


def _pools(context: click.Context) -> Sequence[PoolInfo]:
    return _ask(context, lambda broker: broker.pools())


def _ask(context: click.Context, question: Callable[[Broker], Sequence[T]]) -> Sequence[T]:
    """Return the answer of the broker that the command would use; nothing if it does not answer."""
    from cubroker.client.broker import Broker

    directory: Path | None = None
    for each in (context.find_root(), context):
        if each.get_parameter_source("directory") is ParameterSource.COMMANDLINE:
            directory = each.params["directory"]
    try:
        with Broker(directory, connect_timeout=COMPLETION_SECONDS) as broker:
            return question(broker)
    except (CubrokerError, OSError):
        return ()


def _completions(names: Iterable[str], incomplete: str) -> list[CompletionItem]:
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]


# -- options of most commands --------------------------------------------------------------------------


def _chosen(context: click.Context, _: click.Parameter, value: Path | None) -> Path:
    if named := value or context.obj:
        return Path(named)
    found = find_directory()
    if not os.environ.get("CUBROKER_DIR"):
        context.meta[FOUND] = found
    return found


def where() -> str:
    """Return `` on DIRECTORY`` for a command's output if the directory was found, and not named; else an empty text."""
    found = click.get_current_context().meta.get(FOUND)
    return f" on {format.printable(str(found))}" if found else ""


_directory = partial(click.option, "--directory", type=PATH, metavar="DIR")
_SERVED = "Where the broker serves.  [default: $CUBROKER_DIR, else where a socket is: the user's own, or /run/cubroker]"

group_directory = _directory(
    help="Where the broker serves, for every command.  [default: $CUBROKER_DIR, else the user's own; commands that ask"
    " a broker go on to /run/cubroker if no socket is there]"
)
"""``--directory`` before the command's name, or None."""

serving_directory = _directory(help="Where the broker serves.  [default: $CUBROKER_DIR, else the user's own]")
"""``--directory`` of a broker that is to serve, as it was given, or None."""

given_directory = _directory(help=_SERVED)
"""``--directory`` as it was given, or None, of a command that finds a broker itself."""

directory = _directory(callback=_chosen, help=_SERVED)
"""``--directory``, after the command's name or before it, with its default."""

as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")


# -- options of commands that publish ------------------------------------------------------------------

copies = click.option(
    "--device",
    "chosen",
    metavar="0,1",
    type=device_list,
    shell_complete=complete_device_list,
    help="Devices that get a copy each: indexes, cuda:0, or UUIDs as `cubroker devices` shows them.  [default: 0]",
)

share = click.option(
    "--share",
    type=click.Choice([AUTO, VMM, IPC, MULTICAST]),
    default=AUTO,
    show_default=True,
    help="How workers open the memory: vmm (by descriptor; read-only, able to sleep), ipc (by handle; its readers can"
    " write), multicast, or auto: vmm where the devices can, else ipc, unless the broker's settings say otherwise.",
)

durable = click.option(
    "--durable/--no-durable",
    default=None,
    help="Whether the pool stays when the broker is killed or restarted.  [default: where share and store allow it]",
)

pool_mode = click.option(
    "--mode",
    type=mode,
    metavar="MODE",
    help="Who may attach and publish, like a file's: 640. Who may attach to memory of a GPU can write it, too, if it"
    " means to.  [default: the broker's]",
)

owners = click.option(
    "--owner",
    "owners",
    multiple=True,
    metavar="USER",
    help="Whose version suffices for --if-absent, besides this user's, root's and the broker's."
    "  [default: $CUBROKER_OWNER]",
)


def wait(what: str) -> Callable[[Decorated], Decorated]:
    """Add ``--wait`` for ``what``, whose value :func:`wait_of` completes."""
    return click.option(
        "--wait",
        type=Seconds(min=0, max=MAX_WAIT),
        metavar="SECONDS",
        help=f"How long to wait for {what}.  [default: 0; with --if-absent, as long as it takes]",
    )


def wait_of(given: float | None, owners: Sequence[str], *, if_absent: bool) -> float:
    """Return the seconds to wait; owners without ``--if-absent`` are wrong usage."""
    if owners and not if_absent:
        raise click.UsageError("--owner says whose version suffices for --if-absent; leave it out, or give both")
    return given if given is not None else MAX_WAIT if if_absent else 0.0


# -- options of commands that list ---------------------------------------------------------------------


def matches(patterns: Sequence[str], *names: str) -> bool:
    """Whether one of the names matches a pattern, which is like a shell's for files; without any they do."""
    return not patterns or any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


reverse = click.option("--reverse", "-r", is_flag=True, help="Sort the other way round.")


def sort(orders: Iterable[str], default: str) -> Callable[[Decorated], Decorated]:
    """Add ``--sort``, one of ``orders``."""
    what = "By what to sort; of sizes and counts the largest comes first."
    return click.option("--sort", type=click.Choice([*orders]), default=default, show_default=True, help=what)


# -- the session with the broker -----------------------------------------------------------------------


def connect(directory: Path | None, limit: float | None = None) -> Broker:
    """Open a session with the broker that serves ``directory``; only this loads ZeroMQ and the driver.

    Args:
        directory: as for :class:`cubroker.Broker`.
        limit: seconds that the broker may take to greet; by default :func:`timeout`, which other threads cannot ask.

    Raises:
        Unavailable: no broker serves there, or none answers in time.
        Denied: this user may not connect.
        OverQuota: this user has as many sessions as it may have.
    """
    from cubroker.client.broker import Broker

    with hinting_at_timeout():
        return Broker(directory, connect_timeout=timeout() if limit is None else limit)


def timeout() -> float:
    """Return the seconds that a broker may take to greet, as ``cubroker --timeout`` says."""
    limit: float = click.get_current_context().find_root().params["timeout"]
    return limit


@contextmanager
def hinting_at_timeout() -> Iterator[None]:
    """Name the option ``--timeout`` in the error of a broker that has not greeted in time."""
    from cubroker.client.transport.handshake import Silent

    try:
        yield
    except Silent as error:
        raise Silent(f"{error.message}; cubroker --timeout SECONDS waits longer") from None


@contextmanager
def reported(say: Callable[[str], None], absent: type[CubrokerError] | tuple[()] = ()) -> Iterator[None]:
    """Report a failure by ``say`` and end with status 1, for commands that must not wait for a reader of their errors.

    Args:
        say: writes one line to standard error without blocking.
        absent: the failure that is status 3: no broker serves.

    Raises:
        Exit: instead of a ``CubrokerError`` or ``OSError``.
    """
    try:
        yield
    except (CubrokerError, OSError) as error:
        say(format.reason(error))
        raise click.exceptions.Exit(NO_BROKER if isinstance(error, absent) else REFUSED) from None


# -- the devices that are named ------------------------------------------------------------------------


def find_devices(chosen: Sequence[str], devices: Sequence[DeviceInfo]) -> list[str]:
    """Return the UUIDs of the broker's devices of these names.

    Raises:
        NotFound: the broker has no such device.
        Invalid: a device twice.
    """
    found = [find_device(choice, devices) for choice in chosen]
    if len(set(found)) < len(found):
        raise Invalid(f"--device {','.join(chosen)} names a device twice; give each once")
    return found


def find_device(choice: str, devices: Sequence[DeviceInfo]) -> str:
    """Return the UUID of the broker's device that a name means (:mod:`cubroker.driver.device_names`).

    Raises:
        NotFound: the broker has no such device, or several.
    """
    from cubroker.driver.device_names import UnknownDevice, find

    try:
        return find(choice, devices, "the broker has").uuid
    except UnknownDevice as error:
        raise NotFound(str(error)) from None


# -- completion in bash and zsh -------------------------------------------------------------------------

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
