from __future__ import annotations

import pytest

from cubroker.protocol import names as pools
from cubroker.protocol.errors import Invalid
from cubroker.server.sight.names import HIDDEN, LINGER, MAX_NAMES, OTHER, Names


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_so_many_names_have_a_label_of_their_own_and_the_rest_has_one_together() -> None:
    names = Names()
    names.update(f"pool-{number}" for number in range(MAX_NAMES + 50))
    labels = {names.label(f"pool-{number}") for number in range(MAX_NAMES + 50)}
    assert len(labels) == MAX_NAMES + 1
    assert OTHER in labels


def test_a_name_keeps_its_label_whatever_comes_later() -> None:
    names = Names()
    names.update(["llama"])
    names.update([*(f"pool-{number}" for number in range(MAX_NAMES)), "llama"])
    assert names.label("llama") == "llama"
    assert names.label(f"pool-{MAX_NAMES - 1}") == OTHER


def test_whoever_makes_up_new_names_all_the_time_gets_no_more_labels() -> None:
    clock = Clock()
    names = Names(clock)
    seen = set()
    for turn in range(20):
        names.update(f"pool-{turn}-{number}" for number in range(MAX_NAMES))
        seen |= {names.label(f"pool-{turn}-{number}") for number in range(MAX_NAMES)}
        clock.now += LINGER / 30
    assert seen == {OTHER, *(f"pool-0-{number}" for number in range(MAX_NAMES))}
    clock.now += LINGER
    names.update(["late"])
    assert names.label("late") == "late"


@pytest.mark.parametrize("label", [OTHER, HIDDEN])
def test_no_pool_can_have_the_name_of_a_label_that_stands_for_several(label: str) -> None:
    with pytest.raises(Invalid):
        pools.check(label)


def test_what_has_no_name_is_hidden() -> None:
    assert Names().label("") == HIDDEN
