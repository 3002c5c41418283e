from __future__ import annotations

import pytest

from tests.crash.soak import leaks
from tests.crash.soak.load import load

FEW = 4


@pytest.mark.slow
def test_nothing_that_is_done_again_and_again_leaves_anything() -> None:
    with leaks.scene() as stage:
        for deed in leaks.DEEDS:
            leaks.repeat(stage, deed, 2 if deed is leaks.kill_the_gateway else FEW)


@pytest.mark.slow
def test_a_crowd_is_served_whole_and_leaves_nothing() -> None:
    said: list[str] = []
    load(clients=24, leases=20, workers=4, processes=4, say=said.append)
    assert any("480 leases of 24 clients" in line for line in said)
