"""How the values of settings are written: in the file, as text elsewhere, and in a complaint."""

from __future__ import annotations

import grp
import json
import pwd
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any, NamedTuple

from cubroker.driver.load import check as check_devices
from cubroker.protocol.errors import Invalid
from cubroker.server.quantities import parse_budget, parse_bytes

UNLIMITED = "unlimited"
OFF = "off"
LARGEST = 1 << 62
"""Bytes of the device that a budget is tried on where no device is known."""


class Address(NamedTuple):
    """Where to listen on a network; port 0: one that the system chooses."""

    host: str
    port: int


def show(written: object) -> str:
    """Return a value as a file has it."""
    if isinstance(written, Mapping):
        return "{" + ", ".join(f"{json.dumps(key)} = {show(value)}" for key, value in written.items()) + "}"
    if isinstance(written, list):
        return "[" + ", ".join(map(show, written)) + "]"
    if isinstance(written, str | bool):
        return json.dumps(written, ensure_ascii=False)
    return str(written)


def show_mode(written: object) -> str:
    """Return a mode as people read it."""
    return f"0o{written:03o}" if isinstance(written, int) and not isinstance(written, bool) else show(written)


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


def _text(written: object) -> str:
    if not isinstance(written, str):
        raise ValueError
    return written


def _parse_number(text: str) -> int | str:
    return int(text) if re.fullmatch(r"-?\d{1,18}", text, re.ASCII) else text


def number(least: int, most: int) -> Kind:
    """Return the kind of whole numbers in a range."""

    def read(written: object) -> int:
        if type(written) is not int or not least <= written <= most:
            raise ValueError
        return written

    return Kind(f"write a whole number from {least} to {most}", read, _parse_number)


def _read_seconds(written: object) -> float:
    if type(written) not in (int, float) or not 0 <= written <= 86_400:  # type: ignore[operator]
        raise ValueError
    return float(written)  # type: ignore[arg-type]


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


COUNT = Kind('write 0 or more, or "unlimited"', _read_count, _parse_number)
BYTES = Kind('write bytes, as in 4096 or "40GiB", or "unlimited"', _read_bytes, _parse_number)


def mode(most: int) -> Kind:
    """Return the kind of modes that have no bit but those of ``most``."""

    def read(written: object) -> int:
        octal = isinstance(written, str) and re.fullmatch(r"(0o?)?[0-7]{3}", written, re.ASCII)
        meant = int(str(written), 8) if octal else written
        if type(meant) is not int or meant < 0 or meant & ~most:
            raise ValueError
        return meant

    return Kind(f'write it in octal, as in 0o640 or "640", up to 0o{most:03o}', read, show=show_mode)


def _identity(find: Callable[[str], int], what: str) -> Callable[[object], int]:
    def read(written: object) -> int:
        if type(written) is int and 0 <= written < 1 << 32:
            return written
        if not isinstance(written, str):
            raise ValueError
        try:
            return find(written)
        except (KeyError, ValueError):  # a name with a zero byte is a ValueError
            raise ValueError(f"this system has no such {what}; write a name that it has, or a number") from None

    return read


user = _identity(lambda name: pwd.getpwnam(name).pw_uid, "user")
"""Returns the uid that a name or a number stands for; raises ``ValueError``."""

_group = _identity(lambda name: grp.getgrnam(name).gr_gid, "group")


def _read_users(written: object) -> frozenset[int]:
    if not isinstance(written, list):
        raise ValueError
    return frozenset(map(user, written))


def _parse_users(text: str) -> list[int | str]:
    return [_parse_number(part.strip()) for part in text.split(",")]


GROUP = Kind("write the name or the number of a group", _group, _parse_number)
USERS = Kind('write a list of users, by name or number, as in ["root", 1000]', _read_users, _parse_users)


def _read_directory(written: object) -> Path:
    path = Path(_text(written))
    if not path.is_absolute():
        raise ValueError
    return path


def _parse_path(text: str) -> str:
    return str(Path(text).absolute())


DIRECTORY = Kind("write a path that begins with /", _read_directory, _parse_path)


def _read_devices(written: object) -> str:
    spec = _text(written)
    check_devices(spec)
    return spec


DEVICES = Kind('write "cuda", "cuda:0,1" or "host:2"', _read_devices)


def _read_budget(written: object) -> str | dict[str, str]:
    if isinstance(written, dict):
        return {name: _budget(value) for name, value in written.items()}
    return _budget(written)


def _budget(written: object) -> str:
    text = _text(written)
    try:
        parse_budget(text, LARGEST)
    except Invalid:
        raise ValueError from None
    return text


BUDGET = Kind('write a share or a size, as in "90%" or "40GiB", or a table of them by device', _read_budget)


def _read_listen(written: object) -> Address | Path | None:
    text = _text(written)
    if text == OFF:
        return None
    if text.startswith("unix:/"):
        return Path(text.removeprefix("unix:"))
    found = re.fullmatch(r"(\[?)([0-9A-Fa-f.:]+)(\]?):(\d{1,5})", text, re.ASCII)
    if found is None or bool(found[1]) != bool(found[3]) or int(found[4]) > 65_535:
        raise ValueError
    if bool(found[1]) != (":" in found[2]) or not _is_loopback(found[2]):
        raise ValueError
    return Address(found[2], int(found[4]))


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


LISTEN = Kind('write a loopback address and a port, as in "127.0.0.1:9464", or "unix:/PATH", or "off"', _read_listen)
