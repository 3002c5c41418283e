from __future__ import annotations

import pytest

from cubroker.protocol.errors import Invalid
from cubroker.server.byte_sizes import parse_budget, parse_bytes


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("4096", 4096),
        ("0", 0),
        ("10B", 10),
        ("10GiB", 10 << 30),
        ("10G", 10 << 30),
        ("2 tib", 2 << 40),
        ("1.5MB", 1_500_000),
        ("3kb", 3000),
        ("9007199254740993", 9007199254740993),
    ],
)
def test_a_size_is_a_number_and_a_unit(text: str, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


LONG = [
    pytest.param("9" * 400 + ".0GB", id="a float has no room for it"),
    pytest.param("9" * 5000, id="nor has an int"),
]


@pytest.mark.parametrize("text", ["", "GiB", "-1", "10 parsecs", "1e9", "90%", "1.GiB", *LONG])
def test_anything_else_is_no_size(text: str) -> None:
    with pytest.raises(Invalid, match="is no size"):
        parse_bytes(text)


@pytest.mark.parametrize(("text", "budget"), [("90%", 900), ("12.5 %", 125), ("100%", 1000), ("500", 500)])
def test_a_budget_is_a_size_or_a_share(text: str, budget: int) -> None:
    assert parse_budget(text, 1000) == budget


@pytest.mark.parametrize("text", ["0", "0%", "101%", "1001", "1GiB"])
def test_a_budget_lies_within_its_device(text: str) -> None:
    with pytest.raises(Invalid, match="the device has 1000"):
        parse_budget(text, 1000)


def test_a_share_beyond_all_numbers_is_none() -> None:
    with pytest.raises(Invalid, match="is no size"):
        parse_budget("9" * 400 + "%", 1000)
