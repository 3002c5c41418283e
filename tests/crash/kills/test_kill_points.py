from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from tests.crash.kills.campaign import Campaign
from tests.crash.kills.kill_points import LABELS, SOME, Obstacle


@pytest.fixture(scope="module")
def campaign() -> Iterator[Campaign]:
    with Campaign.begin() as campaign:
        yield campaign


@pytest.mark.parametrize(("scene", "obstacle", "share"), LABELS)
def test_a_worker_may_die_at_any_step(campaign: Campaign, scene: str, obstacle: Obstacle, share: str) -> None:
    for point in SOME:
        if point.key == (scene, obstacle, share):
            try:
                campaign.kill_at(point)
            except AssertionError as error:
                error.add_note(f"killed at {point}")
                raise


def test_workers_may_die_at_any_moment(campaign: Campaign) -> None:
    campaign.kill_at_any_moment(20, random.Random(1))
