"""The short form of the storm: brokers killed and stopped under the real keeper and under load."""

from __future__ import annotations

import pytest

from tests.restart.storm import Storm

BLOWS = 4


@pytest.mark.slow
def test_brokers_may_be_killed_and_stopped_under_load() -> None:
    with Storm.begin(seed=1) as storm:
        storm.stopped["broker"] = 0.4
        storm.begin_counting()
        storm.blow(BLOWS, lambda _: None)
        storm.calm()
        assert len(storm.kills) + len(storm.stops) == BLOWS + 1
        assert storm.stops
