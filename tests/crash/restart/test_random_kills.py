"""The short form of the campaign: brokers killed and stopped under the real keeper and under load."""

from __future__ import annotations

import pytest

from tests.crash.restart.random_kills import RandomKills

BLOWS = 4


@pytest.mark.slow
def test_brokers_may_be_killed_and_stopped_under_load() -> None:
    with RandomKills.begin(seed=1) as campaign:
        campaign.stopped["broker"] = 0.4
        campaign.begin_counting()
        campaign.blow(BLOWS, lambda _: None)
        campaign.calm()
        assert len(campaign.kills) + len(campaign.stops) == BLOWS + 1
        assert campaign.stops
