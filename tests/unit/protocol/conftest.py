"""What the tests of the protocol share."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings

from tests.measuring import traced

# Property tests run on busy machines too, without a deadline of their own; and where nobody may write to this folder.
settings.register_profile("cubroker", deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("cubroker")


@pytest.fixture
def peak() -> Callable[[Callable[[], object]], int]:
    """Measures the bytes that a call has allocated at its peak."""

    def measure(call: Callable[[], object]) -> int:
        with traced() as taken:
            call()
            return taken()[1]

    return measure
