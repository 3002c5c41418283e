"""How the values of settings are written: in the file, as text elsewhere, and in a complaint."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cubroker.protocol.errors import Invalid
from cubroker.server.quantities import parse_bytes

UNLIMITED = "unlimited"


def show(written: object) -> str:
    """Return a value as a file has it."""
    if isinstance(written, Mapping):
        return "{" + ", ".join(f"{json.dumps(key)} = {show(value)}" for key, value in written.items()) + "}"
    if isinstance(written, list):
        return "[" + ", ".join(map(show, written)) + "]"
    if isinstance(written, str | bool):
        return json.dumps(written, ensure_ascii=False)
    return str(written)


@dataclass(frozen=True, slots=True)
class Kind:
    """One way to write a value.

    Attributes:
        allowed: what may be written, as advice to whoever wrote something else.
        read: returns what a value of the file means; raises ``ValueError``, with better advice if it has any.
        parse: returns the value of the file that a text stands for, in the environment or as an option.
        show: returns a value as a file has it.
    """

    allowed: str
    read: Callable[[object], Any]
    parse: Callable[[str], object] = str
    show: Callable[[object], str] = show


def parse_number(text: str) -> int | str:
    """Return a whole number, or the text itself if it is none."""
    return int(text) if re.fullmatch(r"-?\d{1,18}", text, re.ASCII) else text


def number(least: int, most: int) -> Kind:
    """Return the kind of whole numbers in a range."""

    def read(written: object) -> int:
        if type(written) is not int or not least <= written <= most:
            raise ValueError
        return written

    return Kind(f"write a whole number from {least} to {most}", read, parse_number)


def _read_seconds(written: object) -> float:
    if isinstance(written, bool) or not isinstance(written, int | float) or not 0 <= written <= 86_400:
        raise ValueError
    return float(written)


def _parse_seconds(text: str) -> float | str:
    return float(text) if re.fullmatch(r"\d{1,9}(\.\d{1,9})?", text, re.ASCII) else text


SECONDS = Kind("write seconds, from 0 to 86400", _read_seconds, _parse_seconds)


def choice(*names: str) -> Kind:
    """Return the kind that is one of these words."""

    def read(written: object) -> str:
        if written not in names:
            raise ValueError
        return str(written)

    return Kind(f"write {', '.join(map(show, names[:-1]))} or {show(names[-1])}", read)


def _read_boolean(written: object) -> bool:
    if not isinstance(written, bool):
        raise ValueError
    return written


def _parse_boolean(text: str) -> bool | str:
    return {"true": True, "false": False}.get(text, text)


BOOLEAN = Kind("write true or false", _read_boolean, _parse_boolean)


def _read_count(written: object) -> int | None:
    if written == UNLIMITED:
        return None
    if type(written) is not int or written < 0:
        raise ValueError
    return written


def _read_bytes(written: object) -> int | None:
    if isinstance(written, str) and written != UNLIMITED:
        try:
            return parse_bytes(written)
        except Invalid:
            raise ValueError from None
    return _read_count(written)


COUNT = Kind('write 0 or more, or "unlimited"', _read_count, parse_number)
BYTES = Kind('write bytes, as in 4096 or "40GiB", or "unlimited"', _read_bytes, parse_number)
