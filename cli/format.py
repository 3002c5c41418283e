"""Figures and lists in words, lines to the terminal, tables."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import zip_longest
from typing import TypeVar

import click
import msgspec

from cubroker.protocol.errors import CubrokerError, explain
from cubroker.protocol.status import ClientInfo

R = TypeVar("R")

BROKEN_PIPE = 141
"""Exit status when the reader of our output went away, as the shell reports a death by SIGPIPE."""

GAP = "  "
NARROWEST = 16
"""Characters that a folded column keeps, however narrow the terminal."""


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


def count(number: int, noun: str) -> str:
    """Return ``1 lease``, ``2 leases``."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


@cache
def user(uid: int) -> str:
    """Return the name of a user, or the number where there is none."""
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


@cache
def group(gid: int) -> str:
    """Return the name of a group, or the number where there is none."""
    import grp

    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


def leases(client: ClientInfo) -> str:
    """Return the versions that a client holds, in words; nothing if it holds nothing."""
    pools = Counter(f"{lease.pool}@{lease.version}" for lease in client.leases)
    return ", ".join(pool if times == 1 else f"{pool} ({times} times)" for pool, times in pools.items())


def place(indexes: Mapping[str, int], uuid: str) -> str:
    """Return a device's index, or ``gone``: a pool that was lost with its device still names it."""
    return str(indexes.get(uuid, "gone"))


def printable(value: str) -> str:
    """Escape characters that move the cursor or break a line; names of tensors come from files."""
    return value if value.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in value)


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


def document(value: object) -> None:
    """Print one JSON document, in ASCII: the same on every terminal."""
    say(json.dumps(msgspec.to_builtins(value), indent=2))


def print_table(rows: Iterable[R], columns: Mapping[str, Callable[[R], str]]) -> None:
    """Print a table with a line for each of ``rows``; only on a terminal is its width limited.

    Args:
        rows: what the lines are about.
        columns: the cell of a row under each title. ``>`` before a title aligns its cells to the right, as figures are;
            ``~`` folds them into several lines where the terminal is too narrow.
    """
    limit = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    cells = [[cell(row) for cell in columns.values()] for row in rows]
    header, *lines = render_table([*columns], cells, limit)
    say(click.style(header, bold=True))
    for line in lines:
        say(line)


def render_table(titles: Sequence[str], rows: Sequence[Sequence[str]], limit: int | None = None) -> Iterator[str]:
    """Yield the header and the lines of a table; ``limit`` is the width of the terminal."""
    cells = [[title.lstrip(">~") for title in titles], *([printable(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    excess = 0 if limit is None else max(0, sum(widths) + len(GAP) * (len(widths) - 1) - limit)
    widths = [
        max(width - excess, min(width, NARROWEST)) if title.startswith("~") else width
        for title, width in zip(titles, widths, strict=True)
    ]
    for row in cells:
        pieces = [
            [cell[start : start + width] for start in range(0, len(cell), width)]
            for cell, width in zip(row, widths, strict=True)
        ]
        for line in zip_longest(*pieces, fillvalue=""):
            aligned = (
                cell.rjust(width) if title.startswith(">") else cell.ljust(width)
                for title, cell, width in zip(titles, line, widths, strict=True)
            )
            yield GAP.join(aligned).rstrip()
