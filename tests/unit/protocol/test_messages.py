"""The messages: each travels unchanged, and nothing that is not one is taken for one."""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from cubroker.protocol import Layout, fields, status, wire
from cubroker.protocol import messages as m
from cubroker.protocol.errors import Invalid
from cubroker.protocol.layout import MAX_ALLOCATIONS, MAX_ENCODED
from tests.unit.protocol.samples import (
    GREETINGS,
    LAYOUT,
    NOTICES,
    REPLIES,
    REQUESTS,
    SAMPLES,
    SECRET,
    SHAPES,
    label,
    members,
)

PLAN = (63,) * MAX_ALLOCATIONS

each_sample = pytest.mark.parametrize("sample", SAMPLES, ids=label)


@pytest.mark.parametrize(
    ("union", "samples"),
    [(m.Greeting, GREETINGS), (m.Notice, NOTICES), (m.Request, REQUESTS), (m.Reply, REPLIES)],
    ids=["Greeting", "Notice", "Request", "Reply"],
)
def test_every_message_has_a_sample_here(union: Any, samples: tuple[Any, ...]) -> None:
    assert {type(sample) for sample in samples} == members(union)


def test_messages_travel_as_arrays_and_what_they_describe_as_maps() -> None:
    def arrays(module: Any) -> set[bool]:
        own = (each for each in vars(module).values() if getattr(each, "__module__", "") == module.__name__)
        return {each.__struct_config__.array_like for each in own if hasattr(each, "__struct_config__")}

    assert (arrays(m), arrays(status)) == ({True}, {False})


@each_sample
def test_a_message_travels_unchanged(sample: tuple[Any, Any]) -> None:
    value, shape = sample
    assert wire.unpack(wire.pack(value), shape) == value
    assert wire.unpack(memoryview(wire.pack(value)), shape) == value


@each_sample
def test_a_message_cut_short_anywhere_is_refused(sample: tuple[Any, Any]) -> None:
    data = wire.pack(sample[0])
    for length in range(len(data)):
        with pytest.raises(Invalid):
            wire.unpack(data[:length], sample[1])


@each_sample
def test_a_message_with_bytes_after_it_is_refused(sample: tuple[Any, Any]) -> None:
    with pytest.raises(Invalid):
        wire.unpack(wire.pack(sample[0]) + b"\xc0", sample[1])


@each_sample
def test_any_flipped_bit_gives_another_message_or_a_refusal(sample: tuple[Any, Any]) -> None:
    value, shape = sample
    data = bytearray(wire.pack(value))
    for position, bit in itertools.product(range(len(data)), range(8)):
        data[position] ^= 1 << bit
        taken = accept(bytes(data), shape)
        data[position] ^= 1 << bit
        if taken is not None:
            assert wire.unpack(wire.pack(taken), shape) == taken


def test_a_layout_with_any_bit_flipped_still_keeps_its_rules() -> None:
    data = bytearray(LAYOUT.encode())
    for position, bit in itertools.product(range(len(data)), range(8)):
        data[position] ^= 1 << bit
        try:
            Layout.decode(bytes(data)).check()
        except Invalid:
            pass
        finally:
            data[position] ^= 1 << bit


@each_sample
def test_a_message_is_never_taken_for_one_of_another_channel(sample: tuple[Any, Any]) -> None:
    twice = (m.Greeting, m.Notice) if isinstance(sample[0], m.Welcome) else ()  # the same socket, and maybe once more
    others = [shape for shape in SHAPES if shape is not sample[1] and shape not in twice]
    assert len(others) >= len(SHAPES) - 2
    for shape in others:
        with pytest.raises(Invalid):
            wire.unpack(wire.pack(sample[0]), shape)


# -- fields of the wrong type ------------------------------------------------------------------------

OF_EACH_TYPE: tuple[Any, ...] = (
    None,
    True,
    -1,
    (1 << 64) - 1,
    1.5,
    math.nan,
    "text",
    b"bytes",
    [],
    [[[]]],
    {},
    {"name": 1},
    {1: 2},
    msgspec.msgpack.Ext(-1, bytes(4)),  # a timestamp
    msgspec.msgpack.Ext(5, b"extension"),
)

Path = tuple[Any, ...]


def kind(value: object) -> str:
    return "tuple" if isinstance(value, list) else type(value).__name__


