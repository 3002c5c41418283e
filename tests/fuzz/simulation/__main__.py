"""Run many seeds: ``python -m tests.fuzz.simulation --seeds 200000 --first 0 --jobs 2``."""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time

from tests.fuzz.simulation.search import search

CHUNK = 500


def main() -> int:
    """Return 0 if no seed fails, else 1 with a report of the first that was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.simulation", description=__doc__)
    parser.add_argument("--seeds", type=int, default=10_000, help="how many histories to play")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=1, help="processes that play them")
    options = parser.parse_args()
    last = options.first + options.seeds
    chunks = [range(start, min(start + CHUNK, last)) for start in range(options.first, last, CHUNK)]
    began = time.monotonic()
    with multiprocessing.Pool(options.jobs) as pool:
        for number, report in enumerate(pool.imap_unordered(search, chunks), 1):
            if report is not None:
                print(report)
                return 1
            if number % 20 == 0:
                print(f"{min(number * CHUNK, options.seeds)} seeds", file=sys.stderr)
    print(f"{options.seeds} seeds from {options.first}: nothing found in {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
