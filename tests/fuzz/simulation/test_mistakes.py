from __future__ import annotations

import pytest

from tests.fuzz.simulation import today
from tests.fuzz.simulation.mistakes import attempt


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, today()], ids=["fixed", "daily"])
def test_whatever_a_mistake_leaves_half_done_the_next_broker_goes_on_with_the_rest(first: int) -> None:
    for seed in range(first, first + 6):
        attempt(seed)
