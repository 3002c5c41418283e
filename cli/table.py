"""Tables: aligned columns, two spaces apart; at most one of them is folded where a terminal is too narrow."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import NamedTuple

import click

from cubroker.cli.text import printable, say

GAP = "  "
NARROWEST = 16
"""Characters that a folded column keeps, however narrow the terminal."""


class Column(NamedTuple):
    """One column. Figures go ``right``; the one that may ``fold`` takes several lines if it must."""

    title: str
    right: bool = False
    fold: bool = False


def show(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
    """Print a table, as wide as it wants to be where standard output is no terminal."""
    limit = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    header, *lines = render(columns, rows, limit)
    say(click.style(header, bold=True))
    for line in lines:
        say(line)


def render(columns: Sequence[Column], rows: Sequence[Sequence[str]], limit: int | None = None) -> Iterator[str]:
    """Yield the header and the lines of a table; ``limit`` is the width of the terminal."""
    cells = [[column.title for column in columns], *([printable(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    if limit is not None:
        widths = _fit(columns, widths, limit)
    for row in cells:
        pieces = [_split(cell, width) for cell, width in zip(row, widths, strict=True)]
        for line in zip_longest(*pieces, fillvalue=""):
            yield GAP.join(map(_pad, columns, line, widths)).rstrip()


def _fit(columns: Sequence[Column], widths: Sequence[int], limit: int) -> list[int]:
    excess = sum(widths) + len(GAP) * (len(widths) - 1) - limit
    return [
        max(width - excess, min(width, NARROWEST)) if column.fold and excess > 0 else width
        for column, width in zip(columns, widths, strict=True)
    ]


def _split(cell: str, width: int) -> list[str]:
    return [cell[start : start + width] for start in range(0, len(cell), width)] or [""]


def _pad(column: Column, cell: str, width: int) -> str:
    return cell.rjust(width) if column.right else cell.ljust(width)
