"""Kinds of values that stand for something of this system: modes, users, paths, devices and addresses."""

from __future__ import annotations

import grp
import pwd
import re
import tomllib
from collections.abc import Callable
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple

from cubroker.driver.load import check as check_devices
from cubroker.protocol.errors import Invalid
from cubroker.server.config.values import Kind, parse_number, show
from cubroker.server.ledger.policy import Reservation
from cubroker.server.quantities import parse_budget

OFF = "off"
LARGEST = 1 << 62
"""Bytes of the device that a budget is tried on where no device is known."""


class Address(NamedTuple):
    """Where to listen on a network; port 0: one that the system chooses."""

    host: str
    port: int


def show_mode(written: object) -> str:
    """Return a mode as people read it."""
    return f"0o{written:03o}" if isinstance(written, int) and not isinstance(written, bool) else show(written)


def _text(written: object) -> str:
    if not isinstance(written, str):
        raise ValueError
    return written


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
    return [parse_number(part.strip()) for part in text.split(",")]


GROUP = Kind("write the name or the number of a group", _group, parse_number)
USERS = Kind('write a list of users, by name or number, as in ["root", 1000]', _read_users, _parse_users)


def _read_path(written: object) -> Path:
    path = Path(_text(written))
    if not path.is_absolute():
        raise ValueError
    return path


def _parse_path(text: str) -> str:
    return str(Path(text).absolute())


def _read_names(written: object) -> dict[str, Reservation]:
    if not isinstance(written, dict) or not all(written):
        raise ValueError
    return {prefix: _reservation(table) for prefix, table in written.items()}


def _reservation(table: object) -> Reservation:
    if not isinstance(table, dict) or not table.keys() <= {"users", "groups"}:
        raise ValueError
    users, groups = table.get("users", []), table.get("groups", [])
    if not isinstance(groups, list):
        raise ValueError
    return Reservation(_read_users(users), frozenset(map(_group, groups)))


def _parse_table(text: str) -> object:
    try:
        return tomllib.loads(f"it = {text}").get("it")
    except tomllib.TOMLDecodeError:
        return text


NAMES = Kind(
    'write a table of users and groups by prefix, as in {"llm/" = {users = ["svc"], groups = ["ml"]}}',
    _read_names,
    _parse_table,
)


PATH = Kind("write a path that begins with /", _read_path, _parse_path)


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
