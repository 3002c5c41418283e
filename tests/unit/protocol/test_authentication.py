from __future__ import annotations

import os
from typing import Any

import msgspec
import pytest

from cubroker.protocol import messages as m
from cubroker.protocol import status, wire
from cubroker.protocol.errors import Invalid
from cubroker.protocol.layout import MAX_ENCODED
from cubroker.protocol.wire import (
    BESIDE,
    HIDDEN,
    LEGACY,
    MAX_REQUEST,
    SHORT,
    WHOLE,
    Bearer,
    Digest,
    Keyed,
    authentication,
    complete,
    session_of,
)
from tests.unit.protocol.samples import INFO, REPLIES, REQUESTS

SECRET = bytes(range(16))
BODIES = [pytest.param(body, id=type(body).__name__) for body in (*REQUESTS, *REPLIES)]
LAYOUT = os.urandom(3 * SHORT)
HANDLE = os.urandom(64)
REPLICAS = (m.ReplicaHandles("device", (HANDLE, b"", m.DESCRIPTOR, HANDLE)),)


def keyed(number: int = 7, secret: bytes = SECRET) -> Keyed:
    made = authentication(m.VERSIONS[-1], number, secret)
    assert isinstance(made, Keyed)
    return made


def create(layout: bytes) -> m.Create:
    return m.Create("pool", layout, ("device",), "ipc", 0.0, None)


def attached(layout: bytes) -> m.Answer:
    return m.Answer(3, m.Attached(1, "pool", 1, "ipc", layout, REPLICAS))


def asked(frame: bytes, by: Keyed) -> m.Request | None:
    """What the broker takes a frame for."""
    opened = by.opened(frame)
    if opened is None:
        return None
    data, layout = opened
    body: m.Request = wire.unpack(data, m.Envelope).body
    return complete(body, layout, Digest(layout).done()) if layout else body


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("version", m.VERSIONS)
def test_what_one_side_writes_the_other_reads(body: Any, version: int) -> None:
    if version < m.UPDATES:  # which has no such fields
        unknown = {"base": None} if isinstance(body, m.Create) else {"shared": ()}
        body = msgspec.structs.replace(body, **unknown) if isinstance(body, m.Create | m.Description) else body
    both = authentication(version, 7, SECRET)
    assert isinstance(both, Keyed) == (version >= m.AUTHENTICATED)
    if isinstance(body, m.Request):
        frame = both.request(m.Envelope(both.secret, 3, 1, body))
        assert session_of(frame) == (7 if isinstance(both, Keyed) else 0)
        opened = both.opened(frame)
        assert opened
        data, layout = opened
        read = wire.unpack(data, m.Envelope)
        assert read.secret == (b"" if isinstance(both, Keyed) else SECRET)
        assert (complete(read.body, layout, Digest(layout).done()) if layout else read.body) == body
    else:
        answer = m.Answer(3, body)
        assert both.read(both.reply(answer)) == answer
        assert both.bulk(body) == b"", "no sample has a long layout"


@pytest.mark.parametrize("layout", [b"layout", LAYOUT[:SHORT], LAYOUT])
def test_layouts_travel_beside_a_message_if_they_are_long(layout: bytes) -> None:
    both, answer = keyed(), attached(layout)
    assert both.bulk(answer.body) == (layout if len(layout) > SHORT else b"")
    frame = both.reply(answer)
    assert both.read(frame) == answer
    assert (layout in frame) == (len(layout) > SHORT)
    description = m.Answer(4, m.Description(INFO, layout))
    assert both.read(both.reply(description)) == description
    assert asked(both.request(m.Envelope(b"", 1, 1, create(layout))), both) == create(layout)


def test_a_handle_is_never_to_be_seen() -> None:
    both = keyed()
    plain = m.ReplicaHandles("another", (m.DESCRIPTOR,))
    bodies: list[m.Reply] = [m.Created(1, "pool", 1, "ipc", REPLICAS), m.EventOpened(1, "device", HANDLE)]
    for layout in (b"layout", LAYOUT):
        bodies += [
            m.Attached(1, "pool", 1, share, layout, replicas)
            for share in ("ipc", "vmm", "multicast")
            for replicas in (REPLICAS, (plain, *REPLICAS), (*REPLICAS, plain))
        ]
    for body in bodies:
        answer = m.Answer(3, body)
        frames = [both.reply(answer), both.reply(m.Answer(4, body))]
        assert both.read(frames[0]) == answer
        assert {frame[:1] for frame in frames} == {HIDDEN}
        assert all(HANDLE[:16] not in frame and SECRET not in frame for frame in frames)
    share = m.ShareEvent(1, "done", "device", HANDLE)
    frame = both.request(m.Envelope(b"", 3, 1, share))
    assert HANDLE[:16] not in frame
    assert asked(frame, both) == share


@pytest.mark.parametrize("layout", [b"layout", LAYOUT])
def test_what_has_no_handle_is_not_hidden(layout: bytes) -> None:
    both, replicas = keyed(), (m.ReplicaHandles("device", (m.DESCRIPTOR, b"", m.DESCRIPTOR)),) * 2
    for body in (
        m.Attached(1, "pool", 1, "vmm", layout, replicas),
        m.Created(1, "pool", 1, "vmm", replicas),
        m.Description(INFO, layout),
    ):
        answer = m.Answer(3, body)
        beside = both.bulk(body)
        frame = both.reply(answer)
        assert frame[:1] == (BESIDE if beside else WHOLE)
        assert frame.endswith(beside or wire.pack(answer))
        assert both.read(frame) == answer
    frame = both.request(m.Envelope(b"", 3, 1, create(layout)))
    assert frame[8:9] == (BESIDE if len(layout) > SHORT else WHOLE)


