from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from tests.crash.kills.campaign import Campaign
from tests.crash.kills.kill_points import SOME, Point


@pytest.fixture(scope="module")
def campaign() -> Iterator[Campaign]:
    with Campaign.begin() as campaign:
        yield campaign


@pytest.mark.slow
@pytest.mark.parametrize("point", SOME, ids=str)
def test_a_worker_may_die_at_any_step(campaign: Campaign, point: Point) -> None:
    campaign.kill_at(point)


@pytest.mark.slow
def test_workers_may_die_at_any_moment(campaign: Campaign) -> None:
    campaign.kill_at_any_moment(12, random.Random(1))
