"""Reads the settings: an option overrides the environment, which overrides the file, which overrides the default.

:class:`ConfigSources` are the places to look; :class:`EffectiveConfig` is the result, with the origin of each value;
:class:`Current` is the configuration of a running broker, which can read it again. A refusal names the place, the key,
the value and what to write instead. All complaints are gathered before anything is started.
"""

from __future__ import annotations

import asyncio
import logging
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from cubroker.protocol.errors import CubrokerError, Invalid, explain
from cubroker.protocol.paths import default_directory
from cubroker.server.config import schema
from cubroker.server.config.schema import PERSONAL, SETTINGS, TABLES, Config, Setting

log = logging.getLogger(__name__)

DEFAULT = "default"  #: The origin of a value that is not set anywhere.
DIRECT = ("directory", "devices", "budget")  #: Settings with an option of their own; ``--set`` has the others.

Place = tuple[str, ...]  #: The path of a key or table in a document.


class InvalidConfig(Invalid):
    """A configuration is refused; ``complaints`` has everything that is wrong with it, a line each."""

    def __init__(self, complaints: list[str]) -> None:
        more = len(complaints) - 1
        rest = f" (and {more} more, which cubroker config check shows)" if more else ""
        super().__init__(complaints[0] + rest)
        self.complaints = complaints


class Value(NamedTuple):
    """The value of a setting."""

    #: The value as a file would write it.
    written: object
    meant: Any
    #: Where it was set.
    origin: str


@dataclass(frozen=True, slots=True)
class EffectiveConfig:
    """The values of all settings by key, and what they mean together."""

    values: Mapping[str, Value]
    config: Config

    @classmethod
    def of(cls, values: Mapping[str, Value]) -> EffectiveConfig:
        """Build a configuration from values; raises :class:`schema.Conflict`."""
        return cls(values, schema.build({key: value.meant for key, value in values.items()}))

    def adopt(self, newer: EffectiveConfig) -> EffectiveConfig:
        """Return this configuration with those settings of ``newer`` that can change while the broker runs."""
        live = {key: value for key, value in newer.values.items() if schema.get(key).live}
        fixed = {key: value for key, value in self.values.items() if not schema.get(key).live}
        return EffectiveConfig.of({**fixed, **live})

    def changes(self, newer: EffectiveConfig) -> Iterator[tuple[Setting, Value | None, Value | None]]:
        """Yield each setting whose meaning differs in ``newer``, with its value here and its value in ``newer``."""
        for key in {**self.values, **newer.values}:
            before, after = self.values.get(key), newer.values.get(key)
            if before is None or after is None or before.meant != after.meant:
                yield schema.get(key), before, after


@dataclass(frozen=True, slots=True)
class ConfigSources:
    """All places where settings are looked for."""

    #: A TOML file, if one is in use.
    file: Path | None = None
    #: What the command line sets, as text by key.
    options: Mapping[str, str] = field(default_factory=dict)
    #: Environment variables.
    environment: Mapping[str, str] = field(default_factory=dict)
    #: Files that the broker may have open, or places in its store if those are fewer.
    descriptors: int = 1024

    def read(self) -> EffectiveConfig:
        """Return the settings; blocks while the file is read and users are looked up.

        Raises ``InvalidConfig`` if a value or a key is refused, or the file cannot be read.
        """
        reading = _Reading()
        if self.file is not None:
            reading.take_file(self.file)
        for setting in SETTINGS.values():
            if text := self.environment.get(setting.variable):
                reading.take(setting, setting.kind.parse(text), f"${setting.variable}")
        for key, text in self.options.items():
            setting = schema.get(key)
            reading.take(setting, setting.kind.parse(text), f"--{key}" if key in DIRECT else f"--set {key}")
        if not reading.complaints:
            reading.take_defaults(str(default_directory(self.environment)), self.descriptors)
        return reading.result()


