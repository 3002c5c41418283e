from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from cubroker.client.fork_guard import WeakRefs


class Thing:
    """What only the collector ends."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def collector() -> Iterator[None]:
    """The collector comes when the test says so."""
    before = gc.get_threshold()
    gc.disable()
    gc.freeze()  # so that it is quick
    yield
    gc.unfreeze()
    gc.set_threshold(*before)
    gc.enable()


@pytest.mark.usefixtures("collector")
def test_what_lives_is_found_at_whichever_moment_the_collector_takes_the_rest() -> None:
    for moment in range(50):
        gc.collect()
        living, alive = WeakRefs[Thing](), Thing()
        living.add(alive)
        for _ in range(3):
            living.add(Thing())
        gc.set_threshold(gc.get_count()[0] + moment)
        gc.enable()
        found = list(living)
        gc.disable()
        assert alive in found
