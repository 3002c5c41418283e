"""Kernels: segments are copied and compared at once, whatever their number, size and alignment; and digests.

Every driver's kernel computes the digest of device memory as numpy does out of host memory.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import product

import pytest

from cubroker.driver import Context, Driver, DriverError
from cubroker.driver.context import Kernel
from cubroker.driver.kernels import CHUNK, ENTRIES, FLAGS, PIECE, BatchedCopy, Digester, digest
from tests.sampling import daily
from tests.unit.driver.conformance import BLOCK, refused

ROOM = 8 * BLOCK
MARK = 0xEE

# Around what a unit of each width, a block's loads of them, and a chunk have.
SIZES = (1, 2, 3, 4, 5, 15, 16, 17, 31, 255, 256, 4095, 4096, 8191, 8192, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 7)


@pytest.fixture
def ends(context: Context) -> Iterator[tuple[int, int, bytes]]:
    """A target that is full of marks, a source of random bytes, and these bytes."""
    data = random.Random(1).randbytes(ROOM)
    target, source = context.allocate(ROOM), context.allocate(ROOM)
    context.write(target, bytes([MARK]) * ROOM)
    context.write(source, data)
    yield target, source, data
    context.free(target)
    context.free(source)


def check(context: Context, ends: tuple[int, int, bytes], places: list[tuple[int, int, int]]) -> None:
    """Copy segments, by their places in both, and compare all bytes of the target."""
    target, source, data = ends
    expected = bytearray([MARK]) * ROOM
    for to, at, nbytes in places:
        expected[to : to + nbytes] = data[at : at + nbytes]
    with context.stream() as stream:
        context.copy_batch(stream, [(target + to, source + at, nbytes) for to, at, nbytes in places])
        stream.synchronize()
    assert context.read(target, ROOM) == expected


def in_a_row(sizes: list[int], to: int, at: int, gap: int) -> list[tuple[int, int, int]]:
    """Return segments one after the other, the first of them at ``to`` and ``at``, with gaps that are multiples."""
    places = []
    for nbytes in sizes:
        places.append((to, at, nbytes))
        to, at = (place + (nbytes // gap + 1) * gap for place in (to, at))
    return places


@pytest.mark.parametrize(("to", "at"), daily(product((0, 1, 2, 4, 8), (0, 1, 2, 3, 4, 6, 8, 15)), 10))
def test_segments_arrive_whatever_their_size_and_alignment(
    context: Context, ends: tuple[int, int, bytes], to: int, at: int
) -> None:
    check(context, ends, in_a_row(list(SIZES), to, at, gap=256))


@pytest.mark.parametrize("count", [1, 2, ENTRIES - 1, ENTRIES, ENTRIES + 1, 5000])
def test_any_number_of_segments_arrives(context: Context, ends: tuple[int, int, bytes], count: int) -> None:
    sizes = random.Random(count).choices((0, 1, 16, 100, 512, 1000, 2048), k=count)
    places = in_a_row(sizes, 0, 16, gap=256)
    random.Random(count).shuffle(places)
    check(context, ends, places)


def test_a_large_segment_between_small_ones_arrives(context: Context, ends: tuple[int, int, bytes]) -> None:
    check(context, ends, in_a_row([1, 100, 5 * BLOCK + 13, 7, 0, 64], 32, 64, gap=16))


def test_segments_that_adjoin_and_none_at_all(context: Context, ends: tuple[int, int, bytes]) -> None:
    check(context, ends, [])
    check(context, ends, [(0, 0, 0), (10, 20, 0)])
    check(context, ends, [(5, 9, 100), (105, 109, 1), (106, 110, 0), (106, 110, CHUNK), (BLOCK, BLOCK, 3)])


def test_segments_without_a_kernel_are_copied_by_the_driver(
    context: Context, ends: tuple[int, int, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: object) -> None:
        raise DriverError("cuModuleLoadData", 221, "CUDA_ERROR_JIT_COMPILER_NOT_FOUND")

    monkeypatch.setattr(Kernel, "__init__", missing)
    monkeypatch.delitem(context._kept, BatchedCopy, raising=False)
    check(context, ends, in_a_row([1, 100, CHUNK], 32, 64, gap=16))


# -- comparisons ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("to", [0, 1, 2, 8])
@pytest.mark.parametrize("at", [0, 1, 4, 15])
def test_segments_that_differ_are_found_whatever_their_size_and_alignment(
    context: Context, ends: tuple[int, int, bytes], to: int, at: int
) -> None:
    target, source, data = ends
    places = in_a_row([*SIZES, 0], to, at, gap=256)
    for here, there, nbytes in places:
        context.write(target + here, data[there : there + nbytes])
    segments = [(target + here, source + there, nbytes) for here, there, nbytes in places]
    assert context.differing(segments) == [False] * len(places)
    chosen = random.Random(16 * to + at)
    wrong = [nbytes > 0 and chosen.random() < 0.5 for _, _, nbytes in places]
    for (here, there, nbytes), differs in zip(places, wrong, strict=True):
        if differs:
            place = chosen.choice((0, nbytes // 2, nbytes - 1))
            context.write(target + here + place, bytes([data[there + place] ^ 1]))
    assert context.differing(segments) == wrong
    assert context.differing([]) == []


def test_more_segments_than_have_flags_at_once_are_compared(context: Context, ends: tuple[int, int, bytes]) -> None:
    target, source, data = ends
    context.write(target, data)
    count = FLAGS + ENTRIES + 1
    wrong = {0, ENTRIES, FLAGS - 1, FLAGS, count - 1}
    for number in wrong:
        context.write(target + 32 * number, bytes([data[32 * number] ^ 1]))
    found = context.differing([(target + 32 * number, source + 32 * number, 32) for number in range(count)])
    assert {number for number, differs in enumerate(found) if differs} == wrong


# -- digests -------------------------------------------------------------------------------------------

# Around what a word, a piece, a block of threads, four of their pieces, a share and a stride of the kernel have.
DIGEST_SIZES = (1, 7, 8, 15, 16, 17, 31, 255, 4096, 4097, 65_535, 65_536, 65_552, 262_144, 262_160, 1_000_003, BLOCK)


@pytest.mark.parametrize("nbytes", DIGEST_SIZES)
def test_the_digest_of_memory_is_that_of_its_bytes(context: Context, memory: int, nbytes: int) -> None:
    data = random.Random(nbytes).randbytes(BLOCK)
    context.write(memory, data)
    assert context.digests([(memory, nbytes)]) == [digest(data[:nbytes])]


def test_many_ranges_have_their_digests_in_order_and_whatever_else_is_there(context: Context, memory: int) -> None:
    data = random.Random(1).randbytes(BLOCK)
    context.write(memory, data)
    places = [(0, 0), (0, 100), (7 * PIECE, 16), (8 * PIECE, BLOCK // 2), (9 * PIECE, 1), (0, 100)]
    expected = [digest(data[start : start + nbytes]) for start, nbytes in places]
    assert context.digests([(memory + start, nbytes) for start, nbytes in places]) == expected
    assert context.digests([]) == []


def test_the_first_and_the_last_byte_count(context: Context, memory: int) -> None:
    nbytes = BLOCK - 5
    (before,) = context.digests([(memory, nbytes)])
    for place in (0, nbytes - 1, nbytes // 2):
        context.write(memory + place, b"\x01")
        assert context.digests([(memory, nbytes)]) != [before]
        context.write(memory + place, b"\x00")
    context.write(memory + nbytes, b"\x01")
    assert context.digests([(memory, nbytes)]) == [before]


def test_each_device_digests_its_own_memory(driver: Driver) -> None:
    for device in driver.devices:
        context = driver.context(device.index)
        pointer = context.allocate(BLOCK)
        context.write(pointer, device.uuid.encode().ljust(BLOCK))
        assert context.digests([(pointer, BLOCK)]) == [digest(device.uuid.encode().ljust(BLOCK))]
        context.free(pointer)


def test_a_digest_begins_at_a_piece(context: Context, memory: int) -> None:
    with pytest.raises(ValueError, match=r"8 bytes at 0x[0-9a-f]+; a range begins at a multiple of 16"):
        context.digests([(memory + 8, 8)])


def test_a_device_without_room_digests_what_it_has(driver: Driver, context: Context, memory: int) -> None:
    context.digests([(memory, PIECE)])  # which loads the kernel, if nothing has yet
    filled = []
    size = context.memory()[0]
    while size >= BLOCK:
        try:
            filled.append(context.allocate(size))
        except DriverError:
            size //= 2  # in the end not even this much is left, unless other processes end meanwhile
    try:
        assert context.digests([(memory, BLOCK)]) == [digest(bytes(BLOCK))]
    finally:
        for pointer in filled:
            context.free(pointer)


def test_a_kernel_is_loaded_into_a_context_and_unloaded(context: Context) -> None:
    class Missing(Kernel):
        SOURCE = "digest.ptx", b"no_such_entry"

    Digester(context).close()
    with refused("CUDA_ERROR_NOT_FOUND"):
        Missing(context)
