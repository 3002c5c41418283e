"""Messages, their frames, and what is none."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cubroker.client import digests
from cubroker.integrations.cluster import messages
from cubroker.integrations.cluster.messages import (
    Available,
    CurrentVersion,
    DraftContent,
    Going,
    Local,
    Open,
    PeerHello,
    PeerRefusal,
    Progress,
    Reply,
    Request,
)
from cubroker.protocol.errors import ERRORS, CubrokerError, Invalid, Unavailable
from tests.unit.integrations.cluster.samples import LOCALS, REPLIES, REQUESTS


def body(frame: bytes) -> bytes:
    head = frame[: messages.LENGTH.size]
    assert messages.length(head, messages.MAX_REPLY) == len(frame) - len(head)
    return frame[len(head) :]


def test_there_is_a_sample_of_every_message() -> None:
    assert {type(each) for each in REQUESTS} == {*Request.__args__}
    assert {type(each) for each in REPLIES} == {*Reply.__args__}
    assert {type(each) for each in LOCALS} == {*Local.__args__}


@pytest.mark.parametrize("message", REQUESTS, ids=lambda each: type(each).__name__)
def test_a_request_is_read_as_it_was_written_and_is_no_reply(message: Request) -> None:
    frame = messages.frame(message)
    assert len(frame) < messages.MAX_REQUEST
    assert messages.request(body(frame)) == message
    with pytest.raises(Invalid, match="received a message that cannot be decoded"):
        messages.reply(body(frame))


@pytest.mark.parametrize("message", REPLIES, ids=lambda each: type(each).__name__)
def test_a_reply_is_read_as_it_was_written_and_is_no_request(message: Reply) -> None:
    frame = messages.frame(message)
    assert messages.reply(body(frame)) == message
    with pytest.raises(Invalid, match="received a message that cannot be decoded"):
        messages.request(body(frame))


@pytest.mark.parametrize("message", LOCALS, ids=lambda each: type(each).__name__)
def test_what_stays_within_a_host_is_read_as_it_was_written_and_is_no_request(message: Local) -> None:
    frame = messages.frame(message)
    assert messages.local(body(frame)) == message
    with pytest.raises(Invalid, match="received a message that cannot be decoded"):
        messages.request(body(frame))


@given(st.integers(0, 1 << 200))
def test_runs_travel(bits: int) -> None:
    count = max(1, bits.bit_length())
    assert messages.from_runs(messages.to_runs(bits), count) == bits
    assert messages.from_runs(None, count) is None
    for beyond in (messages.to_runs(1 << count), bytes(-(-count // 8) + 1)):
        with pytest.raises(Invalid, match="names runs beyond the"):
            messages.from_runs(beyond, count)


@given(st.integers(0, 100), st.integers(0, 1000))
def test_the_content_of_a_draft_has_no_more_bytes_than_that_of_its_size_may(allocations: int, runs: int) -> None:
    content = DraftContent(digests.DEFINITION, (bytes(16),) * allocations, 1 << 24, messages.to_runs((1 << runs) - 1))
    assert len(messages.frame(content)) <= messages.content_limit(allocations, runs)
    assert len(messages.frame(Available(content.runs))) <= messages.runs_limit(runs)


@given(st.binary(max_size=9), st.lists(st.binary(min_size=16, max_size=16), max_size=3))
def test_versions_are_equal_if_layout_and_digests_are(layout: bytes, sums: list[bytes]) -> None:
    found = messages.content(layout, "a", sums)
    assert found == messages.content(layout, "a", iter(sums))
    others = [(layout + b"x", "a", sums), (layout, "b", sums), (layout, "a", [*sums, bytes(16)])]
    assert found not in [messages.content(*other) for other in others]


names = st.text(min_size=1, max_size=255)
naturals = st.integers(0, (1 << 63) - 1)


@given(
    st.one_of(
        st.builds(PeerHello, st.integers(1, (1 << 63) - 1)),
        st.builds(Open, names, naturals, names),
        st.builds(Progress, naturals),
    )
)
def test_any_request_travels(message: Request) -> None:
    assert messages.request(body(messages.frame(message))) == message


@given(
    st.binary(max_size=200)
    | st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(1 << 63), (1 << 64) - 1)
        | st.text(max_size=5)
        | st.binary(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=8,
    ).map(msgspec.msgpack.encode)
)
def test_any_bytes_are_a_message_or_invalid(data: bytes) -> None:
    for decode in (messages.request, messages.reply, messages.local):
        try:
            message = decode(data)
        except Invalid:
            continue
        assert decode(body(messages.frame(message))) == message


@pytest.mark.parametrize(
    "fields",
    [
        {"type": "PeerHello", "version": 0},
        {"type": "PeerHello", "version": 1 << 63},
        {"type": "PeerHello", "version": "1"},
        {"type": "PeerHello"},
        {"type": "Bye"},
        {"type": 1},
        {"version": 1},
        {"type": "Open", "name": ""},
        {"type": "Open", "name": "x" * 256},
        {"type": "Open", "name": "m", "version": -1},
        {"type": "Open", "name": "m", "engine": None},
        {"type": "Progress", "nbytes": -1},
        {"type": "Progress", "nbytes": 1.5},
        ["PeerHello", 1],
    ],
    ids=str,
)
def test_a_request_out_of_bounds_is_none(fields: Any) -> None:
    with pytest.raises(Invalid):
        messages.request(msgspec.msgpack.encode(fields))


PLACE = {"pointer": 0, "nbytes": 1, "device": None, "digest": bytes(16)}


@pytest.mark.parametrize(
    "wrong",
    [{"pointer": -1}, {"nbytes": 0}, {"device": -1}, {"device": 64}, {"digest": bytes(15)}, {"digest": "x" * 16}],
    ids=str,
)
def test_a_place_out_of_bounds_is_none(wrong: dict[str, Any]) -> None:
    opened = {"type": "ExportedVersion", "name": "m", "version": 1, "layout": b"", "algorithm": "a", "metadata": b""}
    messages.reply(msgspec.msgpack.encode(opened | {"places": [PLACE]}))
    with pytest.raises(Invalid):
        messages.reply(msgspec.msgpack.encode(opened | {"places": [PLACE | wrong]}))


@pytest.mark.parametrize(
    "field",
    [b"\xa1x" + b"\x91" * 60_000 + b"\xc0", b"\xa1x" + b"\x81\xa1x" * 20_000 + b"\xc0", b"\xa4name\xa3\xed\xa0\x80"],
    ids=["deep arrays", "deep maps", "no UTF-8"],
)
def test_a_field_that_no_decoder_takes_is_invalid(field: bytes) -> None:
    with pytest.raises(Invalid, match="received a message that cannot be decoded"):
        messages.request(b"\x82\xa4type\xa5Watch" + field)


def test_what_came_does_not_come_back_in_the_text() -> None:
    with pytest.raises(Invalid) as caught:
        messages.request(msgspec.msgpack.encode({"type": "x" * 60_000}))
    assert len(caught.value.message) < 300


def test_fields_that_a_later_build_adds_are_passed_over() -> None:
    assert messages.request(msgspec.msgpack.encode({"type": "PeerHello", "version": 1, "more": [1]})) == PeerHello(1)


@given(st.binary(min_size=4, max_size=4), st.integers(1, messages.MAX_REPLY))
def test_a_length_is_bounded_before_anything_is_read(head: bytes, limit: int) -> None:
    count = int.from_bytes(head, "big")
    if 0 < count <= limit:
        assert messages.length(head, limit) == count
    else:
        with pytest.raises(Invalid, match=f"received a frame of {count} bytes; 1 to {limit} are accepted"):
            messages.length(head, limit)


@pytest.mark.parametrize("error", ERRORS.values(), ids=lambda each: each.code)
def test_a_refusal_arrives_as_the_error_that_it_was(error: type[CubrokerError]) -> None:
    refused = messages.reply(body(messages.frame(messages.refusal(error("why " * 1000)))))
    assert isinstance(refused, PeerRefusal)
    with pytest.raises(error) as caught:
        messages.expect(refused, Going)
    assert type(caught.value) is error
    assert caught.value.message == ("why " * 1000)[:2000]


def test_a_refusal_of_a_kind_that_is_not_known_here_says_which() -> None:
    with pytest.raises(CubrokerError, match=r"too hot \[overheated\]"):
        messages.expect(PeerRefusal("overheated", "too hot"), Going)


def test_an_answer_of_another_kind_is_invalid() -> None:
    assert messages.expect(CurrentVersion(1), CurrentVersion) == CurrentVersion(1)
    with pytest.raises(Invalid, match="the exporter answered with CurrentVersion instead of Going"):
        messages.expect(CurrentVersion(1), Going)


def test_an_error_that_has_no_text_is_refused_all_the_same() -> None:
    assert messages.reply(body(messages.frame(messages.refusal(Unavailable(""))))) == PeerRefusal("unavailable", "")
