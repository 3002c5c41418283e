"""What a fuzz target is, and how one input is judged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cubroker.protocol.errors import CubrokerError
from tests.measuring import traced

CRASHES = Path(__file__).with_name("crashes")
"""Inputs that once did harm, named ``<target>-<digest>.bin``; every run of the tests tries them again."""

PER_BYTE = 100
PER_INPUT = 1 << 20
"""Bytes of memory that an input may take: so many for each of its own, and so many besides."""

LONGEST = 2000
"""Characters of an error's text."""

SAMPLE = 1009
"""One input in so many has its memory measured, which makes it some ten times slower."""


@dataclass(frozen=True)
class Target:
    """Code that must survive any bytes.

    Attributes:
        name: what it is called on the command line.
        run: takes an input. It may raise a :class:`CubrokerError`; anything else is a finding.
        seeds: inputs that are in order, to begin from.
        tokens: pieces that are worth inserting.
        measured: whether its memory is bounded by the input's length.
    """

    name: str
    run: Callable[[bytes], object]
    seeds: tuple[bytes, ...]
    tokens: tuple[bytes, ...] = ()
    measured: bool = True


class Greedy(Exception):
    """An input took more memory than its length allows."""


def attempt(target: Target, data: bytes) -> None:
    """Give ``data`` to a target; whatever is raised is a finding."""
    try:
        target.run(data)
    except CubrokerError as error:
        if len(error.message) > LONGEST:
            raise AssertionError(f"a text of {len(error.message)} characters: what was sent comes back in it") from None


def attempt_measured(target: Target, data: bytes) -> None:
    """Like :func:`attempt`, and raise :class:`Greedy` if it takes too much memory."""
    attempt(target, data)  # caches that fill up at the first use are not the input's
    with traced() as taken:
        attempt(target, data)
        _, peak = taken()
    if target.measured and peak > PER_BYTE * len(data) + PER_INPUT:
        raise Greedy(f"{peak} bytes of memory for an input of {len(data)}")
