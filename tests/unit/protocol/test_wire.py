"""Packing and unpacking any bytes, and the arrays that peers of earlier protocol versions read."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cubroker.protocol import messages as m
from cubroker.protocol import status, wire
from cubroker.protocol.errors import Invalid
from cubroker.protocol.wire import Bearer, for_version
from tests.brokers import PATIENCE
from tests.unit.protocol.samples import SHAPES

WITHOUT_MEMORY = """
import resource
import sys
from cubroker.protocol import encoding, wire

encode = {"pack": wire.pack, "encode": encoding.encode, "encode_json": encoding.encode_json}[sys.argv[1]]
value, failures = [bytes(3_000_000), "end"], 0
for room in range(0, 8 << 20, 1 << 16):
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + room, resource.RLIM_INFINITY))
    try:
        encode(value)
    except MemoryError:
        failures += 1
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
print(0 < failures < 128)
"""


@pytest.mark.parametrize("function", ["pack", "encode", "encode_json"])
def test_what_there_is_no_memory_to_encode_ends_no_process(function: str) -> None:
    command = [sys.executable, "-c", WITHOUT_MEMORY, function]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert (ended.returncode, ended.stdout) == (0, "True\n"), ended.stderr


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


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES, ids=["Hello", "Greeting", "Notice", "Envelope", "Answer", "Layout"])
@given(plain=trees)
@settings(max_examples=40)  # of each shape
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
    assert wire.unpack(twice, status.LeaseInfo) == status.LeaseInfo("llama", 4)


SECRET = bytes(range(16))
GPU = bytes(16)

FIRST: list[tuple[msgspec.Struct, list[Any]]] = [
    (m.Attach("a", 1, GPU, 2.5), ["Attach", "a", 1, GPU, 2.5, []]),
    (m.Attach("a", 0, None, 0, (GPU,)), ["Attach", "a", 0, None, 0.0, [GPU]]),
    (
        m.Create("a", b"layout", (GPU,), "vmm", 0, m.Where(None), durable=True),
        ["Create", "a", b"layout", [GPU], "vmm", 0.0, [None, []], None, None, False, True],
    ),
    (
        m.Create("a", b"layout", (GPU,), "ipc", 0, None, 0o600, (0,), True, False),
        ["Create", "a", b"layout", [GPU], "ipc", 0.0, None, 0o600, [0], True, False],
    ),
    (m.Close(7), ["Close", 7]),
    (m.Welcome(1, 7, SECRET, "cuda", 1000), ["Welcome", 1, 7, SECRET, "cuda"]),
    (m.Welcome(1, 7, SECRET, "cuda"), ["Welcome", 1, 7, SECRET, "cuda"]),
]
"""Messages, and the arrays that a build of version 1 reads: it refuses one with another number of elements."""


def as_sent(data: bytes) -> Any:
    return msgspec.msgpack.decode(data)


@pytest.mark.parametrize(("message", "array"), FIRST)
def test_a_peer_of_version_1_is_sent_the_fields_that_it_knows(message: msgspec.Struct, array: list[Any]) -> None:
    assert as_sent(wire.pack(for_version(message, 1))) == array


def test_a_peer_of_version_5_is_sent_an_attach_as_its_first_builds_knew_it() -> None:
    attach = m.Attach("a", 1, None, 0.0, (), (4901,))
    assert as_sent(wire.pack(for_version(attach, 5))) == ["Attach", "a", 1, None, 0.0, [], [4901]]


@pytest.mark.parametrize(("body", "array"), [pair for pair in FIRST if not isinstance(pair[0], m.Welcome)])
def test_so_it_is_in_a_request(body: Any, array: list[Any]) -> None:
    assert as_sent(Bearer(SECRET, 1).request(m.Envelope(SECRET, 3, 2, body, (1,)))) == [SECRET, 3, 2, array, [1]]


@pytest.mark.parametrize(("message", "array"), FIRST)
def test_a_peer_of_the_newest_version_is_sent_all_of_it(message: msgspec.Struct, array: list[Any]) -> None:
    assert for_version(message, m.VERSIONS[-1]) is message
    assert len(as_sent(wire.pack(message))) >= len(array)


@pytest.mark.parametrize(
    ("message", "field", "since"),
    [
        (m.Attach("a", 1, None, 0, (), (4901,)), "owners", m.OWNED),
        (m.Where(None, (), (4901,)), "owners", m.OWNED),
        (m.Attach("a", 1, None, 0, unsealed=True), "unsealed", m.UNSEALED),
    ],
)
def test_what_a_peer_would_have_to_heed_is_not_left_out(message: msgspec.Struct, field: str, since: int) -> None:
    sent = for_version(message, since)
    assert wire.unpack(wire.pack(sent), type(message)) == message
    with pytest.raises(AssertionError, match=field):
        for_version(message, since - 1)


@pytest.mark.parametrize("kind", [m.Attach, m.Where, m.Welcome])
def test_added_fields_are_last_in_the_order_of_versions_and_have_defaults(kind: type[msgspec.Struct]) -> None:
    added: dict[str, m.Since] = kind.ADDED  # type: ignore[attr-defined]
    assert kind.__struct_fields__[-len(added) :] == tuple(added)
    assert len(kind.__struct_defaults__) >= len(added)
    versions = [since.version for since in added.values()]
    assert sorted(versions) == versions
