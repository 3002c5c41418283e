from __future__ import annotations

import json
import logging
import os
from datetime import datetime
from pathlib import Path

import pytest

from cubroker.server import logs
from cubroker.server.logs import LogWriter
from cubroker.server.transport.unix_sockets import RejectionLog


def record(message: str, level: int = logging.INFO, **fields: object) -> logging.LogRecord:
    made = logging.LogRecord("cubroker", level, __file__, 1, message, (), None)
    made.__dict__ |= fields
    return made


def failure() -> logging.LogRecord:
    try:
        raise ValueError("two\nlines")
    except ValueError as error:
        made = record("it failed", logging.ERROR)
        made.exc_info = (type(error), error, error.__traceback__)
        return made


@pytest.mark.parametrize("form", logs.FORMATTERS)
def test_an_event_is_one_line_in_every_form_whatever_was_named_how_and_failed(form: str) -> None:
    formatter = logs.choose(form, 0)
    for made in (failure(), record("pool \x1b[2J\nINFO a line of its own")):
        line = formatter.format(made)
        assert line.isprintable()
        assert ("ValueError: two" in line) == (made.exc_info is not None)


def test_text_begins_with_the_time_and_the_level() -> None:
    line = logs.choose("text", 0).format(record("serving", logging.WARNING))
    day, time, rest = line.split(" ", 2)
    assert datetime.fromisoformat(f"{day}T{time}")
    assert rest == "WARNING serving"


def test_json_has_the_fields_that_are_known_and_the_traceback_for_itself() -> None:
    line = json.loads(logs.choose("json", 0).format(record("no", session=5, uid=0, why="", other="x")))
    assert datetime.fromisoformat(line.pop("time")).utcoffset() is not None
    assert line == {"level": "info", "message": "no", "session": 5, "uid": 0, "why": ""}
    assert json.loads(logs.choose("json", 0).format(failure()))["traceback"].endswith("two\nlines")


@pytest.mark.parametrize(
    ("level", "priority"),
    [
        (logging.CRITICAL, 2),
        (logging.ERROR, 3),
        (logging.WARNING, 4),
        (logging.INFO, 6),
        (logging.DEBUG, 7),
    ],
)
def test_the_journal_is_told_the_level_and_keeps_the_time_itself(level: int, priority: int) -> None:
    assert logs.choose("journal", 0).format(record("serving", level)) == f"<{priority}>serving"


def test_the_journal_is_known_by_the_stream_that_the_service_manager_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "log").open("wb") as file:
        here = os.fstat(file.fileno())
        for stream, form in (
            (f"{here.st_dev}:{here.st_ino}", logs.JournalFormatter),
            (f"{here.st_dev}:{here.st_ino + 1}", logs.TextFormatter),
        ):
            monkeypatch.setenv("JOURNAL_STREAM", stream)
            assert isinstance(logs.choose("auto", file.fileno()), form)


def test_form_and_level_can_be_changed_while_it_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    lines, root = LogWriter(write), logging.getLogger()
    monkeypatch.setattr(root, "handlers", [*root.handlers, lines])
    level = root.level
    try:
        logs.adjust("json", "warning")
        logging.info("not worth it")
        RejectionLog().log(4711, 1001, "user 1001 may not attach to a")
    finally:
        root.setLevel(level)
        lines.close()
        os.close(write)
    with os.fdopen(read) as written:
        (line,) = map(json.loads, written)
    assert line | {"time": ""} == {
        "time": "",
        "level": "warning",
        "message": "process 4711 (user 1001) was refused: user 1001 may not attach to a",
        "pid": 4711,
        "uid": 1001,
        "why": "user 1001 may not attach to a",
    }
