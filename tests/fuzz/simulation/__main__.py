"""Run many seeds: ``python -m tests.fuzz.simulation --seeds 200000 --first 0 --jobs 2 --seconds 600``."""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
from functools import partial
from math import inf

from tests.fuzz.simulation.search import explain

CHUNK = 500


def main() -> int:
    """Return 0 if no seed fails, else 1 with a report of the first that was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=10_000, help="how many histories to play")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=1, help="processes that play them")
    parser.add_argument("--seconds", type=float, default=inf, help="begin none after so long")
    options = parser.parse_args()
    last = options.first + options.seeds
    chunks = [range(start, min(start + CHUNK, last)) for start in range(options.first, last, CHUNK)]
    began, played = time.monotonic(), 0
    play = partial(play_until, began + options.seconds)
    with multiprocessing.Pool(options.jobs) as pool:
        for number, (count, report) in enumerate(pool.imap_unordered(play, chunks), 1):
            if report is not None:
                print(report)
                return 1
            played += count
            if number % 20 == 0:
                print(f"{played} seeds", file=sys.stderr)
    print(f"{played} seeds from {options.first}: nothing found in {time.monotonic() - began:.0f} s")
    return 0


def play_until(end: float, seeds: range) -> tuple[int, str | None]:
    """Play seeds until a moment has come; return how many, and the report of one that failed."""
    for count, seed in enumerate(seeds):
        if time.monotonic() >= end:
            return count, None
        if (report := explain(seed)) is not None:
            return count, report
    return len(seeds), None


if __name__ == "__main__":
    sys.exit(main())