@pytest.mark.parametrize(
    "body",
    [m.Close(5), m.ShareEvent(1, "done", "device", HANDLE), create(LAYOUT)],
    ids=["whole", "hidden", "beside"],
)
def test_a_request_that_was_altered_is_nobodys(body: m.Request) -> None:
    both = keyed()
    frame = both.request(m.Envelope(b"", 3, 1, body))
    for at in range(8, len(frame), 1 if len(frame) < 1000 else 13):
        assert asked(frame[:at] + bytes([frame[at] ^ 1]) + frame[at + 1 :], both) is None
        assert asked(frame[:at], both) is None
    assert asked(frame + b"\0", both) is None
    for mark in {WHOLE, BESIDE, HIDDEN} - {frame[8:9]}:
        assert asked(frame[:8] + mark + frame[9:], both) is None


@pytest.mark.parametrize(
    "answer",
    [m.Answer(3, m.Done()), attached(b"layout"), attached(LAYOUT), m.Answer(3, m.Description(INFO, LAYOUT))],
    ids=["whole", "hidden", "hidden, with a layout", "beside"],
)
def test_a_reply_that_was_altered_is_nobodys(answer: m.Answer) -> None:
    both = keyed()
    frame = both.reply(answer)
    for at in range(0, len(frame), 1 if len(frame) < 1000 else 13):
        assert both.read(frame[:at] + bytes([frame[at] ^ 1]) + frame[at + 1 :]) is None
        assert both.read(frame[:at]) is None
    assert both.read(frame + b"\0") is None
    assert both.read(wire.pack(answer)) is None


def test_the_digest_of_a_layout_is_never_taken_for_the_layout() -> None:
    """A frame without what was beside its message has another tag."""
    both = keyed()
    frame = both.reply(attached(LAYOUT))
    assert both.read(frame[: -len(LAYOUT)]) is None
    request = both.request(m.Envelope(b"", 3, 1, create(LAYOUT)))
    assert both.opened(request[: -len(LAYOUT)]) is None


def test_a_layout_beside_what_has_none_is_another_ones() -> None:
    assert complete(m.Close(1), LAYOUT, Digest(LAYOUT).done()) is None
    assert complete(create(b"no digest"), LAYOUT, Digest(LAYOUT).done()) is None
    both = keyed()
    wrong = both._replies.wrap(wire.pack(m.Answer(3, m.Done())), LAYOUT, hidden=False)
    assert both.read(wrong) is None


def test_a_layout_that_no_message_may_have_is_refused() -> None:
    with pytest.raises(Invalid, match=r"a layout of .* bytes; the most is"):
        complete(create(b""), bytes(MAX_ENCODED + 1), b"")


def test_keys_differ_by_session_and_direction() -> None:
    both, stranger = keyed(), keyed(secret=bytes(16))
    frame = both.request(m.Envelope(b"", 3, 1, m.Close(5)))
    assert stranger.opened(frame) is None
    assert both.read(frame[8:]) is None
    assert both.opened(frame[:8] + both.reply(m.Answer(3, m.Done()))) is None
    assert stranger.read(both.reply(m.Answer(3, m.Done()))) is None


def test_what_its_author_wrote_wrongly_is_named() -> None:
    both = keyed()
    assert both.opened(both._requests.sign(b"junk")) == (b"junk", b"")
    with pytest.raises(Invalid):
        both.read(both._replies.sign(b"junk"))
    with pytest.raises(Invalid):
        Bearer(SECRET).read(b"junk")


def test_little_is_looked_at_before_the_author_is_known() -> None:
    both = keyed()
    assert both.opened(both._requests.sign(bytes(MAX_REQUEST))) is not None
    assert both.opened(both._requests.sign(bytes(MAX_REQUEST + 1))) is None
    for size, opened in ((MAX_REQUEST, True), (MAX_REQUEST + 1, False)):
        frame = both._requests.wrap(bytes(size), b"", hidden=True)
        assert (both.opened(frame) is not None) == opened


@pytest.mark.parametrize("version", range(1, m.UPDATES))
def test_an_older_peer_is_sent_the_fields_that_it_knows(version: int) -> None:
    both = authentication(version, 7, SECRET)
    described = m.Description(INFO, b"layout", None, (status.SharingInfo(1, 1, 4096),))
    read = both.read(both.reply(m.Answer(3, described)))
    assert read is not None
    assert read.body == m.Description(INFO, b"layout")
    opened = both.opened(both.request(m.Envelope(both.secret, 3, 1, create(b"layout"))))
    assert opened is not None
    assert len(msgspec.msgpack.decode(opened[0])[3]) == len(m.Create.__struct_fields__)  # the tag, and all but the last
    with pytest.raises(AssertionError, match="base"):
        both.request(m.Envelope(both.secret, 3, 1, msgspec.structs.replace(create(b"layout"), base=m.Base(1, ()))))


def test_a_session_is_named_by_eight_bytes_that_no_other_version_begins_with() -> None:
    for number in (1, 255, 1 << 40, (1 << 63) - 1):
        assert session_of(keyed(number).request(m.Envelope(b"", 1, 1, m.ListPools()))) == number
    old = Bearer(SECRET).request(m.Envelope(SECRET, 1, 1, m.ListPools()))
    assert old[0] >= LEGACY
    assert [session_of(frame) for frame in (old, b"", b"\xc1")] == [0, 0, 0]
