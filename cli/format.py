"""How the output of commands reads: figures, clients and lists in words; lines to the terminal, JSON, tables."""

from __future__ import annotations

import grp
import json
import os
import pwd
import re
import shutil
import sys
import textwrap
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import groupby, zip_longest
from math import inf
from typing import Any, TypeAlias, TypeVar

import click
import msgspec

from cubroker.protocol.errors import CubrokerError, explain
from cubroker.protocol.status import ClientInfo, LeaseInfo, PoolInfo, ProcessInfo

BROKEN_PIPE = 141
"""Exit status when the reader of our output went away, as the shell reports a death by SIGPIPE."""

SCHEMA = 1
"""The version of the JSON documents: it changes if a key is removed or changes its meaning, not if one is added."""

GAP = "  "
NARROWEST = 16
"""Characters that a folded column keeps, however narrow the terminal."""

_PART = re.compile(r"[-_./:]|(?=@)")
"""Where a part of a name ends."""

RUNTIMES = {"docker": "docker", "libpod": "podman", "crio": "cri-o", "containerd": "containerd", "lxc": "lxc"}
"""The runtime of a container, by a part of its cgroup's path."""

SHORT_ID = 12
"""Characters of a container's id, as its runtime's commands show it."""

_CONTAINER = re.compile(r"(?:^|[^0-9a-f])([0-9a-f]{32}|[0-9a-f]{64})(?![0-9a-f])")

R = TypeVar("R")
Columns: TypeAlias = Mapping[str, Callable[[R], str]]
"""The cell of a row under each title. ``>`` before a title aligns its cells to the right, as figures are; ``~`` folds
them into several lines if the terminal is too narrow."""


# -- figures and lists ---------------------------------------------------------------------------------


def size(nbytes: float) -> str:
    """Return bytes with a unit: ``512 B``, ``86.7 MiB``, ``126.9 GiB``."""
    if nbytes < 1024:
        return f"{nbytes:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        nbytes /= 1024
        if nbytes < 1023.95:
            return f"{nbytes:.1f} {unit}"
    return f"{nbytes / 1024:.1f} TiB"


def duration(seconds: float) -> str:
    """Return a time with three digits: ``0.842 ms``, ``34.1 ms``, ``1.27 s``, ``312 s``."""
    value, unit = (seconds * 1e3, "ms") if seconds < 1 else (seconds, "s")
    digits = 3 if value < 1 else 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{digits}f} {unit}"


def rate(nbytes: int, seconds: float) -> str:
    """Return bytes per second: ``37.5 GiB/s``."""
    return f"{size(nbytes / seconds)}/s" if seconds > 0 else "at once"


def since(seconds: float) -> str:
    """Return how long something has lasted, roughly: ``12 s``, ``5 min``, ``3 h``, ``2 d``."""
    for unit, length, last in (("s", 1, 120), ("min", 60, 7200), ("h", 3600, 172_800)):
        if seconds < last:
            return f"{max(0, seconds) / length:.0f} {unit}"
    return f"{seconds / 86_400:.0f} d"


def count(number: int, noun: str) -> str:
    """Return ``1 lease``, ``2 leases``."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


@cache
def user(uid: int) -> str:
    """Return the name of a user, or the number if there is no name."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


@cache
def group(gid: int) -> str:
    """Return the name of a group, or the number if there is no name."""
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


def place(indexes: Mapping[str, int], uuid: str) -> str:
    """Return a device's index, or ``gone``: a pool that was lost with its device still names it."""
    return str(indexes.get(uuid, "gone"))


def ranges(numbers: Sequence[int]) -> str:
    """Return rising numbers, runs of three and more as their ends: ``0,1``, ``0-7``, ``0-3,5``."""
    runs: list[str] = []
    for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        found = [number for _, number in run]
        runs += [f"{found[0]}-{found[-1]}"] if len(found) > 2 else map(str, found)
    return ",".join(runs)


def places(indexes: Mapping[str, int], uuids: Sequence[str]) -> str:
    """Return the indexes of devices as :func:`ranges`, and ``gone`` once for those that are not there any more."""
    found = ranges(sorted(indexes[uuid] for uuid in uuids if uuid in indexes))
    return ",".join(filter(None, (found, "" if all(uuid in indexes for uuid in uuids) else "gone")))


