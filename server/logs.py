"""The log on standard error, and lines on standard output: the broker never waits for a reader of either.

It does not end either because the reader of a pipe is gone or a disk is full.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from queue import Full, Queue
from threading import Thread

from cubroker.server import forms

MAX_LINES = 4096
"""Lines that wait to be written; later ones are lost, and counted."""

FAREWELL = 1.0
"""Seconds that the last lines may take at the end."""


@contextmanager
def to_standard_error() -> Iterator[Callable[[str], None]]:
    """Log what is worth knowing to standard error, if there is one; yields what writes a plain line there.

    Until :func:`adjust` says otherwise it is in the form that suits where that leads, from ``info`` on.
    """
    _fill()
    if sys.__stderr__ is None:  # it was closed when this process began
        yield _nowhere
        return
    lines = Lines(sys.__stderr__.fileno())
    lines.setFormatter(forms.choose("auto", lines.descriptor))
    root = logging.getLogger()
    root.addHandler(lines)
    root.setLevel(logging.INFO)
    try:
        yield lines.say
    finally:
        root.removeHandler(lines)
        lines.close()


@contextmanager
def to_standard_output() -> Iterator[Callable[[str], None]]:
    """Yield what writes a plain line to standard output, if there is one, and never waits for a reader of it."""
    _fill()
    if sys.__stdout__ is None:  # it was closed when this process began
        yield _nowhere
        return
    lines = Lines(sys.__stdout__.fileno())
    try:
        yield lines.say
    finally:
        lines.close()


def adjust(form: str, level: str) -> None:
    """Log in another form, ``auto``, ``text``, ``json`` or ``journal``, from another level on."""
    root = logging.getLogger()
    root.setLevel(level.upper())
    for lines in root.handlers:
        if isinstance(lines, Lines):
            lines.setFormatter(forms.choose(form, lines.descriptor))


class Lines(logging.Handler):
    """Has lines written to a descriptor by a thread of its own, since writing to a pipe may block for ever."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self.descriptor = descriptor
        self._lines: Queue[str | None] = Queue(MAX_LINES)
        self._lost = 0
        self._told = 0
        # A daemon, and no buffered file beneath it, so that the interpreter can exit while it blocks.
        self._thread = Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Have a record written."""
        try:
            self.say(self.format(record))
        except Exception:  # noqa: BLE001  as every handler: logging must not fail
            self.handleError(record)

    def say(self, line: str) -> None:
        """Have a line written, unless too many wait for that already."""
        try:
            self._lines.put_nowait(line)
        except Full:
            self._lost += 1

    def close(self) -> None:
        """Wait a moment for the last lines."""
        with suppress(Full):
            self._lines.put(None, timeout=FAREWELL)
        self._thread.join(FAREWELL)
        super().close()

    def _run(self) -> None:
        while (line := self._lines.get()) is not None:
            self._write(line)
            if lost := self._lost - self._told:
                self._told += lost
                self._write(self.format(_loss(lost)))

    def _write(self, line: str) -> None:
        data = line.encode(errors="backslashreplace") + b"\n"
        with suppress(OSError):  # nobody reads any more
            while data:
                data = data[os.write(self.descriptor, data) :]


def _loss(lines: int) -> logging.LogRecord:
    message = "%d lines of the log were lost here: they were not read in time"
    return logging.LogRecord(__name__, logging.WARNING, __file__, 0, message, (lines,), None)


def _fill() -> None:
    """Open what is closed of standard input, output and error, or the next socket or lock would get its number."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


def _nowhere(line: str) -> None:
    """There is no such stream."""
