from __future__ import annotations

import pytest

from cubroker.protocol import wire
from cubroker.protocol.messages import Create, Envelope
from cubroker.protocol.wire import Digest, Keyed
from cubroker.server.transport import framing
from cubroker.server.transport.framing import BatchDecoder, Gathered, encode, pairs

FRAMES = [b"id", b"frame", b"", b"x" * 70_000]


def test_batches_come_out_as_they_went_in_however_the_stream_is_cut() -> None:
    stream = encode(FRAMES) + encode(()) + encode([b"a", b"b"])
    whole = [FRAMES, [], [b"a", b"b"]]
    assert BatchDecoder().feed(stream) == whole
    for size in (1, 3, 4097):
        reader = BatchDecoder()
        cut = [stream[start : start + size] for start in range(0, len(stream), size)]
        assert [batch for piece in cut for batch in reader.feed(piece)] == whole


def test_a_request_in_pieces_is_put_together_and_others_may_come_in_between() -> None:
    stream = [[b"id", b"a", framing.MORE], FRAMES, [b"id", b"b", framing.MORE], [], [b"id", b"c", framing.LAST]]
    for _ in range(2):
        assert BatchDecoder().feed(b"".join(map(encode, stream))) == [FRAMES, [], [b"id", b"abc"]]
    reader = BatchDecoder()
    assert [reader.feed(encode(each)) for each in stream] == [[], [FRAMES], [], [[]], [[b"id", b"abc"]]]


@pytest.mark.parametrize("size", [1, 20, 1000, framing.PIECE])
def test_the_layout_in_a_request_is_hashed_while_its_pieces_come(size: int) -> None:
    layout = bytes(range(256)) * 40
    body = Create("pool", layout, ("device",), "ipc", 0.0, None)
    frame = Keyed(5, bytes(16)).request(Envelope(b"", 1, 1, body))
    pieces = [frame[:64], *(frame[start : start + size] for start in range(64, len(frame), size))]
    for first in (pieces, [wire.pack(Envelope(bytes(16), 1, 1, body))]):  # a version before has none to be hashed
        reader, which = BatchDecoder(), [framing.MORE] * (len(first) - 1) + [framing.LAST]
        ((_, whole),) = [b for p, w in zip(first, which, strict=True) for b in reader.feed(encode([b"id", p, w]))]
        assert whole == b"".join(first)
        assert isinstance(whole, Gathered)
        assert whole.digest == (Digest(layout).done() if first is pieces else b"")


def test_pieces_without_end_are_an_error_before_they_fill_memory() -> None:
    reader, piece = BatchDecoder(), encode([b"id", bytes(1 << 20), framing.MORE])
    for _ in range(wire.MAX_MESSAGE >> 20):
        assert reader.feed(piece) == []
    with pytest.raises(ValueError, match="no batches: pieces of"):
        reader.feed(piece)


def test_batches_larger_than_most_come_out_whole_and_leave_no_buffer_behind() -> None:
    reader, large = BatchDecoder(), [b"id", bytes(range(256)) * 8192]
    stream = encode(large)
    for size in (len(stream), 65_537, len(stream) - 1):
        for _ in range(10):
            cut = [stream[start : start + size] for start in range(0, len(stream), size)]
            assert [batch for piece in cut for batch in reader.feed(piece)] == [large]
    assert reader.feed(stream + encode(FRAMES) + stream[:10]) == [large, FRAMES]
    assert reader.feed(stream[10:]) == [large]


def test_a_batch_is_pairs_of_routing_id_and_frame() -> None:
    assert list(pairs(FRAMES)) == [(b"id", b"frame"), (b"", b"x" * 70_000)]
    with pytest.raises(ValueError, match="shorter"):
        list(pairs([b"id"]))


@pytest.mark.parametrize(
    "junk",
    [b"\xc0", b"\x91\x01", b"\x91\xa1x", b"\x80", b"\xc1", b"\x91\x91\x90", b"\xc7\x01\x01x", b"\xdd\x7f\xff\xff\xff"],
    ids=bytes.hex,
)
def test_what_is_no_batch_is_an_error(junk: bytes) -> None:
    with pytest.raises(ValueError, match=r"no batch|exceeds"):
        BatchDecoder().feed(junk)


def test_a_batch_without_end_is_an_error_before_it_fills_memory() -> None:
    reader = BatchDecoder()
    piece = bytes(1 << 20)
    assert reader.feed(b"\xc6\xff\xff\xff\xff") == []
    for _ in range(framing.MAX_BATCH // len(piece) - 1):
        assert reader.feed(piece) == []
    with pytest.raises(ValueError, match="no batches"):
        reader.feed(2 * piece)
