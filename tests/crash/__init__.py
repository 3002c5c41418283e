"""Campaigns against whole processes that die, and short forms of them as tests."""

from __future__ import annotations

import signal
import sys


def end_in_order() -> None:
    """Have SIGTERM end this program by an exception, so that it ends what it has started."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
