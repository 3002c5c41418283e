from __future__ import annotations

import pytest

from cubroker.server import batches
from cubroker.server.batches import Batches, encode, pairs

FRAMES = [b"id", b"frame", b"", b"x" * 70_000]


def test_batches_come_out_as_they_went_in_however_the_stream_is_cut() -> None:
    stream = encode(FRAMES) + encode(()) + encode([b"a", b"b"])
    whole = [FRAMES, [], [b"a", b"b"]]
    assert Batches().feed(stream) == whole
    for size in (1, 3, 4097):
        reader = Batches()
        cut = [stream[start : start + size] for start in range(0, len(stream), size)]
        assert [batch for piece in cut for batch in reader.feed(piece)] == whole


def test_a_batch_is_pairs_of_routing_id_and_frame() -> None:
    assert list(pairs(FRAMES)) == [(b"id", b"frame"), (b"", b"x" * 70_000)]
    with pytest.raises(ValueError, match="shorter"):
        list(pairs([b"id"]))


@pytest.mark.parametrize(
    "junk", [b"\xff\xff\xff\xff", (batches.MAX_BATCH + 1).to_bytes(4, "little"), b"\1\0\0\0\xc0", b"\2\0\0\0\x91\x01"]
)
def test_what_is_no_batch_is_an_error(junk: bytes) -> None:
    with pytest.raises(ValueError, match=r"batch of|Expected"):
        Batches().feed(junk)
