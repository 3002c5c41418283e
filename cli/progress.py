"""How far a long transfer is: a bar on a terminal, a plain line every few seconds elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

from cubroker.cli import text

EVERY = 5.0
"""Seconds between two plain lines."""

Report = Callable[[int, int], None]
"""Called with the bytes done and the bytes in all, from any thread."""


@contextmanager
def progress(title: str) -> Iterator[Report]:
    """Show on standard error how ``title`` goes on, until the block ends."""
    if sys.stderr.isatty():
        with _bar(title) as report:
            yield report
    else:
        text.note(title)
        yield Lines(title)


class Lines:
    """A line every few seconds, with the rate since the beginning."""

    def __init__(self, title: str, clock: Callable[[], float] = monotonic) -> None:
        self._title = title
        self._clock = clock
        self._start = self._said = clock()

    def __call__(self, done: int, total: int) -> None:
        """Say how far it is, if the last time was long enough ago and the end is not here yet."""
        now = self._clock()
        if now - self._said >= EVERY and done < total:
            self._said = now
            speed = text.rate(done, now - self._start)
            text.note(f"{self._title}: {text.size(done)} of {text.size(total)}, {speed}")


@contextmanager
def _bar(title: str) -> Iterator[Report]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
    from rich.table import Column
    from rich.text import Text

    class Terminal(Console):
        def show_cursor(self, show: bool = True) -> bool:  # never hidden: who is killed could not bring it back
            return False

    class Figures(ProgressColumn):
        def render(self, task: Task) -> Text:
            if task.total is None:  # it waits for its turn, or for room
                return Text()
            speed = text.size(task.speed or 0)
            return Text(f"{text.size(task.completed)} of {text.size(task.total)}  {speed}/s")

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), Figures(Column(no_wrap=True)))
    with Progress(*columns, console=Terminal(stderr=True), transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
