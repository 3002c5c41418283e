"""What a line of the log looks like: for a terminal, for the journal, or as JSON. One event is one line.

A message says all of it in words. The fields beside it say the same to programs: a logger is given them as
``extra``, by the names in :data:`FIELDS`.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from datetime import UTC, datetime

FIELDS = ("session", "pid", "uid", "request", "pool", "version", "code", "why")
"""Who did it, to what, and why it went so; a record has those that are known of its event."""

PRIORITIES = ((logging.CRITICAL, 2), (logging.ERROR, 3), (logging.WARNING, 4), (logging.INFO, 6))
"""What the journal calls the levels (sd-daemon(3)); below them is 7."""


class Text(logging.Formatter):
    """``2026-11-22 02:41:00,123 INFO serving on /run/cubroker``."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        return one_line(super().format(record))


class Journal(logging.Formatter):
    """``<6>serving on /run/cubroker``: the journal knows the time, and reads the level from the beginning."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        priority = next((number for level, number in PRIORITIES if record.levelno >= level), 7)
        return f"<{priority}>{one_line(super().format(record))}"


class Json(logging.Formatter):
    """One object: ``time`` (UTC), ``level``, ``message``, the fields that there are, and ``traceback``."""

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


FORMS: Mapping[str, type[logging.Formatter]] = {"text": Text, "json": Json, "journal": Journal}


def choose(form: str, descriptor: int) -> logging.Formatter:
    """Return the form of that name; ``auto`` is ``journal`` where ``descriptor`` leads there, else ``text``."""
    if form == "auto":
        form = "journal" if leads_to_journal(descriptor) else "text"
    return FORMS[form]()


def leads_to_journal(descriptor: int) -> bool:
    """Whether a descriptor is the stream that the service manager names in ``$JOURNAL_STREAM`` (systemd.exec(5))."""
    here = os.fstat(descriptor)
    return os.environ.get("JOURNAL_STREAM") == f"{here.st_dev}:{here.st_ino}"


def one_line(text: str) -> str:
    """Return a text in one line that does nothing to a terminal: parts of it are as others have worded them."""
    if text.isprintable():
        return text
    lines = " | ".join(filter(None, map(str.strip, text.splitlines())))
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in lines)
