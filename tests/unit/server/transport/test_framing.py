from __future__ import annotations

import pytest

from cubroker.server.transport import framing
from cubroker.server.transport.framing import BatchDecoder, encode, pairs

FRAMES = [b"id", b"frame", b"", b"x" * 70_000]


def test_batches_come_out_as_they_went_in_however_the_stream_is_cut() -> None:
    stream = encode(FRAMES) + encode(()) + encode([b"a", b"b"])
    whole = [FRAMES, [], [b"a", b"b"]]
    assert BatchDecoder().feed(stream) == whole
    for size in (1, 3, 4097):
        reader = BatchDecoder()
        cut = [stream[start : start + size] for start in range(0, len(stream), size)]
        assert [batch for piece in cut for batch in reader.feed(piece)] == whole


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
    with pytest.raises(ValueError, match=r"not a list|not msgpack|exceeds"):
        BatchDecoder().feed(junk)


def test_a_batch_without_end_is_an_error_before_it_fills_memory() -> None:
    reader = BatchDecoder()
    piece = bytes(1 << 20)
    assert reader.feed(b"\xc6\xff\xff\xff\xff") == []
    for _ in range(framing.MAX_BATCH // len(piece) - 1):
        assert reader.feed(piece) == []
    with pytest.raises(ValueError, match="not msgpack"):
        reader.feed(2 * piece)
