"""The configuration file of a broker: TOML, checked key by key before anything is started.

Every setting and its default is in ``docs/configuration.md``. What is wrong is told with the file, the
key, the value and what would be right.
"""

from __future__ import annotations

import grp
import pwd
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import msgspec

from cubroker.protocol.errors import Invalid
from cubroker.server.policy import MAX_KEEP, MODE, Policy, Quota
from cubroker.server.quantities import parse_bytes
from cubroker.server.records import SESSION

DEFAULT_DEVICES = "cuda"
DEFAULT_BUDGET = "90%"
PRIVATE, SHARED = 0o600, 0o660
"""The mode of the sockets: for the broker's own user (and root), and with a group."""

UNLIMITED = "unlimited"
OTHERS = "default"
"""What the budget of all other devices is called."""

Budgets = str | Mapping[str, str]
"""What the broker may use of its devices: of each, or by index or UUID, ``default`` being that of the others."""


@dataclass(frozen=True, slots=True)
class Access:
    """Who may connect: the mode of the sockets, and the group that they belong to (None: the broker's own)."""

    mode: int = PRIVATE
    group: int | None = None


@dataclass(frozen=True, slots=True)
class Config:
    """Everything that can be set; ``directory`` is None if the file does not say."""

    directory: Path | None = None
    devices: str = DEFAULT_DEVICES
    budget: Budgets = DEFAULT_BUDGET
    access: Access = Access()
    policy: Policy = field(default_factory=Policy)


# -- the file as it is written ---------------------------------------------------------------------


