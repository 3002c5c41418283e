"""Packing and unpacking, whatever the bytes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cubroker.protocol import infos, wire
from cubroker.protocol import messages as m
from cubroker.protocol.errors import Invalid
from tests.protocol.samples import SHAPES

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text()
    | st.binary()
    | st.builds(msgspec.msgpack.Ext, st.integers(-128, 127).filter(lambda code: code != -1), st.binary())
)
tags = st.sampled_from([union.__name__ for shape in (m.Request, m.Reply, m.Notice) for union in shape.__args__])
trees: st.SearchStrategy[Any] = st.recursive(
    scalars | tags,
    lambda inner: st.lists(inner, max_size=8) | st.dictionaries(st.text() | st.integers(0, 99), inner, max_size=4),
    max_leaves=30,
)


def read(data: bytes, shape: Any) -> None:
    """Succeeds if ``data`` is refused as it should be, or is a message that can be sent on."""
    try:
        value = wire.unpack(data, shape)
    except Invalid:
        return
    assert wire.unpack(wire.pack(value), shape) == value


@pytest.mark.parametrize("shape", SHAPES, ids=["Hello", "Greeting", "Notice", "Envelope", "Answer", "Layout"])
@given(data=st.binary(max_size=200))
def test_any_bytes_are_a_message_or_refused(shape: Any, data: bytes) -> None:
    read(data, shape)


@pytest.mark.parametrize("shape", SHAPES, ids=["Hello", "Greeting", "Notice", "Envelope", "Answer", "Layout"])
@given(plain=trees)
def test_any_msgpack_is_a_message_or_refused(shape: Any, plain: Any) -> None:
    read(msgspec.msgpack.encode(plain), shape)


@given(body=st.builds(lambda tag, fields: [tag, *fields], tags, st.lists(scalars | trees, max_size=7)))
def test_any_body_under_a_known_tag_is_a_request_or_refused(body: list[Any]) -> None:
    read(msgspec.msgpack.encode([bytes(16), 1, 1, body]), m.Envelope)
    read(msgspec.msgpack.encode([1, body]), m.Answer)


def test_a_refusal_says_what_was_expected_and_where() -> None:
    with pytest.raises(Invalid, match=r"cannot be read as Envelope: Expected `int`, got `str` - at `\$\[1\]`"):
        wire.unpack(wire.pack([bytes(16), "one", 1, ["ListPools"]]), m.Envelope)
    with pytest.raises(Invalid, match="cannot be read as Welcome or Refused or Pong: "):
        wire.unpack(b"", m.Greeting)


def test_a_message_of_the_largest_size_is_read_and_one_byte_more_is_not() -> None:
    data = b"\xc6" + (wire.MAX_MESSAGE - 5).to_bytes(4, "big") + bytes(wire.MAX_MESSAGE - 5)
    assert len(wire.unpack(data, bytes)) == wire.MAX_MESSAGE - 5
    with pytest.raises(Invalid, match=f"a message of {wire.MAX_MESSAGE + 1} bytes; the most is {wire.MAX_MESSAGE}"):
        wire.unpack(data + b"\0", bytes)


@pytest.mark.parametrize("value", [m.PoolChanged("\ud800", 1), m.PoolChanged("llama", 1 << 64)])
def test_what_msgpack_cannot_say_is_refused_by_the_sender(value: object) -> None:
    with pytest.raises(Invalid, match="a PoolChanged that cannot be sent"):
        wire.pack(value)


def test_a_key_that_comes_twice_counts_once() -> None:
    info = {"pool": "llama", "version": 3}
    plain = msgspec.msgpack.encode(info)
    twice = b"\x83" + plain[1:] + msgspec.msgpack.encode("version") + b"\x04"
    assert wire.unpack(twice, infos.LeaseInfo) == infos.LeaseInfo("llama", 4)
