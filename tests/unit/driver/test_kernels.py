"""Digests: their definition, and which changes show in them."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import numpy as np
import pytest

from cubroker.driver import Driver, DriverError, context
from cubroker.driver.kernels import ALGORITHM, PIECE, Digester, add, digest, finish, sums
from cubroker.protocol.fields import DIGEST_BYTES

WORDS = 1 << 64
BLOCK = 2 << 20


def fold(value: int, shift: int) -> int:
    return value ^ value >> shift


def fmix64(value: int) -> int:
    value = (value ^ value >> 33) * 0xFF51AFD7ED558CCD % WORDS
    value = (value ^ value >> 33) * 0xC4CEB9FE1A85EC53 % WORDS
    return value ^ value >> 33


def spelled_out(data: bytes) -> bytes:
    """The definition, in Python's integers and piece by piece."""
    sum_a = sum_b = 0
    for number, place in enumerate(range(0, len(data), 16)):
        piece = data[place : place + 16].ljust(16, b"\0")
        u, v = int.from_bytes(piece[:8], "little"), int.from_bytes(piece[8:], "little")
        u = fold((u ^ (number + 1) * 0x9E3779B97F4A7C15 % WORDS) * 0xFF51AFD7ED558CCD % WORDS, 29)
        v = fold((v ^ u) * 0xC4CEB9FE1A85EC53 % WORDS, 32)
        x = fold((u ^ v) * 0x9FB21C651E98DF25 % WORDS, 32)
        sum_a, sum_b = sum_a + x, sum_b + (x ^ v)
    ends = (fmix64(total % WORDS ^ len(data)) for total in (sum_a, sum_b))
    return b"".join(end.to_bytes(8, "little") for end in ends)


KNOWN = {
    b"": "00000000000000000000000000000000",
    b"\x00": "dc56930c98c433b2cf83b71a18a297e6",
    b"abc": "1cdd0c9bf1170f67e44868320651d10e",
    bytes(16): "4f2eb8ab79051a1b3c66c1ab1e077f14",
    bytes(range(256)): "234d484790ad2f402068ddecaa967cf5",
    b"cubroker" * 1000: "2a09dcda5be0799fd7732da8bf179e71",
    b"\xff" * 65_537: "2791789c87c0f2fdddfbc35486a7b7ab",
}
"""Digests that stay what they are: published versions are compared with them for as long as they live."""


@pytest.mark.parametrize("data", KNOWN)
def test_the_digest_of_known_bytes_never_changes(data: bytes) -> None:
    assert ALGORITHM == "cubroker-128-1"
    assert digest(data).hex() == KNOWN[data]


@pytest.mark.parametrize("nbytes", [0, 1, 7, 8, 9, 15, 16, 17, 63, 64, 1000, 65_535, 65_536, 65_537, 200_003])
def test_the_digest_is_as_it_is_defined(nbytes: int) -> None:
    data = random.Random(nbytes).randbytes(nbytes)
    assert digest(data) == spelled_out(data)
    assert len(digest(data)) == DIGEST_BYTES


def test_bytes_may_be_in_any_buffer() -> None:
    data = random.Random(2).randbytes(4096)
    assert digest(np.frombuffer(data, "<u2")) == digest(memoryview(data)) == digest(bytearray(data)) == digest(data)


def test_parts_add_up_to_the_whole_in_any_order() -> None:
    data = random.Random(3).randbytes(100_001)
    cuts = [0, 16, 4096, 80_000, len(data)]
    parts = [sums(data[start:end], start // 16) for start, end in itertools.pairwise(cuts)]
    assert finish(add(*reversed(parts)), len(data)) == digest(data)


@pytest.mark.parametrize("data", [bytes(259), b"\xff" * 259, random.Random(4).randbytes(259)], ids=["0", "ff", "any"])
def test_a_flipped_bit_changes_it_wherever_it_is(data: bytes) -> None:
    seen = {digest(data)}
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        seen.add(digest(changed))
    assert len(seen) == 1 + 8 * len(data)


def test_the_same_bit_flipped_in_two_words_changes_it() -> None:
    seen = {digest(bytes(96))}
    for bit, (one, other) in itertools.product(range(64), itertools.combinations(range(12), 2)):
        words = [0] * 12
        words[one] = words[other] = 1 << bit
        seen.add(digest(b"".join(word.to_bytes(8, "little") for word in words)))
    assert len(seen) == 1 + 64 * 12 * 11 // 2


@pytest.mark.parametrize("size", [8, 16, 64, 4096])
def test_pieces_that_changed_places_change_it(size: int) -> None:
    pieces = [random.Random(number).randbytes(size) for number in range(9)]
    seen = {digest(b"".join(pieces))}
    for one, other in itertools.combinations(range(9), 2):
        moved = list(pieces)
        moved[one], moved[other] = moved[other], moved[one]
        seen.add(digest(b"".join(moved)))
    for start in range(1, 9):
        seen.add(digest(b"".join(pieces[start:] + pieces[:start])))
    seen.add(digest(b"".join(reversed(pieces))))
    assert len(seen) == 1 + 36 + 8 + 1


def test_zeros_of_each_length_have_their_own() -> None:
    assert len({digest(bytes(nbytes)) for nbytes in range(600)}) == 600


def test_every_byte_of_it_depends_on_every_bit() -> None:
    """Of the 128 bits about half change with each that is flipped."""
    data = random.Random(5).randbytes(64)
    before = int.from_bytes(digest(data), "little")
    for bit in range(512):
        changed = (int.from_bytes(data, "little") ^ 1 << bit).to_bytes(64, "little")
        assert 30 < (int.from_bytes(digest(changed), "little") ^ before).bit_count() < 98


# -- a kernel that is started with wrong addresses, on host devices ------------------------------------


@pytest.mark.parametrize(
    ("wrong", "status"),
    [
        ("source beside a piece", "MISALIGNED_ADDRESS"),
        ("sums beside a piece", "MISALIGNED_ADDRESS"),
        ("no such source", "ILLEGAL_ADDRESS"),
        ("sums in memory of the device", "ILLEGAL_ADDRESS"),
        ("no room for the sums", "ILLEGAL_ADDRESS"),
    ],
)
def test_a_kernel_that_would_touch_other_memory_fails_as_on_a_gpu(driver: Driver, wrong: str, status: str) -> None:
    context = driver.context(0)
    memory = context.allocate(BLOCK)
    kernel = Digester(context)
    with context.pin(PIECE) as pinned:
        source, blocks, sums = {
            "source beside a piece": (memory + 8, 1, pinned.pointer),
            "sums beside a piece": (memory, 1, pinned.pointer + 8),
            "no such source": (memory + BLOCK, 1, pinned.pointer),
            "sums in memory of the device": (memory, 1, memory),
            "no room for the sums": (memory, 2, pinned.pointer),
        }[wrong]
        with pytest.raises(DriverError, match=f"cuLaunchKernel failed with CUDA_ERROR_{status}"):
            kernel.launch(context.copies(), blocks, 256, source, 2 * blocks, sums)
    kernel.close()
    context.free(memory)


def test_a_kernel_has_the_text_of_the_start_though_its_file_was_replaced(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(context, "KERNEL_FOLDER", tmp_path)
    Digester(driver.context(0)).close()
