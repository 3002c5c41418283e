"""Samples that change daily, for tests that could try a thing at very many places.

``make test`` tries some of the places, others on every day, and ``make long`` all. The header of a run prints the seed;
the same seed in ``$CUBROKER_TEST_SEED`` tries the same places again.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterable
from datetime import date
from typing import TypeVar

T = TypeVar("T")

WHOLE = os.environ.get("CUBROKER_TEST_ALL", "0") != "0"
"""Whether every sweep is whole."""

# The processes of pytest-xdist inherit it: those that start after midnight take the sample of the others.
SEED = int(os.environ.setdefault("CUBROKER_TEST_SEED", str(date.today().toordinal())))


# `make test` sets it; who names tests on the command line wants them all.
SLOW_PART = 1 if WHOLE else max(1, int(os.environ.get("CUBROKER_TEST_SLOW_PART", "1")))
"""Every how many of the slow tests one is run today."""


def daily(items: Iterable[T], count: int, *, always: Iterable[T] = ()) -> list[T]:
    """Return ``count`` of the items in their order, and those that a test ``always`` tries.

    Every item is in a sample at least once in as many successive days as there are samples in the items.
    """
    items = list(items)
    if WHOLE or count >= len(items):
        return items
    shuffled = random.Random(len(items)).sample(range(len(items)), len(items))
    chosen = {shuffled[(SEED * count + number) % len(items)] for number in range(count)}
    kept = list(always)
    return [item for number, item in enumerate(items) if number in chosen or item in kept]


def stride(step: int) -> tuple[int, int]:
    """Return the first of the places 1, 2, 3, ... of which every ``step``-th is tried today, and their distance.

    All are tried in ``step`` successive days.
    """
    return (1, 1) if WHOLE else (1 + SEED % step, step)
