"""Names of pools, and modes as they are written."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cubroker.protocol import fields
from cubroker.protocol.errors import Invalid
from cubroker.protocol.fields import Name


@pytest.mark.parametrize("name", ["llama", "_x", "7", "meta-llama/Llama-3.1:fp8+lora", "a" * 255])
def test_usual_names_are_taken(name: str) -> None:
    assert fields.check_pool_name(name) == name


def test_a_name_of_a_subclass_of_str_is_returned_as_messages_carry_it() -> None:
    class Name(str):
        """As numpy's, and that of an enumeration."""

        def __str__(self) -> str:
            return "another"

    plain = fields.check_pool_name(Name("llama"))
    assert (plain, type(plain)) == ("llama", str)


@pytest.mark.parametrize(
    "name", ["", ".", "-x", "/x", "a b", "a@2", "a\n", "\na", "ä", "a\0", "a" * 256, "\ud800", "٣"], ids=ascii
)
def test_other_names_are_refused_with_the_rule(name: str) -> None:
    with pytest.raises(Invalid, match="use 1 to 255 letters"):
        fields.check_pool_name(name)


@pytest.mark.parametrize("name", [None, 7, b"llama", ("llama",)], ids=repr)
def test_an_object_that_is_no_text_is_refused_with_the_rule(name: Any) -> None:
    with pytest.raises(Invalid, match=f"an object of type {type(name).__name__} cannot name an event: use 1 to 255"):
        fields.check_pool_name(name, "an event")


def test_the_message_stays_short_however_long_the_name() -> None:
    with pytest.raises(Invalid) as caught:
        fields.check_pool_name("!" * 1_000_000)
    assert len(caught.value.message) < 300


@given(st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.:/+-]{0,254}", fullmatch=True))
def test_every_name_that_passes_fits_into_the_messages(name: str) -> None:
    fields.check_pool_name(name)
    assert msgspec.convert(name, Name) == name


@pytest.mark.parametrize(
    ("text", "mode"), [("640", 0o640), ("0640", 0o640), ("0o640", 0o640), ("000", 0), ("777", 0o777)]
)
def test_a_mode_is_written_in_octal(text: str, mode: int) -> None:
    assert fields.parse_mode(text) == mode


@pytest.mark.parametrize(
    "text", ["", "64", "6400", "00640", "648", "0x1ff", "-640", " 640", "640\n", "rw-r-----", "٦٤٠"]
)
def test_no_other_text_is_a_mode(text: str) -> None:
    with pytest.raises(Invalid) as caught:
        fields.parse_mode(text)
    assert caught.value.message == f"{text!r} is no mode: write three octal digits, as in 640"
