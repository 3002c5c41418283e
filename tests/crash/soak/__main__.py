"""Run one of the long tests: ``python -m tests.crash.soak stopped_clients``, and so on; each has its own ``--help``."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module

SUBJECTS = ("leaks", "load", "stopped_clients")


def main() -> int:
    """Return what the subject's ``main`` returns."""
    parser = argparse.ArgumentParser(prog="python -m tests.crash.soak", description=__doc__, add_help=len(sys.argv) < 3)
    parser.add_argument("subject", choices=SUBJECTS)
    options, rest = parser.parse_known_args()
    status: int = import_module(f"tests.crash.soak.{options.subject}").main(rest)
    return status


if __name__ == "__main__":
    sys.exit(main())
