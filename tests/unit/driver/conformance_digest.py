"""Digests of device memory, which every driver's kernel computes as numpy does out of host memory."""

from __future__ import annotations

import random

import pytest

from cubroker.driver import Context, Driver, DriverError
from cubroker.driver.context import Kernel
from cubroker.driver.digest import PIECE, digest
from tests.unit.driver.conformance import BLOCK, refused

# Around what a word, a piece, a block of threads, four of their pieces, a share and a stride of the kernel have.
SIZES = (1, 7, 8, 15, 16, 17, 31, 255, 4096, 4097, 65_535, 65_536, 65_552, 262_144, 262_160, 1_000_003, BLOCK)


@pytest.mark.parametrize("nbytes", SIZES)
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
    Kernel(context, "digest.ptx", b"cubroker_digest").close()
    with refused("CUDA_ERROR_NOT_FOUND"):
        Kernel(context, "digest.ptx", b"no_such_entry")
