"""The log on standard error, and lines on standard output: the broker never waits for a reader of either.

The broker survives the end of a pipe's reader, and a full disk. One event is one line: for a terminal, for systemd's
journal, or as JSON. The message says everything in words. Fields repeat it for programs: callers pass them to the
logger as ``extra``, by the names in :data:`FIELDS`.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from queue import Full, Queue
from threading import Thread
from typing import TextIO

MAX_LINES = 4096  #: Lines that may wait to be written; further ones are lost, and counted.
FAREWELL = 1.0  #: Seconds that the last lines may take at the end.

FIELDS = ("session", "pid", "uid", "request", "pool", "version", "code", "why")
"""The subject, the object and the reason of an event; a record has those that are known."""

PRIORITIES = ((logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6))
"""systemd's priorities of the levels (sd-daemon(3)); lower levels have 7."""


class LogWriter(logging.Handler):
    """A handler that writes lines to a descriptor in its own thread, since a write to a pipe may block for ever."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self.descriptor = descriptor
        self._lines: Queue[str | None] = Queue(MAX_LINES)
        self._lost = 0
        self._unwritten = 0
        self._reported = 0
        self._rest = b""
        # A daemon thread, which writes to no buffered file, so that the interpreter can exit while it blocks.
        self._thread = Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a record for the thread."""
        try:
            self.say(self.format(record))
        except Exception:  # noqa: BLE001  as every handler: logging must not fail
            self.handleError(record)

    def say(self, line: str) -> None:
        """Queue a line for the thread; it is lost if too many wait already."""
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
        # Lines that could not be written were before this one, those that found the queue full are after it.
        while (line := self._lines.get()) is not None:
            self._unwritten -= self._report(self._unwritten)
            self._unwritten += not self._write(line)
            self._reported += self._report(self._lost - self._reported)
        self._write_rest()
        self._report(self._unwritten)

    def _report(self, lost: int) -> int:
        """Write how many lines were lost, if any were; return how many are reported now."""
        lines, reason = ("line", "was lost here: it") if lost == 1 else ("lines", "were lost here: they")
        message = f"%d {lines} of the log {reason} could not be written"
        record = logging.LogRecord(__name__, logging.WARNING, __file__, 0, message, (lost,), None)
        return lost if lost and self._write(self.format(record)) else 0

    def _write(self, line: str) -> bool:
        """Write a line, after the rest of one that a full disk cut off; return whether it was begun."""
        self._write_rest()
        if self._rest:
            return False
        data = self._rest = line.encode(errors="backslashreplace") + b"\n"
        self._write_rest()
        if self._rest != data:
            return True
        self._rest = b""
        return False

    def _write_rest(self) -> None:
        with suppress(OSError):  # the reader is gone, or the disk is full
            while self._rest:
                self._rest = self._rest[os.write(self.descriptor, self._rest) :]


@contextmanager
def to_standard_error() -> Iterator[Callable[[str], None]]:
    """Log to standard error, if there is one; yield a function that writes a plain line there.

    Until :func:`adjust` changes it, the format is ``auto`` and the level ``info``.
    """
    with _writing(sys.__stderr__) as writer:
        if writer is None:
            yield _nowhere
            return
        writer.setFormatter(choose("auto", writer.descriptor))
        root = logging.getLogger()
        root.addHandler(writer)
        root.setLevel(logging.INFO)
        try:
            yield writer.say
        finally:
            root.removeHandler(writer)


@contextmanager
def to_standard_output() -> Iterator[Callable[[str], None]]:
    """Yield a function that writes a plain line to standard output, if there is one, and never waits for a reader."""
    with _writing(sys.__stdout__) as writer:
        yield _nowhere if writer is None else writer.say


@contextmanager
def _writing(stream: TextIO | None) -> Iterator[LogWriter | None]:
    """Yield a writer to a standard stream; None if that was closed when this process began."""
    # Open all of 0, 1 and 2, or the next socket or lock would get such a number.
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    writer = None if stream is None else LogWriter(stream.fileno())
    try:
        yield writer
    finally:
        if writer:
            writer.close()


def _nowhere(line: str) -> None:
    """Drop a line: the stream is closed."""


def adjust(form: str, level: str) -> None:
    """Change the format of the log (``auto``, ``text``, ``json`` or ``journal``) and its lowest level."""
    root = logging.getLogger()
    root.setLevel(level.upper())
    for writer in root.handlers:
        if isinstance(writer, LogWriter):
            writer.setFormatter(choose(form, writer.descriptor))


class TextFormatter(logging.Formatter):
    """``2026-11-22 02:41:00,123 INFO serving on /run/cubroker``."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        return one_line(super().format(record))


class JournalFormatter(logging.Formatter):
    """``<6>serving on /run/cubroker``: systemd's journal adds the time, and reads the level from the prefix."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        priority = next((number for level, number in PRIORITIES if record.levelno >= level), 7)
        return f"<{priority}>{one_line(super().format(record))}"


class JsonFormatter(logging.Formatter):
    """One object: ``time`` (UTC), ``level``, ``message``, the known fields, and ``traceback``."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
        }
        line |= {name: record.__dict__[name] for name in FIELDS if name in record.__dict__}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(line)


FORMATTERS: Mapping[str, type[logging.Formatter]] = {
    "text": TextFormatter,
    "json": JsonFormatter,
    "journal": JournalFormatter,
}


def choose(form: str, descriptor: int) -> logging.Formatter:
    """Return the formatter of a name; ``auto`` is ``journal`` if ``descriptor`` is systemd's journal, else ``text``."""
    if form == "auto":
        here, journal = os.fstat(descriptor), os.environ.get("JOURNAL_STREAM")  # systemd.exec(5)
        form = "journal" if journal == f"{here.st_dev}:{here.st_ino}" else "text"
    return FORMATTERS[form]()


def one_line(text: str) -> str:
    """Return a text in one line without control characters for a terminal: other users may have chosen parts of it."""
    if text.isprintable():
        return text
    return printable(" | ".join(filter(None, map(str.strip, text.splitlines()))))


def printable(text: str) -> str:
    """Return a text with its control characters escaped."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
