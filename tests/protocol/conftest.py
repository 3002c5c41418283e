"""What the tests of the protocol share."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable

import pytest
from hypothesis import settings

# Property tests run on busy machines too: they have no deadline of their own.
settings.register_profile("cubroker", deadline=None)
settings.load_profile("cubroker")


@pytest.fixture
def peak() -> Callable[[Callable[[], object]], int]:
    """Measures the bytes that a call has allocated at its peak."""

    def measure(call: Callable[[], object]) -> int:
        tracemalloc.start()
        try:
            call()
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    return measure
