"""How figures read, and how lines reach the terminal."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import cache

import click

from cubroker.protocol.errors import CubrokerError
from cubroker.protocol.system_errors import explain

BROKEN_PIPE = 141
"""Exit status when the reader of our output went away, as the shell reports a death by SIGPIPE."""


def size(nbytes: float) -> str:
    """Return bytes as people read them: ``512 B``, ``86.7 MiB``, ``126.9 GiB``."""
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


def place(indexes: Mapping[str, int], uuid: str) -> str:
    """Return a device's index, or that it is gone: a pool that was lost with it still names it."""
    return str(indexes.get(uuid, "gone"))


def printable(value: str) -> str:
    """Escape what would move the cursor or break a line; tensors are named by whoever wrote the file."""
    return value if value.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in value)


def say(line: str) -> None:
    """Write a line to standard output; a reader that went away ends the command quietly."""
    try:
        click.echo(line, color=False if _plain() else None)
    except BrokenPipeError:
        # The interpreter flushes once more at exit; that must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise click.exceptions.Exit(BROKEN_PIPE) from None
    except OSError as error:
        raise CubrokerError(f"cannot write the output: {explain(error)}") from None


def _plain() -> bool:
    """Whether the terminal has no styles, or its user wants none (https://no-color.org)."""
    return bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"


def note(line: str) -> None:
    """Write a line to standard error: what goes on, apart from the result. That nobody can read it stops nothing."""
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
    """Print one JSON document, in ASCII: it is the same whatever the terminal can show."""
    say(json.dumps(value, indent=2))
