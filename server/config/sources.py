"""Where settings come from: options before the environment, that before the file, and that before the defaults."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from cubroker.protocol.directory import default_directory
from cubroker.protocol.errors import Invalid
from cubroker.protocol.system_errors import explain
from cubroker.server.config import lines, settings, values
from cubroker.server.config.lines import Place
from cubroker.server.config.settings import PERSONAL, SETTINGS, TABLES, Config, Setting

DEFAULT = "default"
"""The origin of what nobody set."""

DIRECT = ("directory", "devices", "budget")
"""Settings with an option of their own; ``--set`` has the others."""

LONGEST = 80
"""Characters of a value in a complaint."""


class Wrong(Invalid):
    """A configuration makes no sense; ``complaints`` has everything that is wrong with it, a line each."""

    def __init__(self, complaints: list[str]) -> None:
        more = len(complaints) - 1
        rest = f" (and {more} more, which cubroker config check shows)" if more else ""
        super().__init__(complaints[0] + rest)
        self.complaints = complaints


class Value(NamedTuple):
    """A setting's value as a file would have it, what it means, and where it was set."""

    written: object
    meant: Any
    origin: str


@dataclass(frozen=True, slots=True)
class Effective:
    """The values of all settings by key, and what they mean together."""

    values: Mapping[str, Value]
    config: Config

    def adopt(self, newer: Effective) -> Effective:
        """Return this with all of ``newer`` that a broker takes while it runs."""
        live = {key: value for key, value in newer.values.items() if settings.get(key).live}
        fixed = {key: value for key, value in self.values.items() if not settings.get(key).live}
        return _effective({**fixed, **live})

    def changes(self, newer: Effective) -> Iterator[tuple[Setting, Value | None, Value | None]]:
        """Yield each setting that means something else in ``newer``, with its value here and there."""
        for key in {**self.values, **newer.values}:
            before, after = self.values.get(key), newer.values.get(key)
            if before is None or after is None or before.meant != after.meant:
                yield settings.get(key), before, after


@dataclass(frozen=True, slots=True)
class Sources:
    """All places where settings are looked for.

    Attributes:
        file: a TOML file, if one is in use.
        options: what the command line sets, as text by key.
        environment: environment variables.
        descriptors: files that the broker may have open, or its store keeps, if those are fewer; by default a user may
            take half of them.
    """

    file: Path | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    descriptors: int = 1024

    def read(self) -> Effective:
        """Return what holds now; blocks while the file is read and users are looked up.

        Raises:
            Wrong: something makes no sense, or the file cannot be read.
        """
        reading = _Reading()
        if self.file is not None:
            reading.take_file(self.file)
        for setting in SETTINGS.values():
            if text := self.environment.get(setting.variable):
                reading.take_text(setting.key, text, f"${setting.variable}")
        for key, text in self.options.items():
            reading.take_text(key, text, f"--{key}" if key in DIRECT else f"--set {key}")
        if not reading.complaints:
            reading.take_defaults(str(default_directory(self.environment)), self.descriptors)
        return reading.result()


class _Reading:
    """Gathers values, later ones before earlier ones, and everything that is wrong with any of them."""

    def __init__(self) -> None:
        self.complaints: list[str] = []
        self._values: dict[str, Value] = {}

    def take_file(self, path: Path) -> None:
        try:
            text = path.read_bytes().decode()
            document = tomllib.loads(text)
        except OSError as error:
            self.complaints.append(f"cannot read the configuration {path}: {explain(error, path)}")
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            self.complaints.append(f"{path} is no TOML: {error}")
        else:
            self._path, self._lines = path, lines.places(text)
            self._take_table((), document)

    def _take_table(self, place: Place, table: Mapping[str, object]) -> None:
        for name, written in table.items():
            here = (*place, name)
            key, origin = ".".join(here), f"{self._path}:{self._lines[here]}"
            if settings.find(key):
                self._take(key, written, origin)
            elif not (key in TABLES or (place == (PERSONAL,))):
                self.complaints.append(f"{origin}: there is no setting {key}; {settings.nearest(key)}")
            elif isinstance(written, Mapping):
                self._take_table(here, written)
            else:
                self._complain(origin, key, values.show(written), f"write a table, [{key}]")

    def take_text(self, key: str, text: str, origin: str) -> None:
        self._take(key, settings.get(key).kind.parse(text), origin)

    def _take(self, key: str, written: object, origin: str) -> None:
        kind = settings.get(key).kind
        try:
            self._values[key] = Value(written, kind.read(written), origin)
        except ValueError as error:
            self._complain(origin, key, kind.show(written), str(error) or kind.allowed)

    def _complain(self, origin: str, key: str, shown: str, advice: str) -> None:
        shown = shown if len(shown) <= LONGEST else f"{shown[:LONGEST]}…"
        self.complaints.append(f"{origin}: {key} is {shown}; {advice}")

    def take_defaults(self, directory: str, descriptors: int) -> None:
        derived = settings.derive({key: value.meant for key, value in self._values.items()}, descriptors)
        for key, setting in SETTINGS.items():
            written = directory if key == "directory" else derived.get(key, setting.default)
            if key not in self._values and written is not None:
                self._take(key, written, DEFAULT)

    def result(self) -> Effective:
        """Return what was gathered; raises ``Wrong``."""
        if not self.complaints:
            try:
                return _effective({key: self._values[key] for key in [*SETTINGS, *self._values] if key in self._values})
            except settings.Unfit as error:
                key, reason = error.args
                self.complaints.append(f"{self._values[key].origin}: {key}: {reason}")
        raise Wrong(self.complaints)


def _effective(found: Mapping[str, Value]) -> Effective:
    return Effective(found, settings.config({key: value.meant for key, value in found.items()}))
