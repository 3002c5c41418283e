from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.crash.restart.step_campaign import SCENES, Campaign, Scene
from tests.sampling import daily

SOME = daily(SCENES, 10)
PARTS = (1, 2, 3)
"""Quarters of a scene: where in it the broker is killed."""


@pytest.fixture(scope="module")
def campaign() -> Iterator[Campaign]:
    with Campaign.begin() as campaign:
        yield campaign


@pytest.mark.slow
@pytest.mark.parametrize("scene", SOME, ids=str)
def test_the_broker_may_be_killed_at_any_step(campaign: Campaign, scene: Scene) -> None:
    steps = campaign.count(scene)
    for part in PARTS:
        step = steps * part // 4
        try:
            while not campaign.kill_at(scene, step):  # it took fewer steps than when they were counted
                step = step * 3 // 4
                assert step
        except AssertionError as error:
            error.add_note(f"killed at {campaign.supervised.counter.last.read_text()}, step {step} of {steps}")
            raise


@pytest.mark.slow
@pytest.mark.parametrize("step", [10, 20, 40])
def test_the_broker_may_be_killed_while_it_takes_over(campaign: Campaign, step: int) -> None:
    assert campaign.kill_restoring(step)