class _Table(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the file."""


class _Sockets(_Table, frozen=True):
    mode: int | str | None = None
    group: int | str | None = None


class _Quota(_Table, frozen=True):
    memory: int | str | None = None
    sessions: int | str | None = None
    leases: int | str | None = None
    requests: int | str | None = None
    watches: int | str | None = None
    events: int | str | None = None
    layouts: int | str | None = None
    descriptors: int | str | None = None


class _File(_Table, frozen=True):
    directory: str | None = None
    devices: str = DEFAULT_DEVICES
    budget: str | dict[str, str] = DEFAULT_BUDGET
    keep: int = 0
    mode: int | str = MODE
    admins: tuple[int | str, ...] = ()
    sockets: _Sockets = _Sockets()
    quota: _Quota = _Quota()
    quotas: dict[str, _Quota] = {}


TABLES: Mapping[str, type[_Table]] = {"": _File, "sockets": _Sockets, "quota": _Quota, "quotas.*": _Quota}
"""The tables of the file, by their place in it."""

DEFAULT_QUOTA = Quota(leases=1_000_000, requests=65_536, watches=65_536, events=65_536, layouts=1 << 30)
"""Bounds on what one user may cost the broker's own memory; others depend on the limit of open files."""


def read(path: Path, descriptors: int) -> Config:
    """Read a configuration file.

    Args:
        path: the file.
        descriptors: files that the broker may have open; by default a user may take half of them.

    Raises:
        Invalid: it cannot be read, is no TOML, or says what makes no sense.
    """
    try:
        document = tomllib.loads(path.read_text())
    except OSError as error:
        raise Invalid(f"cannot read the configuration {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise Invalid(f"{path} is no TOML: {error}") from None
    return _Reader(path, document).config(descriptors)


def default(descriptors: int) -> Config:
    """Return what holds without a file."""
    return Config(policy=Policy(quota=_default_quota(descriptors)))


def _default_quota(descriptors: int) -> Quota:
    most = max(SESSION, descriptors // 2)
    return replace(DEFAULT_QUOTA, sessions=most // SESSION, descriptors=most)


class _Reader:
    """Turns a parsed file into a configuration; every complaint names the file and the key."""

    def __init__(self, path: Path, document: dict[str, object]) -> None:
        self._path = path
        self._document = document

    def config(self, descriptors: int) -> Config:
        self._check_keys("", self._document)
        for place, shape in (("quotas", _Quota), ("budget", str)):
            table = self._document.get(place)
            for key, value in table.items() if isinstance(table, dict) else ():
                self._convert(value, shape, f"{place}.{key}")
        file: _File = self._convert(self._document, _File, "")
        return Config(
            directory=self._directory(file.directory),
            devices=file.devices,
            budget=file.budget,
            access=self._access(file.sockets),
            policy=self._policy(file, _default_quota(descriptors)),
        )

    def _wrong(self, key: str, value: object, allowed: str) -> Invalid:
        return Invalid(f"{self._path}: {key} is {value!r}; {allowed}")

    def _check_keys(self, place: str, table: Mapping[str, object]) -> None:
        """Complain of a key that there is not, and say which is near."""
        known = TABLES["quotas.*" if place.startswith("quotas.") else place].__struct_fields__
        for key, value in table.items():
            whole = f"{place}.{key}" if place else key
            if key not in known:
                near = get_close_matches(key, known, 1)
                hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
                raise Invalid(f"{self._path}: there is no setting {whole}; {hint}")
            if isinstance(value, dict) and whole in TABLES:
                self._check_keys(whole, value)
            elif isinstance(value, dict) and whole == "quotas":
                for user, quota in value.items():
                    if isinstance(quota, dict):
                        self._check_keys(f"quotas.{user}", quota)

    def _convert(self, value: object, shape: object, place: str) -> Any:
        """Return a part of the file as a ``shape``."""
        try:
            return msgspec.convert(value, shape, strict=True)
        except msgspec.ValidationError as error:
            what, _, path = str(error).partition(" - at `$")
            path = path.rstrip("`")
            for part in re.findall(r"[^.\[\]]+", path):
                value = (
                    value[part] if isinstance(value, dict) else value[int(part)] if isinstance(value, list) else value
                )
            raise self._wrong((place + path).lstrip("."), value, what[:1].lower() + what[1:]) from None

    def _directory(self, directory: str | None) -> Path | None:
        if directory is not None and not Path(directory).is_absolute():
            raise self._wrong("directory", directory, "write a path that begins with /")
        return None if directory is None else Path(directory)

    def _access(self, sockets: _Sockets) -> Access:
        group = None if sockets.group is None else self._identity("sockets.group", sockets.group, _gid, "group")
        usual = PRIVATE if group is None else SHARED
        mode = usual if sockets.mode is None else self._mode("sockets.mode", sockets.mode, 0o666)
        return Access(mode, group)

    def _policy(self, file: _File, usual: Quota) -> Policy:
        if not 0 <= file.keep <= MAX_KEEP:
            raise self._wrong("keep", file.keep, f"it can be 0 to {MAX_KEEP}")
        quota = self._quota("quota", file.quota, usual)
        return Policy(
            keep=file.keep,
            mode=self._mode("mode", file.mode, 0o777),
            admins=frozenset(self._identity("admins", admin, _uid, "user") for admin in file.admins),
            quota=quota,
            quotas=self._quotas(file, quota),
        )

    def _quotas(self, file: _File, usual: Quota) -> dict[int, Quota]:
        found: dict[int, Quota] = {}
        for name, table in file.quotas.items():
            key = f"quotas.{name}"
            uid = self._identity(key, int(name) if name.isdecimal() else name, _uid, "user")
            if uid in found:
                raise Invalid(f"{self._path}: {key} is user {uid}, who has a quota here already; leave one out")
            found[uid] = self._quota(key, table, usual)
        return found

    def _quota(self, key: str, table: _Quota, usual: Quota) -> Quota:
        return Quota(
            memory=self._bytes(f"{key}.memory", table.memory, usual.memory),
            sessions=self._count(f"{key}.sessions", table.sessions, usual.sessions),
            leases=self._count(f"{key}.leases", table.leases, usual.leases),
            requests=self._count(f"{key}.requests", table.requests, usual.requests),
            watches=self._count(f"{key}.watches", table.watches, usual.watches),
            events=self._count(f"{key}.events", table.events, usual.events),
            layouts=self._bytes(f"{key}.layouts", table.layouts, usual.layouts),
            descriptors=self._count(f"{key}.descriptors", table.descriptors, usual.descriptors),
        )

    def _bytes(self, key: str, value: int | str | None, usual: int | None) -> int | None:
        if isinstance(value, str) and value != UNLIMITED:
            try:
                return parse_bytes(value)
            except Invalid:
                allowed = 'write bytes, as in 4096 or "40GiB", or "unlimited"'
                raise self._wrong(key, value, allowed) from None
        return self._count(key, value, usual)

    def _count(self, key: str, value: int | str | None, usual: int | None) -> int | None:
        if value is None or value == UNLIMITED:
            return usual if value is None else None
        if isinstance(value, str) or value < 0:
            raise self._wrong(key, value, 'write 0 or more, or "unlimited"')
        return value

    def _mode(self, key: str, value: int | str, most: int) -> int:
        octal = isinstance(value, str) and re.fullmatch(r"0?[0-7]{3}", value, re.ASCII)
        mode = int(str(value), 8) if octal else value
        if not isinstance(mode, int) or not 0 <= mode <= most or mode & ~most:
            raise self._wrong(key, value, f'write it in octal, as in 0o640 or "640", up to 0o{most:03o}')
        return mode

    def _identity(self, key: str, value: int | str, find: Callable[[str], int], what: str) -> int:
        if isinstance(value, int):
            if 0 <= value < 1 << 32:
                return value
            raise self._wrong(key, value, f"write the name or the number of a {what}")
        try:
            return find(value)
        except KeyError:
            raise self._wrong(
                key, value, f"this system has no such {what}; write a name that it has, or a number"
            ) from None


def _uid(name: str) -> int:
    return pwd.getpwnam(name).pw_uid


def _gid(name: str) -> int:
    return grp.getgrnam(name).gr_gid