def part(some: int, whole: int) -> str:
    """Return a part of bytes and the whole: ``54.6 of 126.0 GiB``, ``512 B of 1.0 GiB``."""
    (one, unit), (other, same) = size(some).split(), size(whole).split()
    return f"{one} of {other} {same}" if unit == same else f"{one} {unit} of {other} {same}"


def shorten(value: str, width: int) -> str:
    """Return a text that fits in ``width``, its end replaced if necessary."""
    return value if len(value) <= width else value[: max(0, width - 1)] + "…"


def squeeze(value: str, width: int) -> str:
    """Return a text that fits in ``width``, its middle replaced if necessary: the end of a name has its version."""
    if len(value) <= width:
        return value
    end = max(0, width - 1) // 2
    return value[: max(0, width - 1 - end)] + "…" + value[len(value) - end :]


def some_of(words: Sequence[str], width: int) -> str:
    """Return as many words as fit, and how many more there are: ``40000, 40013 +4``."""
    for number in range(len(words), 0, -1):
        rest = f" +{len(words) - number}" if number < len(words) else ""
        line = ", ".join(words[:number]) + rest
        if len(line) <= width:
            return line
    return shorten(line, width)


def fitting(parts: Sequence[str], width: int, spare: Sequence[int], gap: str = ", ") -> str:
    """Return parts in a line; while they do not fit, drop the parts with the indexes ``spare``, in that order."""
    kept = dict(enumerate(parts))
    for index in spare:
        if len(gap.join(kept.values())) <= width:
            break
        del kept[index]
    return shorten(gap.join(kept.values()), width)


def printable(value: str) -> str:
    """Escape characters that move the cursor or break a line; names of tensors come from files."""
    return value if value.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in value)


# -- lines to the terminal -----------------------------------------------------------------------------


def say(line: str) -> None:
    """Write a line to standard output; a reader that went away ends the command quietly."""
    # The terminal has no styles, or its user wants none (https://no-color.org).
    plain = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
    try:
        click.echo(line, color=False if plain else None)
    except BrokenPipeError:
        # The interpreter flushes once more at exit; that must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise click.exceptions.Exit(BROKEN_PIPE) from None
    except OSError as error:
        raise CubrokerError(f"cannot write the output: {explain(error)}") from None


