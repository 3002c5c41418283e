"""Samples that change daily, for tests that could try a thing at very many places.

``make test`` tries some of the places, others on every day, and ``make long`` all. The header of a run prints the seed;
the same seed in ``$CUBROKER_TEST_SEED`` tries the same places again.
"""

from __future__ import annotations

import os
import random
from collections import defaultdict
from collections.abc import Iterable
from datetime import date
from pathlib import Path
from typing import NamedTuple, TypeVar

T = TypeVar("T")

WHOLE = os.environ.get("CUBROKER_TEST_ALL", "0") != "0"
"""Whether every sweep is whole."""

# The processes of pytest-xdist inherit it: those that start after midnight take the sample of the others.
SEED = int(os.environ.setdefault("CUBROKER_TEST_SEED", str(date.today().toordinal())))


# `make test` sets it; who names tests on the command line wants them all.
SLOW_PART = 1 if WHOLE else max(1, int(os.environ.get("CUBROKER_TEST_SLOW_PART", "1")))
"""Every how many of the slow tests one is run today."""


def daily(items: Iterable[T], count: int, *, always: Iterable[T] = (), day: int = SEED) -> list[T]:
    """Return ``count`` of the items in their order, and those that a test ``always`` tries.

    Every item is in a sample at least once in as many successive days as there are samples in the items.
    """
    items = list(items)
    if WHOLE or count >= len(items):
        return items
    shuffled = random.Random(len(items)).sample(range(len(items)), len(items))
    chosen = {shuffled[(day * count + number) % len(items)] for number in range(count)}
    kept = list(always)
    return [item for number, item in enumerate(items) if number in chosen or item in kept]


class Collected(NamedTuple):
    """A test, as pytest has collected it."""

    name: str
    file: Path
    #: Whether it may be left out on some days.
    slow: bool


def left_out(tests: Iterable[Collected], *, part: int = SLOW_PART, day: int = SEED) -> set[str]:
    """Return the names of slow tests that are not today's.

    In each folder, one in ``part`` of the slow ones is today's. A file of which no test would be left keeps one: all
    that is tested at all is tested in a short form on every day.
    """
    folders: dict[Path, list[Collected]] = defaultdict(list)
    files: dict[Path, list[Collected]] = defaultdict(list)
    for test in tests:
        files[test.file].append(test)
        if test.slow:
            folders[test.file.parent].append(test)
    out: set[Collected] = set()
    for slow in folders.values():
        out |= set(slow) - set(daily(slow, -(-len(slow) // part), day=day))
    for those in files.values():
        if out.issuperset(those):
            out -= set(daily(those, 1, day=day))
    return {test.name for test in out}


def stride(step: int) -> tuple[int, int]:
    """Return the first of the places 1, 2, 3, ... of which every ``step``-th is tried today, and their distance.

    All are tried in ``step`` successive days.
    """
    return (1, 1) if WHOLE else (1 + SEED % step, step)
