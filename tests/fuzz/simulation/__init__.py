"""Random histories for the ledger, checked after every step against a naive model of what it promises.

``python -m tests.fuzz.simulation --seeds 200000`` runs many; the tests in this package run a few.
"""

from __future__ import annotations

from tests.sampling import SEED

DAILY = 20
"""Seeds that the tests play only today; `make simulate` plays many more."""


def today() -> int:
    """Return the first seed of today."""
    return 1_000_000 + DAILY * SEED