def places(plain: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    yield path, plain
    inner = enumerate(plain) if isinstance(plain, list) else plain.items() if isinstance(plain, dict) else ()
    for key, value in inner:
        yield from places(value, (*path, key))


def put(plain: Any, path: Path, value: Any) -> Any:
    if not path:
        return value
    copy = plain.copy()
    copy[path[0]] = put(plain[path[0]], path[1:], value)
    return copy


def accept(data: bytes, shape: Any) -> Any:
    """What ``data`` is read as; None if it is refused, shortly. Any other exception fails the test."""
    try:
        return wire.unpack(data, shape)
    except Invalid as refusal:
        message = refusal.message
    assert len(message) < 400
    return None


def kinds_seen(sample: tuple[Any, Any]) -> dict[Path, set[str]]:
    """Which types stand at each place in the samples of one message; an int will do for a float."""
    seen: dict[Path, set[str]] = {}
    for other in SAMPLES:
        if label(other) == label(sample):
            for path, value in places(msgspec.msgpack.decode(wire.pack(other[0]))):
                seen.setdefault(path, set()).update({kind(value)} | ({"int"} if kind(value) == "float" else set()))
    return seen


@each_sample
def test_a_field_of_another_type_is_refused(sample: tuple[Any, Any]) -> None:
    plain = msgspec.msgpack.decode(wire.pack(sample[0]))
    seen = kinds_seen(sample)
    tried = 0
    for (path, _), wrong in itertools.product(places(plain), OF_EACH_TYPE):
        taken = accept(msgspec.msgpack.encode(put(plain, path, wrong)), sample[1])
        if kind(wrong) not in seen[path]:
            tried += 1
            assert taken is None, f"{wrong!r} was taken at {path}"
    assert tried >= len(OF_EACH_TYPE) - 2


LATER = {
    field.name
    for info in (status.PoolInfo, status.ClientInfo, status.LeaseInfo, status.BlockInfo)
    for field in msgspec.structs.fields(info)
    if not field.required
}
"""Keys that came later than the others: older peers do not send them."""


@each_sample
def test_a_missing_field_is_refused(sample: tuple[Any, Any]) -> None:
    plain = msgspec.msgpack.decode(wire.pack(sample[0]))
    for path, value in places(plain):
        if isinstance(value, dict):
            for key in value:
                less = {other: value[other] for other in value if other != key}
                taken = accept(msgspec.msgpack.encode(put(plain, path, less)), sample[1])
                assert (taken is not None) == (key in LATER), key
    # Fields with a default came later than the others, and older peers do not send them.
    optional = sum(not field.required for field in msgspec.structs.fields(sample[0]))
    for count in range(optional):
        assert accept(msgspec.msgpack.encode(plain[: len(plain) - count]), sample[1]) is not None
    assert accept(msgspec.msgpack.encode(plain[: len(plain) - optional - 1]), sample[1]) is None


# -- values out of bounds ----------------------------------------------------------------------------


def envelope(body: Any, secret: bytes = SECRET, request: int = 1, oldest: int = 1) -> bytes:
    return wire.pack(m.Envelope(secret, request, oldest, body))


@pytest.mark.parametrize(
    "wait", [math.nan, math.inf, -math.inf, -0.001, fields.MAX_WAIT + 1, True, "1", None, (1 << 64) - 1], ids=repr
)
def test_a_wait_that_is_no_time_is_refused(wait: Any) -> None:
    with pytest.raises(Invalid):
        wire.unpack(envelope(m.Attach("llama", 0, None, wait)), m.Envelope)


@pytest.mark.parametrize("wait", [0, 0.0, 30, fields.MAX_WAIT])
def test_a_wait_is_read_as_a_float(wait: float) -> None:
    read = wire.unpack(envelope(m.Attach("llama", 0, None, wait)), m.Envelope)
    assert isinstance(read.body, m.Attach)
    assert (read.body.wait, type(read.body.wait)) == (wait, float)


@pytest.mark.parametrize(
    "data",
    [
        envelope(m.Seal(1), secret=bytes(17)),
        envelope(m.Seal(1), request=0),
        envelope(m.Seal(1), request=1 << 63),
        envelope(m.Seal(1), oldest=-1),
        envelope(m.Seal(0)),
        envelope(m.Retire("", 0)),
        envelope(m.Retire("n" * 257, 0)),
        envelope(m.Retire("n", -1)),
        envelope(m.Retire("n", (1 << 48) + 1)),
        envelope(m.Attach("n", 0, "", 0.0)),
        envelope(m.Attach("n", 0, "u" * 65, 0.0)),
        envelope(m.Create("n", b"", (), "ipc", 0.0, None)),
        envelope(m.Create("n", b"", ("d",) * 65, "ipc", 0.0, None)),
        envelope(m.Create("n", b"", ("d",), "s" * 17, 0.0, None)),
        envelope(m.Create("n", b"", ("d",), "ipc", 0.0, m.Where(""))),
        envelope(m.Create("n", b"", ("d",), "ipc", 0.0, m.Where("d", ("d",) * 65))),
        envelope(m.Create("n", bytes(MAX_ENCODED + 1), ("d",), "ipc", 0.0, None)),
        envelope(m.Create("n", b"", ("d",), "ipc", 0.0, None, None, (*PLAN, 0))),
        envelope(m.Create("n", b"", ("d",), "ipc", 0.0, None, None, (-1,))),
        envelope(m.Attach("n", 0, "d", 0.0, ("u",) * 65)),
        envelope(m.Attach("n", 0, "d", 0.0, ("",))),
        envelope(m.ShareEvent(1, "n", "d", bytes(63))),
        envelope(m.ShareEvent(1, "n", "d", bytes(65))),
        envelope(m.AwaitEvent(1, 0, 0, 0.0)),
        envelope(m.AwaitEvent(1, 1, -1, 0.0)),
        envelope(m.Done()),
        envelope([]),
        envelope(["Reboot"]),
        envelope(["Retire", "n", 0, "more"]),
        envelope(["seal", 1]),
        envelope([0, 1]),
    ],
)
def test_a_request_out_of_bounds_is_refused(data: bytes) -> None:
    assert accept(data, m.Envelope) is None


@pytest.mark.parametrize(
    "hello",
    [m.Hello("cubrokeR", (1,)), m.Hello("cubroker\n", (1,)), m.Hello("cubroker", ()), m.Hello("cubroker", (1,) * 33)],
)
def test_a_stranger_s_hello_is_refused(hello: m.Hello) -> None:
    assert accept(wire.pack(hello), m.Hello) is None


@pytest.mark.parametrize(
    "notice", [m.Descriptors(0, 1), m.Descriptors(1, 0), m.Descriptors(1, fields.MAX_DESCRIPTORS + 1)]
)
def test_a_notice_out_of_bounds_is_refused(notice: m.Descriptors) -> None:
    assert accept(wire.pack(notice), m.Notice) is None


def test_a_hello_of_a_later_version_is_understood() -> None:
    later = ["cubroker", [1, 2, 3], False, {"later": True}]
    assert wire.unpack(wire.pack(later), m.Hello) == m.Hello("cubroker", (1, 2, 3))


MOST = ("u" * 64,) * fields.MAX_DEVICES


def test_the_largest_answers_fit_into_a_message() -> None:
    handles = (bytes(64),) * MAX_ALLOCATIONS
    created = m.Created(1, "n" * 255, 1, "ipc", (m.ReplicaHandles("u" * 64, handles),) * fields.MAX_DEVICES)
    attached = m.Attached(1, "n" * 255, 1, "ipc", bytes(MAX_ENCODED), (m.ReplicaHandles("u" * 64, handles),))
    shard = m.ReplicaHandles(
        "u" * 64, (bytes(64),) * (MAX_ALLOCATIONS // fields.MAX_DEVICES) + (b"",) * (MAX_ALLOCATIONS * 63 // 64)
    )
    sharded = m.Attached(1, "n" * 255, 1, "ipc", bytes(MAX_ENCODED), (shard,) * fields.MAX_DEVICES)
    for body in (created, attached, sharded):
        assert wire.unpack(wire.pack(m.Answer(1, body)), m.Answer).body == body
    assert (
        len(envelope(m.Create("n", bytes(MAX_ENCODED), MOST, "ipc", 0.0, m.Where("u" * 64, MOST), None, PLAN)))
        < wire.MAX_MESSAGE
    )


# -- the shape of the protocol itself ----------------------------------------------------------------

CONTAINERS = (msgspec.inspect.CollectionType, msgspec.inspect.VarTupleType)
SCALARS = (
    msgspec.inspect.NoneType,
    msgspec.inspect.BoolType,
    msgspec.inspect.IntType,
    msgspec.inspect.FloatType,
    msgspec.inspect.StrType,
    msgspec.inspect.BytesType,
)


def check_bounded(node: msgspec.inspect.Type, above: tuple[object, ...] = ()) -> None:
    if isinstance(node, SCALARS):
        return
    if isinstance(node, msgspec.inspect.UnionType):
        for member in node.types:
            check_bounded(member, above)
    elif isinstance(node, msgspec.inspect.StructType):
        assert node.cls not in above, f"{node.cls} contains itself"
        for field in node.fields:
            check_bounded(field.type, (*above, node.cls))
    else:
        assert isinstance(node, CONTAINERS), f"{node} in {above}"
        assert node.max_length is not None, f"an array without a bound in {above[-1]}"
        assert node.max_length <= fields.MAX_ITEMS
        check_bounded(node.item_type, above)


@pytest.mark.parametrize("shape", SHAPES, ids=["Hello", "Greeting", "Notice", "Envelope", "Answer", "Layout"])
def test_every_array_has_a_bound_and_nothing_contains_itself(shape: Any) -> None:
    check_bounded(msgspec.inspect.type_info(shape))


def header(kind_of: Callable[[int], bytes], count: int, inner: bytes) -> bytes:
    return kind_of(count) + inner * count


def array(count: int) -> bytes:
    return b"\xdd" + struct.pack(">I", count)


def mapping(count: int) -> bytes:
    return b"\xdf" + struct.pack(">I", count)


START = b"\x94\xc4\x10" + SECRET + b"\x01\x01"
HOSTILE = {
    "many empty maps": (header(array, 390_000, b"\x80"), m.Envelope),
    "many empty arrays as a body": (START + header(array, 390_000, b"\x90"), m.Envelope),
    "many fields": (START + b"\xdd" + struct.pack(">I", 1 << 19) + b"\xa6Retire" + b"\x90" * (1 << 19), m.Envelope),
    "arrays that promise more": (array(400_000) * 1000, m.Envelope),
    "a body that promises more": (START + array(0xFFFFFFFF), m.Envelope),
    "a map that promises more": (b"\x92\x01\x93\xabDescription" + mapping(0xFFFFFFFF), m.Answer),
    "a string that promises more": (START + b"\x93\xa6Retire\xdb\xff\xff\xff\xff", m.Envelope),
    "bytes that promise more": (b"\x94\xc6\xff\xff\xff\xff", m.Envelope),
    "handles that promise more": (
        b"\x92\x01\x97\xa8Attached\x01\xa1x\x01\xa3ipc\xc4\x00\x91\x92\xa1d" + array(1 << 31),
        m.Answer,
    ),
    "a layout that promises more": (b"\x92" + array(0xFFFFFFFF), Layout),
    "a layout of the most tensors that promises more": (
        b"\x92" + array(100_000) + b"\x95\xa1x\xa2U8\x90\x00\x00",
        Layout,
    ),
    "very deep": (b"\x91" * (1 << 20), m.Envelope),
    "very deep in a field": (START + b"\x93\xa6Retire" + b"\x91" * (1 << 20), m.Envelope),
    "very deep in what is passed over": (b"\x95" + START[1:] + b"\x91\xa9ListPools" + b"\x91" * (1 << 20), m.Envelope),
    "very deep maps in what is passed over": (
        b"\x95" + START[1:] + b"\x91\xa9ListPools" + b"\x81\x01" * (1 << 20),
        m.Envelope,
    ),
    "a long tag": (START + b"\x91\xdb" + struct.pack(">I", 1 << 20) + b"q" * (1 << 20), m.Envelope),
    "a tag that is no text": (START + b"\x91\xa3\xff\xff\xff", m.Envelope),
    "a name that is no text": (START + b"\x93\xa6Retire\xa3\xed\xa0\x80\x00", m.Envelope),
    "a layout of small tensors": (
        b"\x92" + header(array, 100_000, b"\x95\xa4name\xa2U8\x90\x00\x00") + b"\x91\xc0",
        Layout,
    ),
    "a layout of large ranks": (
        b"\x92" + header(array, 60_000, b"\x95\xa4name\xa2U8\xdc\x00\x20" + b"\xcd\xff\xff" * 32 + b"\x00\x00"),
        Layout,
    ),
    "too long": (bytes(wire.MAX_MESSAGE + 1), m.Envelope),
    "nothing": (b"", m.Envelope),
    "never used by msgpack": (b"\xc1", m.Envelope),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_message_costs_a_small_multiple_of_its_bytes(
    name: str, peak: Callable[[Callable[[], object]], int]
) -> None:
    data, shape = HOSTILE[name]
    assert accept(data, shape) is None
    assert peak(lambda: accept(data, shape)) < 32 * len(data) + 65_536
