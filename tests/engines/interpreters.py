"""What interpreters of engines have: they may be others than that of the tests."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import util
from pathlib import Path
from subprocess import PIPE, run

FIND = """
import sys
from importlib.util import find_spec
found = find_spec(sys.argv[1])
print(*(found.submodule_search_locations if found else ()), sep="\\n")
"""


def package(python: str, name: str) -> Path | None:
    """Return the folder of a package of an interpreter, or None if that has none."""
    places: Sequence[str]
    if python == sys.executable:  # without another one, whenever tests are collected
        found = util.find_spec(name)
        places = list(found.submodule_search_locations or ()) if found else []
    else:
        done = run([python, "-c", FIND, name], check=False, stdout=PIPE, text=True)
        places = [line for line in done.stdout.splitlines() if line]
    return Path(places[0]) if places else None
