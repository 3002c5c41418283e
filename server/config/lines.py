"""On which line of a TOML document each key is, which its parser does not tell."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping

Place = tuple[str, ...]


def places(text: str) -> dict[Place, int]:
    """Return the first line of each key and table of a valid document, by its path.

    A header or an assignment that is complete is a document of its own; so lines are taken together until they are one.
    """
    found: dict[Place, int] = {}
    table: Place = ()
    gathered, first = "", 1
    for number, line in enumerate(text.split("\n"), 1):
        gathered += line + "\n"
        try:
            part = tomllib.loads(gathered)
        except tomllib.TOMLDecodeError:
            continue  # it goes on in the next line
        if gathered.lstrip().startswith("["):
            table = ()
            *_, header = _paths(part)
        for path in _paths(part):
            found.setdefault(table + path, first)
        if gathered.lstrip().startswith("["):
            table = header
        gathered, first = "", number + 1
    return found


def _paths(table: Mapping[str, object]) -> Iterator[Place]:
    for key, value in table.items():
        yield (key,)
        if isinstance(value, Mapping):
            yield from ((key, *path) for path in _paths(value))
