"""What a day leaves out, of the tests that this run has collected."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from tests import sampling
from tests.conftest import COLLECTED, ROOT
from tests.sampling import Collected, left_out

PART = int(re.findall(r"CUBROKER_TEST_SLOW_PART=(\d+)", (ROOT.parent / "Makefile").read_text())[0])
"""What `make test` runs of the slow tests, as a divisor."""


@pytest.fixture
def collected(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[Collected]:
    """All tests of this run, from which a part is left out, whatever else the run is told."""
    monkeypatch.setattr(sampling, "WHOLE", False)
    return request.config.stash[COLLECTED]


def test_no_file_is_left_without_a_test_on_any_day(collected: list[Collected]) -> None:
    files = {test.file for test in collected}
    for day in range(3 * PART):
        out = left_out(collected, part=PART, day=day)
        assert {test.file for test in collected if test.name not in out} == files


def folder(counts: dict[str, tuple[int, int]]) -> list[Collected]:
    """Return tests of files in one folder, so many quick and slow ones of each."""
    return [
        Collected(f"{file}-{number}", ROOT / "some" / file, number >= quick)
        for file, (quick, slow) in counts.items()
        for number in range(quick + slow)
    ]


def test_quick_ones_and_one_in_so_many_slow_ones_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "WHOLE", False)
    tests = folder({"a.py": (3, 20), "b.py": (1, 4)})
    for day in range(30):
        out = left_out(tests, part=PART, day=day)
        assert len(out) == 24 - 24 // PART
        assert out <= {test.name for test in tests if test.slow}


def test_each_slow_one_has_its_day(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "WHOLE", False)
    tests = folder({"a.py": (3, 20), "b.py": (0, 4), "c.py": (0, 1)})
    ran = Counter[str]()
    for day in range(PART):
        ran.update({test.name for test in tests} - left_out(tests, part=PART, day=day))
    assert ran.keys() == {test.name for test in tests}
    assert ran["c.py-0"] == PART  # or nothing of that file would be tested


def test_the_long_form_leaves_nothing_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "WHOLE", True)
    assert left_out(folder({"a.py": (3, 20), "b.py": (0, 4)}), part=PART) == set()
