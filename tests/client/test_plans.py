from __future__ import annotations

import pytest

from cubroker.client.plans import spell_out
from cubroker.protocol.errors import Invalid

NAMES = ("embed", "layers.0.q", "layers.1.q", "layers.1.norm[0]", "head")


def test_a_name_goes_before_patterns_and_of_these_the_first_counts() -> None:
    plan = {"layers.*": 1, "layers.1.*": 2, "layers.1.norm[0]": 3, "*": 0, "head": 4, "[eh]*": 5}
    assert spell_out(plan, NAMES) == {
        "embed": 0,
        "layers.0.q": 1,
        "layers.1.q": 1,
        "layers.1.norm[0]": 3,
        "head": 4,
    }


def test_a_plan_by_names_alone_is_what_it_is() -> None:
    plan = dict.fromkeys(reversed(NAMES), "GPU-1")
    assert spell_out(plan, NAMES) == plan
    assert list(spell_out(plan, NAMES)) == list(NAMES)


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        ({"layers.*": 1, "embed": 0}, r"no device for tensor 'head'; add its name, or '\*' as the last pattern"),
        ({"*": 1, "layers.7.*": 0}, r"the plan's 'layers\.7\.\*' is no tensor's name and matches none"),
        ({"*": 1, "tail": 0}, "the plan's 'tail' is no tensor's name"),
        ({}, "no device for tensor 'embed'"),
    ],
)
def test_what_a_plan_leaves_open_or_says_of_nothing_is_refused(plan: dict[str, int], says: str) -> None:
    with pytest.raises(Invalid, match=says):
        spell_out(plan, NAMES)
