from __future__ import annotations

import pytest

from tests.crash.soak.stopped_clients import stops


@pytest.mark.slow
def test_stopped_clients_lose_nothing_and_disturb_nobody() -> None:
    figures = stops(clients=6, stopped=2, seconds=0.3, pause=0.05)
    assert len(figures.without) >= 4
    assert len(figures.with_stopped) >= 4
