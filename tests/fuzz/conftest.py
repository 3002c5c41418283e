from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def unmeasured() -> Iterator[None]:
    """Coverage is not measured here: unit tests cover all that is run, and measuring takes twice as long as running."""
    coverage = sys.modules.get("coverage")
    measured = coverage and coverage.Coverage.current()
    if measured:
        measured.stop()
    yield
    if measured:
        measured.start()