def terminal_width() -> int | None:
    """Return the columns of the terminal that is standard output; None if standard output is no terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def say_sentence(line: str) -> None:
    """Write a line to standard output; on a terminal, break it between words if it is too long."""
    limit = terminal_width()
    for piece in (
        [line] if limit is None else textwrap.wrap(line, limit, break_on_hyphens=False, break_long_words=False) or [""]
    ):
        say(piece)


def note(line: str) -> None:
    """Write a line about progress to standard error; a failure to write it is ignored."""
    with suppress(OSError):
        click.echo(line, err=True)


def reason(error: CubrokerError | OSError) -> str:
    """Return why something failed, in one printable line."""
    message = error.message if isinstance(error, CubrokerError) else explain(error)
    return printable(" ".join(message.split()))


def complain(message: str) -> None:
    """Write the reason of a failure as one line on standard error."""
    note("cubroker: " + printable(" ".join(message.split())))


# -- JSON documents ------------------------------------------------------------------------------------


def document(value: object) -> None:
    """Print one JSON document, in ASCII: the same on every terminal.

    An object has :data:`SCHEMA`. In a list each element has it, because lists are older than the version.
    """
    if isinstance(value, list | tuple):
        told: object = [_versioned(each) for each in value]
    else:
        told = _versioned(value)
    say(json.dumps(told, indent=2))


def plain(value: object) -> Any:
    """Return structs as dicts, in which a missing value is None and never an empty text."""
    if isinstance(value, msgspec.Struct):
        return {key: plain(getattr(value, key)) for key in value.__struct_fields__}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    return None if value == "" else msgspec.to_builtins(value)


def _versioned(value: object) -> object:
    built = plain(value)
    return {"schema": SCHEMA} | built if isinstance(built, dict) else built


# -- tables --------------------------------------------------------------------------------------------


def print_table(rows: Sequence[R], columns: Columns[R], spare: Sequence[str] = ()) -> None:
    """Print a table as :func:`render_table` yields it; only on a terminal is its width limited."""
    header, *lines = render_table(rows, columns, terminal_width(), spare)
    say(click.style(header, bold=True))
    for line in lines:
        say(line)


def fits(rows: Sequence[R], columns: Columns[R]) -> bool:
    """Whether a table is no wider than the terminal; True if there is no terminal."""
    limit = terminal_width()
    return limit is None or max(map(len, render_table(rows, columns))) <= limit


def render_table(
    rows: Sequence[R], columns: Columns[R], limit: int | None = None, spare: Sequence[str] = ()
) -> Iterator[str]:
    """Yield the header of a table, and the lines for each of ``rows``.

    Args:
        rows: what the lines are about.
        columns: the cells of a row.
        limit: the width of the terminal.
        spare: titles of the columns that are left out, in this order, before any column is folded to less than the
            longest element of its lists, or than half of the terminal if that is less.
    """
    cells = {title: [title.lstrip(">~"), *(printable(cell(row)) for row in rows)] for title, cell in columns.items()}
    widths = {title: max(map(len, column)) for title, column in cells.items()}
    if limit is not None:
        least = widths | {
            title: min(
                limit // 2, max(len(piece) for cell in column for piece in cell.replace(", ", ",\n").splitlines())
            )
            for title, column in cells.items()
            if title.startswith("~")
        }
        for name in spare:
            if sum(least[title] + len(GAP) for title in cells) - len(GAP) <= limit:
                break
            cells = {title: column for title, column in cells.items() if title.lstrip(">~") != name}
        excess = max(0, sum(widths[title] + len(GAP) for title in cells) - len(GAP) - limit)
        for title in cells:
            if title.startswith("~") and excess:
                folded = max(widths[title] - excess, min(widths[title], NARROWEST))
                excess -= widths[title] - folded
                widths[title] = folded
    for row in zip(*cells.values(), strict=True):
        pieces = [[*_fold(cell, widths[title])] for title, cell in zip(cells, row, strict=True)]
        for line in zip_longest(*pieces, fillvalue=""):
            aligned = (align(cell, title, widths[title]) for title, cell in zip(cells, line, strict=True))
            yield GAP.join(aligned).rstrip()


def align(cell: str, title: str, width: int) -> str:
    """Return a cell as wide as the column of that title."""
    return cell.rjust(width) if title.startswith(">") else cell.ljust(width)


def _fold(cell: str, width: int) -> Iterator[str]:
    """Yield the lines of a cell, each of which ends after a comma if it has one, else where a part of a name ends."""
    while len(cell) > width:
        comma = cell.rfind(", ", 0, width + 1)
        ends = [match.end() for match in _PART.finditer(cell, 0, width + 1) if width // 2 < match.end() <= width]
        end = comma + 1 if comma >= 0 else max(ends, default=width)
        yield cell[:end]
        cell = cell[end:].lstrip() if comma >= 0 else cell[end:]
    yield cell


# -- clients: processes and what they hold -------------------------------------------------------------


def other_clients(clients: Sequence[ClientInfo], session: int) -> list[ClientInfo]:
    """Return the clients but this process's own ``session``; look up processes that the broker could not look at.

    A broker whose /proc hides other users (``ProtectProc=``) knows only the PIDs of their processes. A PID is looked up
    here if this process has the same PID on both sides. A process that has a session has not ended.
    """
    # Imported here, since a keeper never loads code of the broker.
    from cubroker.server.transport.unix_sockets import read_process

    others = [client for client in clients if client.session != session]
    if not any(client.session == session and client.pid == os.getpid() for client in clients):
        return others
    return [
        client
        if client.process
        else msgspec.structs.replace(client, process=read_process(client.pid) if client.pid else None)
        for client in others
    ]


def client_name(client: ClientInfo) -> str:
    """Return what the process calls itself, or ``?``."""
    return (client.process and client.process.name) or "?"


def container(process: ProcessInfo | None) -> str:
    """Return the container or the unit of a process: ``docker 3f2a9c…``, ``vllm.service``; ``-`` if it has none."""
    if process is None:
        return "?"
    if process.cgroup is None:
        return "-"
    if found := _CONTAINER.findall(process.cgroup):
        runtime = next((runtime for mark, runtime in RUNTIMES.items() if mark in process.cgroup), "container")
        return f"{runtime} {found[-1][:SHORT_ID]}"
    return process.cgroup.rstrip("/").rpartition("/")[2] or "-"


def client_age(client: ClientInfo, now: float) -> str:
    """Return how long the process has run, or ``?``."""
    return since(now - client.process.started) if client.process else "?"


def _began(leases: Iterable[LeaseInfo]) -> float | None:
    """Return when the oldest of some leases began, in seconds since 1970; None if that is unknown."""
    return min((lease.held_since for lease in leases if lease.held_since is not None), default=None)


def held_for(leases: Iterable[LeaseInfo], number: int, now: float) -> str:
    """Return for how long the oldest lease is held, of ``number`` leases, some of which may not be known."""
    began = _began(leases)
    return since(now - began) if began is not None else "?" if number else "-"


def leases(client: ClientInfo) -> str:
    """Return the versions that a client holds, in words; nothing if it holds nothing."""
    pools = Counter(f"{lease.pool}@{lease.version}" for lease in client.leases)
    return ", ".join(pool if times == 1 else f"{pool} ({times} times)" for pool, times in pools.items())


def holders(pools: Iterable[PoolInfo], clients: Iterable[ClientInfo]) -> list[list[ClientInfo]]:
    """Return the clients that hold each of the versions ``pools``, in the order of ``clients``."""
    found: dict[tuple[str, int], dict[int, ClientInfo]] = defaultdict(dict)
    for client in clients:
        for lease in client.leases:
            found[lease.pool, lease.version][client.session] = client
    return [[*found[pool.name, pool.version].values()] for pool in pools]


def leases_on(pool: PoolInfo, clients: Iterable[ClientInfo]) -> list[LeaseInfo]:
    """Return the leases that clients have on a version."""
    version = pool.name, pool.version
    return [lease for client in clients for lease in client.leases if (lease.pool, lease.version) == version]


def client_short(client: ClientInfo) -> str:
    """Return a process in two words: ``vllm 4711``."""
    return f"{client_name(client)} {client.pid}"


def client_with_user(client: ClientInfo) -> str:
    """Return a process and its user: ``vllm 4711 (alice)``."""
    return f"{client_short(client)} ({user(client.uid)})"


def client_label(client: ClientInfo) -> str:
    """Return a process in words: ``vllm 4711 (alice, docker 3f2a9c5d1e07)``."""
    where = container(client.process)
    return f"{client_short(client)} ({user(client.uid)}{'' if where in '-?' else f', {where}'})"


CLIENT_SPARE = ("SESSION", "CONTAINER", "AGE", "LOCKS", "STATE", "HELD", "USER", "BEYOND LEASES")
"""The columns that a narrow terminal leaves out, in this order."""

CLIENT_ORDERS: dict[str, Callable[[ClientInfo], Any]] = {
    "session": lambda client: client.session,
    "pid": lambda client: client.pid,
    "process": client_name,
    "user": lambda client: user(client.uid),
    "container": lambda client: container(client.process),
    "age": lambda client: client.process.started if client.process else inf,
    "held": lambda client: inf if (began := _began(client.leases)) is None else began,
    "leases": lambda client: -len(client.leases),
}
"""The keys that clients are sorted by: the oldest, and those with most leases, come first."""


def client_columns(clients: Sequence[ClientInfo], now: float) -> dict[str, Callable[[ClientInfo], str]]:
    """Return the columns of a table of clients; locks, and memory beyond leases, have one if any client has some."""
    found: dict[str, Callable[[ClientInfo], str]] = {
        ">SESSION": lambda client: str(client.session),
        ">PID": lambda client: str(client.pid),
        "PROCESS": client_name,
        "USER": lambda client: user(client.uid),
        "CONTAINER": lambda client: container(client.process),
        ">AGE": lambda client: client_age(client, now),
        "STATE": lambda client: client.state,
        ">HELD": lambda client: held_for(client.leases, len(client.leases), now),
        "~LEASES": lambda client: leases(client) or "none",
    }
    if any(client.locks for client in clients):
        found |= {"~LOCKS": lambda client: ", ".join(client.locks) or "none"}
    if any(client.mapped_beyond_leases for client in clients):
        found |= {">BEYOND LEASES": _beyond}
    return found


def _beyond(client: ClientInfo) -> str:
    nbytes = client.mapped_beyond_leases
    return "?" if nbytes is None else size(nbytes)