class _Reading:
    """Gathers values and complaints. A later value of a setting replaces an earlier one."""

    def __init__(self) -> None:
        self.complaints: list[str] = []
        self._values: dict[str, Value] = {}

    def take(self, setting: Setting, written: object, origin: str) -> None:
        try:
            self._values[setting.key] = Value(written, setting.read(written), origin)
        except ValueError as error:
            self.complaints.append(f"{origin}: {error}")

    def take_file(self, path: Path) -> None:
        try:
            text = path.read_bytes().decode()
            document = tomllib.loads(text)
        except OSError as error:
            self.complaints.append(f"cannot read the configuration {path}: {explain(error, path)}")
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            self.complaints.append(f"{path} is no TOML: {error}")
        else:
            numbers = line_numbers(text)
            self._take_table((), document, {place: f"{path}:{number}" for place, number in numbers.items()})

    def _take_table(self, place: Place, table: Mapping[str, object], origins: Mapping[Place, str]) -> None:
        for name, written in table.items():
            here = (*place, name)
            key, origin = ".".join(here), origins[here]
            if setting := schema.find(key):
                self.take(setting, written, origin)
            elif not (key in TABLES or (place == (PERSONAL,))):
                self.complaints.append(f"{origin}: there is no setting {key}; {schema.nearest(key)}")
            elif isinstance(written, Mapping):
                self._take_table(here, written, origins)
            else:
                advice = f"write a table, [{key}]"
                self.complaints.append(f"{origin}: {schema.refusal(key, schema.show(written), advice)}")

    def take_defaults(self, directory: str, descriptors: int) -> None:
        derived = schema.derive({key: value.meant for key, value in self._values.items()}, descriptors)
        for key, setting in SETTINGS.items():
            written = directory if key == "directory" else derived.get(key, setting.default)
            if key not in self._values and written is not None:
                self.take(setting, written, DEFAULT)

    def result(self) -> EffectiveConfig:
        """Return what was gathered, in the order of the settings; raises ``InvalidConfig``."""
        if not self.complaints:
            try:
                ordered = dict.fromkeys((*SETTINGS, *self._values))
                return EffectiveConfig.of({key: self._values[key] for key in ordered if key in self._values})
            except schema.Conflict as error:
                key, reason = error.args
                self.complaints.append(f"{self._values[key].origin}: {key}: {reason}")
        raise InvalidConfig(self.complaints)


def line_numbers(text: str) -> dict[Place, int]:
    """Return the number of the first line of each key and table of a valid document, which ``tomllib`` does not report.

    A complete header or assignment is a valid document of its own, so lines are joined until they can be parsed.
    """
    found: dict[Place, int] = {}
    table: Place = ()
    gathered, first = "", 1
    for number, line in enumerate(text.split("\n"), 1):
        gathered += line + "\n"
        try:
            part = tomllib.loads(gathered)
        except tomllib.TOMLDecodeError:
            continue  # the statement continues on the next line
        paths = list(_paths(part))
        is_header = gathered.lstrip().startswith("[")
        for path in paths:
            found.setdefault(path if is_header else table + path, first)
        if is_header:
            table = paths[-1]
        gathered, first = "", number + 1
    return found


def _paths(table: Mapping[str, object]) -> Iterator[Place]:
    for key, value in table.items():
        yield (key,)
        if isinstance(value, Mapping):
            yield from ((key, *path) for path in _paths(value))


class Current:
    """The configuration in force; raises ``InvalidConfig`` if it is invalid. :meth:`reload` reads it again."""

    def __init__(self, sources: ConfigSources) -> None:
        self.sources = sources
        self.effective = sources.read()

    @property
    def config(self) -> Config:
        """What all settings mean together."""
        return self.effective.config

    async def reload(self, apply: Callable[[Config], None]) -> None:
        """Read the configuration again, and call ``apply`` to put in force what can change while the broker runs.

        If the configuration is invalid, or ``apply`` refuses it, nothing changes, and the log says why.
        """
        try:
            newer, adopted = await asyncio.to_thread(self._read)
            apply(adopted.config)
        except CubrokerError as error:
            log.error("the configuration cannot be read again, so nothing has changed: %s", error.message)
            return
        changes = list(self.effective.changes(newer))
        for setting, *values in changes:
            was, now = (
                "not set" if value is None else f"{setting.kind.show(value.written)} ({value.origin})"
                for value in values
            )
            if setting.live:
                log.info("%s is now %s; it was %s", setting.key, now, was)
            else:
                log.warning("%s would be %s, which needs a restart; until then it stays %s", setting.key, now, was)
        count = {0: "no change", 1: "1 setting differs"}.get(len(changes), f"{len(changes)} settings differ")
        log.info("the configuration was read again: %s", count)
        self.effective = adopted

    def _read(self) -> tuple[EffectiveConfig, EffectiveConfig]:
        """Return the configuration of the sources, and the one to put in force; blocks while users are looked up."""
        newer = self.sources.read()
        return newer, self.effective.adopt(newer)
