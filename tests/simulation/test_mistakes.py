from __future__ import annotations

import pytest

from tests.simulation.mistakes import attempt


@pytest.mark.parametrize("first", range(0, 60, 30))
def test_whatever_a_mistake_leaves_half_done_the_next_broker_goes_on_with_the_rest(first: int) -> None:
    for seed in range(first, first + 30):
        attempt(seed)
